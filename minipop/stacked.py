"""The K/V of all skipped layers in one product: a faster form of `project_kv` for a suffix, and the home of calibrated K/V.

Every layer of a skipped suffix sees the same residual stream x, so one RMS statistic serves them all, and with the weight w_l of
each layer's input norm folded into its projection,

    W_l (w_l * x / rms(x)) = (W_l diag(w_l)) (x / rms(x)),

their projections stack into one matrix [L' * 2K * E, D] (projection.py). Ten small products, norms and rotary embeddings become one each.
The plain form is `run_layers` calling `project_kv` layer by layer; a test proves both equal (in bfloat16 up to rounding, because the
folded weights are rounded once more). A calibrated K/V file has another such matrix, for the same work.

Shapes: L' skipped layers, B batch, N tokens, D hidden, K kv heads, E head_dim.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import CachePass
from .layers import Rope, Tap, no_tap, rotate
from .packing import PackedLinear, is_packed
from .plan import PrefillPlan
from .projection import KVProjection


class StackedKV:
    """Writes the K/V of the layers plan.cut .. L-1: by a copy of their own W_K and W_V, or by the plan's calibrated file.

    Raises PlanError when that file cannot be read, or was made for another checkpoint or cut.
    """

    def __init__(self, model: nn.Module, plan: PrefillPlan):
        if plan.kv is None:
            projection = KVProjection.of(model, plan.cut)
        else:
            projection = KVProjection.load(plan.kv)
            projection.check(model, plan, plan.kv)
        self.cut = plan.cut
        layers = [model.layers[i] for i in range(plan.cut, plan.num_layers)]
        self.first = layers[0]
        config = model.config
        self.shape = (len(layers), 2, config.num_kv_heads, config.head_dim)
        own = model.embedding.weight
        weight = projection.weight.to(own.device, own.dtype)  # [L' * 2K * E, D]
        bias = None if projection.bias is None else projection.bias.to(own.device, own.dtype)
        self.project = PackedLinear(weight, bias) if is_packed(model) else partial(F.linear, weight=weight, bias=bias)
        norms = [layer.attn.k_norm for layer in layers]
        self.k_scale = None if norms[0] is None else torch.stack([n.weight for n in norms])[:, None, None, None]  # [L', 1, 1, 1, E]

    def write(self, x: Tensor, rope: list[Rope], kv: CachePass, tap: Tap = no_tap) -> None:
        """Write the K/V rows of x [B, N, D] in all L' layers. tap: shown `k_proj`, `k` and `v` of each, as in `layers.Tap`."""
        normed = self.first.input_norm.normalise(x).to(x.dtype)
        rows = self.project(normed).unflatten(-1, self.shape)  # [B, N, L', 2, K, E]
        k, v = rows.permute(3, 2, 0, 4, 1, 5)  # each [L', B, K, N, E]
        k = self._tapped(tap, "k_proj", k)
        if self.k_scale is not None:
            k = self.first.attn.k_norm.apply_weight(k, self.k_scale)
        tables = rope[self.cut :]
        if all(table is tables[0] for table in tables):
            k = rotate(k, tables[0])
        else:  # Gemma-3: sliding and full layers turn at different speeds; cos and sin become [L', B, 1, N, E]
            k = rotate(k, (torch.stack([t[0] for t in tables]), torch.stack([t[1] for t in tables])))
        kv.write_stacked(self.cut, self._tapped(tap, "k", k), self._tapped(tap, "v", v))

    def _tapped(self, tap: Tap, name: str, rows: Tensor) -> Tensor:
        """rows [L', B, K, N, E] as the tap returns them, layer by layer."""
        return rows if tap is no_tap else torch.stack([tap(self.cut + i, name, layer) for i, layer in enumerate(rows)])
