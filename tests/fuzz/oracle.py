"""What a cache must hold, computed the slow and obvious way: all tokens at once, each with the layers it skipped.

A token's keys, values and stream depend only on the tokens before it and on its own way through the layers. So however a conversation was
cut into calls, its cache equals one pass over all of it in which every layer runs for everyone, and the stream of whoever skips that layer
(arXiv 2602.03295) is put back to what it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minipop import Runner
from minipop.attention import Visible
from minipop.inputs import Batch


@dataclass(frozen=True)
class Row:
    """A token in the cache: its id, the layers it skipped, and whether it left keys and values there."""

    token: int
    skip: frozenset[int] = frozenset()
    project_kv: bool = True


class _Rows:
    """Keys and values of one pass over everything; see minipop.layers.KV."""

    def __init__(self, rows: list[Row], layers: int):
        self.keys, self.values = {}, {}
        gone = [[i in row.skip and not row.project_kv for row in rows] for i in range(layers)]
        self.gone = torch.tensor(gone)  # [L, T]: no keys and values there
        self.at = torch.arange(len(rows))

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def visible(self, layer: int, window: int | None) -> Visible:
        behind = self.at[:, None] - self.at  # [T, T]: query - key
        seen = (behind >= 0) & ~self.gone[layer]
        if window is not None:
            seen &= behind < window
        return Visible((seen | (behind == 0))[None, None])  # the diagonal: a token that leaves nothing needs something to look at


@torch.no_grad()
def expected(model, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Text only. -> keys and values [L, K, T, E], and the logits of each token [T, vocab]."""
    batch = Batch(torch.tensor([[row.token for row in rows]]), torch.tensor([len(rows)]))
    positions, _ = model.positions(batch, torch.zeros(1, dtype=torch.long))
    rope, kv, x = model.rope(positions), _Rows(rows, len(model.layers)), model.embed_tokens(batch.token_ids)
    for i, layer in enumerate(model.layers):
        skips = torch.tensor([i in row.skip for row in rows])[None, :, None]
        x = torch.where(skips, x, layer(x, rope[i], kv))
    stack = lambda parts: torch.stack([parts[i][0] for i in range(len(model.layers))])  # noqa: E731
    return stack(kv.keys), stack(kv.values), model.logits(x)[0]


class WatchedRunner(Runner):
    """A runner that notes how each row of its cache came to be, and every call that made one."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rows: list[list[Row]] = [[] for _ in self.cache.lengths]
        self.calls: list[tuple] = []  # since the cache was last empty: ("prefill", prompts, plan), ("extend", ids), ("rewind", n)

    def prefill(self, inputs):
        sequences, plan, before = self._sequences(inputs), self.plan, self._length()
        try:
            return super().prefill(sequences)
        finally:
            if self._length() > before:  # an interruption may come after the rows are in
                for row, sequence in zip(self.rows, sequences):
                    ids = sequence.token_ids.tolist()
                    row += [Row(token, plan.skip, plan.project_kv) for token in ids[:-1]]
                    row += [Row(ids[-1]) if plan.split_boundary else Row(ids[-1], plan.skip, plan.project_kv)]
                self.calls.append(("prefill", sequences, plan))

    def extend(self, token_ids):
        before = self._length()
        try:
            return super().extend(token_ids)
        finally:
            if self._length() > before:
                ids = torch.as_tensor(token_ids).tolist()
                for row, tokens in zip(self.rows, ids):
                    row += [Row(token) for token in tokens]
                self.calls.append(("extend", ids))

    def rewind(self, n):
        try:
            super().rewind(n)
        finally:
            self._forget()

    def reset(self):
        try:
            super().reset()
        finally:
            self._forget()

    def _forget(self) -> None:
        length = self._length()
        if any(len(row) > length for row in self.rows):
            self.rows = [row[:length] for row in self.rows]
            self.calls = [*self.calls, ("rewind", length)] if length else []

    def _length(self) -> int:
        return int(self.cache.lengths.max())  # not cache.length: no line of the engine's code, where an interruption could strike

    # --- the checks ------------------------------------------------------------------------------------------------------

    def check(self, tolerance: float = 1e-4) -> None:
        """The cache is what its rows' histories say, to `tolerance` of its largest entry."""
        for b in range(self.cache.active):
            rows = self.rows[b]
            assert self.token_ids(b) == [row.token for row in rows], f"row {b} holds other tokens than it was given"
            if not rows:
                continue
            for name, store, right in zip(("keys", "values"), (self.cache.keys, self.cache.values), expected(self.model, rows)):
                left = torch.tensor([[i not in row.skip or row.project_kv for row in rows] for i in range(len(self.model.layers))])
                ours = store[:, b, :, : len(rows)].transpose(1, 2)[left]  # [rows that were written, K, E]
                compare(ours, right.transpose(1, 2)[left], tolerance, f"{name} of row {b}")

    def replayed(self) -> "Runner":
        """The same calls on a new runner, in the paper's two-pass form."""
        other = Runner(self.model, self.plan, self.cache.max_seq_len, len(self.cache.lengths), fused=False)
        for name, *arguments in self.calls:
            if name == "prefill":
                other.plan = arguments.pop()
            getattr(other, name)(*arguments)
        other.plan = self.plan
        return other


def compare(ours: Tensor, right: Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == right.shape, f"{what}: shape {list(ours.shape)}, expected {list(right.shape)}"
    assert bool(ours.isfinite().all()), f"{what}: not finite"
    scale = float(right.abs().max()) if right.numel() else 0.0
    error = float((ours - right).abs().max()) if right.numel() else 0.0
    assert error <= tolerance * max(scale, 1e-6), f"{what}: differ by {error:.2e}, the largest entry is {scale:.2e}"
