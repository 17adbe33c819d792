"""Accuracy of weights/tiny-qwen3-vl on its held-out questions, run by minipop under full prefill and under POP.

    python scripts/eval_tiny_vl.py [--ratios 0,1/4,1/3,1/2] [--json FILE]

The questions (1,000 about colour, count and relation, 500 that ask to read) are the ones that `train_tiny_vl.py --eval` gives to
transformers; an answer counts when its text is exactly the right one. Greedy, float32 unless --dtype says otherwise.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from tqdm import tqdm
from train_tiny_vl import EVAL_SEED, ROOT
from tiny_vl.scenes import HELDOUT_KINDS, heldout_questions

import minipop
from minipop import MinipopError, PrefillPlan, Runner, SamplingParams
from minipop.files import write_text


def questions(limit: int | None) -> list[tuple]:
    """(kind, picture, question, answer), the same ones every time."""
    asked = heldout_questions(1000, EVAL_SEED, ("colour", "count", "relation")) + heldout_questions(500, EVAL_SEED, ("read",))
    return asked if limit is None else asked[:: max(1, len(asked) // limit)]


def answers(model, processor, plan: PrefillPlan, asked: list[tuple], batch_size: int = 16) -> list[str]:
    """Greedy answers, `batch_size` pictures of one size at a time."""
    runner = Runner(model, plan, max_seq_len=512, batch_size=batch_size)
    order = sorted(range(len(asked)), key=lambda i: asked[i][1].size)
    found = [""] * len(asked)
    for first in tqdm(range(0, len(order), batch_size), desc=plan.describe(), disable=None):
        chosen = order[first : first + batch_size]
        inputs = [processor([{"role": "user", "content": [{"type": "image", "image": asked[i][1]}, {"type": "text", "text": asked[i][2]}]}])
                  for i in chosen]
        for i, ids in zip(chosen, runner.generate_batch(inputs, SamplingParams(temperature=0.0, max_new_tokens=48))):
            found[i] = processor.tokenizer.decode(ids).strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=ROOT / "weights" / "tiny-qwen3-vl")
    parser.add_argument("--ratios", default="0,1/4,1/3,1/2", help="shares of the layers to skip (default %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, help="use about this many of the questions")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        model, processor = minipop.load_model(args.ckpt, args.dtype), minipop.load_processor(args.ckpt)
        asked = questions(args.limit)
        kinds = [kind for kind in HELDOUT_KINDS if any(kind == a[0] for a in asked)]
        depth = model.config.num_layers
        rows = []
        for ratio in args.ratios.split(","):
            plan = PrefillPlan.deepest(depth, ratio)
            right = [said == answer for (_, _, _, answer), said in zip(asked, answers(model, processor, plan, asked))]
            row = {kind: [sum(ok for ok, a in zip(right, asked) if a[0] == kind), sum(a[0] == kind for a in asked)] for kind in kinds}
            rows.append({"skipped": len(plan.skip), "layers": depth, "right": row})
    except MinipopError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"| prefill | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for row in rows:
        name = "full" if not row["skipped"] else f"POP, {row['skipped']} of {row['layers']} layers skipped"
        print(f"| {name} | {' | '.join(f'{a / n:.1%}' for a, n in row['right'].values())} |")
    if args.json:
        write_text(args.json, json.dumps({"checkpoint": args.ckpt.name, "dtype": args.dtype, "seed": EVAL_SEED, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
