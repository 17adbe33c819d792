"""Softmax attention, and what a pass may attend to.

One function, `attend`, with three kinds of mask. Everything goes through PyTorch's `scaled_dot_product_attention`, the plain form,
except causal prompts on a CPU: there a walk over blocks of queries is faster (docs/PERFORMANCE.md), by the kernel where that uses the
processor's matrix unit (`attend_by_kernel`), by plain products elsewhere (`attend_in_blocks`). Both stand beside the plain form; a test
proves them equal.

Shapes: B batch, N new tokens, T cache rows, H heads, K kv heads, E head_dim.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import has_kernels, has_matrix_unit

BLOCK = 128  # queries a block: large enough for the matrix product, small enough for the scores to stay in the CPU's cache
FEW_ROWS = 512  # up to as many rows, all kv heads of a block together
KERNEL_BLOCK = 256  # the same where the kernel makes the scores, which keeps few of them at a time


class Causal:
    """Tokens that follow `past` earlier rows: token n sees rows past + n - window + 1 .. past + n (all earlier ones if None)."""

    def __init__(self, past: int, window: int | None = None):
        self.past, self.window = past, window
        self._mask: Tensor | None = None

    def is_plain(self, tokens: int) -> bool:
        """A fresh prompt inside its window: the kernel's own causal mask serves."""
        return self.past == 0 and (self.window is None or tokens <= self.window)

    def mask(self, tokens: int, device) -> Tensor:
        """The same as a bool mask [N, past + N], made once and shared by the layers of a pass."""
        if self._mask is None:
            query = self.past + torch.arange(tokens, device=device)[:, None]
            key = torch.arange(self.past + tokens, device=device)
            self._mask = key <= query if self.window is None else (key <= query) & (query - key < self.window)
        return self._mask


class Visible(NamedTuple):
    """Who sees whom: a bool mask [B, 1, N, T - first], Causal, or None where every new token sees every row from `first` on."""

    mask: Tensor | Causal | None
    first: int = 0  # no new token sees a cache row before this one


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | Causal | None, scale: float) -> Tensor:
    """Softmax attention. q [B, H, N, E], keys and values [B, K, T, E] -> [B, H, N, E]; H is a multiple of K."""
    heads, tokens = q.shape[1:3]
    if isinstance(mask, Causal):
        plain = mask.is_plain(tokens)
        if q.device.type == "cpu" and tokens >= 64 and has_matrix_unit(q.dtype):
            if not plain:
                return attend_by_kernel(q, keys, values, mask, scale)
        elif q.device.type == "cpu" and tokens >= (BLOCK if plain else 64):
            quick = q.dtype != torch.float32 and has_kernels(q.dtype)
            if quick or not plain:  # in float32, and where products of q's dtype are slow, a fresh prompt is better off with the kernel
                wide = (t if quick else t.float() for t in (q, keys, values))
                return attend_in_blocks(*wide, mask, scale).to(q.dtype)
        if plain:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=heads != keys.shape[1])
        mask = mask.mask(tokens, q.device)
    if tokens == 1 and heads != keys.shape[1]:
        # The heads that share a kv head are the query rows of one product: [B, H, 1, E] -> [B, K, H/K, E].
        rows = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)[:, :, None]
    if q.is_cuda and mask is not None and heads != keys.shape[1]:  # its fast kernel for masks has no grouped form: give every head its own rows
        keys, values = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != keys.shape[1])


def attend_by_kernel(q: Tensor, keys: Tensor, values: Tensor, mask: Causal, scale: float, block: int = KERNEL_BLOCK) -> Tensor:
    """`attend` for a causal mask, a block of queries at a time through the kernel, against just the rows that block can see."""
    tokens, out = q.shape[2], []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        first = 0 if mask.window is None else max(0, mask.past + start - mask.window + 1)
        seen = Causal(mask.past + start - first, mask.window).mask(stop - start, q.device)  # [block, rows]
        rows = slice(first, mask.past + stop)
        out.append(F.scaled_dot_product_attention(q[:, :, start:stop], keys[:, :, rows], values[:, :, rows], attn_mask=seen, scale=scale,
                                                  enable_gqa=q.shape[1] != keys.shape[1]))
    return torch.cat(out, 2)


def attend_in_blocks(q: Tensor, keys: Tensor, values: Tensor, mask: Causal, scale: float, block: int = BLOCK) -> Tensor:
    """`attend` for a causal mask, a block of queries at a time against just the rows that block can see.

    The H/K heads that share a kv head are the rows of one product, [H/K * block, E] x [E, rows]. While the rows are few, the kv heads go
    together (a batched product); later one after the other, which keeps the scores in the CPU's cache.
    """
    batch, heads, tokens, width = q.shape
    groups = keys.shape[1]
    q = (q * scale).unflatten(1, (groups, -1))  # [B, K, H/K, N, E]
    out = torch.empty_like(q)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        size, end = stop - start, mask.past + stop  # `end`: rows the block's last query sees
        first = 0 if mask.window is None else max(0, mask.past + start - mask.window + 1)
        # Only two corners need masking: the rows after a query at the end, those that left its window at the start. Query i of the block
        # lies `end - size - first + i` rows behind the first row.
        future, gone = after(size, q.dtype, q.device), None
        if mask.window is not None and end - first > mask.window:
            gone = before(size, end - size - first - mask.window, q.dtype, q.device)
        together = groups if end - first <= FEW_ROWS else 1
        for b in range(batch):
            for k in range(0, groups, together):
                some = slice(k, k + together)
                queries = q[b, some, :, start:stop].flatten(1, 2)  # [k, H/K * size, E]
                scores = product(queries, keys[b, some, first:end].transpose(1, 2)).unflatten(1, (-1, size))  # [k, H/K, size, rows]
                scores[..., end - size - first :] += future
                if gone is not None:
                    scores[..., : size - 1] += gone
                weights = scores.softmax(-1).flatten(1, 2)  # [k, H/K * size, rows]
                out[b, some, :, start:stop] = product(weights, values[b, some, first:end]).unflatten(1, (-1, size))
    return out.flatten(1, 2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [k, m, n] x b [k, n, o]. A batch of one is quicker without being a batch."""
    return torch.bmm(a, b) if len(a) > 1 else torch.mm(a[0], b[0])[None]


# What hides scores when it is added to them, which is quicker than filling; all layers and most blocks share one.


@lru_cache(maxsize=16)
def after(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size, size]: minus infinity right of the diagonal, else 0."""
    return torch.full((size, size), -math.inf, dtype=dtype, device=device).triu(1)


@lru_cache(maxsize=16)
def before(size: int, diagonal: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size, size - 1]: minus infinity where column <= row + diagonal, else 0."""
    return torch.full((size, size - 1), -math.inf, dtype=dtype, device=device).tril(diagonal)
