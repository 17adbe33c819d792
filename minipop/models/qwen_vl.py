"""Qwen3-VL: the Qwen3 decoder with three-axis positions (M-RoPE) and image features fed in at several depths (DeepStack).

Shapes: B batch, N new tokens, D hidden, E head_dim, R image rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..config import ModelConfig, RopeConfig
from ..errors import PromptError
from ..inputs import Batch
from ..layers import Rope, rope_frequencies, rope_table
from ..vision import qwen
from .decoder import Decoder, Embedded
from .names import Sources, expand, find_prefix


class QwenVL(Decoder):
    """Text decoder and vision tower (`self.vision`)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.vision = qwen.QwenVisionTower(config.vision)
        self.deepstack_layers = len(config.vision.deepstack_indexes)

    def embed(self, batch: Batch) -> Embedded:
        """Image rows replace the placeholders; the DeepStack rows wait for their layers, zero where there is no image."""
        x = self.embed_tokens(batch.token_ids)  # [B, N, D]
        if batch.pixel_values is None:
            return Embedded(x)
        image = (batch.token_ids == self.config.image_token_id).to(x.device)
        seen = self.vision(batch.pixel_values.to(x.device, x.dtype), batch.image_grid_thw)
        x[image] = seen.rows.to(x.dtype)
        deepstack = []
        for rows in seen.deepstack:  # [R, D]
            spread = torch.zeros_like(x)
            spread[image] = rows.to(x.dtype)
            deepstack.append(spread)
        return Embedded(x, tuple(deepstack))

    def after_layer(self, index: int, x: Tensor, deepstack: tuple[Tensor, ...]) -> Tensor:
        return x + deepstack[index] if index < len(deepstack) else x

    def positions(self, batch: Batch, starts: Tensor) -> tuple[Tensor, Tensor]:
        """M-RoPE: time, height and width of each token, [B, N, 3], and the next free position of each row [B].

        Text counts on along all three axes. An image at position p has time p, and height and width p + its place in the
        merged grid; what follows stands after the largest of them. 4 text tokens, a merged 2 x 3 image, 3 text tokens:

            time   0 1 2 3  4 4 4 4 4 4  7 8 9
            height 0 1 2 3  4 4 4 5 5 5  7 8 9
            width  0 1 2 3  4 5 6 4 5 6  7 8 9
        """
        width = batch.token_ids.shape[1]
        positions = (starts[:, None] + torch.arange(width))[..., None].repeat(1, 1, 3)
        following = starts + batch.counts
        if batch.image_grid_thw is None:
            return positions, following
        side = self.config.vision.spatial_merge_size
        grids = iter(batch.image_grid_thw.tolist())
        for b, images in enumerate(batch.images):
            for start, count in images:
                _, height, columns = next(grids)
                height, columns = height // side, columns // side  # of the merged grid
                first = int(positions[b, start, 0])
                end, after = start + count, first + max(height, columns)
                place = torch.arange(count)
                positions[b, start:end] = first + torch.stack((torch.zeros(count, dtype=torch.long), place // columns,
                                                               place % columns), dim=1)
                positions[b, end:] = (after + torch.arange(width - end))[:, None]
                following[b] = after + int(batch.counts[b]) - end
        return positions, following

    def rope_table(self, positions: Tensor, rope: RopeConfig) -> Rope:
        """positions [B, N, 3]. Frequencies 1, 4, 7, ... follow the height, 2, 5, 8, ... the width, the rest the time."""
        weight = self.embedding.weight
        frequencies = rope_frequencies(rope, self.config.head_dim, weight.device)  # [E/2]
        axes = mrope_axes(self.config.mrope_section, len(frequencies), weight.device)
        angles = positions.to(weight.device).float()[..., axes] * frequencies  # [B, N, 3] -> [B, N, E/2]
        return rope_table(angles, weight.dtype)

    def image_counts(self, pixel_values: Tensor | None, image_grid_thw: Tensor | None) -> tuple[int, ...]:
        if pixel_values is None and image_grid_thw is None:
            return ()
        if pixel_values is None or image_grid_thw is None:
            raise PromptError("an image needs both pixel_values and image_grid_thw")
        return self.vision.count_rows(pixel_values, image_grid_thw)

    def sources(self, names) -> Sources:
        names = set(names)
        prefix = find_prefix(names, qwen.PREFIXES, "patch_embed.proj.weight")
        vision = self.config.vision
        return super().sources(names) | expand(qwen.WEIGHTS, prefix, "vision.", i=vision.depth, t=len(vision.deepstack_indexes))


@lru_cache
def mrope_axes(section: tuple[int, ...], frequencies: int, device: torch.device) -> Tensor:
    """Which axis each frequency follows, LongTensor [E/2]."""
    axes = torch.zeros(frequencies, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes.to(device)
