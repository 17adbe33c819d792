"""Gemma-3's tower against transformers': the stream after every block and the rows after pooling and projection."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Model

from minipop.config import VisionConfig
from minipop.errors import PromptError
from minipop.models.names import expand, find_prefix
from minipop.vision.siglip import PREFIXES, PROJECTOR_PREFIXES, PROJECTOR_WEIGHTS, WEIGHTS, SiglipTower
from tests.vision.reference import Record, differing, fill, gap, randomise

TEXT = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=8,
            vocab_size=10, sliding_window=4)
SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=3, image_size=32, patch_size=8,
             hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)


def make_config(tokens=4, **changes):
    sizes = {**SIZES, **changes}
    return VisionConfig(kind="siglip", depth=sizes.pop("num_hidden_layers"), num_heads=sizes.pop("num_attention_heads"),
                        out_hidden_size=TEXT["hidden_size"], tokens_per_image=tokens, **sizes)


def reference_config(tokens=4, **changes):
    vision = {**SIZES, "vision_use_head": False, **changes}
    return Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=tokens)


def make_reference(tokens=4, **changes):
    return randomise(Gemma3Model(reference_config(tokens, **changes)))


def vision_weights(reference):
    return {name: weight for name, weight in reference.state_dict().items() if not name.startswith("language_model.")}


def make_sources(blocks=3):
    return expand(WEIGHTS, "vision_tower.", i=blocks) | expand(PROJECTOR_WEIGHTS, "multi_modal_projector.")


def make_tower(reference, folder, dtype=torch.float32, **changes):
    return fill(lambda: SiglipTower(make_config(**changes)), vision_weights(reference), make_sources(), folder, dtype)


def make_images(count, size=32, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def run_reference(reference, pixels):
    """The stream before the first and after every block, and the projected rows; all without the image dimension."""
    streams = []
    encoder = reference.vision_tower.encoder
    hooks = [encoder.register_forward_pre_hook(lambda _, args, kwargs: streams.append(kwargs["inputs_embeds"]), with_kwargs=True)]
    hooks += [layer.register_forward_hook(lambda _, inputs, output: streams.append(output)) for layer in encoder.layers]
    with torch.no_grad():
        rows = reference.get_image_features(pixels, return_dict=True).pooler_output
    for hook in hooks:
        hook.remove()
    return [stream.flatten(0, 1) for stream in streams], rows.flatten(0, 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    reference = make_reference()
    return reference, make_tower(reference, tmp_path_factory.mktemp("siglip"))


@pytest.mark.parametrize("images", [1, 2, 3])
def test_equals_the_reference(pair, images):
    reference, tower = pair
    pixels = make_images(images)
    streams, rows = run_reference(reference, pixels)
    record = Record()
    ours = tower(pixels, record)

    assert [(name, layer) for name, layer, _ in record.seen] == [("vision_resid", i) for i in range(-1, 3)] + [("vision_out", 2)]
    for stream, expected in zip(record["vision_resid"], streams, strict=True):
        assert gap(stream, expected) < 3e-6
    assert gap(ours.rows, rows) < 3e-6
    assert ours.counts == (4,) * images and ours.deepstack == ()
    assert record["vision_out"][0] is ours.rows


@pytest.mark.parametrize("changes", [
    dict(tokens=1), dict(tokens=16), dict(image_size=48, tokens=9), dict(image_size=39), dict(hidden_act="gelu"),
    dict(layer_norm_eps=0.1), dict(hidden_size=30, num_attention_heads=3, patch_size=4, tokens=16),
], ids=str)
def test_other_configurations(changes, tmp_path):
    reference = make_reference(**changes)
    tower = make_tower(reference, tmp_path, **changes)
    pixels = make_images(2, size=changes.get("image_size", 32))
    _, rows = run_reference(reference, pixels)
    ours = tower(pixels)
    assert gap(ours.rows, rows) < 3e-6
    assert ours.counts == (changes.get("tokens", 4),) * 2


def test_bfloat16_rounds_where_the_reference_rounds(tmp_path):
    """Every step starts from the reference's own stream, so what differs was rounded elsewhere, not inherited."""
    changes = dict(image_size=96, tokens=9)
    reference = make_reference(**changes)
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16()
    tower = make_tower(reference, tmp_path, dtype=torch.bfloat16, **changes)
    pixels = make_images(2, size=96)
    streams, rows = run_reference(reference, pixels)

    def continue_from_reference(layer, name, tensor):
        if name != "vision_resid":
            return tensor
        assert gap(tensor, streams[layer + 1]) < 2 ** -7
        assert differing(tensor, streams[layer + 1]) < 0.01
        return streams[layer + 1]

    ours = tower(pixels, continue_from_reference)
    assert gap(ours.rows, rows) < 2 ** -7 and differing(ours.rows, rows) < 0.01
    assert gap(tower(pixels).rows, rows) < 2 ** -5  # left alone, the few last bits add up


def test_no_image(pair):
    ours = pair[1](torch.zeros(0, 3, 32, 32))
    assert ours.rows.shape == (0, 24) and ours.counts == ()


def test_images_do_not_see_each_other(pair):
    pixels = make_images(2)
    together = pair[1](pixels).rows
    assert gap(together[4:], pair[1](pixels[1:]).rows) < 1e-6


def test_what_the_tap_returns_is_used(pair):
    pixels = make_images(2)
    stopped = pair[1](pixels, lambda layer, name, x: x * 0 if (layer, name) == (2, "vision_resid") else x).rows
    assert (stopped - stopped[0]).abs().max() < 1e-5 < gap(stopped, pair[1](pixels).rows)  # every patch is now the same
    assert bool((pair[1](pixels, lambda layer, name, x: x if name == "vision_resid" else torch.ones_like(x)).rows == 1).all())


def test_table_names_every_parameter_of_both_sides_once():
    theirs = [name for names in make_sources().values() for name in names]
    assert sorted(theirs) == sorted(vision_weights(make_reference()))
    assert sorted(make_sources()) == sorted(name for name, _ in SiglipTower(make_config()).named_parameters())


@pytest.mark.parametrize("tower", ["model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.",
                                   "vision_tower."])
@pytest.mark.parametrize("projector", ["model.multi_modal_projector.", "multi_modal_projector."])
def test_the_right_prefix_is_found(tower, projector):
    """The short prefixes are also the beginning of the long ones."""
    names = {prefix + name for table, prefix in ((WEIGHTS, tower), (PROJECTOR_WEIGHTS, projector))
             for group in expand(table, i=1).values() for name in group}
    assert find_prefix(names, PREFIXES, "embeddings.patch_embedding.weight") == tower
    assert find_prefix(names, PROJECTOR_PREFIXES, "mm_input_projection_weight") == projector


def test_prefixes_of_a_whole_checkpoint():
    whole = Gemma3ForConditionalGeneration(reference_config()).state_dict()
    names = [name for name in whole if "vision_tower" in name or "projector" in name]
    tower = find_prefix(names, PREFIXES, "embeddings.patch_embedding.weight")
    projector = find_prefix(names, PROJECTOR_PREFIXES, "mm_input_projection_weight")
    sources = expand(WEIGHTS, tower, i=3) | expand(PROJECTOR_WEIGHTS, projector)
    assert sorted(names) == sorted(name for group in sources.values() for name in group)


@pytest.mark.parametrize("shape", [(1, 3, 40, 40), (1, 3, 32, 40), (3, 32, 32), (1, 1, 32, 32), (16, 192)], ids=str)
def test_bad_input(pair, shape):
    with pytest.raises(PromptError, match=r"pixel_values must be \[images, 3, 32, 32\], not \[") as caught:
        pair[1](torch.zeros(shape))
    assert str(list(shape)) in str(caught.value) and "\n" not in str(caught.value)
