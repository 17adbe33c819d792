"""lm-eval tasks that need no hub: YAML files beside this one, their Python parts, and nothing that lm-eval's own tasks do not have.

The data of the standard tasks come from `scripts/fetch_eval_data.py`; `retrieval` and `continuation` make their own. See
docs/EVALUATE.md.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
DATA = FOLDER.parent.parent / "eval_data"  # where scripts/fetch_eval_data.py puts them in a checkout of the repository
