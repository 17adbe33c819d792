"""The building blocks of a decoder: norms, rotary embedding, gated MLP, attention, and the layer itself.

A `DecoderLayer` has exactly two ways in:

    layer(x, rope, kv)            attention + MLP; writes its K/V rows; returns the new residual stream
    layer.project_kv(x, rope, kv) input norm, W_K, W_V, (k-norm), RoPE; writes the rows and does nothing else

The second one is Prefill-Only Pruning (arXiv 2602.03295, section 3): a skipped layer still leaves K/V rows behind, so that
tokens which do run through it later find the prompt there.

Shapes: B batch, N new tokens, T cache rows, D hidden, H heads, K kv heads, E head_dim.
"""

from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Visible, attend
from .config import ModelConfig, RopeConfig

Rope = tuple[Tensor, Tensor]  # cos, and sin with its first half negated, each [B, 1, N, E] in the model's dtype

class KV(Protocol):
    """Where a pass writes its keys and values. The preallocated cache serves inference, a functional one gradients."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, K, N, E] -> the keys and values that attention reads, [B, K, T, E]."""

    def visible(self, layer: int, window: int | None) -> Visible:
        """Which of those rows the new tokens may attend to, in a layer with this sliding window (None = unlimited)."""


class Tap(Protocol):
    """A look inside: called with each named tensor of each layer; what it returns is used in its place.

    Names, in the order of their making: `attn_in` (normed input), `k_proj` (before k-norm and RoPE) [B, K, N, E], `k`, `v`
    (the rows as cached) [B, K, N, E], `attn_out` and `mlp_out` (the two residual branches, after Gemma's post-norms)
    [B, N, D], `resid` (the stream after the layer; layer -1 is the embedding) [B, N, D]. Vision towers tap `vision_resid`
    (the stream after a block), `vision_deepstack` and `vision_out` (the rows they hand over).
    """

    def __call__(self, layer: int, name: str, tensor: Tensor) -> Tensor: ...


def no_tap(layer: int, name: str, tensor: Tensor) -> Tensor:
    return tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm. Llama and Qwen round the normalised x to the dtype, then multiply by w."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight)

    def normalise(self, x: Tensor) -> Tensor:
        """x / rms(x) in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm with another weight: several layers' at once, say."""
        return F.rms_norm(x, x.shape[-1:], eps=self.eps).mul_(weight)  # the first computed in float32 and rounded, in one call

    def scale(self) -> Tensor:
        """What the normalised x is multiplied by."""
        return self.weight


class GemmaRMSNorm(RMSNorm):
    """Gemma stores w - 1 and stays in float32 to the end."""

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.normalise(x) * (1.0 + weight.float())).to(x.dtype)

    def scale(self) -> Tensor:
        return 1.0 + self.weight.float()


@lru_cache
def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angles a position adds to each pair of dimensions, float32 [E/2]; made once for each device."""
    if str(device) != "cpu":
        return rope_frequencies(rope, head_dim).to(device)  # made on the CPU, so that all devices have the same bits
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        # Three bands by wavelength: short waves stay, long ones are slowed by the factor, the middle is blended
        # (Llama-3.1 model card; `original_max_position` is the context the model was first trained for).
        wavelength = 2 * torch.pi / inv_freq
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)  # 0 = long wave, 1 = short wave
        return blend * inv_freq + (1 - blend) * inv_freq / rope.factor
    return inv_freq


def rope_table(angles: Tensor, dtype: torch.dtype) -> Rope:
    """angles float32 [B, N, E/2] -> tables [B, 1, N, E]; the same angle serves dimension i and i + E/2."""
    cos, sin = angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding, x [B, heads, N, E]: pairs (i, i + E/2) turn by their position's angle.

    x_i becomes x_i cos - x_j sin and x_j, j = i + E/2, becomes x_j cos + x_i sin; the minus is in the table.
    """
    cos, sin = rope
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def activation(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up fused in one matrix [2 * intermediate, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.act = config.hidden_act
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(activation(self.act, gate).mul_(up))  # in place: one pass over memory less


class Attention(nn.Module):
    """Grouped-query attention. W_Q, W_K, W_V lie in one matrix [(H + 2K) * E, D], so K/V alone is its lower part."""

    def __init__(self, config: ModelConfig, index: int, norm: type[RMSNorm] = RMSNorm):
        super().__init__()
        self.index, self.window, self.scale = index, config.layer_windows[index], config.attention_scale
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_width = config.queries_width
        self.qkv = nn.Linear(config.hidden_size, config.queries_width + 2 * config.kv_width, bias=config.qkv_bias)
        self.o = nn.Linear(config.queries_width, config.hidden_size, bias=config.o_bias)
        self.q_norm = norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = norm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, kv: KV, tap: Tap) -> Tensor:
        """x, the normed input [B, N, D] -> the attention branch [B, N, D]."""
        q, k, v = self._split(self.qkv(x))
        keys, values = self._write(k, v, rope, kv, tap)  # [B, K, T, E]
        q = rotate(q if self.q_norm is None else self.q_norm(q), rope)  # [B, H, N, E]
        mask, first = kv.visible(self.index, self.window)
        out = attend(q, keys[:, :, first:], values[:, :, first:], mask, self.scale)
        return self.o(out.transpose(1, 2).flatten(2))  # [B, N, H * E] -> [B, N, D]

    def project_kv(self, x: Tensor, rope: Rope, kv: KV, tap: Tap) -> None:
        """The K/V-only path: the lower part of the same matrix, no queries, no attention, no output."""
        weight, bias = self.qkv.weight[self.q_width:], self.qkv.bias
        k, v = self._split(F.linear(x, weight, None if bias is None else bias[self.q_width:]))
        self._write(k, v, rope, kv, tap)

    def _split(self, projected: Tensor) -> list[Tensor]:
        """[B, N, heads * E] -> q (if it is there), k, v, each [B, heads, N, E]."""
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries = heads.shape[1] - 2 * self.kv_heads
        return list(heads.split([queries, self.kv_heads, self.kv_heads] if queries else [self.kv_heads] * 2, dim=1))

    def _write(self, k: Tensor, v: Tensor, rope: Rope, kv: KV, tap: Tap) -> tuple[Tensor, Tensor]:
        k = tap(self.index, "k_proj", k)
        k = rotate(k if self.k_norm is None else self.k_norm(k), rope)
        return kv.write(self.index, tap(self.index, "k", k), tap(self.index, "v", v))


class DecoderLayer(nn.Module):
    """Pre-norm layer of Llama, Mistral and Qwen: y = x + Attn(norm(x)), x' = y + MLP(norm(y))."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, index)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rope: Rope, kv: KV, tap: Tap = no_tap) -> Tensor:
        """x [B, N, D] -> [B, N, D]; writes N rows of K/V."""
        h = tap(self.index, "attn_in", self.input_norm(x))
        x = x + tap(self.index, "attn_out", self.attn(h, rope, kv, tap))
        return x + tap(self.index, "mlp_out", self.mlp(self.mlp_norm(x)))

    def project_kv(self, x: Tensor, rope: Rope, kv: KV, tap: Tap = no_tap) -> None:
        """x [B, N, D]: write N rows of K/V; the stream passes by."""
        self.attn.project_kv(tap(self.index, "attn_in", self.input_norm(x)), rope, kv, tap)
