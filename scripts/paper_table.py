"""Results of `python -m minipop.bench --json` as a Markdown table, beside the speed-ups that the paper reports for those models.

    python scripts/paper_table.py gpu_results/*.json
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

# arXiv 2602.03295, Table 2: full over POP at about one third, A100, batch 8, by prompt tokens or image size.
PAPER = {
    "llama-3.1-8b": {"32": 1.22, "128": 1.27, "512": 1.34, "2048": 1.36},
    "gemma-3-12b": {"32": 1.02, "128": 1.27, "512": 1.34, "2048": 1.37},
    "qwen3-vl-8b": {"640x480": 1.19, "1280x720": 1.19, "1920x1080": 1.18, "2560x1440": 1.16},
}


def table(paths: list[Path]) -> str:
    lines = ["| model | prompt | batch | full, ms | POP, ms | speed-up | least | most | ideal | paper |", "|" + "---|" * 10]
    machines = []
    for path in paths:
        result = json.loads(path.read_text())
        name = Path(result["checkpoint"]).name
        machines.append(f"{result['processor']}, torch {result['torch']}, {result['dtype']}")
        for row in result["prefill"]:
            full, pop = (next(t["seconds"] for t in row["timings"] if t["name"].startswith(kind)) for kind in ("full", "POP"))
            ratios = sorted(a / b for a, b in zip(full, pop))
            ideal = row["flops"]["full"] / next(f for key, f in row["flops"].items() if key.startswith("POP"))
            paper = PAPER.get(name, {}).get(row["label"])
            cells = [name, row["label"], str(row["batch"]), f"{1e3 * statistics.median(full):.1f}", f"{1e3 * statistics.median(pop):.1f}",
                     f"{statistics.median(ratios):.2f}x", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", f"{ideal:.2f}",
                     "" if paper is None else f"{paper:.2f}x"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Random weights. " + "; ".join(dict.fromkeys(machines)) + "."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of minipop.bench")
    try:
        print(table(parser.parse_args().results))
    except (OSError, ValueError, KeyError, StopIteration) as problem:
        print(f"error: not a result of minipop.bench: {problem!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
