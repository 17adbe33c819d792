"""How a checkpoint wants its pixels: the settings file of its image processor, and the arithmetic from 0..255 to floats."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..errors import ConfigError
from ..files import read_json


@dataclass(frozen=True)
class ImageSettings:
    """The settings of a checkpoint's image processor, and the file they come from (for messages). Null counts as absent."""

    values: dict[str, Any]
    where: str

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> "ImageSettings":
        """`processor_config.json` has them under "image_processor" where the whole processor was saved at once (transformers 5);
        otherwise `preprocessor_config.json` is them. Raises ConfigError when neither file has any.
        """
        whole, single = Path(folder) / "processor_config.json", Path(folder) / "preprocessor_config.json"
        if whole.exists() and (nested := read_json(whole, ConfigError).get("image_processor")) is not None:
            if not isinstance(nested, dict):
                raise ConfigError(f"{whole}: image_processor must be an object, not {type(nested).__name__}")
            return cls(nested, f"{whole}: image_processor")
        if single.exists():
            return cls(read_json(single, ConfigError), str(single))
        raise ConfigError(f"{folder} has no preprocessor_config.json, nor a processor_config.json with an image_processor: "
                          "it says how images are resized; get it from where the checkpoint came from")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int) -> int:
        """A whole number from 1 on."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(f"{key} must be a whole number above 0, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        return self._finite(key, self.get(key, default))

    def per_channel(self, key: str, default: float) -> tuple[float, float, float]:
        """Three numbers (red, green, blue), or one for all three."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * 3
        if len(values) != 3:
            raise self.error(f"{key} must have 3 numbers (red, green, blue), not {len(values)}")
        return tuple(self._finite(key, number) for number in values)

    def nested(self, key: str) -> "ImageSettings":
        """The object under a key; an empty one where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return ImageSettings(value, f"{self.where}: {key}")

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def _finite(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"{key} must be finite numbers, not {value!r}")
        return float(value)


@dataclass(frozen=True)
class PixelScale:
    """Resize with a Pillow filter, then (value * rescale_factor - mean) / std in each channel.

    rescale_factor is 1/255 and mean and std are 0.5 in the published Gemma-3 and Qwen3-VL checkpoints: pixels lie in [-1, 1].
    """

    resample: int
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def from_settings(cls, settings: ImageSettings, resample: int) -> "PixelScale":
        """`resample` is the family's filter, for settings that name none."""
        if settings.get("do_resize") is False:
            raise settings.error("do_resize false is not supported: the model takes images of certain sizes only")
        resample = settings.get("resample", int(resample))
        if type(resample) is not int or resample not in list(Image.Resampling):
            raise settings.error(f"resample must be the number of a Pillow filter (0 to 5), not {resample!r}")
        factor = settings.number("rescale_factor", 1 / 255)
        mean, std = settings.per_channel("image_mean", 0.5), settings.per_channel("image_std", 0.5)
        if 0 in std:
            raise settings.error(f"image_std must not be 0: {list(std)}")
        if settings.get("do_rescale") is False:
            factor = 1.0
        if settings.get("do_normalize") is False:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(resample, factor, mean, std)

    def __call__(self, image: Image.Image, height: int, width: int) -> Tensor:
        """RGB image -> float32 [3, height, width]."""
        resized = image.resize((width, height), self.resample)
        values = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)  # [height * width * 3]
        values = values.view(height, width, 3).permute(2, 0, 1)  # [3, height, width]
        # The product in float64 and the rest in float32: the roundings of the reference processors, so that values equal theirs.
        values = (values.double() * self.rescale_factor).float()
        mean, std = (torch.tensor(per_channel, dtype=torch.float32).view(3, 1, 1) for per_channel in (self.mean, self.std))
        return values.sub_(mean).div_(std)
