"""Calibrated K/V: a better projection for the skipped layers, for the same work at run time.

    python -m minipop.calibrate --ckpt path/to/checkpoint --text book.txt news.txt --ratio 1/3 --out kv.safetensors
    python -m minipop.chat --ckpt path/to/checkpoint --ratio 1/3 --kv kv.safetensors

POP (arXiv 2602.03295) computes K and V of a skipped layer l from the stream at the cut with W_K and W_V that were trained for another
stream, the one that reaches layer l in the full model. This goes one step past the paper: it refits them, for the keys and for the values
of every skipped layer by themselves. With n_t the RMS-normalised stream of token t at the cut (and a 1 behind it, for a bias) and y_t its K
(before k-norm and RoPE) or V in the full model,

1. a ridge regression in closed form, which starts from POP's own projection W:

       minimise over D:   sum over prompt tokens t of  w_t |(W + D) n_t - y_t|^2  +  penalty on D

   Few tokens of a prompt are read by those that follow, and an error in the others costs nothing. So a token counts by how much the loss of
   what follows depends on its row, w_t = |d loss / d row_t|, relative to the root mean square over the prompt and at most CLIP. The penalty
   is in proportion to the diagonal of the Gram matrix, because residual streams have a few huge coordinates; held-out samples choose it.

2. a few steps of natural gradient (--steps): rows need not be right, answers do. Each step lowers the KL divergence between the full
   model's predictions of what follows and the calibrated model's. It is preconditioned by the regression's Gram matrix of the inputs and by the
   second moments of the rows' gradients (the Kronecker-factored Fisher matrix of arXiv 1503.05671), and held-out samples choose its length.

docs/CALIBRATION.md has what either buys. A sample is a prompt and what follows it: pieces of --text, divided at three quarters, or the prompts of
--prompts (with pictures, for a vision-language checkpoint), each with a response sampled from the model itself. The more they are like
what comes later, the better.

Shapes: L' skipped layers, T tokens of a prompt that are pruned, D hidden, K kv heads, E head_dim, R tokens that follow.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .attention import Visible
from .cache import FunctionalKV, Span, visibility
from .cli import DEFAULT_SEQ_LEN, Parser, add_model_arguments, check_outputs, load_from, positive, run, seed
from .errors import MinipopError, PlanError, PromptError
from .generate import measure
from .importance import Sample, check_plain, rollouts
from .inputs import ModelInputs
from .layers import rotate
from .plan import PrefillPlan, format_layers, parse_layers
from .projection import KVProjection, fingerprint
from .prompts import measuring_prompts
from .runner import Runner, run_layers
from .sampling import log_probs
from .texts import read_text, text_sequences

CLIP = 20.0
PENALTIES = tuple(10.0**-k for k in range(1, 7))  # relative to the Gram matrix's diagonal
DAMPING = 0.1  # of both factors of the natural gradient, relative to their diagonals' mean
PROMPT_SHARE = 3 / 4

Samples = Sequence[tuple[list[int] | ModelInputs, list[int]]]  # (prompt, what follows it)


# --- a sample in the full model, and what follows its prompt under other rows ----------------------------------------------------


class PromptRows:
    """A `layers.KV` for the tokens after a pruned prompt: they find its rows in the skipped layers, and add their own behind."""

    def __init__(self, keys: dict[int, Tensor], values: dict[int, Tensor], span: Span):
        self.keys, self.values, self.span = keys, values, span  # each layer's rows [1, K, T, E]

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.keys[layer], k), 2), torch.cat((self.values[layer], v), 2)

    def visible(self, layer: int, window: int | None) -> Visible:
        return visibility(self.span, window, None, self.keys[layer].device)


class Observed:
    """A sample after one pass through the full model: the stream at the cut and the rows that the projection should give.

    x [1, T + rest, D]; n [T, D]; targets [T, L', 2, K * E], keys before k-norm and RoPE, then values; final [R, D], the last layer's
    stream where the response is predicted. pruned: T; 0 for a prompt that is all boundary.
    """

    def __init__(self, model: nn.Module, cut: int, sample: Sample, seen: dict[tuple[int, str], Tensor], last: Tensor):
        self.model, self.cut, self.response = model, cut, sample.response
        self.pruned, self.rope = sample.prefill_length, sample.rope
        self.x = seen[cut - 1, "resid"] if cut else sample.x
        self.n = model.layers[cut].input_norm.normalise(self.x[0, : self.pruned])
        above = range(cut, model.config.num_layers)
        rows = torch.stack([seen[i, name][0].transpose(0, 1).flatten(1) for i in above for name in ("k_proj", "v")], 1)
        self.targets = rows.unflatten(1, (-1, 2))
        self.first = sample.prompt_length - 1 - self.pruned  # of the tokens after the pruned ones, the one that predicts the response's first
        self.final = last[0, sample.prompt_length - 1 :]
        rest = sample.x.shape[1] - self.pruned
        blocks = None if sample.span.blocks is None else sample.span.blocks[:, self.pruned :]
        self.span = Span(torch.tensor([self.pruned]), torch.tensor([rest]), rest, blocks if blocks is not None and (blocks >= 0).any() else None)

    @classmethod
    @torch.no_grad()
    def at(cls, model: nn.Module, cuts: Sequence[int], sample: Sample) -> list["Observed"]:
        """The sample at several cuts: one pass serves them all."""
        seen: dict[tuple[int, str], Tensor] = {}

        def keep(layer: int, name: str, tensor: Tensor) -> Tensor:
            if layer >= min(cuts) and name in ("k_proj", "v"):
                seen[layer, name] = tensor[:, :, : sample.prefill_length]
            elif layer + 1 in cuts and name == "resid":
                seen[layer, name] = tensor
            return tensor

        last = run_layers(model, sample.x, sample.rope, FunctionalKV(sample.span, sample.x.device), sample.deepstack, tap=keep)
        return [cls(model, cut, sample, seen, last) for cut in cuts]

    def log_predictions(self, rows: Tensor) -> Tensor:
        """Log-probabilities of what follows [R, vocab] when the prompt's rows are these [T, L', 2, K * E]; gradients flow to them."""
        model, keys, values = self.model, {}, {}
        for i, layer in enumerate(rows.unbind(1), self.cut):
            k, v = layer.to(self.x.dtype).unflatten(-1, (model.config.num_kv_heads, -1)).permute(1, 2, 0, 3)[:, None]  # each [1, K, T, E]
            norm, (cos, sin) = model.layers[i].attn.k_norm, self.rope[i]
            keys[i] = rotate(k if norm is None else norm(k), (cos[:, :, : self.pruned], sin[:, :, : self.pruned]))
            values[i] = v
        rope = [(cos[:, :, self.pruned :], sin[:, :, self.pruned :]) for cos, sin in self.rope]
        above = range(self.cut, model.config.num_layers)
        x = run_layers(model, self.x[:, self.pruned :], rope, PromptRows(keys, values, self.span), layers=above)
        return model.logits(x[:, self.first :])[0].log_softmax(-1)

    def loss_gradient(self) -> Tensor:
        """d (sum of -log p of the response) / d rows at the full model's, [T, L', 2, K * E]."""
        rows = self.targets.detach().float().requires_grad_()
        predicted = self.log_predictions(rows)
        loss = -predicted.gather(1, self.response.to(predicted.device)[:, None]).sum()
        return torch.autograd.grad(loss, rows)[0]

    def divergence(self, rows: Tensor) -> Tensor:
        """KL(full || with these rows), summed over the R predictions."""
        with torch.no_grad():
            full = self.model.logits(self.final[None])[0].log_softmax(-1)
        return (full.exp() * (full - self.log_predictions(rows))).sum()


def token_weights(gradients: Tensor) -> Tensor:
    """Gradients [T, L', 2, K * E] -> what each token counts [T, L', 2]: their norm over the prompt's root mean square, at most CLIP."""
    norms = gradients.float().norm(dim=-1)
    scale = norms.square().mean(0, keepdim=True).sqrt().clamp_min(torch.finfo(norms.dtype).tiny)
    return (norms / scale).clamp(max=CLIP)


# --- step one: the regression ---------------------------------------------------------------------------------------------------


class Statistics:
    """The sums that the regression needs, in float64: one regression for the keys and one for the values of every skipped layer.

    gram [L', 2, D + 1, D + 1] of the weighted inputs; cross [L', 2, D + 1, K * E] with the residuals y - W n; power [L', 2] of the
    residuals; moments [L', 2, K * E, K * E] of the rows' gradients.
    """

    def __init__(self, weight: Tensor, bias: Tensor):
        layers, _, outputs, width = weight.shape
        self.weight, self.bias = weight, bias
        zeros = {"dtype": torch.float64, "device": weight.device}
        self.gram = torch.zeros(layers, 2, width + 1, width + 1, **zeros)
        self.cross = torch.zeros(layers, 2, width + 1, outputs, **zeros)
        self.power = torch.zeros(layers, 2, **zeros)
        self.moments = torch.zeros(layers, 2, outputs, outputs, **zeros)

    @torch.no_grad()
    def add(self, n: Tensor, targets: Tensor, gradients: Tensor) -> None:
        """n [T, D]; targets and gradients [T, L', 2, K * E]."""
        inputs, weights = with_one(n.double()), token_weights(gradients).double()
        for layer in range(len(self.gram)):
            for part in range(2):
                residual = targets[:, layer, part].double() - inputs[:, :-1] @ self.weight[layer, part].T - self.bias[layer, part]
                weighted = inputs * weights[:, layer, part, None]
                self.gram[layer, part] += weighted.T @ inputs
                self.cross[layer, part] += weighted.T @ residual
                self.power[layer, part] += (weights[:, layer, part, None] * residual.square()).sum()
                gradient = gradients[:, layer, part].double()
                self.moments[layer, part] += gradient.T @ gradient

    def solve(self, layer: int, part: int, penalties: Sequence[float]) -> list[Tensor]:
        """The correction [D + 1, K * E] for each penalty. One eigendecomposition serves all of them."""
        gram = self.gram[layer, part]
        scale = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()  # the penalty is relative to the diagonal: make it ones
        values, vectors = torch.linalg.eigh(gram * scale * scale[:, None])
        projected = vectors.T @ (self.cross[layer, part] * scale[:, None])
        return [scale[:, None] * (vectors @ (projected / (values.clamp_min(0) + penalty)[:, None])) for penalty in penalties]

    def error(self, layer: int, part: int, correction: Tensor) -> float:
        """The weighted squared error that is left with a correction, as a share of the residuals'."""
        gram, cross = self.gram[layer, part], self.cross[layer, part]
        left = self.power[layer, part] - 2 * (correction * cross).sum() + (correction * (gram @ correction)).sum()
        return float(left / self.power[layer, part])


def with_one(n: Tensor) -> Tensor:
    """[T, D] -> [T, D + 1]: the input of the bias."""
    return torch.cat((n, torch.ones_like(n[:, :1])), 1)


# --- step two: natural gradient -------------------------------------------------------------------------------------------------


class NaturalGradient:
    """Directions that lower the divergence from the full model, preconditioned by what the regression has summed up."""

    def __init__(self, statistics: Statistics):
        self.inputs = [[damped_inverse(gram) for gram in pair] for pair in statistics.gram]
        self.outputs = [[damped_inverse(moments) for moments in pair] for pair in statistics.moments]

    def direction(self, samples: Iterable[Observed], map_: Tensor) -> Tensor:
        """Of the steepest ascent in the Fisher metric, like map_ [L', 2, D + 1, K * E]."""
        ascent = torch.zeros_like(map_)
        for sample in samples:
            rows = rows_of(map_, sample.n).requires_grad_()
            gradient, = torch.autograd.grad(sample.divergence(rows), rows)
            ascent += torch.einsum("td,tlpo->lpdo", with_one(sample.n.double()), gradient.double())
        for layer, pair in enumerate(ascent):
            for part, one in enumerate(pair):
                pair[part] = self.inputs[layer][part] @ one @ self.outputs[layer][part]
        return ascent


def damped_inverse(matrix: Tensor) -> Tensor:
    """Of a symmetric positive matrix scaled to a mean diagonal of 1; DAMPING is relative to the diagonal, as the regression's penalty is."""
    matrix = matrix / matrix.diagonal().mean()
    diagonal = matrix.diagonal()
    return torch.linalg.inv(matrix + DAMPING * torch.diag(diagonal + diagonal.mean() * 1e-3))


def rows_of(map_: Tensor, n: Tensor) -> Tensor:
    """What a map [L', 2, D + 1, K * E] makes of n [T, D]: float32 [T, L', 2, K * E]."""
    return torch.einsum("td,lpdo->tlpo", with_one(n.float()), map_.float())


@torch.no_grad()
def mean_divergence(samples: Sequence[Observed], map_: Tensor) -> float:
    """KL a predicted token, nats."""
    return sum(float(sample.divergence(rows_of(map_, sample.n))) for sample in samples) / sum(len(sample.response) for sample in samples)


# --- the calibration ------------------------------------------------------------------------------------------------------------


@dataclass
class Calibration:
    """projection: what goes into the file. error [L', 2]: of keys and values, the share of POP's weighted squared error that the regression
    left on the held-out samples; penalty [L', 2]: what they chose (both 0 at the cut, where POP is exact). divergences: their KL from the
    full model, nats a token: under POP, after the regression, and after each step; POP's alone where the regression did not lower it, and
    the projection is POP's own."""

    projection: KVProjection
    error: Tensor
    penalty: Tensor
    divergences: list[float]


def calibrate(model: nn.Module, samples: Samples, cut: int, steps: int = 3, held_out: float = 0.1,
              progress: Callable[[Iterable], Iterable] = iter) -> Calibration:
    """Refit the K/V projections of the layers cut .. L-1 to the stream at the cut.

    model: plain (not packed), of any family. samples: (prompt, what follows it) pairs, at least two; the last `held_out` of them choose the
    penalties and the lengths of the steps, nothing else. steps: of natural gradient after the regression; fewer are made where one does not
    help. Memory: 2 * L' Gram matrices of (D + 1)^2 float64 numbers three times, and of each sample the stream and L' layers' K/V.
    Raises PlanError for a cut that leaves nothing to skip or lies below Qwen3-VL's DeepStack layers, PromptError for too few samples.
    """
    return calibrate_cuts(model, samples, [cut], steps, held_out, progress)[0]


def calibrate_cuts(model: nn.Module, samples: Samples, cuts: Sequence[int], steps: int = 3, held_out: float = 0.1,
                   progress: Callable[[Iterable], Iterable] = iter) -> list[Calibration]:
    """`calibrate` at several cuts: the samples go through the full model once for all of them. Memory is that of all together."""
    check_plain(model)
    depth = model.config.num_layers
    for cut in cuts:
        if not model.deepstack_layers <= cut < depth:
            raise PlanError(f"cannot calibrate a cut at layer {cut}: it must lie in {model.deepstack_layers} to {depth - 1}")
    if model.config.sliced_width is not None:
        raise PlanError("cannot calibrate a model that SliceGPT made: it cannot skip layers")
    if not 0 < held_out < 1:
        raise PromptError(f"held_out must lie between 0 and 1, not {held_out}")
    if len(samples) < 2:
        raise PromptError("calibration needs at least two samples, one of them to choose the penalty: give more text or prompts")
    fits = [_Fit(model, cut) for cut in cuts]
    kept = held_out_count(len(samples), held_out)
    for number, (prompt, response) in enumerate(progress(samples)):
        for fit, observed in zip(fits, Observed.at(model, cuts, Sample(model, prompt, response))):
            if observed.pruned:
                fit.add(observed, held_out=number >= len(samples) - kept)
    return [fit.solve(steps, progress) for fit in fits]


class _Fit:
    """The calibration of one cut: sums of the samples it is fitted to and of those that choose, then the two steps."""

    def __init__(self, model: nn.Module, cut: int):
        self.model, self.cut = model, cut
        own = KVProjection.of(model, cut, torch.float32)
        self.weight = own.weight.double().view(model.config.num_layers - cut, 2, -1, own.weight.shape[1])  # [L', 2, K * E, D]
        self.bias = torch.zeros_like(self.weight[..., 0]) if own.bias is None else own.bias.double().view(self.weight.shape[:3])
        self.fit, self.check = Statistics(self.weight, self.bias), Statistics(self.weight, self.bias)
        self.fitted: list[Observed] = []
        self.checked: list[Observed] = []

    def add(self, observed: Observed, held_out: bool) -> None:
        statistics, group = (self.check, self.checked) if held_out else (self.fit, self.fitted)
        statistics.add(observed.n, observed.targets, observed.loss_gradient())
        observed.targets = None  # large, and not needed any more
        group.append(observed)

    def solve(self, steps: int, progress: Callable[[Iterable], Iterable]) -> Calibration:
        fit, check, checked = self.fit, self.check, self.checked
        if not self.fitted or not checked:
            raise PromptError("the samples' prompts are too short: nothing of them is pruned")
        if not fit.gram.isfinite().all() or not fit.moments.isfinite().all() or not check.power.isfinite().all():
            raise MinipopError("the streams or their gradients are not finite: calibrate in float32; if that is so already, check the weights")

        map_ = torch.cat((self.weight.transpose(2, 3), self.bias[:, :, None]), 2)  # [L', 2, D + 1, K * E]
        divergences, fitted_map = [mean_divergence(checked, map_)], map_.clone()
        error, penalty = torch.zeros_like(fit.power), torch.zeros_like(fit.power)
        for layer in range(1, len(map_)):  # not the first: its own input is the stream at the cut, so POP is exact there
            for part in range(2):
                corrections = fit.solve(layer, part, PENALTIES)
                errors = [check.error(layer, part, correction) for correction in corrections]
                best = min(range(len(errors)), key=errors.__getitem__)
                error[layer, part], penalty[layer, part] = errors[best], PENALTIES[best]
                fitted_map[layer, part] += corrections[best]
        if (found := mean_divergence(checked, fitted_map)) < divergences[0]:
            map_, steps_left = fitted_map, steps
            divergences.append(found)
        else:
            steps_left = 0  # so little text that not even this much can be learnt from it

        natural = NaturalGradient(fit) if steps_left else None
        length = None
        for _ in range(steps_left):
            direction = natural.direction(progress(self.fitted), map_)
            if length is None:  # a first guess: a thousandth of the map
                length = float(map_.norm() / direction.norm()) * 1e-3
            length, found = line_search(lambda size: mean_divergence(checked, map_ - size * direction), length)
            if found >= divergences[-1]:
                break
            map_ = map_ - length * direction
            divergences.append(found)
        projection = KVProjection(map_[:, :, :-1].transpose(2, 3).flatten(0, 2).float(), map_[:, :, -1].flatten().float(), self.cut,
                                  self.model.config.num_layers, fingerprint(self.model, self.cut))
        return Calibration(projection, error, penalty, divergences)


def line_search(value: Callable[[float], float], start: float) -> tuple[float, float]:
    """The length at which `value` is lowest, and its value there: by factors of two from `start`, upwards or else downwards."""
    best = start, value(start)
    for factor in (2.0, 0.5):
        while (found := value(best[0] * factor)) < best[1]:
            best = best[0] * factor, found
        if best[0] != start:
            break
    return best


def held_out_count(samples: int, share: float) -> int:
    return min(max(1, round(share * samples)), samples - 1)


@torch.no_grad()
def continuation_loss(model: nn.Module, plan: PrefillPlan, samples: Samples) -> Tensor:
    """The mean -log p of what follows each prompt, [samples]: the prompt prefilled under the plan, the rest through the full model."""
    losses = []
    for prompt, response in samples:
        runner = Runner(model, plan, max_seq_len=len(prompt) + len(response))
        logits = runner.prefill(prompt if isinstance(prompt, ModelInputs) else [prompt])
        if len(response) > 1:
            logits = torch.cat((logits, runner.extend(torch.tensor([response[:-1]]))[0]))  # [R, vocab]
        losses.append(-log_probs(logits, torch.tensor(response, device=logits.device)).mean())
    return torch.stack(losses)


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _calibrate(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.calibrate", description=first, epilog=rest)
    parser.add_argument("--out", metavar="FILE", required=True, help="the calibrated K/V, a safetensors file")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--ratio", default="1/3", metavar="R", help="share of the layers that prefill skips, the deepest (default: 1/3)")
    one.add_argument("--skip-layers", metavar="LIST", help="the same by number, counted from 0: 20-29")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="text to calibrate with")
    parser.add_argument("--prompts", metavar="FILE", help="prompts to calibrate with, as in minipop.importance: a text or .jsonl file")
    parser.add_argument("--samples", type=positive, default=400, metavar="N", help="at most, of text and prompts each (default: 400)")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens of a piece of text (default: 512)")
    parser.add_argument("--response-tokens", type=positive, default=64, metavar="N", help="sampled after a prompt (default: 64)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of natural gradient after the regression (default: 3)")
    parser.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="of the samples, to choose the penalty (default: 0.1)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the draw and of the responses (default: 0)")
    add_model_arguments(parser, dtype="float32")
    return parser


def _calibrate(args: argparse.Namespace) -> int:
    if not args.text and not args.prompts:
        raise PromptError("nothing to calibrate with: give --text FILE or --prompts FILE")
    if args.steps < 0:
        raise PromptError("--steps must be 0 or more")
    if not 0 < args.held_out < 1:
        raise PromptError(f"--held-out must lie between 0 and 1, not {args.held_out}")
    if args.length < 4:
        raise PromptError(f"--length {args.length} is too short: a piece is divided into a prompt and what follows it; give 4 tokens or more")
    if args.max_seq_len is not None and not args.prompts:
        raise PromptError("--max-seq-len is for --prompts: how long a piece of --text is, --length says")
    check_outputs({"--out": args.out}, [*args.text, args.prompts, args.ckpt])
    texts = [read_text(path) for path in args.text]
    args.dtype = args.dtype or "float32"
    folder, model, tokenizer, processor = load_from(args, packed=False)
    depth, largest = model.config.num_layers, model.config.max_position_embeddings
    plan = PrefillPlan.deepest(depth, args.ratio) if args.skip_layers is None else PrefillPlan(depth, parse_layers(args.skip_layers))
    if not plan.skip or not plan.is_suffix:
        raise PlanError(f"calibration is for the deepest layers, skipped together; this plan has {plan.describe()}")
    if args.length > largest:
        raise PromptError(f"--length {args.length} exceeds the {largest} positions the model was made for")

    samples: list = []
    if args.prompts:
        prompts = measuring_prompts(args.prompts, tokenizer, processor is not None)[: args.samples]
        measure(prompts, model, tokenizer, processor, min(args.max_seq_len or DEFAULT_SEQ_LEN, largest) - args.response_tokens)
        sampled = rollouts(model, (prompt.inputs(tokenizer, processor) for prompt in prompts), args.response_tokens, args.seed)
        samples += tqdm(sampled, total=len(prompts), desc="responses", file=sys.stderr)
    if texts:
        divide = max(1, math.floor(PROMPT_SHARE * args.length))
        pieces = text_sequences(tokenizer, texts, args.samples, args.length, args.seed)
        samples += [(piece[:divide], piece[divide:]) for piece in pieces]
    samples = [samples[i] for i in torch.randperm(len(samples), generator=torch.Generator().manual_seed(args.seed)).tolist()]
    made = calibrate(model, samples, plan.cut, args.steps, args.held_out, lambda items: tqdm(items, unit="sample", file=sys.stderr))
    made.projection.notes = {"checkpoint": folder.resolve().name, "samples": str(len(samples)), "dtype": args.dtype,
                             "sources": ", ".join(Path(name).name for name in [*args.text, *filter(None, [args.prompts])])}
    made.projection.save(args.out)
    print(f"{len(samples)} samples, {sum(len(prompt) for prompt, _ in samples):,} prompt tokens")
    print(table(made))
    if len(made.divergences) == 1:
        print("nothing that was fitted lowered the divergence on held-out samples: the file holds POP's own projections. Give more text")

    kept = samples[-held_out_count(len(samples), args.held_out):][:32]
    plans = (PrefillPlan.full(depth), plan, PrefillPlan(depth, plan.skip, kv=args.out))
    full, pop, calibrated = (continuation_loss(model, each, kept) for each in plans)
    gap, left = (pop - full).mean().item(), (calibrated - full).mean().item()
    print(f"\nloss of what follows {len(kept)} held-out prompts, nats a token: full {full.mean():.3f}, POP {pop.mean():.3f}, calibrated "
          f"{calibrated.mean():.3f}" + (f": {1 - left / gap:.0%} of the gap closed" if gap > 0 else ""))
    print(f"written to {args.out}; use it with --skip-layers {format_layers(plan.skip)} --kv {args.out}")
    return 0


def table(made: Calibration) -> str:
    lines = ["share of POP's error in K and V that is left on held-out samples (and the penalty)", f"{'layer':>5} {'K':>16} {'V':>16}"]
    for layer, (errors, penalties) in enumerate(zip(made.error.tolist(), made.penalty.tolist()), made.projection.cut):
        lines.append(f"{layer:>5} " + " ".join(f"{error:>7.3f} ({penalty:.0e})" for error, penalty in zip(errors, penalties)))
    names = ["POP", "regression", *(f"step {i}" for i in range(1, len(made.divergences)))]
    lines.append("\ndivergence from the full model, nats a token: " + ", ".join(f"{name} {value:.4f}" for name, value in zip(names, made.divergences)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
