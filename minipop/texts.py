"""Text to calibrate and measure with, cut into sequences of token ids."""

import importlib.util
import random
from pathlib import Path

from .errors import MinipopError, PromptError
from .files import open_regular
from .tokenizer import Tokenizer

# Long modules without much in common. argparse is not among them: scripts/perplexity.py measures on it.
MODULES = ("ast", "asyncio.base_events", "configparser", "csv", "ctypes", "dataclasses", "datetime", "difflib", "doctest", "email.message",
           "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "http.client", "http.cookiejar", "http.server", "imaplib",
           "inspect", "ipaddress", "json.decoder", "locale", "logging", "mailbox", "optparse", "pathlib", "pdb", "pickle", "pickletools",
           "plistlib", "pydoc", "random", "shutil", "smtplib", "socket", "sqlite3.dump", "ssl", "statistics", "string", "subprocess",
           "tarfile", "tempfile", "textwrap", "threading", "tokenize", "trace", "traceback", "turtle", "typing", "unittest.mock",
           "urllib.parse", "urllib.request", "uuid", "wave", "xml.dom.minidom", "xml.etree.ElementTree", "zipfile", "_pydecimal")


def read_text(path: str | Path) -> str:
    """A UTF-8 file. Raises PromptError when it cannot be read as one."""
    with open_regular(Path(path), PromptError) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise PromptError(f"{path}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None


def default_text() -> list[str]:
    """The source of MODULES, as far as this Python has it: about 2.5 million characters of code and documentation."""
    specs = [importlib.util.find_spec(name) for name in MODULES]
    sources = [spec.loader.get_source(spec.name) for spec in specs if spec is not None and hasattr(spec.loader, "get_source")]
    texts = [source for source in sources if source]
    if not texts:
        raise MinipopError("this Python has no source of its standard library to calibrate with: give --text FILE")
    return texts


def text_sequences(tokenizer: Tokenizer, texts: list[str], count: int, length: int, seed: int) -> list[list[int]]:
    """At most `count` pieces of `length` tokens that do not overlap, drawn from the texts; each begins with the BOS, if there is one.

    Raises PromptError when the text is too short for one.
    """
    start = tokenizer.encode("")  # a BOS or nothing
    ids = [token_id for text in texts for token_id in tokenizer.encode(text, add_bos=False)]
    step = length - len(start)
    pieces = [start + ids[first : first + step] for first in range(0, len(ids) - step + 1, step)] if step > 0 else []
    if not pieces:
        raise PromptError(f"the text has {len(ids)} tokens, too few for one sequence of {length}: give more text, or lower --length")
    return random.Random(seed).sample(pieces, min(count, len(pieces)))
