"""Text and pictures -> ModelInputs: `load_processor(path)` gives the processor of a vision-language checkpoint.

The two families differ in how a picture is cut up and how many tokens it costs (qwen.py, gemma.py); the road is the same:
render the conversation, replace each picture's placeholder by as many image tokens as it has, encode.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..checkpoint import resolve_checkpoint
from ..config import read_config
from ..errors import ConfigError, PromptError
from ..inputs import ModelInputs
from ..tokenizer import Tokenizer, load_tokenizer
from .gemma import GemmaImageProcessor
from .image import load_image
from .qwen import QwenImageProcessor

__all__ = ["load_processor", "Processor", "ImageProcessor", "QwenImageProcessor", "GemmaImageProcessor", "load_image"]


class ImageProcessor(Protocol):
    """What a family says about its pictures."""

    placeholder: str  # marks a picture in a prompt
    image_token: str  # repeated once for each row of image features

    def __call__(self, images: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Pictures -> (pixel_values, image_grid_thw), the latter None for a family that needs none."""

    def expansions(self, pixel_values: Tensor, image_grid_thw: Tensor | None) -> list[str]:
        """For each picture, the text its placeholder becomes."""


IMAGE_KEYS = ("image", "path", "url")  # where an image part may hold its image; the last two are transformers' names for a path
IMAGE_PROCESSORS = {"qwen3_vl": QwenImageProcessor, "gemma3": GemmaImageProcessor}


def load_processor(path: str | os.PathLike) -> "Processor":
    """The processor of a checkpoint: a folder, or `org/model` through the hub's cache.

    Raises ConfigError for a checkpoint that takes no images, and for one whose tokenizer, image settings and model disagree.
    """
    path = resolve_checkpoint(path)
    config = read_config(path)
    if config.vision is None or config.family not in IMAGE_PROCESSORS:
        raise ConfigError(f"{path} has no images: it is a text-only checkpoint of family {config.family}; "
                          "use load_tokenizer instead")
    image_processor = IMAGE_PROCESSORS[config.family].from_folder(path, config.vision)
    return Processor(load_tokenizer(path), image_processor, config.image_token_id)


class Processor:
    """Turns a conversation, or a prompt, and its pictures into ModelInputs."""

    def __init__(self, tokenizer: Tokenizer, image_processor: ImageProcessor, image_token_id: int):
        """image_token_id: the id the model looks for; the tokenizer must give it to the image token, else ConfigError."""
        self.tokenizer, self.image_processor, self.image_token_id = tokenizer, image_processor, image_token_id
        ids = tokenizer.encode_rendered(image_processor.image_token)
        if ids != [image_token_id]:
            raise ConfigError(f"the tokenizer encodes {image_processor.image_token} as {ids}, but the model's image token has "
                              f"the id {image_token_id}")

    def __call__(self, prompt: str | Sequence[dict], images: Any = None) -> ModelInputs:
        """A conversation, or a prompt with its images -> ModelInputs.

        A conversation is a list of {"role": ..., "content": ...}, where content is a string or a list of parts
        {"type": "text", "text": ...} and {"type": "image", "image": path, bytes, file or Pillow image}. It is rendered by the
        chat template up to the place where the reply begins; what looks like an image placeholder in its texts stays text.

        A prompt is a string taken as it is, in which each placeholder (Qwen `<|image_pad|>`, usually between `<|vision_start|>`
        and `<|vision_end|>`; Gemma `<start_of_image>`) is the place of the next of `images` (a list, or a single image).
        A tokenizer that starts texts with a BOS starts it with exactly one.

        Raises PromptError when placeholders and images do not match, ImageError for an image that cannot be used, TokenizerError
        for a malformed conversation.
        """
        if isinstance(prompt, str):
            rendered, pixel_values, grid = self.expand(prompt, images)
            token_ids = self._with_bos(self.tokenizer.encode_rendered(rendered))
        else:
            if not isinstance(prompt, (list, tuple)):
                raise PromptError(f"a prompt is a string or a list of messages, not {type(prompt).__name__}")
            if images is not None:
                raise PromptError("images of a conversation belong into its messages, as parts {'type': 'image', 'image': ...}")
            messages, images = split_images(prompt)
            rendered, pixel_values, grid = self.expand(self.tokenizer.render_chat(messages, add_generation_prompt=True), images)
            token_ids = self.tokenizer.encode_rendered(rendered)
        self._check_image_tokens(token_ids, pixel_values, grid)
        return ModelInputs(token_ids, pixel_values, grid)

    def expand(self, rendered: str, images: Any) -> tuple[str, Tensor | None, Tensor | None]:
        """Rendered text with one placeholder an image -> (text with all image tokens, pixel_values, image_grid_thw).

        `images` is a list, a single image, or None; without any, the text comes back as it is, with None and None.
        """
        images = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        placeholder = self.image_processor.placeholder
        count = self.tokenizer.count_special(rendered, placeholder)
        if count != len(images):
            raise PromptError(f"the prompt has {count} image placeholder{'s' * (count != 1)} ({placeholder}) "
                              f"but there {'is' if len(images) == 1 else 'are'} {len(images)} image{'s' * (len(images) != 1)}")
        if not images:
            return rendered, None, None
        pixel_values, grid = self.image_processor(images)
        expansions = self.image_processor.expansions(pixel_values, grid)
        return self.tokenizer.replace_special(rendered, placeholder, expansions), pixel_values, grid

    def _with_bos(self, token_ids: list[int]) -> list[int]:
        bos = [self.tokenizer.bos_token_id] if self.tokenizer.adds_bos else []
        return token_ids if token_ids[:1] == bos else bos + token_ids

    def _check_image_tokens(self, token_ids: list[int], pixel_values: Tensor | None, grid: Tensor | None) -> None:
        # A raw prompt may hold the image token itself: the model would then look for features that are not there.
        expansions = [] if pixel_values is None else self.image_processor.expansions(pixel_values, grid)
        expected = sum(text.count(self.image_processor.image_token) for text in expansions)
        found = token_ids.count(self.image_token_id)
        if found != expected:
            raise PromptError(f"the prompt has {found} image tokens ({self.image_processor.image_token}) but its images make "
                              f"{expected}: mark each image by one {self.image_processor.placeholder}")


def split_images(messages: Sequence[dict]) -> tuple[list[dict], list[Any]]:
    """Messages with images -> (messages whose image parts are bare {"type": "image"}, the images in order).

    The chat template sees where an image is, never its bytes. Everything but images is left for the tokenizer to check.
    Raises PromptError for an image part without an image.
    """
    bare, images = [], []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, (list, tuple)):
            parts = list(content)
            for j, part in enumerate(parts):
                if isinstance(part, dict) and part.get("type") == "image":
                    image = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
                    if image is None:
                        raise PromptError(f"message {i}: content: part {j}: the image is missing: "
                                          '{"type": "image", "image": a path, bytes, a file or a Pillow image}')
                    images.append(image)
                    parts[j] = {"type": "image"}
            message = {**message, "content": parts}
        bare.append(message)
    return bare, images
