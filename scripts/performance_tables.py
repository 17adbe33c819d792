"""Results of `python -m minipop.bench --json` as Markdown tables, each with its two limits: arithmetic and bytes.

    python scripts/performance_tables.py performance_results/*.json

The limits are what the phase must compute over the rate of a matrix product, and what it must read (every matrix once, and the cache)
over the rate of reading memory, both rates measured in the same run.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path


def spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} | {1e3 * min(seconds):.1f} | {1e3 * max(seconds):.1f}"


def prefill_table(result: dict) -> list[str]:
    lines = ["| prompt | batch | contender | ms | least | most | speed-up over full | ideal | limit by arithmetic, ms | by bytes, ms | us a token | MiB above "
             "weights and cache |", "|" + "---|" * 12]
    for row in result["prefill"]:
        full = next(t["seconds"] for t in row["timings"] if t["name"] == "full")
        for timing in row["timings"]:
            name, seconds = timing["name"], timing["seconds"]
            ratio = statistics.median(a / b for a, b in zip(full, seconds))
            memory = "" if timing["memory"] is None else f"{timing['memory'] / 2**20:.0f}"
            lines.append(f"| {row['label']} | {row['batch']} | {name} | {spread(seconds)} | {ratio:.2f}x | "
                         f"{row['flops']['full'] / row['flops'][name]:.2f} | {1e3 * row['flops'][name] / result['matmul_flops']:.1f} | "
                         f"{1e3 * result['matrix_bytes'] / result['read_bytes']:.1f} | "
                         f"{1e6 * statistics.median(seconds) / sum(row['lengths']):.0f} | {memory} |")
    return lines


def decode_table(result: dict) -> list[str]:
    lines = ["| after | batch | contender | tokens/s | ms a step | least | most | limit by arithmetic, ms | by bytes, ms |", "|" + "---|" * 9]
    for row in result["decode"]:
        after = str(row["prompt"][0]) if len(set(row["prompt"])) == 1 else f"{min(row['prompt'])} to {max(row['prompt'])}"
        for timing in row["timings"]:
            steps = [s / row["steps"] for s in timing["seconds"]]
            lines.append(f"| {after} | {row['batch']} | {timing['name']} | {row['batch'] / statistics.median(steps):.1f} | {spread(steps)} | "
                         f"{1e3 * row['step_flops'] / result['matmul_flops']:.1f} | {1e3 * row['must_read_bytes'] / result['read_bytes']:.1f} |")
    return lines


def tables(path: Path) -> str:
    result = json.loads(path.read_text())
    lines = [f"### {Path(result['checkpoint']).name}, {result['dtype']}, {result['processor']}, {result['threads']} threads, torch {result['torch']}", "",
             f"Matrix products {result['matmul_flops'] / 1e9:.0f} GFLOP/s, memory read at {result['read_bytes'] / 1e9:.1f} GB/s. Loaded in "
             f"{result['load_seconds']:.2f} s" + ("" if not result["file_bytes"] else
                                                  f" (its tokenizer alone: {result['tokenizer_seconds']:.2f} s; a plain read of the file: {result['read_seconds']:.2f} s)") +
             ("" if result["load_peak_bytes"] is None else f", {result['load_peak_bytes'] / result['weight_bytes']:.2f}x the weights at the peak") + ".",
             "", *prefill_table(result), ""]
    return "\n".join(lines + ([*decode_table(result), ""] if result["decode"] else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of minipop.bench")
    try:
        print("\n".join(tables(path) for path in parser.parse_args().results))
    except (OSError, ValueError, KeyError, StopIteration) as problem:
        print(f"error: not a result of minipop.bench: {problem!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
