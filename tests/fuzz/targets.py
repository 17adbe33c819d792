"""Every target by its name."""

from .core import Target
from .engine import ENGINE
from .files import FILES
from .talk import TALK

TARGETS: dict[str, Target] = {target.name: target for target in [*FILES, *ENGINE, *TALK]}
