"""How well a text goes on: negative log-likelihood of the 64 tokens after 384-token prompts.

The text is that of `continuation/*.txt` in the data folder, or, where there are none, the sources of some of Python's own modules (they are
wherever Python is, but differ between its versions). Pieces are cut at token boundaries, so this task needs minipop's tokenizer.
"""

import importlib.util
import math
import random
from pathlib import Path

from datasets import Dataset

from ..errors import MinipopError
from . import DATA

PROMPT, CONTINUATION = 384, 64  # tokens
ITEMS = 300
MODULES = ("argparse", "ast", "difflib", "doctest", "inspect", "mailbox", "optparse", "pickletools", "tarfile", "typing")


def load(minipop_tokenizer=None, minipop_data: str | None = None, minipop_seed: int = 0, **_) -> dict[str, Dataset]:
    """For `custom_dataset`: at most ITEMS pieces that do not overlap, at places that follow from the seed."""
    if minipop_tokenizer is None:
        raise MinipopError("minipop_continuation cuts its text by minipop's tokenizer: run it by python -m minipop.evaluate")
    documents = [text.splitlines(keepends=True) for text in texts(Path(minipop_data or DATA) / "continuation")]
    starts = [(number, first) for number, lines in enumerate(documents) for first in range(len(lines))]
    random.Random(f"continuation {minipop_seed}").shuffle(starts)
    found, used = [], set()  # lines that are part of a piece
    for number, first in starts:
        piece = None if (number, first) in used else cut(documents[number], first, minipop_tokenizer)
        if piece is not None:
            lines = {(number, first + i) for i in range(1 + (piece["prompt"] + piece["continuation"]).count("\n"))}
            if not lines & used:
                used |= lines
                found.append(piece)
                if len(found) == ITEMS:
                    break
    if not found:
        raise MinipopError(f"minipop_continuation: the text has no piece of {PROMPT + CONTINUATION} tokens")
    return {"test": Dataset.from_list(found)}


def texts(folder: Path) -> list[str]:
    """The user's text files, or Python's own sources."""
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        files = [Path(spec.origin) for name in MODULES if (spec := importlib.util.find_spec(name)) is not None and spec.origin]
    try:
        return [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as problem:
        raise MinipopError(f"minipop_continuation: {problem}") from None


def cut(lines: list[str], first: int, tokenizer) -> dict | None:
    """The prompt and the continuation that begin with line `first`; None where the text ends before them, or where a cut falls inside what
    the tokenizer would take as one: encoded anew, they must be exactly PROMPT and CONTINUATION tokens, BOS aside."""
    length = PROMPT + CONTINUATION
    ids = tokenizer.encode("".join(lines[first : first + length])[: 12 * length], add_bos=False)  # more than enough, mostly
    if len(ids) <= length:
        return None
    ids = ids[:length]
    prompt, whole = tokenizer.decode(ids[:PROMPT]), tokenizer.decode(ids)
    exact = (prompt == prompt.rstrip()  # lm-eval would give spaces at its end to the continuation
             and whole.startswith(prompt) and tokenizer.encode(prompt, add_bos=False) == ids[:PROMPT]
             and tokenizer.encode(whole, add_bos=False) == ids)
    return {"prompt": prompt, "continuation": whole[len(prompt):]} if exact else None


def process_results(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    """Per token, natural log; both metrics are made from it."""
    nll = -results[0][0] / CONTINUATION
    return {"nll": nll, "perplexity": nll}


def perplexity(nlls: list[float]) -> float:
    return math.exp(sum(nlls) / len(nlls))
