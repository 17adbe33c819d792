"""One token a row through the full model, in few operations: decode steps, and the boundary token of a prompt.

`runner.run_layers` is the plain form, made for any number of tokens. With a single one most operations take no longer than the call
itself, so what counts is the number of calls. Here a layer takes half as many: q and k are normed and turned together, and the views
through which the layers write and read the cache are made for all of them in one go. The arithmetic is the plain form's, in its order;
tests/test_decoding.py holds one against the other.

On a GPU the whole step, from ids to logits, is recorded as a CUDA graph and replayed by one call (`GraphedStep`). That needs shapes that
do not change from step to step: a token sees all columns of a bucket, those it must not see behind a mask.

Shapes: B batch, T cache rows seen, C columns of a bucket, L layers, D hidden, H heads, K kv heads, E head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KVCache, Span, visibility
from .layers import Attention, DecoderLayer, Rope, rotate
from .models.gemma import GemmaLayer

Write = Callable[[int, Tensor, Tensor], None]  # (layer, k, v), each [B, K, E]


class Seen(NamedTuple):
    """What the tokens attend to in the layers of one window: a mask [B, 1, 1, T] (None = all), and rows of each layer, L x [B, K, T, E]."""

    mask: Tensor | None
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def fits(model: nn.Module) -> bool:
    """Whether all layers are of the kinds this form knows."""
    return all(type(layer) in (DecoderLayer, GemmaLayer) and type(layer.attn) is Attention for layer in model.layers)


def places(cache: KVCache, starts: Tensor, windows: set[int | None]) -> tuple[Write, dict[int | None, Seen]]:
    """For tokens at column starts[b] (LongTensor [B], CPU) of each row: how layers write them, and what they see by window."""
    batch = len(starts)
    span = Span(starts, torch.ones_like(starts), 1)
    seen = {}
    for window in windows:
        mask, first = visibility(span, window, None, cache.keys.device)
        seen[window] = Seen(mask, *(store[:, :batch, :, first : span.stop].unbind() for store in (cache.keys, cache.values)))
    if not span.uniform:
        return scatter_rows(cache, starts.to(cache.keys.device)), seen
    keys, values = (store[:, :batch, :, int(starts[0])].unbind() for store in (cache.keys, cache.values))  # L x [B, K, E]

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        keys[layer].copy_(k)
        values[layer].copy_(v)
    return write, seen


def scatter_rows(cache: KVCache, columns: Tensor) -> Write:
    """Row b's token goes to column columns[b]: LongTensor [B] on the cache's device."""
    batch = len(columns)
    keys, values = (store[:, :batch].unbind() for store in (cache.keys, cache.values))
    index = columns[:, None, None, None].expand(batch, cache.keys.shape[2], 1, cache.keys.shape[4])  # [B, K, 1, E]

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        keys[layer].scatter_(2, index, k[:, :, None])
        values[layer].scatter_(2, index, v[:, :, None])
    return write


class OneToken:
    """The layers of a model for one token a row. Holds references to the model's parts, so that none is looked up in a step."""

    def __init__(self, model: nn.Module):
        self.config = config = model.config
        self.windows = set(config.layer_windows)
        self.parts = []
        for layer in model.layers:
            attn, qk_weight = layer.attn, None
            if attn.q_norm is not None:  # one weight a head: the queries' H times, then the keys' K times, [H + K, E]
                qk_weight = torch.cat((attn.q_norm.weight.expand(config.num_heads, -1), attn.k_norm.weight.expand(config.num_kv_heads, -1)))
            after = (layer.attn_post_norm, layer.mlp_post_norm) if isinstance(layer, GemmaLayer) else (nn.Identity(), nn.Identity())
            self.parts.append((layer.input_norm, attn, attn.qkv, attn.q_norm, qk_weight, attn.o, layer.mlp_norm, layer.mlp, *after))

    def __call__(self, x: Tensor, rope: list[Rope], write: Write, seen: dict[int | None, Seen], layers: range) -> Tensor:
        """The stream x [B, 1, D] after `layers`, [B, 1, D]. rope: a table a layer, cos and sin [B, 1, 1, E]."""
        config, batch = self.config, len(x)
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        turns: dict[int, Rope] = {}
        for table in rope:  # layers share tables
            if id(table) not in turns:
                turns[id(table)] = table[0][:, :, 0], table[1][:, :, 0]  # each [B, 1, E]
        x = x[:, 0]  # [B, D]
        for i in layers:
            input_norm, attn, qkv, qk_norm, qk_weight, o, mlp_norm, mlp, attn_post_norm, mlp_post_norm = self.parts[i]
            qk, v = qkv(input_norm(x)).view(batch, -1, width).split((heads + groups, groups), 1)  # [B, H + K, E], [B, K, E]
            if qk_norm is not None:
                qk = qk_norm.apply_weight(qk, qk_weight)
            q, k = rotate(qk, turns[id(rope[i])]).split((heads, groups), 1)
            write(i, k, v)
            mask, keys, values = seen[attn.window]
            # The heads that share a kv head are the query rows of one product: [B, H, E] -> [B, K, H/K, E].
            rows = q.reshape(batch, groups, -1, width)
            out = F.scaled_dot_product_attention(rows, keys[i], values[i], attn_mask=mask, scale=attn.scale)
            x = x + attn_post_norm(o(out.reshape(batch, -1)))  # [B, H * E] -> [B, D]
            x = x + mlp_post_norm(mlp(mlp_norm(x)))
        return x[:, None]


# --- a step of constant shapes, and CUDA graphs ------------------------------------------------------------------------------------

SMALLEST_BUCKET = 128


def static_step(model: nn.Module, one_token: OneToken, cache: KVCache, columns: int, ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
    """One decode step: ids [B, 1] at columns starts [B] of their rows -> float32 logits [B, 1, vocab].

    All tensors lie on the model's device, `positions` as `Decoder.positions` gives them. columns: C, more than any of `starts`; no
    shape depends on what the tensors hold.
    """
    batch, column = len(ids), torch.arange(columns, device=starts.device)
    seen = {}
    for window in one_token.windows:
        mask = column <= starts[:, None]  # [B, C]
        if window is not None:
            mask = mask & (column > starts[:, None] - window)
        seen[window] = Seen(mask[:, None, None], *(store[:, :batch, :, :columns].unbind() for store in (cache.keys, cache.values)))
    layers = range(one_token.config.num_layers)
    x = one_token(model.embed_tokens(ids), model.rope(positions), scatter_rows(cache, starts), seen, layers)
    return model.logits(x)


def bucket(needed: int, most: int) -> int:
    """Columns to look at when `needed` hold something: a power of two, so that few shapes occur."""
    return min(most, max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length()))


class GraphedStep:
    """`static_step` as CUDA graphs, recorded when a number of rows and a bucket of columns first occur, and replayed from then on."""

    def __init__(self, model: nn.Module, one_token: OneToken, cache: KVCache):
        self.model, self.one_token, self.cache = model, one_token, cache
        self.pool = torch.cuda.graph_pool_handle()  # replays never overlap, so the graphs share their working memory
        self.recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """One GPU, and nothing in the layers that leaves it: no sums over processes."""
        return model.embedding.weight.is_cuda and all(type(part) is nn.Linear for layer in model.layers for part in (layer.attn.o, layer.mlp.down))

    def __call__(self, ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """As `static_step`, with all tensors on the CPU. Raises RuntimeError where recording fails."""
        key = len(ids), bucket(int(starts.max()) + 1, self.cache.max_seq_len)
        if key not in self.recorded:
            self.recorded[key] = self._record(key[1], ids, positions, starts)
        graph, inputs, logits = self.recorded[key]
        for there, here in zip(inputs, (ids, positions, starts)):
            there.copy_(here)
        graph.replay()
        return logits.clone()  # the next replay writes over them

    def _record(self, columns: int, *inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        inputs = tuple(tensor.to(self.cache.keys.device, copy=True) for tensor in inputs)

        def step() -> Tensor:
            return static_step(self.model, self.one_token, self.cache, columns, *inputs)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # before recording, libraries must have chosen kernels and allocated what they keep
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = step()
        return graph, inputs, logits
