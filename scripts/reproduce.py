"""Measure the paper's claims, the methods it beats and calibrated K/V on small checkpoints, and write docs/RESULTS.md.

    python scripts/fetch_weights.py smollm2-135m-instruct     # and gemma-3-270m, if you accept its terms
    python scripts/fetch_eval_data.py
    python scripts/reproduce.py                               # about 90 minutes on two cores; --quick: under 10

Each step leaves a JSON file in results/CHECKPOINT; a run that was interrupted goes on after the last of them, and a step whose file was
made with other settings is made anew. Code that a model writes for HumanEval is run in a process with limits, so this asks for
--allow-code-execution; without it GSM8K and HumanEval are left out.
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
from minipop.figures import load_pyplot  # noqa: E402
from minipop.files import write_text  # noqa: E402

CHECKPOINTS = ("smollm2-135m-instruct", "gemma-3-270m", "tiny-qwen3-vl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog=__doc__.partition("\n\n")[2],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", nargs="+", type=Path, metavar="FOLDER", help=f"checkpoints (default: those there are of {', '.join(CHECKPOINTS)})")
    parser.add_argument("--quick", action="store_true", help="a few items of everything, to see that it works")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the steps' files go (default: results, or results-quick)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page to write (default: docs/RESULTS.md, or RESULTS.md in the results with --quick)")
    parser.add_argument("--data", type=Path, default=ROOT / "eval_data", metavar="FOLDER", help="what fetch_eval_data.py made (default: eval_data)")
    parser.add_argument("--only", metavar="WORDS", help="only steps whose names contain one of these words, separated by commas")
    parser.add_argument("--allow-code-execution", action="store_true", help="run the code that models write for HumanEval")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the page from what there is")
    args = parser.parse_args()
    args.results = args.results or ROOT / ("results-quick" if args.quick else "results")
    args.docs = args.docs or (args.results / "RESULTS.md" if args.quick else ROOT / "docs" / "RESULTS.md")
    try:
        load_pyplot()  # now rather than at the end
        if not args.report:
            measure_all(args)
        page = report.write(args.results, args.docs, "python scripts/reproduce.py" + " --quick" * args.quick, ROOT / "scripts" / "reproduction" / "notes.md")
        write_text(args.docs, page)
    except (MinipopError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    print(args.docs)
    return 0


def measure_all(args: argparse.Namespace) -> None:
    folders = args.ckpt or [ROOT / "weights" / name for name in CHECKPOINTS if (ROOT / "weights" / name / "config.json").is_file()]
    if not (args.data / "calibration").is_dir():
        raise MinipopError(f"{args.data} lacks the texts and tasks: run scripts/fetch_eval_data.py")
    sizes = QUICK if args.quick else Sizes()
    words = args.only.split(",") if args.only else [""]
    for folder in folders:
        study = Study(folder, args.results / folder.resolve().name, args.data, sizes)
        study.results.mkdir(parents=True, exist_ok=True)
        for name, work in steps(study):
            if not any(word in name for word in words) or name.startswith("generation") and not args.allow_code_execution:
                continue
            file = study.results / f"{name}.json"
            settings = {"seed": study.seed, **{field: getattr(sizes, field) for field in USES[name.split()[0]]}}
            if file.is_file() and json.loads(file.read_text())["settings"] == settings:
                continue
            print(f"{folder.name}: {name} ... ", end="", flush=True, file=sys.stderr)
            begin = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - begin
            write_text(file, json.dumps({"settings": settings, "seconds": seconds, "result": result}))
            print(f"{seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
