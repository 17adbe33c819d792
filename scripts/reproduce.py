"""Measure the paper's claims, the methods it beats and calibrated K/V on small checkpoints, and write docs/RESULTS.md.

    python scripts/fetch_weights.py smollm2-135m-instruct     # and gemma-3-270m, if you accept its terms
    python scripts/fetch_eval_data.py
    python scripts/reproduce.py                               # --quick: a few items of everything

Each step leaves a JSON file in results/CHECKPOINT; a run that was interrupted goes on after the last of them, and a step whose file was
made with other settings is made anew. Code that a model writes for HumanEval is run in a process with limits, so this asks for
--allow-code-execution; without it GSM8K and HumanEval are left out. Qualities do not mind what else the machine does, timings do:
`--only speed` makes them alone. The committed run took 94, 109 and 1 minutes for the three checkpoints, on one core each, two side by side.

The page goes to docs/RESULTS.md after a whole run, and beside the results after a part of one (--only, --quick, --report), unless --docs names a
file. `--report --results docs/results --notes docs/results/notes.md --docs docs/RESULTS.md` makes the committed page from the committed items.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from reproduction import report  # noqa: E402
from reproduction.steps import QUICK, USES, Sizes, Study, steps  # noqa: E402

from minipop import MinipopError  # noqa: E402
from minipop.cli import Parser, run  # noqa: E402
from minipop.errors import CheckpointError  # noqa: E402
from minipop.figures import load_pyplot  # noqa: E402
from minipop.files import read_json, write_text  # noqa: E402

CHECKPOINTS = ("smollm2-135m-instruct", "gemma-3-270m", "tiny-qwen3-vl")


def main() -> int:
    return run(reproduce)


def reproduce() -> int:
    parser = Parser(prog="python scripts/reproduce.py", description=__doc__.partition("\n\n")[0], epilog=__doc__.partition("\n\n")[2])
    parser.add_argument("--ckpt", nargs="+", type=Path, metavar="FOLDER", help=f"checkpoints (default: those there are of {', '.join(CHECKPOINTS)})")
    parser.add_argument("--quick", action="store_true", help="a few items of everything, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the steps' files go (default: results, or results-quick)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page to write (default: docs/RESULTS.md after a whole run)")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="text that goes above the tables")
    parser.add_argument("--data", type=Path, default=ROOT / "eval_data", metavar="FOLDER", help="what fetch_eval_data.py made (default: eval_data)")
    parser.add_argument("--only", metavar="WORDS", help="only steps whose names contain one of these words, separated by commas")
    parser.add_argument("--allow-code-execution", action="store_true", help="run the code that models write for HumanEval")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the page from what there is")
    args = parser.parse_args()
    args.results = args.results or ROOT / ("results-quick" if args.quick else "results")
    whole = not (args.quick or args.only or args.report)
    args.docs = args.docs or (ROOT / "docs" / "RESULTS.md" if whole else args.results / "RESULTS.md")
    load_pyplot()  # now rather than at the end
    try:
        if not args.report:
            measure_all(args)
        if not args.results.is_dir():
            raise MinipopError(f"{args.results}: there are no results yet; run this without --report, or with --results docs/results")
        page = report.write(args.results, args.docs, "python scripts/reproduce.py" + " --quick" * args.quick, args.notes)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        return 130
    write_text(args.docs, page)
    print(args.docs)
    return 0


def measure_all(args: argparse.Namespace) -> None:
    folders = args.ckpt or [ROOT / "weights" / name for name in CHECKPOINTS if (ROOT / "weights" / name / "config.json").is_file()]
    if not (args.data / "calibration").is_dir():
        raise MinipopError(f"{args.data} lacks the texts and tasks: run scripts/fetch_eval_data.py")
    sizes = QUICK if args.quick else Sizes()
    words, matched = args.only.split(",") if args.only else [""], False
    for folder in folders:
        study = Study(folder, args.results / folder.resolve().name, args.data, sizes)
        study.claim()
        for name, work in steps(study):
            if not any(word in name for word in words):
                continue
            matched = True
            if name.startswith("generation") and not args.allow_code_execution:
                continue
            file = study.results / f"{name}.json"
            settings = {"seed": study.seed, **{field: getattr(sizes, field) for field in USES[name.split()[0]]}}
            if file.is_file() and read_json(file, CheckpointError).get("settings") == settings:
                continue
            print(f"{folder.name}: {name} ... ", end="", flush=True, file=sys.stderr)
            begin = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - begin
            write_text(file, json.dumps({"settings": settings, "seconds": seconds, "result": result}))
            print(f"{seconds:.0f} s", file=sys.stderr)
    if not matched:
        raise MinipopError(f"--only {args.only}: no step has such a name; there are {', '.join(name for name, _ in steps(study))}")


if __name__ == "__main__":
    sys.exit(main())
