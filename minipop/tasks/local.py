"""Tasks whose data are JSON-lines files that `scripts/fetch_eval_data.py` wrote."""

import re
from pathlib import Path

from datasets import Dataset

from ..errors import MinipopError
from ..files import open_regular, parse_json
from . import DATA


def load(file: str, fewshot: str | None = None, minipop_data: str | None = None, **_) -> dict[str, Dataset]:
    """The splits of a task, for `custom_dataset` in its YAML file: `test`, and `fewshot` if it has a file of examples.

    minipop_data: the folder; None = eval_data in the repository. Raises MinipopError when a file is missing or damaged.
    """
    folder = Path(minipop_data or DATA)
    splits = {"test": read(folder / file)}
    return splits if fewshot is None else {**splits, "fewshot": read(folder / fewshot)}


def read(path: Path) -> Dataset:
    if not path.is_file():
        raise MinipopError(f"{path}: no such file; python scripts/fetch_eval_data.py fetches the data of these tasks (--data names another "
                           "folder)")
    with open_regular(path, MinipopError) as file:
        rows = [parse_json(line, f"{path} line {number}", MinipopError) for number, line in enumerate(file, 1)]
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise MinipopError(f"{path}: is empty, or its lines differ in their keys; fetch it again")
    return Dataset.from_list(rows)


def hellaswag_query(doc: dict) -> str:
    """"Activity: context", the context's unfinished last sentence begun with a capital letter, as lm-eval's hellaswag has it."""
    context = re.sub(r"(?:^|(?<=[.!?] ))[a-z](?=[^.!?]*$)", lambda first: first[0].upper(), doc["context"])
    return plain(f"{doc['activity']}: {context}")


def hellaswag_choices(doc: dict) -> list[str]:
    return [plain(ending) for ending in doc["endings"]]


def plain(text: str) -> str:
    """WikiHow's marks taken out: [title] ends a heading, the others go."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
