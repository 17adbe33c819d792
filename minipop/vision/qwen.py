"""Qwen3-VL's vision tower (model card: Qwen/Qwen3-VL-8B-Instruct).

    patches -> linear embedding + learned positions -> blocks with 2-D rotary attention -> 2x2 patches merged to one row
                                                            |
                                                            +-> after a few blocks: a merger of its own -> DeepStack rows

Images keep their shape, so each brings its own grid of patches. The image processor hands the patches over in merge-block
order: the four (m * m) patches that become one row lie next to each other. Everything here that has a place in the picture
must be put in that order too (`merge_order`).

Shapes: N patches of all images, D hidden of the tower, R = N / (m * m) rows, E head_dim, m spatial_merge_size.
"""

import math
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RopeConfig, VisionConfig
from ..errors import ConfigError, PromptError
from ..layers import Rope, Tap, no_tap, rope_frequencies, rope_table
from . import VisionRows
from .block import VisionBlock

ROPE = RopeConfig(theta=10000.0)
Grid = tuple[int, int]  # height and width of an image, in patches

PREFIXES = ("model.visual.", "visual.")

# Our parameter -> its name in the checkpoint, after the prefix. {i} counts the blocks, {t} the DeepStack mergers.
WEIGHTS = {
    "patch_embed.weight": "patch_embed.proj.weight",
    "patch_embed.bias": "patch_embed.proj.bias",
    "pos_embed.weight": "pos_embed.weight",
    "blocks.{i}.norm1.weight": "blocks.{i}.norm1.weight",
    "blocks.{i}.norm1.bias": "blocks.{i}.norm1.bias",
    "blocks.{i}.qkv.weight": "blocks.{i}.attn.qkv.weight",
    "blocks.{i}.qkv.bias": "blocks.{i}.attn.qkv.bias",
    "blocks.{i}.proj.weight": "blocks.{i}.attn.proj.weight",
    "blocks.{i}.proj.bias": "blocks.{i}.attn.proj.bias",
    "blocks.{i}.norm2.weight": "blocks.{i}.norm2.weight",
    "blocks.{i}.norm2.bias": "blocks.{i}.norm2.bias",
    "blocks.{i}.fc1.weight": "blocks.{i}.mlp.linear_fc1.weight",
    "blocks.{i}.fc1.bias": "blocks.{i}.mlp.linear_fc1.bias",
    "blocks.{i}.fc2.weight": "blocks.{i}.mlp.linear_fc2.weight",
    "blocks.{i}.fc2.bias": "blocks.{i}.mlp.linear_fc2.bias",
    "merger.norm.weight": "merger.norm.weight",
    "merger.norm.bias": "merger.norm.bias",
    "merger.fc1.weight": "merger.linear_fc1.weight",
    "merger.fc1.bias": "merger.linear_fc1.bias",
    "merger.fc2.weight": "merger.linear_fc2.weight",
    "merger.fc2.bias": "merger.linear_fc2.bias",
    "deepstack_mergers.{t}.norm.weight": "deepstack_merger_list.{t}.norm.weight",
    "deepstack_mergers.{t}.norm.bias": "deepstack_merger_list.{t}.norm.bias",
    "deepstack_mergers.{t}.fc1.weight": "deepstack_merger_list.{t}.linear_fc1.weight",
    "deepstack_mergers.{t}.fc1.bias": "deepstack_merger_list.{t}.linear_fc1.bias",
    "deepstack_mergers.{t}.fc2.weight": "deepstack_merger_list.{t}.linear_fc2.weight",
    "deepstack_mergers.{t}.fc2.bias": "deepstack_merger_list.{t}.linear_fc2.bias",
}


class QwenVisionTower(nn.Module):
    """Patches of any number of images, each with its own grid, to rows for the decoder.

    Taps: `vision_resid` [N, D] after block `layer` (-1 = patch embedding and positions), `vision_deepstack` [R, out] made
    from block `layer`'s stream, `vision_out` [R, out] at the last layer.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        width, patch = config.hidden_size, (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.head_dim, self.merge = width // config.num_heads, config.spatial_merge_size
        if self.head_dim % 4:
            raise ConfigError(f"vision_config: hidden_size {width} / num_heads {config.num_heads} = {self.head_dim} must be a "
                              "multiple of 4: rotary pairs for the row and for the column")
        self.out_width, self.patch_width = config.out_hidden_size, config.in_channels * math.prod(patch)
        self.taps = config.deepstack_indexes
        self.patch_embed = nn.Conv3d(config.in_channels, width, kernel_size=patch, stride=patch)
        self.pos_embed = nn.Embedding.from_pretrained(torch.empty(config.num_position_embeddings, width), freeze=False)  # see decoder.py
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_width=width)
        self.deepstack_mergers = nn.ModuleList(PatchMerger(config, norm_width=width * self.merge ** 2) for _ in self.taps)

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor, tap: Tap = no_tap) -> VisionRows:
        """pixel_values [N, C * T * P * P] in merge-block order, image_grid_thw [images, 3]: 1 (frame), height, width in patches.

        Raises PromptError when the two do not fit each other or this tower.
        """
        counts = self.count_rows(pixel_values, image_grid_thw)
        grids = [(h, w) for _, h, w in image_grid_thw.tolist()]
        weight = self.patch_embed.weight
        if not grids:
            none = weight.new_zeros(0, self.out_width)
            return VisionRows(none, counts, (none,) * len(self.taps))

        # The kernel is as large as its stride, so the convolution is one matrix product over the flattened patches.
        x = F.linear(pixel_values.to(weight), weight.flatten(1), self.patch_embed.bias)  # [N, C * T * P * P] -> [N, D]
        x = tap(-1, "vision_resid", x + self.positions(grids).to(x.dtype))
        rope = self.rope(grids)
        runs = [(len(list(images)), patches) for patches, images in groupby(h * w for h, w in grids)]

        deepstack = []
        for i, block in enumerate(self.blocks):
            x = tap(i, "vision_resid", block(x, runs, rope))
            if i in self.taps:
                merger = self.deepstack_mergers[self.taps.index(i)]
                deepstack.append(tap(i, "vision_deepstack", merger(x)))  # [N, D] -> [R, out]
        rows = tap(len(self.blocks) - 1, "vision_out", self.merger(x))  # [N, D] -> [R, out]
        return VisionRows(rows, counts, tuple(deepstack))

    def count_rows(self, pixel_values: Tensor, image_grid_thw: Tensor) -> tuple[int, ...]:
        """How many rows each image will have. Raises PromptError like `forward`, which begins with this check."""
        if image_grid_thw.dim() != 2 or image_grid_thw.shape[1] != 3 or image_grid_thw.is_floating_point():
            raise PromptError("image_grid_thw must be whole numbers [images, 3] (frames, height, width in patches), not "
                              f"{image_grid_thw.dtype} {list(image_grid_thw.shape)}")
        if pixel_values.dim() != 2 or pixel_values.shape[1] != self.patch_width:
            raise PromptError(f"pixel_values must be [patches, {self.patch_width}] (channels * frames * patch * patch), not "
                              f"{list(pixel_values.shape)}; was the image processor made for another model?")
        grids = image_grid_thw.tolist()
        for number, (t, h, w) in enumerate(grids, start=1):
            if t != 1:
                raise PromptError(f"image_grid_thw: image {number} has {t} frames; only single pictures are supported, no video")
            if min(h, w) < 1 or h % self.merge or w % self.merge:
                raise PromptError(f"image_grid_thw: image {number} has {h} x {w} patches; height and width must be positive "
                                  f"multiples of {self.merge}")
        patches = sum(h * w for _, h, w in grids)
        if patches != len(pixel_values):
            raise PromptError(f"image_grid_thw counts {patches} patches in {len(grids)} image(s) but pixel_values has "
                              f"{len(pixel_values)} rows")
        return tuple(h * w // self.merge ** 2 for _, h, w in grids)

    def positions(self, grids: list[Grid]) -> Tensor:
        """The learned positions resized to each image's grid, float32 [N, D].

        They are learned on a square grid whose corners stay at the picture's corners: bilinear between the two nearest
        entries, along the height and then along the width.
        """
        side = math.isqrt(self.pos_embed.num_embeddings)
        learned = self.pos_embed.weight.float().unflatten(0, (side, side))  # [side, side, D]
        sized = {}
        for h, w in set(grids):
            low, high, share = _neighbours(h, side, learned.device)
            rows = torch.lerp(learned[low], learned[high], share[:, None, None])  # [h, side, D]
            low, high, share = _neighbours(w, side, learned.device)
            sized[h, w] = merge_order(torch.lerp(rows[:, low], rows[:, high], share[:, None]), self.merge)  # [h * w, D]
        return torch.cat([sized[grid] for grid in grids])

    def rope(self, grids: list[Grid]) -> Rope:
        """2-D rotary table, float32 [1, 1, N, E]: one half of the pairs turns by the patch's row, the other by its column."""
        device = self.patch_embed.weight.device
        frequencies = rope_frequencies(ROPE, self.head_dim // 2).to(device)  # [E / 4]
        places = []
        for h, w in grids:
            place = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)  # [h, w, 2]
            places.append(merge_order(place, self.merge))  # [h * w, 2]
        angles = torch.cat(places).to(device)[..., None] * frequencies  # [N, 2, E / 4]
        return rope_table(angles.flatten(1)[None], torch.float32)


class PatchMerger(nn.Module):
    """m * m neighbouring patches to one row: fc2(gelu(fc1(norm(x)))), exact GELU.

    The last merger norms each patch (norm_width D), DeepStack's norm the m * m patches as one (norm_width m * m * D).
    """

    def __init__(self, config: VisionConfig, norm_width: int):
        super().__init__()
        self.norm_width, self.width = norm_width, config.hidden_size * config.spatial_merge_size ** 2
        self.norm = nn.LayerNorm(norm_width, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(self.width, self.width)
        self.fc2 = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] in merge-block order -> [R, out_hidden_size]."""
        x = self.norm(x.reshape(-1, self.norm_width)).reshape(-1, self.width)  # [R, m * m * D]
        return self.fc2(F.gelu(self.fc1(x)))


def merge_order(grid: Tensor, merge: int) -> Tensor:
    """[h, w, ...] -> [h * w, ...]: block by block, the merge * merge places of a block next to each other."""
    h, w = grid.shape[:2]
    blocks = grid.reshape(h // merge, merge, w // merge, merge, *grid.shape[2:])
    return blocks.transpose(1, 2).flatten(0, 3)


def _neighbours(n: int, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where n points, evenly spread from entry 0 to entry side - 1, lie: the entry below, the one above, the latter's share."""
    x = torch.arange(n, dtype=torch.float32, device=device) * (side - 1) / max(n - 1, 1)
    low = x.long()
    return low, (low + 1).clamp(max=side - 1), x - low
