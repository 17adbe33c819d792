#!/usr/bin/env python3
"""Feed minipop what nobody should, for as long as you like, and keep what breaks it.

    python scripts/fuzz.py --seconds 600                      every target, one after the other, 600 seconds together
    python scripts/fuzz.py --target image --target template   these only
    python scripts/fuzz.py --replay fuzz-findings/image-7.json
    python scripts/fuzz.py --list

The targets are those of the test suite (tests/fuzz); the suite tries a few inputs of each, this script other ones every time (or
always the same: --seed). A fault is an exception that is no MinipopError, a wrong answer, a hang, or the death of the process; the
smallest input that shows it is written to --out, and --replay tries it again. A target ends at its first fault.

Exit codes: 0 nothing found, 1 a fault was found (or shown again), 2 a mistake in the command line, 130 interrupted.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the targets are in tests/, which is not installed
HANG_SECONDS = 120  # an input that takes longer, on a machine that may be busy, is taken for a hang
MEMORY = 8 << 30  # bytes of address space for a target's process: an input that needs more is a fault, not the machine's end


class Mistake(Exception):
    """In the command line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Mistake(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    try:
        return fuzz(parser().parse_args(argv))
    except Mistake as problem:
        print("error:", " ".join(str(problem).split()), file=sys.stderr)
        return 2


def fuzz(args: argparse.Namespace) -> int:
    try:
        import torch

        from tests.fuzz.core import Fault, judge, load_case
        from tests.fuzz.targets import TARGETS
    except ImportError as problem:
        raise Mistake(f"{problem}: fuzzing needs the test extra: pip install -e '.[test]'") from None
    torch.set_num_threads(1)
    if args.list:
        for target in TARGETS.values():
            print(f"{target.name:<12} {target.what}")
        return 0
    if args.replay:
        try:
            name, case = load_case(Path(args.replay).read_text(encoding="utf-8"))
            target = TARGETS[name]
        except (OSError, ValueError, KeyError) as problem:
            raise Mistake(f"{args.replay}: is no finding of this script: {problem}") from None
        try:
            print(f"{name}: {judge(target, case)}")
            return 0
        except Fault as fault:
            traceback.print_exception(fault.__cause__ or fault)
            return 1
    for name in args.target:
        if name not in TARGETS:
            raise Mistake(f"there is no target {name!r}; there are {', '.join(TARGETS)}")
    if args.seconds <= 0:
        raise Mistake("--seconds must be above 0")
    seed = secrets.randbits(32) if args.seed is None else args.seed
    if args.worker:
        return work(TARGETS[args.target[0]], seed, args.seconds, Path(args.out))
    names = args.target or list(TARGETS)
    print(f"seed {seed}, {args.seconds / len(names):.0f} seconds a target")
    found = [fault for name in names if (fault := supervise(name, seed, args.seconds / len(names), Path(args.out)))]
    for fault in found:
        print(f"FAULT {fault}")
    return 1 if found else 0


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python scripts/fuzz.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", action="append", default=[], metavar="NAME", help="a target (repeatable; default: all)")
    p.add_argument("--seconds", type=float, default=60.0, metavar="S", help="all targets together (default: 60)")
    p.add_argument("--seed", type=int, metavar="N", help="where the random inputs begin (default: somewhere else each time)")
    p.add_argument("--out", default="fuzz-findings", metavar="FOLDER", help="for what is found (default: fuzz-findings)")
    p.add_argument("--replay", metavar="FILE", help="try a finding again")
    p.add_argument("--list", action="store_true", help="name the targets")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


# --- one target, in a process of its own ------------------------------------------------------------------------------------------


def work(target, seed: int, seconds: float, out: Path) -> int:
    """Try inputs until the time is up; the last line of stdout is the tally. Notes each input before it is tried."""
    from tests.fuzz.core import Fault, Tally, dump_case, run

    limit_memory()
    warnings.simplefilter("ignore")
    tally, end, current = Tally(), time.monotonic() + seconds, out / f".{target.name}.current"
    inputs, outcomes, fault, round_seed = 0, Counter(), None, seed

    def before(case) -> bool:
        if time.monotonic() > end and (inputs or tally.inputs):
            return False
        current.write_text(dump_case(target.name, round_seed, case, "the process died or hung"), encoding="utf-8")
        return True

    while fault is None and (time.monotonic() < end or not inputs):
        tally = Tally()
        try:
            run(target, round_seed, 200, tally, before)
        except Fault as problem:
            fault = str(problem)
            path = out / f"{target.name.replace(' ', '-')}-{round_seed}.json"
            path.write_text(dump_case(target.name, round_seed, tally.case, fault), encoding="utf-8")
        inputs, outcomes, round_seed = inputs + tally.inputs, outcomes + tally.outcomes, round_seed + 1
    current.unlink(missing_ok=True)
    print(json.dumps({"inputs": inputs, "outcomes": outcomes, "fault": fault, "file": None if fault is None else str(path)}))
    return 0


def limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # not on this system


def supervise(name: str, seed: int, seconds: float, out: Path) -> str | None:
    """Run one target, watch that it moves on, and report. Gives what was found, or None."""
    out.mkdir(parents=True, exist_ok=True)
    current = out / f".{name}.current"
    current.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--worker", "--target", name, "--seed", str(seed), "--seconds", str(seconds), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    last, since = None, time.monotonic()
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=5)
                break
            except subprocess.TimeoutExpired:
                now = current.stat().st_mtime_ns if current.exists() else None
                if now != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > HANG_SECONDS:
                    process.kill()
                    output, errors = "", f"one input took more than {HANG_SECONDS} seconds"
                    process.wait()
                    break
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == 0 and output.strip():
        result = json.loads(output.splitlines()[-1])
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items(), key=lambda item: -item[1]))
        print(f"{name:<12} {result['inputs']:>8} inputs: {outcomes}", flush=True)
        return None if result["fault"] is None else f"{name}: {result['fault'][:300]} ({result['file']})"
    path = out / f"{name.replace(' ', '-')}-died-{seed}.json"
    if current.exists():
        current.replace(path)
    reason = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"
    print(f"{name:<12} the process ended: {reason}", flush=True)
    return f"{name}: {reason} ({path})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
