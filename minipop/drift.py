"""How far does a pruned prefill drift from the full one, and how much of it does a reader notice? (arXiv 2602.03295, section 4)

    python -m minipop.drift --ckpt path/to/checkpoint --ratio 1/3 --figure drift.png

The same prompt is prefilled in full and under the plan, and both runs are compared by cosine, layer by layer:

    hidden      the residual stream that enters the layer, over its D coordinates, mean over the pruned tokens 1 .. N-1
    keys        what those tokens leave in the cache, all kv heads of a token as one vector [K * E], after k-norm and rotation
    values      the same for the values
    attention   the attention branch's output (after W_O, and after Gemma's post-norm) of the boundary token N, which reads those rows.
                The token is the one of its own run: its query has drifted too, as it has when POP is used

hidden[l] is measured before layer l, so at the cut c of a suffix plan hidden[c], keys[c] and values[c] are still 1: drift begins with
layer c + 1, whose K/V come from the stream at c. Attention is 1 up to layer c. The numbers are means over all such tokens of all prompts.
A plan that leaves no K/V, or no boundary token, has NaN where there is nothing to compare. (Where a Gemma-3 prompt ends in an image, the
whole image is the boundary.)

Shapes: L layers, N prompt tokens, D hidden, K kv heads, E head_dim.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .cli import DEFAULT_SEQ_LEN, Parser, add_model_arguments, add_plan_arguments, load_from, plan_from, positive, run
from .errors import PromptError
from .figures import load_pyplot, save_figure
from .files import open_regular, write_text
from .generate import measure
from .inputs import Batch, ModelInputs
from .plan import PrefillPlan, format_layers
from .prompts import measuring_prompts
from .runner import Runner, boundary_lengths

NAMES = ("hidden", "keys", "values", "attention")


@dataclass(frozen=True, eq=False)
class Drift:
    """Mean cosines of each layer, float64 [L] each; from `tokens` pruned tokens of `prompts` prompts."""

    hidden: Tensor
    keys: Tensor
    values: Tensor
    attention: Tensor
    prompts: int
    tokens: int

    def save(self, path: str | Path, **extra) -> None:
        """Write JSON: a list of numbers for each name (null for NaN), prompts, tokens, and what else is given."""
        columns = {name: [None if math.isnan(x) else x for x in getattr(self, name).tolist()] for name in NAMES}
        write_text(path, json.dumps({**columns, "prompts": self.prompts, "tokens": self.tokens, **extra}, indent=1) + "\n")


def measure_drift(model: nn.Module, plan: PrefillPlan, sequences: Iterable[list[int] | ModelInputs]) -> Drift:
    """Compare prefill under `plan` with full prefill on prompts of at least two tokens each.

    Raises PromptError for a prompt that is too short or that the model cannot take, PlanError for a plan of another depth.
    """
    sums = torch.zeros(len(NAMES), plan.num_layers, dtype=torch.float64)
    prompts = pruned = boundaries = 0
    for sequence in sequences:
        inputs = sequence if isinstance(sequence, ModelInputs) else ModelInputs(sequence)
        batch = Batch.of([inputs], model)
        boundary = int(boundary_lengths(batch, model.image_blocks(batch.token_ids)))
        if len(inputs) <= boundary:
            raise PromptError(f"a prompt of {len(inputs)} token{'s' * (len(inputs) != 1)} has none that a plan could prune")
        full, other = prefilled(model, PrefillPlan.full(plan.num_layers), inputs), prefilled(model, plan, inputs)
        before, last = slice(None, -boundary), slice(-boundary, None)
        for layer in range(plan.num_layers):
            compared = (((layer - 1, "resid"), before), ((layer, "k"), before), ((layer, "v"), before), ((layer, "attn_out"), last))
            for row, (key, tokens) in enumerate(compared):
                sums[row, layer] += cosine_sum(full[key][tokens], other[key][tokens] if key in other else None)
        prompts, pruned, boundaries = prompts + 1, pruned + len(inputs) - boundary, boundaries + boundary
    if not prompts:
        raise PromptError("no prompts to measure drift with")
    sums[:3] /= pruned
    sums[3] /= boundaries
    return Drift(*sums, prompts, pruned)


def cosine_sum(a: Tensor, b: Tensor | None) -> float:
    """Sum of the rows' cosines, a and b [n, width]; NaN if b lacks rows."""
    return math.nan if b is None or len(b) < len(a) else F.cosine_similarity(a.double(), b.double(), dim=-1).sum().item()


def prefilled(model: nn.Module, plan: PrefillPlan, inputs: ModelInputs) -> dict[tuple[int, str], Tensor]:
    """What a prefill makes of the prompt: (layer, name) -> rows [N, ...] of `resid`, `k`, `v`, `attn_out`, in the tokens' order.

    A pass comes after the one before it in the prompt, so their rows follow each other. Names as in `layers.Tap`.
    """
    rows = defaultdict(list)

    def keep(layer: int, name: str, tensor: Tensor) -> Tensor:
        if name in ("k", "v"):
            rows[layer, name].append(tensor[0].transpose(0, 1).flatten(1))  # [1, K, n, E] -> [n, K * E]
        elif name in ("resid", "attn_out"):
            rows[layer, name].append(tensor[0])  # [1, n, D] -> [n, D]
        return tensor

    Runner(model, plan, max_seq_len=len(inputs), tap=keep).prefill(inputs)
    return {key: torch.cat(parts) for key, parts in rows.items()}


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _drift(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minipop.drift", description=__doc__.partition("\n\n")[0], epilog=__doc__.partition("\n\n")[2])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="a text, cut into prompts of --prompt-tokens tokens")
    source.add_argument("--prompts", metavar="FILE", help="a text file, a prompt a paragraph; or NAME.jsonl as minipop.generate reads it "
                        "(default: 40 built-in prompts)")
    parser.add_argument("--prompt-tokens", type=positive, default=256, metavar="N", help="with --text: tokens a prompt (default: 256)")
    parser.add_argument("--count", type=positive, default=40, metavar="N", help="use at most N prompts (default: 40)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--figure", metavar="FILE", help="draw them (needs matplotlib)")
    add_model_arguments(parser)
    add_plan_arguments(parser)
    return parser


def _drift(args: argparse.Namespace) -> int:
    if args.figure:
        load_pyplot()  # now rather than later
    folder, model, tokenizer, processor = load_from(args)
    plan = plan_from(args, model.config.num_layers)
    limit = min(args.max_seq_len or DEFAULT_SEQ_LEN, model.config.max_position_embeddings)
    if args.text is not None:
        sequences: list = text_pieces(args.text, tokenizer, min(args.prompt_tokens, limit), args.count)
    else:
        prompts = measuring_prompts(args.prompts, tokenizer, processor is not None)[: args.count]
        measure(prompts, model, tokenizer, processor, limit)
        sequences = [prompt.inputs(tokenizer, processor) for prompt in prompts]
    drift = measure_drift(model, plan, tqdm(sequences, unit="prompt", file=sys.stderr))
    print(f"{plan.describe()}; cosines with the full prefill, {drift.prompts} prompts, {drift.tokens} pruned tokens")
    print(table(drift, plan))
    if args.json:
        drift.save(args.json, checkpoint=folder.resolve().name, dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
                   skip=sorted(plan.skip), plan=plan.describe())
    if args.figure:
        draw_drift(drift, plan, args.figure, folder.resolve().name)
    return 0


def text_pieces(path: str, tokenizer, length: int, count: int) -> list[list[int]]:
    """Up to `count` pieces of `length` tokens, spread evenly over the text. Raises PromptError if it is too short for one."""
    with open_regular(Path(path), PromptError) as file:
        ids = tokenizer.encode(file.read().decode("utf-8-sig", errors="replace"))
    count = min(count, len(ids) // length)
    if not count:
        raise PromptError(f"{path}: has {len(ids)} tokens, too few for a prompt of {length}: lower --prompt-tokens")
    step = (len(ids) - length) // max(1, count - 1)
    return [ids[i * step : i * step + length] for i in range(count)]


def table(drift: Drift, plan: PrefillPlan) -> str:
    """A line a layer, the skipped ones marked; then the lowest of each column among them."""
    lines = [f"{'layer':>5}   " + " ".join(f"{name:>10}" for name in NAMES)]
    for layer in range(plan.num_layers):
        cells = " ".join(f"{getattr(drift, name)[layer]:>10.4f}" for name in NAMES)
        lines.append(f"{layer:>5} {'*' if layer in plan.skip else ' '} {cells}")
    if plan.skip:
        skipped = sorted(plan.skip)
        lowest = ", ".join(f"{name} {getattr(drift, name)[skipped].min():.3f}" for name in NAMES)
        lines.append(f"lowest in the skipped layers ({format_layers(plan.skip)}): {lowest}")
    return "\n".join(lines)


def draw_drift(drift: Drift, plan: PrefillPlan, path: str | Path, title: str = "") -> None:
    """The four cosines over the layers; the skipped ones are shaded."""
    figure, axes = load_pyplot().subplots(figsize=(6.5, 4))
    for name, marker in zip(NAMES, "osv^"):
        axes.plot(range(plan.num_layers), getattr(drift, name).tolist(), marker=marker, markersize=4, label=name)
    for layer in plan.skip:
        axes.axvspan(layer - 0.5, layer + 0.5, color="black", alpha=0.07, linewidth=0)
    axes.set(xlabel="layer (shaded: skipped in prefill)", ylabel="cosine with the full prefill", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
