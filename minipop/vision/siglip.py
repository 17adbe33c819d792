"""Gemma-3's vision tower (model card: google/gemma-3-4b-it): a SigLIP encoder, pooling, and a projection to the text width.

    square image -> patches -> linear embedding + learned positions -> blocks -> norm
                 -> average over k x k patches -> RMSNorm -> matrix -> a fixed number of rows an image

Every image has the same size (896 pixels, 64 x 64 patches of 14), so there is nothing to resize and nothing to reorder.

Shapes: B images, N patches of all images, D hidden of the tower, R rows of all images.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import VisionConfig
from ..errors import PromptError
from ..layers import GemmaRMSNorm, Tap, no_tap
from . import VisionRows
from .block import VisionBlock

PREFIXES = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
PROJECTOR_PREFIXES = ("model.multi_modal_projector.", "multi_modal_projector.")

# Our parameter -> its name in the checkpoint, after the prefix. {i} counts the blocks; several names are stacked in that order.
WEIGHTS = {
    "patch_embed.weight": "embeddings.patch_embedding.weight",
    "patch_embed.bias": "embeddings.patch_embedding.bias",
    "pos_embed.weight": "embeddings.position_embedding.weight",
    "blocks.{i}.norm1.weight": "encoder.layers.{i}.layer_norm1.weight",
    "blocks.{i}.norm1.bias": "encoder.layers.{i}.layer_norm1.bias",
    "blocks.{i}.qkv.weight": ("encoder.layers.{i}.self_attn.q_proj.weight", "encoder.layers.{i}.self_attn.k_proj.weight",
                              "encoder.layers.{i}.self_attn.v_proj.weight"),
    "blocks.{i}.qkv.bias": ("encoder.layers.{i}.self_attn.q_proj.bias", "encoder.layers.{i}.self_attn.k_proj.bias",
                            "encoder.layers.{i}.self_attn.v_proj.bias"),
    "blocks.{i}.proj.weight": "encoder.layers.{i}.self_attn.out_proj.weight",
    "blocks.{i}.proj.bias": "encoder.layers.{i}.self_attn.out_proj.bias",
    "blocks.{i}.norm2.weight": "encoder.layers.{i}.layer_norm2.weight",
    "blocks.{i}.norm2.bias": "encoder.layers.{i}.layer_norm2.bias",
    "blocks.{i}.fc1.weight": "encoder.layers.{i}.mlp.fc1.weight",
    "blocks.{i}.fc1.bias": "encoder.layers.{i}.mlp.fc1.bias",
    "blocks.{i}.fc2.weight": "encoder.layers.{i}.mlp.fc2.weight",
    "blocks.{i}.fc2.bias": "encoder.layers.{i}.mlp.fc2.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
PROJECTOR_WEIGHTS = {
    "pool_norm.weight": "mm_soft_emb_norm.weight",
    "projection": "mm_input_projection_weight",
}


class SiglipTower(nn.Module):
    """Images of one fixed size to `tokens_per_image` rows each.

    Taps: `vision_resid` [N, D] after block `layer` (-1 = patch embedding and positions), `vision_out` [R, out] at the last
    layer.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        width, self.patch, self.channels = config.hidden_size, config.patch_size, config.in_channels
        self.image_size, self.side = config.image_size, config.image_size // config.patch_size
        self.rows_side = math.isqrt(config.tokens_per_image)
        self.patch_embed = nn.Conv2d(config.in_channels, width, kernel_size=self.patch, stride=self.patch)
        self.pos_embed = nn.Embedding.from_pretrained(torch.empty(self.side ** 2, width), freeze=False)  # see decoder.py
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.pool_norm = GemmaRMSNorm(width, config.layer_norm_eps)
        self.projection = nn.Parameter(torch.empty(width, config.out_hidden_size))

    def forward(self, pixel_values: Tensor, tap: Tap = no_tap) -> VisionRows:
        """pixel_values [B, C, S, S] -> rows [B * tokens_per_image, out_hidden_size]. Raises PromptError on any other shape."""
        counts = self.count_rows(pixel_values)
        runs = [(len(counts), self.side ** 2)]

        x = self._embed(pixel_values.to(self.patch_embed.weight))  # [B, C, S, S] -> [B, patches, D]
        x = tap(-1, "vision_resid", (x + self.pos_embed.weight).flatten(0, 1))  # [N, D]
        for i, block in enumerate(self.blocks):
            x = tap(i, "vision_resid", block(x, runs))
        rows = self._project(self.norm(x), len(counts))  # [N, D] -> [R, out]
        return VisionRows(tap(len(self.blocks) - 1, "vision_out", rows), counts)

    def count_rows(self, pixel_values: Tensor) -> tuple[int, ...]:
        """How many rows each image will have. Raises PromptError like `forward`, which begins with this check."""
        expected = (self.channels, self.image_size, self.image_size)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != expected:
            raise PromptError(f"pixel_values must be [images, {', '.join(map(str, expected))}], not {list(pixel_values.shape)}; "
                              "was the image processor made for another model?")
        return (self.rows_side ** 2,) * len(pixel_values)

    def _embed(self, pixels: Tensor) -> Tensor:
        # The kernel is as large as its stride, so the convolution is one matrix product over whole patches.
        used = self.side * self.patch  # pixels beyond the last whole patch are not looked at
        patches = pixels[..., :used, :used].unflatten(3, (self.side, self.patch)).unflatten(2, (self.side, self.patch))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, C, s, P, s, P] -> [B, s * s, C * P * P]
        return F.linear(patches, self.patch_embed.weight.flatten(1), self.patch_embed.bias)

    def _project(self, x: Tensor, images: int) -> Tensor:
        r, k = self.rows_side, self.side // self.rows_side
        x = x.unflatten(0, (images, r, k, r, k)).mean(dim=(2, 4))  # [N, D] -> [B, r, k, r, k, D] -> [B, r, r, D]
        return self.pool_norm(x).flatten(0, 2) @ self.projection  # [R, out]
