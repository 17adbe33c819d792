"""Gemma-3: sandwich norms, (1 + w) RMSNorm, scaled embedding, two rotary tables, images that see themselves both ways.

Shapes: B batch, N new tokens, D hidden, R image rows.
"""

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError, PromptError
from ..inputs import Batch
from ..layers import KV, Attention, DecoderLayer, GemmaRMSNorm, Rope, Tap, no_tap
from ..vision import siglip
from .decoder import WEIGHTS, Decoder, Embedded
from .names import Sources, expand, find_prefix

GEMMA_WEIGHTS = {
    **WEIGHTS,
    "layers.{i}.attn_post_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_post_norm.weight": "layers.{i}.post_feedforward_layernorm.weight",
}


class GemmaLayer(DecoderLayer):
    """y = x + post(Attn(norm(x))), x' = y + post(MLP(norm(y))): a norm before and one after each block."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        norm = lambda: GemmaRMSNorm(config.hidden_size, config.norm_eps)  # noqa: E731
        self.input_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm = norm(), norm(), norm(), norm()
        self.attn = Attention(config, index, GemmaRMSNorm)

    def forward(self, x: Tensor, rope: Rope, kv: KV, tap: Tap = no_tap) -> Tensor:
        h = tap(self.index, "attn_in", self.input_norm(x))
        x = x + tap(self.index, "attn_out", self.attn_post_norm(self.attn(h, rope, kv, tap)))
        return x + tap(self.index, "mlp_out", self.mlp_post_norm(self.mlp(self.mlp_norm(x))))


class Gemma(Decoder):
    """Gemma-3 text, and with a vision tower where the config has one."""

    layer_class = GemmaLayer
    norm_class = GemmaRMSNorm
    weights = GEMMA_WEIGHTS

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.vision = None if config.vision is None else siglip.SiglipTower(config.vision)

    def embed(self, batch: Batch) -> Embedded:
        image = batch.token_ids == self.config.image_token_id if batch.pixel_values is not None else None
        # The image id may lie beyond the vocabulary; its embedding is replaced anyway.
        ids = batch.token_ids if image is None else batch.token_ids.masked_fill(image, 0)
        x = self.embed_tokens(ids)
        if image is not None:
            rows = self.vision(batch.pixel_values.to(x.device, x.dtype)).rows  # [R, D], not scaled
            x[image.to(x.device)] = rows.to(x.dtype)
        return Embedded(x)

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        x = super().embed_tokens(token_ids)
        return x * embedding_scale(self.config, x.dtype)

    def rope(self, positions: Tensor) -> list[Rope]:
        """Sliding layers keep the short base of Gemma-2; full ones use the long (scaled) one."""
        full = self.rope_table(positions, self.config.rope)
        local = self.rope_table(positions, self.config.rope_local)
        return [full if window is None else local for window in self.config.layer_windows]

    def image_counts(self, pixel_values: Tensor | None, image_grid_thw: Tensor | None) -> tuple[int, ...]:
        if pixel_values is None:
            return ()
        if self.vision is None:
            raise PromptError("this model reads text only: the prompt holds an image")
        return self.vision.count_rows(pixel_values)

    def image_blocks(self, token_ids: Tensor) -> Tensor | None:
        """A run of image tokens is a block. Token types 0 0 1 1 0 1 -> -1 -1 0 0 -1 1."""
        if self.vision is None:
            return None
        image = token_ids == self.config.image_token_id  # [B, N]
        if not image.any():
            return None
        before = torch.nn.functional.pad(image, (1, 0))[:, :-1]
        return torch.where(image, (image & ~before).cumsum(1) - 1, -1)

    def sources(self, names) -> Sources:
        names = set(names)
        sources = super().sources(names)
        if self.vision is not None:
            tower = find_prefix(names, siglip.PREFIXES, "embeddings.patch_embedding.weight")
            projector = find_prefix(names, siglip.PROJECTOR_PREFIXES, "mm_input_projection_weight")
            sources |= expand(siglip.WEIGHTS, tower, "vision.", i=self.config.vision.depth)
            sources |= expand(siglip.PROJECTOR_WEIGHTS, projector, "vision.")
        return sources


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """sqrt(D), rounded to the weights' dtype as the reference does: 640 -> 25.25 in bfloat16."""
    return torch.tensor(config.embedding_scale, dtype=dtype).item()


def check_dtype(dtype: torch.dtype) -> None:
    """Gemma-3's residual stream passes 65504, the largest float16: it would turn into infinities."""
    if dtype == torch.float16:
        raise ConfigError("Gemma-3 overflows in float16 (its residual stream exceeds 65504): use dtype bfloat16 or float32")
