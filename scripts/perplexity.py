"""What pruning the prefill costs on real text: perplexity of the 64 tokens after 384-token prompts, under several plans.

    python scripts/perplexity.py [--ckpt FOLDER] [--text FILE ...] [--documents 16]

Without --text the source of Python's own argparse module serves: it is wherever Python is. The continuation runs through the full
model, as an answer would; only the prompt is pruned.
"""

import argparse
import inspect
import math
import sys
from pathlib import Path

import torch

import minipop
from minipop import MinipopError, PrefillPlan, PromptError, Runner

ROOT = Path(__file__).resolve().parent.parent
PROMPT, CONTINUATION = 384, 64


def standard_plans(depth: int) -> dict[str, PrefillPlan]:
    """Full, POP at three ratios, and the paper's two ablations of the third."""
    third = PrefillPlan.deepest(depth, 1 / 3).skip
    return {"full": PrefillPlan.full(depth), "POP 1/4": PrefillPlan.deepest(depth, 1 / 4), "POP 1/3": PrefillPlan.deepest(depth, 1 / 3),
            "POP 1/2": PrefillPlan.deepest(depth, 1 / 2), "1/3, no K/V": PrefillPlan(depth, third, project_kv=False),
            "1/3, no boundary": PrefillPlan(depth, third, split_boundary=False)}


def documents(ids: list[int], count: int) -> list[list[int]]:
    """`count` pieces of prompt and continuation, spread evenly over the text. Raises PromptError if it is too short for one."""
    length = PROMPT + CONTINUATION
    if len(ids) < length:
        raise PromptError(f"the text has {len(ids)} tokens, too few for one prompt and continuation of {length}")
    count = min(count, len(ids) // length)
    step = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return [ids[i * step : i * step + length] for i in range(count)]


def losses(model, plan: PrefillPlan, pieces: list[list[int]]) -> torch.Tensor:
    """Negative log-likelihood of each continuation token, float32 [documents, 64]."""
    runner, rows = Runner(model, plan, max_seq_len=PROMPT + CONTINUATION), []
    for piece in pieces:
        runner.reset()
        target = torch.tensor(piece[PROMPT:])
        logits = torch.cat((runner.prefill(piece[:PROMPT]), runner.extend(target[None, :-1])[0]))  # [64, vocab]
        rows.append(-logits.log_softmax(-1).gather(1, target[:, None])[:, 0])
    return torch.stack(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default=str(ROOT / "weights" / "smollm2-135m-instruct"))
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--documents", type=int, default=16, help="prompts to use at most (default %(default)s)")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    try:
        model, tokenizer = minipop.load_model(args.ckpt, args.dtype), minipop.load_tokenizer(args.ckpt)
        text = "\n".join(f.read_text(encoding="utf-8") for f in args.text) if args.text else inspect.getsource(argparse)
        pieces = documents(tokenizer.encode(text), max(1, args.documents))
        print(f"{args.ckpt}, {args.dtype}, {len(pieces)} documents\n")
        print(f"{'prefill':<18} {'perplexity':>10} {'difference in NLL':>18} {'of the first token':>19}")
        full = None
        for name, plan in standard_plans(model.config.num_layers).items():
            nll = losses(model, plan, pieces)
            full = nll if full is None else full
            change = (nll - full).mean(1)  # paired by document
            error = change.std().item() / math.sqrt(len(pieces)) if len(pieces) > 1 else math.nan
            print(f"{name:<18} {math.exp(nll.mean()):>10.2f} {change.mean():>9.3f} +- {error:.3f} {(nll - full)[:, 0].mean():>19.2f}", flush=True)
    except (MinipopError, OSError, UnicodeDecodeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
