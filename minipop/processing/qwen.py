"""Qwen3-VL: a picture keeps its shape, roughly, and becomes as many patches as it has 16x16 squares.

Each side is rounded to a multiple of 32 (two patches: the vision encoder merges 2x2 patches into one token), so a picture of
H x W pixels costs about H * W / 1024 tokens. In the prompt one `<|image_pad|>` stands for each of those tokens.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from ..config import VisionConfig
from ..errors import ImageError
from .image import load_image
from .pixels import ImageSettings, PixelScale

MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels of a picture -> the (height, width) it is resized to, both multiples of `factor`.

    Each side goes to the nearest multiple (half to even). Where the area then leaves [min_pixels, max_pixels], both sides are
    scaled by one number instead, and rounded down (too large; at least one factor) or up (too small).
    Raises ImageError when one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ImageError(f"an image of {width}x{height} pixels is too long and thin: "
                         f"one side may be at most {MAX_ASPECT_RATIO} times the other")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:  # also where a side rounded to 0
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


@dataclass(frozen=True)
class QwenImageProcessor:
    """Pictures -> patches. The defaults are those of the published Qwen3-VL checkpoints; min_pixels and max_pixels are areas."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    scale: PixelScale = PixelScale(Image.Resampling.BICUBIC)

    placeholder: ClassVar[str] = "<|image_pad|>"  # marks a picture in a prompt
    image_token: ClassVar[str] = "<|image_pad|>"  # the token whose embeddings the picture's features replace

    @classmethod
    def from_folder(cls, path: str | os.PathLike, vision: VisionConfig | None = None) -> "QwenImageProcessor":
        """Read preprocessor_config.json or processor_config.json.

        vision: the model's vision encoder, whose patches these must be. Raises ConfigError where they are not, and for settings
        that make no sense.
        """
        settings = ImageSettings.from_folder(path)
        model = {} if vision is None else {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size,
                                           "merge_size": vision.spatial_merge_size}
        patches = {key: settings.count(key, model.get(key, getattr(cls, key)))
                   for key in ("patch_size", "temporal_patch_size", "merge_size")}
        for key, value in model.items():
            if patches[key] != value:
                raise settings.error(f"{key} is {patches[key]}, but the model's vision encoder has {value}")
        # Two spellings of the two areas; where both are given, the older min_pixels and max_pixels win, as in the reference.
        size = settings.nested("size")
        if not set(size.values) <= {"shortest_edge", "longest_edge"}:
            raise settings.error(f"size must have shortest_edge and longest_edge (two areas), not {', '.join(size.values)}")
        min_pixels = settings.count("min_pixels", size.count("shortest_edge", cls.min_pixels))
        max_pixels = settings.count("max_pixels", size.count("longest_edge", cls.max_pixels))
        if min_pixels > max_pixels:
            raise settings.error(f"the smallest area, {min_pixels} pixels, is above the largest, {max_pixels}")
        scale = PixelScale.from_settings(settings, Image.Resampling.BICUBIC)
        return cls(**patches, min_pixels=min_pixels, max_pixels=max_pixels, scale=scale)

    def __call__(self, images: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Pictures (anything `load_image` takes) -> pixel_values and image_grid_thw.

        pixel_values: float32 [patches of all images, 3 * temporal_patch_size * patch_size ** 2]
        image_grid_thw: int64 [images, 3], the patches of each image in time (1), height and width
        """
        patches, grids = zip(*(self._patches(load_image(image)) for image in images))
        return torch.cat(patches), torch.tensor(grids)

    def _patches(self, image: Image.Image) -> tuple[Tensor, tuple[int, int, int]]:
        patch, merge, frames = self.patch_size, self.merge_size, self.temporal_patch_size
        height, width = smart_resize(image.height, image.width, patch * merge, self.min_pixels, self.max_pixels)
        pixels = self.scale(image, height, width)  # [3, height, width]
        rows, columns = height // patch, width // patch
        pixels = pixels.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
        # The merge x merge patches that become one token lie next to each other, token after token.
        pixels = pixels.permute(1, 4, 2, 5, 0, 3, 6)  # [rows/merge, columns/merge, merge, merge, 3, patch, patch]
        # A still picture is a film in which the one frame is repeated.
        pixels = pixels.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
        return pixels.reshape(rows * columns, 3 * frames * patch * patch), (1, rows, columns)

    def expansions(self, pixel_values: Tensor, image_grid_thw: Tensor) -> list[str]:
        """What each picture's placeholder becomes in the prompt: one image token for each merge x merge patches."""
        counts = image_grid_thw.prod(dim=1) // self.merge_size**2  # [images]
        return [self.image_token * count for count in counts.tolist()]
