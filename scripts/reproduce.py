"""Measure the paper's claims, the methods it beats and calibrated K/V on small checkpoints, and write docs/RESULTS.md.

    python scripts/fetch_weights.py smollm2-135m-instruct     # and gemma-3-270m, if you accept its terms
    python scripts/fetch_eval_data.py
    python scripts/reproduce.py                               # --quick: a few items of everything

Each step leaves a JSON file in results/CHECKPOINT; a run that was interrupted goes on after the last of them, and a step whose file was
made with other settings is made anew. Code that a model writes for HumanEval is run in a process with limits, so this asks for
--allow-code-execution; without it GSM8K and HumanEval are left out. Steps run side by side, a core
each; what is timed comes last and alone. The committed run took 71.5 minutes from nothing on 2 cores (AVX512-BF16, bfloat16), 36 of
them for the calibrations; on processors without instructions for bfloat16 all of it is done in float32, which takes about twice as
long. --quick took 7.7 minutes there.

The page goes to docs/RESULTS.md after a whole run, and beside the results after a part of one (--only, --quick, --report), unless --docs names a
file. `--report --results docs/results --notes docs/results/notes.md --docs docs/RESULTS.md` makes the committed page from the committed items.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from reproduction import report  # noqa: E402
from reproduction.steps import QUICK, USES, Sizes, Step, Study, steps  # noqa: E402

from minipop import MinipopError  # noqa: E402
from minipop.cli import Parser, positive, run  # noqa: E402
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
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="steps side by side, each with its share of the cores; timings run alone (default: 2)")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # one step by its whole name: how --jobs starts them
    parser.add_argument("--allow-code-execution", action="store_true", help="run the code that models write for HumanEval")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the page from what there is")
    args = parser.parse_args()
    args.results = args.results or ROOT / ("results-quick" if args.quick else "results")
    whole = not (args.step or args.quick or args.only or args.report)
    args.docs = args.docs or (ROOT / "docs" / "RESULTS.md" if whole else args.results / "RESULTS.md")
    load_pyplot()  # now rather than at the end
    try:
        if not args.report:
            measure_all(args)
        if not args.results.is_dir():
            raise MinipopError(f"{args.results}: there are no results yet; run this without --report, or with --results docs/results")
        if args.step:
            return 0
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
    words = args.only.split(",") if args.only else [""]
    jobs: list[Job] = []
    for folder in folders:
        study = Study(folder, args.results / folder.resolve().name, args.data, sizes)
        study.claim()
        chosen = [Job(study, step) for step in steps(study)]
        jobs += [job for job in chosen if (job.step.name == args.step if args.step else any(word in job.step.name for word in words))]
    if not jobs:
        raise MinipopError(f"--only {args.only or args.step}: no step has such a name; there are {', '.join(job.step.name for job in chosen)}")
    todo = [job for job in jobs if not job.done and (args.allow_code_execution or not job.step.name.startswith("generation"))]
    begin = time.perf_counter()
    if args.jobs == 1 or len(todo) < 2:
        for number, job in enumerate(sorted(todo, key=lambda job: job.step.alone), 1):
            job.run()
            if not args.step:
                report_step(job, number, len(todo))
    else:
        options = ["--results", args.results, "--data", args.data, *["--quick"] * args.quick, *["--allow-code-execution"] * args.allow_code_execution]
        run_side_by_side(todo, args.jobs, options)
    if todo and not args.step:
        print(f"{len(todo)} steps in {(time.perf_counter() - begin) / 60:.1f} minutes", file=sys.stderr)


@dataclass
class Job:
    """A step of one checkpoint."""

    study: Study
    step: Step

    @property
    def file(self) -> Path:
        return self.study.results / f"{self.step.name}.json"

    @property
    def settings(self) -> dict:
        return {"seed": self.study.seed, **{field: getattr(self.study.sizes, field) for field in USES[self.step.name.split()[0]]}}

    @property
    def done(self) -> bool:
        return self.file.is_file() and read_json(self.file, CheckpointError).get("settings") == self.settings

    def run(self) -> None:
        begin, busy = time.perf_counter(), time.process_time()
        result = self.step.work()
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        write_text(self.file, json.dumps({"settings": self.settings, "seconds": seconds, "cpu_seconds": busy, "result": result}))


def report_step(job: Job, number: int, count: int) -> None:
    seconds = read_json(job.file, CheckpointError)["seconds"]
    print(f"{number} of {count}: {job.study.folder.name}, {job.step.name}, {seconds:.0f} s", flush=True, file=sys.stderr)


def run_side_by_side(todo: list[Job], lanes: int, options: list) -> None:
    """Each step in a process of its own, `lanes` of them at a time with an equal share of the cores; what is timed comes last, alone.

    Two processes of one thread each get more done than one of two: most operations of a small model are too short to share. When a process
    fails, its last line says why; then nothing new is started, and what runs is waited for.
    """
    cores = os.cpu_count() or 1

    def start(job: Job) -> subprocess.Popen:
        threads = cores if job.step.alone else max(1, cores // lanes)
        command = [sys.executable, __file__, "--ckpt", job.study.folder, "--step", job.step.name, *options]
        print(f"{job.study.folder.name}, {job.step.name} ...", flush=True, file=sys.stderr)
        with open(log(job), "wb") as file:  # bars of several processes would overwrite each other
            return subprocess.Popen(list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stderr=file)

    def log(job: Job) -> Path:
        return job.study.results / f"{job.step.name}.log"

    # Round the checkpoints, so that the long steps at the beginning of each start first.
    waiting = [job for group in zip_longest(*by_checkpoint(todo)) for job in group if job is not None]
    running: dict[subprocess.Popen, Job] = {}
    failed: list[Job] = []
    ended = 0
    try:
        while waiting or running:
            unfinished = {(job.study.folder, job.step.name) for job in [*waiting, *running.values()]}
            for job in list(waiting):
                ready = not any((job.study.folder, name) in unfinished for name in job.step.needs)
                if job.step.alone:
                    ready = ready and not running and all(other.step.alone for other in waiting)
                if ready and len(running) < lanes and not any(other.step.alone for other in running.values()):
                    waiting.remove(job)
                    running[start(job)] = job
            for process in [process for process in running if process.poll() is not None]:
                job = running.pop(process)
                if process.returncode:
                    failed.append(job)
                    waiting.clear()
                    print(*log(job).read_text(errors="replace").splitlines()[-1:], f"(all it said is in {log(job)})", file=sys.stderr)
                else:
                    log(job).unlink(missing_ok=True)
                    ended += 1
                    report_step(job, ended, len(todo))
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    if failed:
        names = ", ".join(f"{job.study.folder.name}: {job.step.name}" for job in failed)
        raise MinipopError(f"{names} failed; the same command goes on from there")


def by_checkpoint(jobs: list[Job]) -> list[list[Job]]:
    groups: dict[Path, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.study.folder, []).append(job)
    return list(groups.values())


if __name__ == "__main__":
    sys.exit(main())
