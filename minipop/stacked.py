"""The K/V of all skipped layers in one product: a faster form of `project_kv` for a suffix.

Every layer of a skipped suffix sees the same residual stream x, so one RMS statistic serves them all, and with the weight w_l of
each layer's input norm folded into its projection,

    W_l (w_l * x / rms(x)) = (W_l diag(w_l)) (x / rms(x)),

their projections stack into one matrix [L' * 2K * E, D]. Ten small products, norms and rotary embeddings become one each. The plain
form is `run_layers` calling `project_kv` layer by layer; a test proves both equal (in bfloat16 up to rounding, because the folded weights
are rounded once more).

Shapes: L' skipped layers, B batch, N tokens, D hidden, K kv heads, E head_dim.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import CachePass
from .layers import Rope, rotate
from .packing import PackedLinear, is_packed
from .plan import PrefillPlan


class StackedKV:
    """Holds the stacked projections of the layers plan.cut .. L-1 of a model: a copy of their W_K and W_V."""

    def __init__(self, model: nn.Module, plan: PrefillPlan):
        self.cut = plan.cut
        layers = [model.layers[i] for i in range(plan.cut, plan.num_layers)]
        self.first = layers[0]
        config = model.config
        self.shape = (len(layers), 2, config.num_kv_heads, config.head_dim)
        weights, biases = [], []
        for layer in layers:
            qkv, width = layer.attn.qkv, layer.attn.q_width
            weights.append((qkv.weight[width:].float() * layer.input_norm.scale().float()).to(qkv.weight.dtype))
            biases.append(None if qkv.bias is None else qkv.bias[width:])
        weight = torch.cat(weights)  # [L' * 2K * E, D]
        bias = None if biases[0] is None else torch.cat(biases)
        self.project = PackedLinear(weight, bias) if is_packed(model) else partial(F.linear, weight=weight, bias=bias)
        norms = [layer.attn.k_norm for layer in layers]
        self.k_scale = None if norms[0] is None else torch.stack([n.weight for n in norms])[:, None, None, None]  # [L', 1, 1, 1, E]

    def write(self, x: Tensor, rope: list[Rope], kv: CachePass) -> None:
        """Write the K/V rows of x [B, N, D] in all L' layers."""
        normed = self.first.input_norm.normalise(x).to(x.dtype)
        rows = self.project(normed).unflatten(-1, self.shape)  # [B, N, L', 2, K, E]
        k, v = rows.permute(3, 2, 0, 4, 1, 5)  # each [L', B, K, N, E]
        if self.k_scale is not None:
            k = self.first.attn.k_norm.apply_weight(k, self.k_scale)
        tables = rope[self.cut :]
        if all(table is tables[0] for table in tables):
            k = rotate(k, tables[0])
        else:  # Gemma-3: sliding and full layers turn at different speeds; cos and sin become [L', B, 1, N, E]
            k = rotate(k, (torch.stack([t[0] for t in tables]), torch.stack([t[1] for t in tables])))
        kv.write_stacked(self.cut, k, v)
