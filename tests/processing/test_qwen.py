"""Qwen3-VL's image processor against the reference's Pillow-backed one, value for value."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_smart_resize

from minipop.config import VisionConfig
from minipop.errors import ConfigError, ImageError
from minipop.processing.qwen import QwenImageProcessor, smart_resize

# preprocessor_config.json as the published Qwen3-VL checkpoints have it
PUBLISHED = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
             "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
             "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
SMALL = {**PUBLISHED, "size": {"longest_edge": 65536, "shortest_edge": 4096}}
VISION = VisionConfig(kind="qwen3_vl", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=16, out_hidden_size=8,
                      temporal_patch_size=2, spatial_merge_size=2)


def write(folder, settings, name="preprocessor_config.json"):
    (folder / name).write_text(json.dumps(settings))
    return folder


def noise(width, height, mode="RGB", seed=0):
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode)


def assert_equals_reference(folder, images, settings):
    reference = Qwen2VLImageProcessorPil(**deepcopy(settings))  # it writes into the size it is given
    reference = reference(images=[image.convert("RGB") for image in images], return_tensors="pt")
    pixel_values, grid = QwenImageProcessor.from_folder(folder)(images)
    assert pixel_values.dtype == torch.float32 and grid.dtype == torch.int64
    assert torch.equal(grid, reference["image_grid_thw"])
    assert torch.equal(pixel_values, reference["pixel_values"])


@pytest.mark.parametrize("width, height", [(332, 27), (28, 26), (1, 1), (1, 200), (200, 1), (304, 272), (64, 64), (640, 97),
                                           (31, 33), (257, 255), (48, 80), (700, 500)])
def test_pixels_equal_the_reference_at_any_size(tmp_path, width, height):
    assert_equals_reference(write(tmp_path, SMALL), [noise(width, height)], SMALL)


def test_pixels_equal_the_reference_with_the_published_settings(tmp_path):
    assert_equals_reference(write(tmp_path, PUBLISHED), [noise(304, 272), noise(10, 20)], PUBLISHED)


def test_several_images_follow_each_other(tmp_path):
    images = [noise(100, 60), noise(60, 100, "L", seed=1), noise(333, 64, seed=2)]
    assert_equals_reference(write(tmp_path, SMALL), images, SMALL)
    pixel_values, grid = QwenImageProcessor.from_folder(tmp_path)(images)
    assert pixel_values.shape == (grid.prod(dim=1).sum(), 3 * 2 * 16 * 16) and len(grid) == 3


def test_transparent_images_equal_the_reference(tmp_path):
    images = [noise(64, 64, "RGBA"), noise(64, 64, "LA"), Image.new("RGBA", (64, 64), (255, 0, 0, 0))]
    reference = Qwen2VLImageProcessorPil(**SMALL)(images=images, return_tensors="pt")
    pixel_values, _ = QwenImageProcessor.from_folder(write(tmp_path, SMALL))(images)
    assert torch.equal(pixel_values, reference["pixel_values"])
    assert (pixel_values[-1] == 1).all()  # all transparent: all white


@pytest.mark.parametrize("changes", [
    {"patch_size": 8, "merge_size": 3}, {"temporal_patch_size": 1}, {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
    {"resample": 2}, {"rescale_factor": 0.01}, {"do_normalize": False}, {"do_rescale": False},
    {"min_pixels": 2048, "max_pixels": 8192}, {"min_pixels": 9000}])
def test_settings_are_obeyed(tmp_path, changes):
    settings = {**SMALL, **changes}
    assert_equals_reference(write(tmp_path, settings), [noise(90, 50), noise(300, 300)], settings)


def test_what_the_reference_saves_is_read(tmp_path):
    Qwen2VLImageProcessorPil(**SMALL).save_pretrained(tmp_path)
    assert QwenImageProcessor.from_folder(tmp_path) == QwenImageProcessor(min_pixels=4096, max_pixels=65536)


def test_absent_settings_are_those_of_the_published_checkpoints(tmp_path):
    published = QwenImageProcessor.from_folder(write(tmp_path, PUBLISHED))
    assert published == QwenImageProcessor()
    empty = {"size": None, "patch_size": None, "image_mean": None}
    assert QwenImageProcessor.from_folder(write(tmp_path, empty)) == published
    assert QwenImageProcessor.from_folder(write(tmp_path, {}), VISION) == published


def test_nested_settings_come_first(tmp_path):
    write(tmp_path, PUBLISHED)
    write(tmp_path, {"processor_class": "Qwen3VLProcessor"}, "processor_config.json")  # as older saves write it: nothing nested
    assert QwenImageProcessor.from_folder(tmp_path) == QwenImageProcessor()
    write(tmp_path, {"image_processor": {**SMALL, "patch_size": 8}}, "processor_config.json")
    assert QwenImageProcessor.from_folder(tmp_path) == QwenImageProcessor(patch_size=8, min_pixels=4096, max_pixels=65536)
    (tmp_path / "preprocessor_config.json").unlink()
    assert QwenImageProcessor.from_folder(tmp_path).patch_size == 8


@pytest.mark.parametrize("settings, message", [
    ({"patch_size": 0}, "patch_size must be a whole number above 0"), ({"patch_size": 16.0}, "patch_size"),
    ({"merge_size": True}, "merge_size"),
    ({"patch_size": 14}, "patch_size is 14, but the model's vision encoder has 16"), ({"merge_size": 4}, "merge_size is 4"),
    ({"temporal_patch_size": 1}, "temporal_patch_size is 1"), ({"size": 448}, "size must be an object"),
    ({"size": {"height": 4, "width": 4}}, "shortest_edge and longest_edge"), ({"size": {"shortest_edge": -1}}, "shortest_edge"),
    ({"size": {"shortest_edge": 70000, "longest_edge": 65536}}, "smallest area, 70000 pixels, is above the largest, 65536"),
    ({"image_mean": [0.5, 0.5]}, "image_mean must have 3 numbers"), ({"image_std": [0.5, 0, 0.5]}, "image_std must not be 0"),
    ({"image_mean": "grey"}, "image_mean"), ({"resample": 9}, "resample"), ({"resample": "bicubic"}, "resample"),
    ({"rescale_factor": "x"}, "rescale_factor"), ({"do_resize": False}, "do_resize false is not supported")])
def test_settings_that_make_no_sense(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        QwenImageProcessor.from_folder(write(tmp_path, settings), VISION)
    assert "preprocessor_config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_settings_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="has no preprocessor_config.json"):
        QwenImageProcessor.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="preprocessor_config.json"):
        QwenImageProcessor.from_folder(tmp_path)
    write(tmp_path, {"image_processor": [1]}, "processor_config.json")
    with pytest.raises(ConfigError, match="image_processor must be an object"):
        QwenImageProcessor.from_folder(tmp_path)


# ---------------------------------------------------------------- smart_resize


def test_smart_resize_equals_the_reference_on_many_sizes():
    generator = np.random.default_rng(0)
    for _ in range(3000):
        height, width = (int(side) for side in np.exp(generator.uniform(0, 9, 2)))
        factor = int(generator.choice([16, 28, 32]))
        low = int(generator.integers(1, 100000))
        area = {"factor": factor, "min_pixels": low, "max_pixels": low + int(generator.integers(1, 10**6))}
        if max(height, width) / min(height, width) > 200:
            with pytest.raises(ImageError, match=f"{width}x{height}"):
                smart_resize(height, width, **area)
        else:
            assert smart_resize(height, width, **area) == reference_smart_resize(height, width, **area)


def test_smart_resize_known_sizes():
    published = {"factor": 32, "min_pixels": 65536, "max_pixels": 16777216}
    assert smart_resize(272, 304, **published) == (256, 320)  # 8.5 and 9.5 factors: halves go to even; 80 tokens
    assert smart_resize(1, 1, **published) == (256, 256)
    assert smart_resize(1, 200, **published) == (32, 3648)
    assert smart_resize(10000, 10000, **published) == (4096, 4096)
    assert smart_resize(8000, 40, **{**published, "max_pixels": 4096 * 16}) == (3616, 32)  # never below one factor


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (2, 401)])
def test_long_thin_images_are_refused(tmp_path, size):
    with pytest.raises(ImageError, match=f"{size[0]}x{size[1]}.*at most 200 times"):
        QwenImageProcessor.from_folder(write(tmp_path, SMALL))([Image.new("RGB", size)])
