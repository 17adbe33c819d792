"""The key/value cache: contiguous, allocated once, and the owner of its lengths.

Row b of the batch fills columns 0 .. lengths[b] - 1 from the left. A pass over the layers announces its new tokens as a
`Span`, gets a `CachePass`, and hands every layer's keys and values to it. Lengths move only when a pass is `commit`ted, so a
pass that is interrupted leaves nothing behind but rows nobody looks at.

Shapes: L layers, B batch, K kv heads, T cache rows in use, S max_seq_len, N new tokens, E head_dim.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .attention import Causal, Visible


@dataclass
class Span:
    """New tokens of one pass, padded on the right to a rectangle [B, N].

    starts, counts: LongTensor [B] on the CPU: the first cache column of each row, and how many of its N tokens are real.
    blocks: LongTensor [B, N] or None: tokens of one image share an id >= 0 and see each other both ways (Gemma-3); text -1.
    """

    starts: Tensor
    counts: Tensor
    width: int
    blocks: Tensor | None = None

    @cached_property
    def uniform(self) -> bool:
        """No padding and one common start: the pass touches a plain slice of the cache."""
        return bool((self.counts == self.width).all()) and bool((self.starts == self.starts[0]).all())

    @cached_property
    def stop(self) -> int:
        """T: columns in use once the span is written."""
        return int((self.starts + self.counts).max())

    def columns(self, device=None) -> Tensor:
        """Cache column of each token [B, N]; padding runs on past the row's own end."""
        return (self.starts[:, None] + torch.arange(self.width)).to(device)

    def real(self) -> Tensor:
        """Which tokens are not padding, bool [B, N]."""
        return torch.arange(self.width) < self.counts[:, None]


def visibility(span: Span, window: int | None, hidden: Tensor | None, device) -> Visible:
    """Which cache rows the span's tokens attend to.

    A token sees every earlier column of its row and its own; inside an image block also the later ones. In a sliding layer
    only columns less than `window` behind it count. `hidden` [B, T] marks rows that nobody sees.
    """
    total = span.stop
    first = 0 if window is None else max(0, int(span.starts.min()) - window + 1)
    # Rows that start together are causal even when some end early: their padding comes after everything real.
    if bool((span.starts == span.starts[0]).all()) and span.blocks is None and hidden is None:
        if span.width == 1 and span.uniform:
            return Visible(None, first)
        return Visible(Causal(int(span.starts[0]) - first, window), first)
    query = span.columns(device)[:, :, None]  # [B, N, 1]
    key = torch.arange(first, total, device=device)  # [T - first]
    mask = key <= query  # [B, N, T - first]
    if span.blocks is not None:
        block = span.blocks.to(device)
        real = span.real().to(device)
        key_block = torch.full((len(block), total), -1, device=device)
        rows, tokens = real.nonzero(as_tuple=True)
        key_block[rows, span.columns(device)[rows, tokens]] = block[rows, tokens]
        mask |= (block[:, :, None] == key_block[:, None, first:]) & (block >= 0)[:, :, None]
    if window is not None:
        mask &= query - key < window
    if hidden is not None:
        mask &= ~hidden[:, None, first:]
    return Visible(mask[:, None], first)


class KVCache:
    """keys, values: [L, B, K, S, E]; lengths: LongTensor [B] (CPU); length: the largest of them."""

    def __init__(self, num_layers: int, batch_size: int, num_kv_heads: int, max_seq_len: int, head_dim: int,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        shape = (num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.hidden: Tensor | None = None  # bool [L, B, S], made when a plan first leaves rows without K/V
        self.active = batch_size  # rows 0 .. active-1 take part in passes

    @property
    def max_seq_len(self) -> int:
        return self.keys.shape[3]

    @property
    def length(self) -> int:
        return int(self.lengths.max())

    def begin(self, span: Span) -> "CachePass":
        """Start a pass that appends the span's tokens to the first rows, as many as it has."""
        return CachePass(self, span)

    def commit(self, counts: Tensor) -> None:
        """Count the tokens of finished passes as present: counts LongTensor [B]; those rows are the active ones from now on."""
        self.active = len(counts)
        self.lengths[: self.active] += counts

    def rewind(self, n: int | Tensor) -> None:
        """Keep the first n columns of every row, or the first n[b] of each active one: LongTensor [B]."""
        if isinstance(n, Tensor):
            self.lengths[: self.active] = n
        else:
            self.lengths.clamp_(max=n)

    def reset(self) -> None:
        self.lengths.zero_()
        self.hidden, self.active = None, len(self.lengths)

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes a copy of row `source` (a finished row makes room for a running one)."""
        n = int(self.lengths[source])
        for store in (self.keys, self.values):
            store[:, target, :, :n] = store[:, source, :, :n]
        if self.hidden is not None:
            self.hidden[:, target] = self.hidden[:, source]
        self.lengths[target] = n


class CachePass:
    """One pass over the layers: writes its span's rows, and tells each layer what it may see."""

    def __init__(self, cache: KVCache, span: Span):
        self.cache, self.span = cache, span
        self.total, self.batch = span.stop, len(span.starts)
        self._masks: dict = {}
        device = cache.keys.device
        if span.uniform:
            start = int(span.starts[0])
            self._where = (slice(0, self.batch), slice(None), slice(start, start + span.width))
            self._real = None
        else:  # only real tokens are written: padding must not overwrite, nor run past the end
            rows, tokens = span.real().nonzero(as_tuple=True)
            self._where = (rows.to(device), slice(None), span.columns()[rows, tokens].to(device))
            self._real = (rows.to(device), tokens.to(device))

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, K, N, E] go to their columns; returns all rows so far, [B, K, T, E] views of the cache."""
        for store, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            store[self._where] = new if self._real is None else new.transpose(1, 2)[self._real]
        if self.cache.hidden is not None:
            self._set_hidden(layer, False)
        return self.cache.keys[layer, : self.batch, :, : self.total], self.cache.values[layer, : self.batch, :, : self.total]

    def write_stacked(self, first: int, k: Tensor, v: Tensor) -> None:
        """The rows of layers first .. first + L' - 1 at once: k, v [L', B, K, N, E]."""
        layers = slice(first, first + len(k))
        for store, new in ((self.cache.keys, k), (self.cache.values, v)):
            if self._real is None:
                store[(layers, *self._where)] = new
            else:
                rows, _, columns = self._where
                store[layers, rows, :, columns] = new.transpose(2, 3)[:, self._real[0], self._real[1]].transpose(0, 1)
        if self.cache.hidden is not None:
            for layer in range(first, first + len(k)):
                self._set_hidden(layer, False)

    def hide(self, layer: int) -> None:
        """The span leaves no K/V in this layer: mask its rows out of attention, now and in later turns."""
        if self.cache.hidden is None:
            layers, batch, _, length, _ = self.cache.keys.shape
            self.cache.hidden = torch.zeros(layers, batch, length, dtype=torch.bool, device=self.cache.keys.device)
        self._set_hidden(layer, True)

    def visible(self, layer: int, window: int | None) -> Visible:
        """See `visibility`; computed once a pass for each window."""
        hidden = self.cache.hidden
        key = window if hidden is None else (layer, window)
        if key not in self._masks:
            rows = None if hidden is None else hidden[layer, : self.batch, : self.total]
            self._masks[key] = visibility(self.span, window, rows, self.cache.keys.device)
        return self._masks[key]

    def _set_hidden(self, layer: int, value: bool) -> None:
        rows, _, columns = self._where
        self.cache.hidden[layer][rows, columns] = value


class FunctionalKV:
    """Keys and values of one fresh pass, kept out of place so that gradients flow. The span must start at column 0."""

    def __init__(self, span: Span, device=None):
        self.span, self.device = span, device
        self._masks: dict = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def visible(self, layer: int, window: int | None) -> Visible:
        if window not in self._masks:
            self._masks[window] = visibility(self.span, window, None, self.device)
        return self._masks[window]
