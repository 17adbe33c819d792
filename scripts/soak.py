#!/usr/bin/env python3
"""A long conversation after another, and another: does minipop drift, leak or break when it is used for hours?

    python scripts/soak.py --turns 5000
    python scripts/soak.py --turns 200 --seed 7 --family gemma3_text

On a tiny random model, a chat session takes thousands of turns: questions of random length, other plans, retries, undo, other system
messages, interruptions at random places of the code, contexts that fill up, new beginnings. Now and then (--check-every) everything
is held against the obvious: the cache against one dense pass over its history (tests/fuzz/oracle.py) and against a replay of the
same calls in the paper's two-pass form, the next answer against the replay's, and a history without pruning against one fresh
prefill of it. The resident memory of the process is sampled at every check and must stay flat.

Exit codes: 0 all equal and flat, 1 a difference or a leak (with the seed and turn to find it again), 2 a mistake in the command
line, 130 interrupted.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tiny models are in tests/, which is not installed
WARM_UP = 0.2  # the share of the run after which memory must not grow any more
GROWTH = 0.01  # by which share it may, all the same: an allocator's noise, and the session's log of its answers


class Mistake(Exception):
    """In the command line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Mistake(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    try:
        return soak(parser().parse_args(argv))
    except Mistake as problem:
        print("error:", " ".join(str(problem).split()), file=sys.stderr)
        return 2


def soak(args: argparse.Namespace) -> int:
    if args.turns < 1 or args.check_every < 1:
        raise Mistake("--turns and --check-every must be at least 1")
    try:
        import torch

        from tests.fuzz.worlds import FAMILIES
    except ImportError as problem:
        raise Mistake(f"{problem}: the soak needs the test extra: pip install -e '.[test]'") from None
    if args.family and args.family not in FAMILIES:
        raise Mistake(f"there is no family {args.family!r}; there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    families = [args.family] if args.family else ["llama", "qwen3"]
    return max(Soak(family, args.seed, args.check_every).run(max(1, args.turns // len(families))) for family in families)


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python scripts/soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=1000, metavar="N", help="turns of all families together (default: 1000)")
    p.add_argument("--check-every", type=int, default=25, metavar="N", help="turns between two checks, about (default: 25)")
    p.add_argument("--family", help="llama, qwen3, gemma3 or qwen3_vl (default: llama and qwen3)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the conversation (default: 0)")
    return p


class Soak:
    """One family's conversation, its checks, and what they saw."""

    COLUMNS = 240  # small, so that contexts fill up often
    WORDS = 11_000  # tokenizers remembers the first 10,000 words it sees: they are shown before memory is watched

    def __init__(self, family: str, seed: int, check_every: int):
        from tests.fuzz.talk import new_session

        self.family, self.seed, self.check_every = family, seed, check_every
        self.random = random.Random(f"{family} {seed}")
        self.session = new_session(family, columns=self.COLUMNS, temperature=0.9, seed=seed, max_new_tokens=24)
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[int, int]] = []  # (turn, resident bytes)

    def run(self, turns: int) -> int:
        begin, turn = time.perf_counter(), 0
        for word in range(self.WORDS):
            self.session.tokenizer.encode(f"word {word}")
        self.watch(0)
        try:
            for turn in range(1, turns + 1):
                self.turn()
                if turn == turns or self.random.random() < 1 / self.check_every:
                    self.check()
                    self.watch(turn)
        except AssertionError as difference:
            print(f"{self.family}: turn {turn} of seed {self.seed}: {difference}", file=sys.stderr)
            return 1
        settled = [size for at, size in self.memory if at >= turns * WARM_UP] or [self.memory[-1][1]]
        print(f"{self.family}: {turns} turns in {time.perf_counter() - begin:.0f} s: "
              + ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items(), key=lambda item: -item[1])))
        print(f"{self.family}: resident memory {self.memory[0][1] / 2**20:.1f} MiB at the start, {settled[0] / 2**20:.1f} MiB after "
              f"{WARM_UP:.0%}, {settled[-1] / 2**20:.1f} MiB at the end, {max(settled) / 2**20:.1f} MiB at most")
        if settled[-1] > settled[0] * (1 + GROWTH):
            print(f"{self.family}: memory grew by {(settled[-1] - settled[0]) / 2**20:.1f} MiB", file=sys.stderr)
            return 1
        return 0

    # --- what happens in a turn -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        from tests.fuzz.core import attempt
        from tests.fuzz.talk import interrupted_at

        session, rng = self.session, self.random
        action = rng.choices(["ask", "retry", "undo", "plan", "system", "reset", "picture"], [60, 8, 6, 10, 3, 2, 4])[0]
        if action == "plan":
            session.set_plan(self.plan())
        elif action == "system":
            session.set_system(rng.choice([None, "Be brief.", "Be very, very brief."]))
        elif action == "reset":
            session.reset()
        elif action == "undo":
            self.count("undos" if attempt(session.undo)[1] is None else "refusals")
            return
        if action in ("plan", "system", "reset"):
            self.count(f"{action}s")
        pictures = [self.picture()] if action == "picture" and session.processor is not None else []
        pieces, refusal = attempt(session.retry) if action == "retry" else attempt(session.ask, self.question(), pictures)
        if refusal:  # a full context, or nothing to retry: people begin anew
            self.count("refusals")
            if "context" in str(refusal):
                session.reset() if rng.random() < 0.5 else [session.undo() for _ in range(len(session.exchanges) // 2)]
            return
        how = rng.random()
        if how < 0.15:  # Ctrl-C somewhere in the code
            with interrupted_at(rng.choice([rng.randint(1, 300), rng.randint(1, 8000)])) as was_hit:
                try:
                    "".join(pieces)
                except KeyboardInterrupt:
                    pass
            self.count("interruptions" if was_hit() else "answers")
        elif how < 0.25:  # the reader closes the answer
            for _ in range(rng.randint(0, 5)):
                next(pieces, None)
            pieces.close()
            self.count("answers closed early")
        else:
            _, refusal = attempt("".join, pieces)
            self.count("refusals" if refusal else "answers")
        if session.log and session.log[-1].ended == "context full":
            self.count("contexts filled")

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def question(self) -> str:
        length = min(int(self.random.expovariate(1 / 15)) + 1, 150)
        return "".join(self.random.choice("abcdefgh \n?\u00e9\u4e16\U0001f600<|>") for _ in range(length)).strip() or "?"

    def picture(self):
        from PIL import Image

        size = (self.random.randint(4, 40), self.random.randint(4, 40))
        return Image.new("RGB", size, tuple(self.random.randint(0, 255) for _ in range(3)))

    def plan(self):
        from minipop import PrefillPlan
        from tests.fuzz.worlds import LAYERS

        skip = [layer for layer in range(LAYERS) if self.random.random() < 0.4]
        return PrefillPlan(LAYERS, self.random.choice([[], skip, [LAYERS - 1]]), project_kv=self.random.random() < 0.9)

    # --- what must hold ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The cache against the oracle, a replay and a fresh prefill; then one answer against the replay's."""
        from minipop import Runner, SamplingParams
        from tests.fuzz.oracle import compare

        self.count("checks")
        runner = self.session.runner
        text_only = runner.model.config.vision is None
        if text_only:
            runner.check()
        n = runner.cache.length
        if n == 0:
            return
        other = runner.replayed()
        assert other.token_ids() == runner.token_ids(), "the replay holds other tokens"
        if all(row.project_kv for row in runner.rows[0]):
            compare(runner.cache.keys[..., :n, :], other.cache.keys[..., :n, :], 1e-4, "keys against a replay")
            compare(runner.cache.values[..., :n, :], other.cache.values[..., :n, :], 1e-4, "values against a replay")
        if text_only and not any(row.skip for row in runner.rows[0]):
            self.count("fresh prefills compared")
            fresh = Runner(runner.model, max_seq_len=self.COLUMNS)
            fresh.prefill(runner.token_ids())
            compare(runner.cache.keys[..., :n, :], fresh.cache.keys[..., :n, :], 1e-4, "keys against one fresh prefill")
        if n + 20 < self.COLUMNS:
            params = SamplingParams(temperature=0.0, max_new_tokens=6)
            ours, theirs = (list(r.generate([104, 105, 63], params)) for r in (runner, other))
            assert ours == theirs, f"the answer is {ours}, the replay's {theirs}"
            runner.rewind(n)

    def watch(self, turn: int) -> None:
        gc.collect()
        self.memory.append((turn, resident()))


def resident() -> int:
    """Bytes of memory the process holds now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: the largest so far must do
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
