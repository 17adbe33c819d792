"""From logits to the next token id: penalise, scale, filter, draw.

Reads top-down: what a user may ask for (`SamplingParams`), the state of one batch (`Sampler`), then the steps as pure functions,
in the order they are applied: repetition penalty, temperature, top-k, top-p, min-p, draw. Temperature 0 is the plain argmax.

Shapes: B rows of the batch, V ids that may be sampled (logits beyond the tokenizer's last id are padding, cut off first).
"""

import math
import reprlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from minipop.errors import MinipopError, PromptError

_LARGEST = sys.float_info.max
_RULES = (  # field, type, what is allowed (NaN fails every comparison), the same in words
    ("temperature", Real, lambda x: 0 <= x <= _LARGEST, "a finite number >= 0 (0 is greedy)"),
    ("top_k", Integral, lambda x: x >= 0, "an integer >= 0 (0 keeps every token)"),
    ("top_p", Real, lambda x: 0 <= x <= 1, "a number from 0 to 1 (1 keeps every token)"),
    ("min_p", Real, lambda x: 0 <= x <= 1, "a number from 0 to 1 (0 keeps every token)"),
    ("repetition_penalty", Real, lambda x: 0 < x <= _LARGEST, "a finite number > 0 (1 is no penalty)"),
    ("max_new_tokens", Integral, lambda x: x >= 0, "an integer >= 0"),
    ("seed", Integral, lambda x: 0 <= x < 2**64, "None or an integer from 0 to 2**64 - 1"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises PromptError for a field out of range or of the wrong type.

    seed: same seed, same text (PyTorch's CPU generator looks at its low 32 bits). EVERY row of a batch starts from this seed, so
          that a row equals its solo run; hence equal prompts give equal rows. None: a fresh seed for each row.
    stop_token_ids: ids that end generation, beside the model's own end-of-text ids; kept as a tuple.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name, kind, allowed, rule in _RULES:
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not allowed(value):
                raise PromptError(f"sampling parameter {name} must be {rule}, got {reprlib.repr(value)}")
            object.__setattr__(self, name, float(value) if kind is Real else int(value))  # how a frozen class sets a field
        ids = self.stop_token_ids
        if not isinstance(ids, (tuple, list, set, frozenset)) or any(
                isinstance(i, bool) or not isinstance(i, Integral) or i < 0 for i in ids):
            raise PromptError(f"sampling parameter stop_token_ids must be a tuple of integers >= 0, got {reprlib.repr(ids)}")
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))


class Sampler:
    """Chooses the next token of each row of a batch, and remembers what later choices depend on.

    Rows share nothing: each has its own random generator, of which every token uses one number, and its own history. So a row's
    tokens depend neither on its neighbours nor on their leaving the batch.

    prompts: one per row, list[int] or LongTensor [N]; they begin the history that the repetition penalty looks at.
    vocab_size: the width of the logits. num_token_ids: ids from here on are never sampled (None: all may be).
    Raises PromptError if there is a penalty and a prompt has an id outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompts: Sequence[Sequence[int] | Tensor], *, vocab_size: int,
                 num_token_ids: int | None = None, device: torch.device | str = "cpu"):
        self.params = params
        self.vocab_size = vocab_size
        self.num_ids = vocab_size if num_token_ids is None else min(num_token_ids, vocab_size)  # V
        self.rows = list(range(len(prompts)))  # each row's number in the original batch, for messages
        # The generators are on the CPU wherever the model is: the same seed gives the same numbers everywhere.
        self.generators = [torch.Generator().manual_seed(secrets.randbits(64) if params.seed is None else params.seed)
                           for _ in prompts]
        # The penalty counts an id once however often it occurred, so a history is a set: a row of this mask. No penalty, no mask.
        self.seen = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), self.num_ids, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.extend_history(row, prompt)

    def sample(self, logits: Tensor) -> Tensor:
        """logits [B, vocab] -> LongTensor [B] on the same device; the ids join the history.

        Raises MinipopError, naming the row, if its logits hold NaN or +inf or are all -inf: no token would be the right one.
        """
        if tuple(logits.shape) != (len(self.rows), self.vocab_size):
            raise MinipopError(f"the sampler expects logits [{len(self.rows)}, {self.vocab_size}], got {list(logits.shape)}")
        logits = logits[:, : self.num_ids].float()  # [B, vocab] -> [B, V]
        largest, ids = logits.max(dim=-1)  # [B] each; the first index among ties
        self._check_finite(largest)
        if self.params.temperature > 0:
            ids = draw(process_logits(logits, self.params, self.seen), self.generators)
        elif self.seen is not None:
            ids = apply_repetition_penalty(logits, self.seen, self.params.repetition_penalty).argmax(dim=-1)
        if self.seen is not None:
            self.seen = self.seen.scatter(1, ids[:, None], True)  # out of place: works in and out of inference mode
        return ids

    def keep(self, rows: Sequence[int] | Tensor) -> None:
        """Drop finished rows: go on with these only (indices into the current batch, in the order wanted, or a mask)."""
        chosen = torch.arange(len(self.rows))[rows.cpu() if isinstance(rows, Tensor) else list(rows)].tolist()
        self.rows = [self.rows[row] for row in chosen]
        self.generators = [self.generators[row] for row in chosen]
        if self.seen is not None:
            self.seen = self.seen[chosen]

    def extend_history(self, row: int, ids: Sequence[int] | Tensor) -> None:
        """Add ids from elsewhere, such as the next user turn, to one row's history. PromptError: an id outside the vocabulary."""
        if self.seen is None:
            return
        ids = torch.as_tensor(ids, dtype=torch.long, device=self.seen.device).reshape(-1)  # [N]
        if outside := ids[(ids < 0) | (ids >= self.vocab_size)].tolist():
            raise PromptError(f"prompt {self.rows[row]}: token id {outside[0]} is outside the vocabulary of {self.vocab_size}")
        seen = self.seen.clone()
        seen[row, ids[ids < self.num_ids]] = True  # padding ids are never sampled: nothing to penalise
        self.seen = seen

    def _check_finite(self, largest: Tensor) -> None:
        # A NaN wins every max, so a row's largest logit tells all: NaN, +inf, or -inf if no token is left. A few -inf are fine.
        if not largest.isfinite().all():
            row, value = next((row, x) for row, x in zip(self.rows, largest.tolist()) if not math.isfinite(x))
            raise MinipopError(f"the model produced non-finite logits in row {row} (largest value: {value}): "
                               "try float32 or bfloat16; if it already is one of them, check the weights")


# ---- The steps: logits [B, V] -> float32 [B, V]. A token that is filtered out gets -inf; the most likely one always stays ----


def process_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Every step before the draw; the result's softmax is the distribution drawn from. seen: history mask, BoolTensor [B, V]."""
    logits = logits.float()
    if params.repetition_penalty != 1 and seen is not None:
        logits = apply_repetition_penalty(logits, seen, params.repetition_penalty)
    if params.temperature == 0:
        return keep_top_p(logits, 0.0)  # the argmax alone
    if params.temperature != 1:
        logits = apply_temperature(logits, params.temperature)
    if params.top_k > 0:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    if params.min_p > 0:
        logits = keep_min_p(logits, params.min_p)
    return logits


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Where seen [B, V]: multiply a negative logit by the penalty, divide any other (arXiv 1909.05858). Above 1: less likely."""
    penalty = _within_float32(penalty)
    limit = torch.finfo(logits.dtype).max
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty).clamp(-limit, limit)  # extremes stay finite
    return torch.where(seen & logits.isfinite(), penalised, logits)  # -inf, ruled out by the model itself, stays -inf


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Below 1 sharpens, above 1 flattens. The largest logit is moved to 0 first: a tiny temperature cannot make +inf."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / _within_float32(temperature)


def _within_float32(x: float) -> float:
    # A Python float is wider than float32, where 1e-300 is 0 and 1e300 is inf: 0 / 0 and inf / inf would be NaN.
    return min(max(x, 1e-30), 1e30)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits and whatever ties with the k-th. k above V keeps all."""
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]  # [B, 1]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Nucleus: keep the fewest most likely tokens whose probabilities reach p, and at least one (arXiv 1904.09751)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # [B, V] each; among ties the lower id comes first
    reached = ordered.softmax(dim=-1).cumsum(dim=-1) >= p  # [B, V]: is p reached with this token?
    drop = torch.zeros_like(reached)
    drop[:, 1:] = reached[:, :-1]  # then every later one goes
    return logits.masked_fill(drop.scatter(1, order, drop), -math.inf)  # scatter: from sorted order back to ids


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep the tokens at least min_p times as likely as the most likely one (arXiv 2407.01082)."""
    probs = logits.softmax(dim=-1)  # [B, V]
    return logits.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -math.inf)


def draw(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One id per row from softmax(logits [B, V]) -> LongTensor [B]: the first with cumulative probability above a random number.

    One number per row and token, whatever V. The sum is float64: in float32 a long tail of rare tokens is lost to rounding.
    """
    probs = logits.softmax(dim=-1)  # [B, V]
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    cumulative = cumulative.masked_fill(probs == 0, 0.0)  # rounding in a parallel sum must not let a filtered token be hit
    uniform = [torch.rand((), generator=g, dtype=torch.float64).item() for g in generators]  # each in [0, 1)
    uniform = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]  # [B, 1]
    threshold = uniform * cumulative.amax(dim=-1, keepdim=True)  # [B, 1], below the total: some id exceeds it
    return (cumulative > threshold).int().argmax(dim=-1)  # [B]; argmax of 0s and 1s = the first 1


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """log p(id), natural log, for scoring: logits [..., vocab], ids [...] -> float32 [...]."""
    if ids.shape != logits.shape[:-1]:
        raise MinipopError(f"log_probs needs one id per row of logits: logits {list(logits.shape)}, ids {list(ids.shape)}")
    return logits.float().log_softmax(dim=-1).gather(-1, ids[..., None]).squeeze(-1)
