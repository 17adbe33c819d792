"""Gemma-3: every picture is resized to one square (896 x 896), whatever its shape, and costs 256 tokens.

In the prompt a `<start_of_image>` stands for a picture; it becomes a blank line, `<start_of_image>`, 256 `<image_soft_token>`,
`<end_of_image>` and another blank line.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from ..config import VisionConfig
from .image import load_image
from .pixels import ImageSettings, PixelScale


@dataclass(frozen=True)
class GemmaImageProcessor:
    """Pictures -> squares of pixels. The defaults are those of the published Gemma-3 checkpoints."""

    image_size: int = 896
    tokens_per_image: int = 256
    scale: PixelScale = PixelScale(Image.Resampling.BILINEAR)

    placeholder: ClassVar[str] = "<start_of_image>"  # marks a picture in a prompt
    image_token: ClassVar[str] = "<image_soft_token>"  # the token whose embeddings the picture's features replace

    @classmethod
    def from_folder(cls, path: str | os.PathLike, vision: VisionConfig | None = None) -> "GemmaImageProcessor":
        """Read preprocessor_config.json or processor_config.json.

        vision: the model's vision encoder; it says how many tokens an image has, and takes squares of one size only. Raises
        ConfigError where that differs, for settings that make no sense, and for pan-and-scan (cutting a long picture into
        several squares), which is not supported: no published checkpoint turns it on.
        """
        settings = ImageSettings.from_folder(path)
        if settings.get("do_pan_and_scan"):
            raise settings.error("do_pan_and_scan true is not supported: set it to false to send each image as one square")
        size = settings.nested("size")
        image_size = size.count("height", cls.image_size if vision is None else vision.image_size)
        if not set(size.values) <= {"height", "width"} or size.count("width", image_size) != image_size:
            raise settings.error(f"size must be a square with height and width, not {size.values}")
        if vision is not None and vision.image_size != image_size:
            raise settings.error(f"size is {image_size} pixels, but the model's vision encoder takes {vision.image_size}")
        tokens_per_image = cls.tokens_per_image if vision is None else vision.tokens_per_image
        return cls(image_size, tokens_per_image, PixelScale.from_settings(settings, Image.Resampling.BILINEAR))

    def __call__(self, images: Sequence[Any]) -> tuple[Tensor, None]:
        """Pictures (anything `load_image` takes) -> pixel_values, float32 [images, 3, image_size, image_size], and no grid."""
        squares = [self.scale(load_image(image), self.image_size, self.image_size) for image in images]
        return torch.stack(squares), None

    def expansions(self, pixel_values: Tensor, image_grid_thw: None) -> list[str]:
        """What each picture's placeholder becomes in the prompt. The blank lines may merge with line breaks beside them."""
        one = f"\n\n<start_of_image>{self.image_token * self.tokens_per_image}<end_of_image>\n\n"
        return [one] * len(pixel_values)
