"""Gemma-3's image processor against the reference's Pillow-backed one, value for value."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from minipop.config import VisionConfig
from minipop.errors import ConfigError
from minipop.processing.gemma import GemmaImageProcessor

# preprocessor_config.json as the published Gemma-3 checkpoints have it
PUBLISHED = {"do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
             "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256,
             "image_std": [0.5, 0.5, 0.5], "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
             "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor", "resample": 2,
             "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896}}
SMALL = {**PUBLISHED, "size": {"height": 56, "width": 56}}
VISION = VisionConfig(kind="siglip", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=14, out_hidden_size=8,
                      image_size=56, tokens_per_image=16)


def write(folder, settings, name="preprocessor_config.json"):
    (folder / name).write_text(json.dumps(settings))
    return folder


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(56, 56), (332, 27), (1, 1), (1, 201), (300, 200), (55, 57)])
def test_pixels_equal_the_reference_at_any_size(tmp_path, size):
    reference = Gemma3ImageProcessorPil(**SMALL)(images=[noise(*size)], return_tensors="pt")["pixel_values"]
    pixel_values, grid = GemmaImageProcessor.from_folder(write(tmp_path, SMALL))([noise(*size)])
    assert grid is None and pixel_values.dtype == torch.float32 and torch.equal(pixel_values, reference)


def test_pixels_equal_the_reference_with_the_published_settings(tmp_path):
    images = [noise(100, 60), noise(1000, 900, seed=1)]
    reference = Gemma3ImageProcessorPil(**PUBLISHED)(images=images, return_tensors="pt")["pixel_values"]
    pixel_values, _ = GemmaImageProcessor.from_folder(write(tmp_path, PUBLISHED))(images)
    assert pixel_values.shape == (2, 3, 896, 896) and torch.equal(pixel_values, reference)


def test_settings(tmp_path):
    assert GemmaImageProcessor.from_folder(write(tmp_path, PUBLISHED)) == GemmaImageProcessor()
    assert GemmaImageProcessor.from_folder(write(tmp_path, {})) == GemmaImageProcessor()
    small = GemmaImageProcessor(image_size=56, tokens_per_image=16)
    assert GemmaImageProcessor.from_folder(write(tmp_path, {}), VISION) == small
    Gemma3ImageProcessorPil(**SMALL).save_pretrained(tmp_path)
    assert GemmaImageProcessor.from_folder(tmp_path, VISION) == small
    write(tmp_path, {"image_processor": SMALL}, "processor_config.json")
    (tmp_path / "preprocessor_config.json").unlink()
    assert GemmaImageProcessor.from_folder(tmp_path, VISION) == small


@pytest.mark.parametrize("changes, message", [
    ({"do_pan_and_scan": True}, "do_pan_and_scan true is not supported"),
    ({"size": {"height": 56, "width": 28}}, "must be a square"), ({"size": {"shortest_edge": 56}}, "must be a square"),
    ({"size": {"height": 28, "width": 28}}, "the model's vision encoder takes 56"),
    ({"size": [56, 56]}, "size must be an object"),
    ({"size": {"height": "56", "width": "56"}}, "height must be a whole number")])
def test_settings_that_make_no_sense(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        GemmaImageProcessor.from_folder(write(tmp_path, {**SMALL, **changes}), VISION)
