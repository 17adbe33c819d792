"""Which layers does each stage need? Virtual gates and their Fisher information (arXiv 2602.03295, section 3).

    python -m minipop.importance --ckpt path/to/checkpoint --samples 200 --out importance.json --figure importance.png

A gate g multiplies both residual branches of a layer:

    y = x + g * Attn(norm(x));  x' = y + g * MLP(norm(y))        g = 1 is the model, g = 0 removes the layer

(in Gemma-3 the branches after their post-norms). There are two gates a layer: one acts on the prompt's tokens 1 .. N-1, the prefill; the
other on the boundary token N and on every response token that is fed back, the decode. (Where a Gemma-3 prompt ends in an image, the
whole image is the boundary, as in the runner.) For each prompt a response y is sampled from the model itself, at temperature 1, and

    loss = sum over the response's tokens of -log p(y_t | prompt, y_<t)        I_l = mean over samples of (d loss / d g_l)^2

Because the model's own samples are the targets, the mean of the gradient itself is zero, and I_l is the Fisher information of the gate:
to second order, removing the layer in that stage costs I_l / 2 nats of KL divergence. One forward and one backward a sample give both
sets. The square is taken sample by sample; the square of a mean would be (almost) zero.

The last layer's prefill importance is exactly zero: what it computes for tokens 1 .. N-1 feeds nothing.

How well this stands for the real thing is measured with --validate: each layer is really removed in one stage (its K/V are still
written), and the rise of the responses' loss is ranked against the importance.

An interrupted run goes on where it was: what is done lies in OUT.partial until OUT is written.

Shapes: L layers, N prompt tokens, R response tokens, T = N + R - 1 tokens of a pass, D hidden; stage 0 is prefill, 1 decode.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .cache import FunctionalKV, Span
from .cli import DEFAULT_SEQ_LEN, Parser, add_model_arguments, check_outputs, load_from, positive, run, seed
from .errors import MinipopError, PlanError, PromptError
from .figures import check_figure, load_pyplot, save_figure
from .files import read_json, write_text
from .generate import Prompt, measure, settings_digest
from .inputs import Batch, ModelInputs, check_token_ids
from .layers import Tap
from .packing import PackedLinear
from .plan import PrefillPlan
from .prompts import measuring_prompts
from .runner import Runner, as_token_ids, boundary_lengths, run_layers
from .sampling import SamplingParams, draw, log_probs

STAGES = ("prefill", "decode")
GROUP = 16  # responses sampled side by side; each has a generator of its own, so the number changes nothing but the time


# --- the measure ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Importance:
    """Mean squared gate gradients and the standard errors of these means, each float64 [L] (NaN errors for a single sample)."""

    prefill: Tensor
    decode: Tensor
    prefill_error: Tensor
    decode_error: Tensor
    samples: int

    @classmethod
    def of(cls, squares: Tensor) -> "Importance":
        """squares [samples, 2, L] -> their means and standard errors."""
        squares = squares.double()
        mean, error = squares.mean(0), squares.std(0) / math.sqrt(len(squares)) if len(squares) > 1 else squares[0] * math.nan
        return cls(mean[0], mean[1], error[0], error[1], len(squares))

    def least_important(self, ratio: float | str = 1 / 3, stage: str = "prefill") -> PrefillPlan:
        """The plan that skips the floor(ratio * L) layers that this stage needs least; among equals the deeper one."""
        if stage not in STAGES:
            raise PlanError(f"stage must be prefill or decode, not {stage!r:.60}")
        depth = len(self.prefill)
        order = sorted(range(depth), key=lambda layer: (getattr(self, stage)[layer].item(), -layer))
        return PrefillPlan(depth, frozenset(order[: len(PrefillPlan.deepest(depth, ratio).skip)]))

    def save(self, path: str | Path, **extra) -> None:
        """Write JSON: prefill, decode, prefill_stderr, decode_stderr (a number a layer), samples, and what else is given."""
        values = {"prefill": self.prefill, "decode": self.decode, "prefill_stderr": self.prefill_error, "decode_stderr": self.decode_error}
        values = {name: _numbers(tensor) for name, tensor in values.items()}
        write_text(path, json.dumps({**values, "samples": self.samples, **extra}, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Importance":
        """Read what `save` wrote. Raises PlanError when the file is something else."""
        values = read_json(path, PlanError)
        try:
            columns = [torch.tensor([math.nan if x is None else x for x in values[key]], dtype=torch.float64)
                       for key in ("prefill", "decode", "prefill_stderr", "decode_stderr")]
            if len({column.shape for column in columns}) > 1 or not len(columns[0]) or type(values["samples"]) is not int:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise PlanError(f"{path}: not an importance file: prefill, decode, prefill_stderr and decode_stderr must be lists of one "
                            "number a layer, and samples their count") from None
        return cls(*columns, values["samples"])


def _numbers(values: Tensor) -> list:
    """A list for JSON, which has no NaN."""
    return [None if math.isnan(x) else x for x in values.tolist()]


@torch.no_grad()
def measure_importance(model: nn.Module, prompts: Iterable, max_new_tokens: int = 64, seed: int = 0,
                       on_sample: Callable[[int, Tensor], None] | None = None) -> Importance:
    """Both importances of every layer; one sample for each prompt, so give a prompt several times for several samples.

    model: plain, not packed; float32 recommended. prompts: list[int] | ModelInputs, any number of them.
    on_sample(index, squares): called after each sample with its squared gradients, float64 [2, L].
    Raises PromptError for a prompt that the model cannot take, MinipopError for a packed model or when a gradient is not finite.
    """
    squares = []
    for index, (inputs, response) in enumerate(rollouts(model, prompts, max_new_tokens, seed)):
        squares.append(gate_gradients(model, inputs, response).double().square())
        if on_sample is not None:
            on_sample(index, squares[-1])
    if not squares:
        raise PromptError("no prompts to measure the importance with")
    return Importance.of(torch.stack(squares))


def gate_gradients(model: nn.Module, inputs: list[int] | ModelInputs, response_ids: list[int]) -> Tensor:
    """d loss / d gate of one prompt and response: [2, L], row 0 the prefill gates, row 1 the decode gates.

    float32 (float64 for a float64 model). One forward, one backward; weights get no gradients. Errors: see `measure_importance`.
    """
    check_plain(model)
    sample = Sample(model, inputs, response_ids)
    with torch.enable_grad():
        gates = sample.open_gates().requires_grad_()
        gradients, = torch.autograd.grad(sample.losses(sample.gated(gates)).sum(), gates)
    if not gradients.isfinite().all():
        raise MinipopError("the gates' gradients are not finite: try float32; if it already is, check the weights")
    return gradients


class Sample:
    """A prompt and a response in one pass: the same positions, masks and image rows that the runner gives them."""

    def __init__(self, model: nn.Module, inputs: list[int] | ModelInputs, response_ids: list[int]):
        config, inputs = model.config, as_inputs(inputs, model)
        self.model = model
        self.response = as_token_ids(response_ids).reshape(-1)  # [R]
        if not len(self.response):
            raise PromptError("the response is empty: there is no loss to take a gradient of")
        check_token_ids(self.response, config)
        batch = Batch.of([inputs], model)
        self.prompt_length, length = len(inputs), len(inputs) + len(self.response) - 1  # N, T
        if length > config.max_position_embeddings:
            raise PromptError(f"prompt and response together have {length} tokens, but the model was made for "
                              f"{config.max_position_embeddings}")
        blocks = model.image_blocks(batch.token_ids)
        self.prefill_length = self.prompt_length - int(boundary_lengths(batch, blocks))  # tokens under the prefill gates
        with torch.no_grad():
            embedded = model.embed(batch)  # [1, N, D]
            positions, following = model.positions(batch, torch.zeros(1, dtype=torch.long))
            fed = self.response[None, :-1]  # [1, R - 1]: the last token is predicted, but never fed back
            if fed.shape[1]:
                more, _ = model.positions(Batch(fed, torch.tensor([fed.shape[1]])), following)
                embedded.x = torch.cat((embedded.x, model.embed_tokens(fed)), 1)  # [1, T, D]
                embedded.deepstack = tuple(F.pad(rows, (0, 0, 0, fed.shape[1])) for rows in embedded.deepstack)
                positions = torch.cat((positions, more), 1)
                blocks = None if blocks is None else F.pad(blocks, (0, fed.shape[1]), value=-1)
            self.x, self.deepstack, self.rope = embedded.x, embedded.deepstack, model.rope(positions)
        self.span = Span(torch.zeros(1, dtype=torch.long), torch.tensor([length]), length, blocks)
        decode = torch.arange(length, device=self.x.device) >= self.prefill_length
        self.decode = decode[:, None]  # [T, 1]: which tokens belong to the decode stage

    def open_gates(self) -> Tensor:
        """Ones [2, L], in float32 at least: the gradient of a gate is a sum over many products."""
        return torch.ones(2, self.model.config.num_layers, device=self.x.device, dtype=torch.promote_types(self.x.dtype, torch.float32))

    def gated(self, gates: Tensor) -> Tap:
        """A tap that multiplies both branches of layer l by gates [2, L]: gates[0, l] in prefill tokens, gates[1, l] in the others."""
        def tap(layer: int, name: str, tensor: Tensor) -> Tensor:
            if name in ("attn_out", "mlp_out"):
                return (tensor * torch.where(self.decode, gates[1, layer], gates[0, layer])).to(tensor.dtype)  # [1, T, D] * [T, 1]
            return tensor
        return tap

    def losses(self, tap: Tap, first: int = 0, x: Tensor | None = None) -> Tensor:
        """-log p of each response token, [R]. With x [1, T, D], the stream that enters layer `first`, only the layers from there run."""
        depth = self.model.config.num_layers
        kv = FunctionalKV(self.span, self.x.device)
        x = run_layers(self.model, self.x if x is None else x, self.rope, kv, self.deepstack, layers=range(first, depth), tap=tap)
        logits = self.model.logits(x[:, self.prompt_length - 1 :])[0]  # [R, vocab]
        return -log_probs(logits, self.response.to(logits.device))


def as_inputs(inputs: list[int] | ModelInputs, model: nn.Module) -> ModelInputs:
    """A prompt as ModelInputs; an empty one stands for the family's BOS, as in the runner."""
    inputs = inputs if isinstance(inputs, ModelInputs) else ModelInputs(inputs)
    if len(inputs):
        return inputs
    if model.config.bos_token_id is None:
        raise PromptError("the prompt is empty, and this family has no BOS to start from")
    return ModelInputs([model.config.bos_token_id])


def check_plain(model: nn.Module) -> None:
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise MinipopError("packed weights have no gradients: load the model in float32, or leave out packing.pack")


# --- responses ------------------------------------------------------------------------------------------------------------------


def rollouts(model: nn.Module, prompts: Iterable, max_new_tokens: int, seed: int = 0,
             first: int = 0) -> Iterator[tuple[ModelInputs, list[int]]]:
    """(prompt, sampled response) for each prompt, in order. Sample i depends on its prompt, `seed` and its number alone.

    first: the number of the first prompt.
    """
    prompts = iter(prompts)
    while group := [as_inputs(prompt, model) for prompt in islice(prompts, GROUP)]:
        responses = sample_responses(model, group, max_new_tokens, [seed + 1_000_003 * (first + i) for i in range(len(group))])
        yield from zip(group, responses)
        first += len(group)


@torch.no_grad()
def sample_responses(model: nn.Module, prompts: list[ModelInputs], max_new_tokens: int, seeds: list[int]) -> list[list[int]]:
    """A response to each prompt at temperature 1, without filters, with a seed a prompt; an end-of-text id is its last token.

    The runner's `generate_batch`, but for the seeds: there one seed serves all rows.
    """
    config = model.config
    room = min(max(map(len, prompts)) + max_new_tokens - 1, config.max_position_embeddings)
    runner = Runner(model, max_seq_len=room, batch_size=len(prompts))
    generators = [torch.Generator().manual_seed(seed % 2**64) for seed in seeds]
    responses: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    logits = runner.prefill(prompts)
    while True:
        ids = draw(logits[:, : config.num_token_ids], generators).tolist()
        for row in list(running):
            responses[row].append(ids[row])
            if ids[row] in config.eos_token_ids or len(responses[row]) == max_new_tokens:
                running.discard(row)
        if not running or runner.cache.length == room:
            return responses
        logits = runner.decode(ids)  # finished rows go on to the end of their group, unheard


# --- the real thing: layers removed ---------------------------------------------------------------------------------------------


def removal_loss(model: nn.Module, samples: Iterable[tuple], layers: Iterable[int] | None = None, stage: str = "prefill") -> Tensor:
    """What the importance predicts: by how much the response's loss rises when one layer is removed in one stage. float64 [L].

    samples: (prompt, response ids) pairs. layers: those to remove, each alone (None: all of them), one result for each.
    stage: "prefill", where the layer's K/V are still written for tokens 1 .. N-1, as in POP; or "decode", for all other tokens.
    The mean over samples, in nats a response.
    """
    rows = [removal_losses(Sample(model, *sample), layers, stage) for sample in samples]
    if not rows:
        raise PromptError("no samples to remove layers in")
    return torch.stack(rows).mean(0)


@torch.no_grad()
def removal_losses(sample: Sample, layers: Iterable[int] | None = None, stage: str = "prefill") -> Tensor:
    """The same for one sample: float64 [L]."""
    if stage not in STAGES:
        raise PlanError(f"stage must be prefill or decode, not {stage!r:.60}")
    streams = [sample.x]  # what enters each layer: the layers below the removed one need not run again

    def keep(layer: int, name: str, tensor: Tensor) -> Tensor:
        if name == "resid":
            streams.append(tensor)
        return tensor

    unchanged, rises = sample.losses(keep).double().sum(), []
    for layer in range(sample.model.config.num_layers) if layers is None else layers:
        gates = sample.open_gates()
        gates[STAGES.index(stage), layer] = 0
        rises.append(sample.losses(sample.gated(gates), layer, streams[layer]).double().sum() - unchanged)
    return torch.stack(rises).cpu()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing their mean rank. NaN where one side is constant."""
    ranks = [(x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (a, b)]
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].item()


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _importance(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minipop.importance", description=__doc__.partition("\n\n")[0], epilog=__doc__.partition("\n\n")[2])
    parser.add_argument("--out", metavar="FILE", required=True, help="the importances, as JSON")
    parser.add_argument("--samples", type=positive, default=200, metavar="N", help="responses to sample (default: 200)")
    parser.add_argument("--prompts", metavar="FILE", help="a text file, a prompt a paragraph; or NAME.jsonl as minipop.generate reads it "
                        "(default: 40 built-in prompts); used again and again until there are enough samples")
    parser.add_argument("--response-tokens", type=positive, default=64, metavar="N", help="longest response (default: 64)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="same seed, same responses (default: 0)")
    parser.add_argument("--validate", type=positive, nargs="?", const=24, metavar="N",
                        help="also remove each layer in the first N samples (default: 24) and compare; about L forwards a sample")
    parser.add_argument("--figure", metavar="FILE", help="draw both curves on a logarithmic scale (needs matplotlib)")
    parser.add_argument("--plan-out", metavar="FILE", help="write a plan that skips the least important layers of the prefill")
    parser.add_argument("--ratio", default="1/3", metavar="R", help="share of the layers in that plan (default: 1/3)")
    add_model_arguments(parser, dtype="float32")
    return parser


def _importance(args: argparse.Namespace) -> int:
    if args.figure:
        load_pyplot()  # now rather than after an hour
        check_figure(args.figure)
    check_outputs({"--out": args.out, "--plan-out": args.plan_out, "--figure": args.figure, "--out with .partial": args.out + ".partial"},
                  [args.prompts, args.ckpt])
    args.dtype = args.dtype or "float32"
    folder, model, tokenizer, processor = load_from(args, packed=False)
    check_plain(model)
    depth, largest = model.config.num_layers, model.config.max_position_embeddings
    if model.config.sliced_width is not None and args.plan_out:
        raise PlanError("--plan-out is not for a model that SliceGPT made: it cannot skip layers")
    PrefillPlan.deepest(depth, args.ratio)  # only to refuse a ratio that is none
    prompts = measuring_prompts(args.prompts, tokenizer, processor is not None)
    limit = min(args.max_seq_len or DEFAULT_SEQ_LEN, largest) - args.response_tokens
    if limit < 1:
        raise PromptError(f"--response-tokens {args.response_tokens} leaves no room for a prompt")
    measure(prompts, model, tokenizer, processor, limit)

    validate = min(args.validate or 0, args.samples)
    partial = Path(args.out + ".partial")
    settings = _settings(model, prompts, args, validate)
    records = read_partial(partial, settings)[: args.samples]  # a sample: its squares [2][L], and its removal losses or None
    todo = (prompts[i % len(prompts)].inputs(tokenizer, processor) for i in range(len(records), args.samples))
    with tqdm(total=args.samples, initial=len(records), unit="sample", file=sys.stderr) as bar:
        for inputs, response in rollouts(model, todo, args.response_tokens, args.seed, len(records)):
            squares, removal = gate_gradients(model, inputs, response).double().square(), None
            if len(records) < validate:
                sample = Sample(model, inputs, response)
                removal = torch.stack([removal_losses(sample, stage=stage) for stage in STAGES]).tolist()
            records.append([squares.tolist(), removal])
            write_text(partial, json.dumps({"settings": settings, "records": records}))
            bar.update()

    importance = Importance.of(torch.tensor([squares for squares, _ in records], dtype=torch.float64))
    extra = {"checkpoint": folder.resolve().name, "dtype": args.dtype, "seed": args.seed, "response_tokens": args.response_tokens,
             "prompts": len(prompts), "prompt_source": Path(args.prompts).name if args.prompts else "built-in"}
    if validate:
        removal = torch.tensor([row for _, row in records[:validate]], dtype=torch.float64).mean(0)  # [2, L]
        correlation = [rank_correlation(getattr(importance, stage), removal[s]) for s, stage in enumerate(STAGES)]
        extra["validation"] = {"samples": validate, "prefill_removal": removal[0].tolist(), "decode_removal": removal[1].tolist(),
                               **{f"{stage}_rank_correlation": _numbers(torch.tensor([c], dtype=torch.float64))[0]
                                  for stage, c in zip(STAGES, correlation)}}
    importance.save(args.out, **extra)
    print(table(importance, extra.get("validation")))
    plan = importance.least_important(args.ratio)
    print(f"\nleast important: {plan.describe()}")
    if args.plan_out:
        plan.save(args.plan_out)
    if args.figure:
        draw_importance(importance, args.figure, folder.resolve().name)
    partial.unlink(missing_ok=True)  # last: as long as something could not be written, the same command makes it from here
    return 0


def table(importance: Importance, validation: dict | None = None) -> str:
    """Both importances of each layer with their standard errors, and the losses of real removals beside half of them."""
    head = f"{'layer':>5} {'prefill':>22} {'decode':>22}"
    if validation:
        head += f"   removed in prefill, decode: nats more ({validation['samples']} samples)"
    lines = [head]
    for layer in range(len(importance.prefill)):
        cells = [f"{getattr(importance, stage)[layer]:>10.3g} +- {getattr(importance, stage + '_error')[layer]:<8.2g}" for stage in STAGES]
        line = f"{layer:>5} " + " ".join(cells)
        if validation:
            line += f"  {validation['prefill_removal'][layer]:>10.3f} {validation['decode_removal'][layer]:>10.3f}"
        lines.append(line)
    if validation:
        rank = [validation[f"{stage}_rank_correlation"] for stage in STAGES]
        lines.append("rank correlation of importance and removal: " + ", ".join(
            f"{stage} {'undefined' if r is None else f'{r:.3f}'}" for stage, r in zip(STAGES, rank)))
    return "\n".join(lines)


def _settings(model: nn.Module, prompts: list[Prompt], args: argparse.Namespace, validate: int) -> str:
    """Stands for all that decides about a sample beside its number."""
    params = SamplingParams(seed=args.seed, max_new_tokens=args.response_tokens)
    parts = [settings_digest(model, PrefillPlan.full(model.config.num_layers), params, False), validate, *(p.digest for p in prompts)]
    return sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_partial(path: Path, settings: str) -> list:
    """What an interrupted run has done; nothing where there was none. Raises MinipopError for a file of another run."""
    if not path.exists():
        return []
    values = read_json(path, MinipopError)
    if values.get("settings") != settings or not isinstance(values.get("records"), list):
        raise MinipopError(f"{path}: left by a run with another checkpoint, other prompts or other settings: remove it, or choose "
                           "another --out")
    return values["records"]


def draw_importance(importance: Importance, path: str | Path, title: str = "") -> None:
    """Both curves over the layers, logarithmic, with standard errors, like the paper's Figure 1. A zero has no place and is left out."""
    figure, axes = load_pyplot().subplots(figsize=(6.5, 4))
    for stage, colour in zip(STAGES, ("tab:blue", "tab:red")):
        mean, error = getattr(importance, stage), getattr(importance, stage + "_error").nan_to_num(0.0)
        axes.errorbar(range(len(mean)), mean.where(mean > 0, math.nan).tolist(), yerr=error.tolist(), marker="o", markersize=3,
                      capsize=2, color=colour, label=stage)
    axes.set_yscale("log", nonpositive="clip")
    axes.set(xlabel="layer", ylabel="importance (mean squared gate gradient)", title=f"{title}, {importance.samples} samples".strip(", "))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
