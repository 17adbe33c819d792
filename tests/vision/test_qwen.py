"""Qwen3-VL's tower against transformers': the stream after every block, the merged rows, the DeepStack rows."""

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from minipop.config import VisionConfig
from minipop.errors import ConfigError, PromptError
from minipop.models.names import expand, find_prefix
from minipop.vision.qwen import PREFIXES, WEIGHTS, QwenVisionTower, merge_order
from tests.vision.reference import Record, differing, fill, gap, randomise

SIZES = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=24, temporal_patch_size=2,
             spatial_merge_size=2, num_position_embeddings=16, hidden_act="gelu_pytorch_tanh")
PATCH_WIDTH = 3 * 2 * 4 * 4
GRIDS = {
    "tall and wide": [(1, 6, 2), (1, 2, 8)],  # 12 and 16 patches on a learned grid of 4 x 4: shrunk here, stretched there
    "one": [(1, 4, 6)],
    "smallest": [(1, 2, 2)],
    "same size twice": [(1, 4, 4), (1, 4, 4), (1, 2, 6), (1, 4, 4)],
    "same number of patches": [(1, 2, 8), (1, 8, 2), (1, 4, 4)],
    "large": [(1, 18, 22)],
}


def make_config(taps=(0, 2), **changes):
    return VisionConfig(kind="qwen3_vl", deepstack_indexes=taps, **{**SIZES, **changes})


def make_reference(taps=(0, 2), **changes):
    config = Qwen3VLVisionModel.config_class(**{**SIZES, **changes}, deepstack_visual_indexes=list(taps))
    return randomise(Qwen3VLVisionModel._from_config(config, attn_implementation="sdpa"))


def make_tower(reference, folder, dtype=torch.float32, **changes):
    config = make_config(**changes)
    sources = expand(WEIGHTS, i=config.depth, t=len(config.deepstack_indexes))
    return fill(lambda: QwenVisionTower(config), reference.state_dict(), sources, folder, dtype)


def make_images(grids, seed=1):
    grids = torch.tensor(grids).reshape(-1, 3)
    patches = int(grids.prod(dim=1).sum())
    return torch.randn(patches, PATCH_WIDTH, generator=torch.Generator().manual_seed(seed)), grids


def run_reference(reference, pixels, grids):
    """The stream before the first and after every block, the merged rows, the DeepStack rows."""
    streams = []
    hooks = [reference.blocks[0].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))]
    hooks += [block.register_forward_hook(lambda _, inputs, output: streams.append(output)) for block in reference.blocks]
    with torch.no_grad():
        out = reference(pixels, grid_thw=grids)
    for hook in hooks:
        hook.remove()
    return streams, out.pooler_output, out.deepstack_features


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    reference = make_reference()
    return reference, make_tower(reference, tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_equals_the_reference(pair, grids):
    reference, tower = pair
    pixels, grids = make_images(grids)
    streams, rows, deepstack = run_reference(reference, pixels, grids)
    record = Record()
    ours = tower(pixels, grids, record)

    assert [layer for name, layer, _ in record.seen if name == "vision_resid"] == [-1, 0, 1, 2]
    assert [layer for name, layer, _ in record.seen if name != "vision_resid"] == [0, 2, 2]  # two DeepStack mergers, the last one
    for stream, expected in zip(record["vision_resid"], streams, strict=True):
        assert gap(stream, expected) < 3e-6
    assert gap(ours.rows, rows) < 3e-6
    for part, expected in zip(ours.deepstack, deepstack, strict=True):
        assert gap(part, expected) < 3e-6
    assert ours.counts == tuple((grids.prod(dim=1) // 4).tolist()) and sum(ours.counts) == len(ours.rows)
    assert record["vision_out"][0] is ours.rows and record["vision_deepstack"] == list(ours.deepstack)


@pytest.mark.parametrize("changes", [
    dict(spatial_merge_size=1), dict(spatial_merge_size=3), dict(num_position_embeddings=1), dict(num_position_embeddings=49),
    dict(hidden_act="gelu"), dict(hidden_size=24, num_heads=3), dict(taps=()), dict(taps=(1,)), dict(taps=(2, 0)),
], ids=str)
def test_other_configurations(changes, tmp_path):
    reference = make_reference(**changes)
    tower = make_tower(reference, tmp_path, **changes)
    pixels, grids = make_images([(1, 6, 6), (1, 6, 12)])
    _, rows, deepstack = run_reference(reference, pixels, grids)
    ours = tower(pixels, grids)
    assert gap(ours.rows, rows) < 3e-6
    for part, expected in zip(ours.deepstack, deepstack, strict=True):
        assert gap(part, expected) < 3e-6


def test_bfloat16_rounds_where_the_reference_rounds(tmp_path):
    """Every step starts from the reference's own stream, so what differs was rounded elsewhere, not inherited."""
    reference = make_reference()
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16()
    tower = make_tower(reference, tmp_path, dtype=torch.bfloat16)
    pixels, grids = make_images([(1, 18, 22), (1, 6, 2)])
    streams, rows, deepstack = run_reference(reference, pixels, grids)

    def continue_from_reference(layer, name, tensor):
        if name != "vision_resid":
            return tensor
        assert gap(tensor, streams[layer + 1]) < 2 ** -7
        assert differing(tensor, streams[layer + 1]) < 0.01
        return streams[layer + 1]

    ours = tower(pixels, grids, continue_from_reference)
    for part, expected in zip([ours.rows, *ours.deepstack], [rows, *deepstack], strict=True):
        assert gap(part, expected) < 2 ** -7
        assert differing(part, expected) < 0.01
    assert gap(tower(pixels, grids).rows, rows) < 2 ** -5  # left alone, the few last bits add up


def test_no_image(pair):
    ours = pair[1](torch.zeros(0, PATCH_WIDTH), torch.zeros(0, 3, dtype=torch.long))
    assert ours.rows.shape == (0, 24) and ours.counts == ()
    assert [part.shape for part in ours.deepstack] == [(0, 24), (0, 24)]


def test_images_do_not_see_each_other(pair):
    tower = pair[1]
    grids = [(1, 4, 6), (1, 4, 6), (1, 2, 8)]
    pixels, both = make_images(grids)
    together = tower(pixels, both)
    start = 0
    for number, (_, h, w) in enumerate(grids):
        alone = tower(pixels[start:start + h * w], both[number:number + 1])
        first = sum(together.counts[:number])
        assert gap(together.rows[first:first + together.counts[number]], alone.rows) < 1e-6
        start += h * w


def test_merge_order():
    grid = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]])
    assert merge_order(grid, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert merge_order(grid[:2], 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert merge_order(grid, 1).tolist() == list(range(16))


def test_positions_keep_the_corners(pair):
    """Worked by hand: 3 columns on 4 entries stand at 0, 1.5 and 3; 2 rows at 0 and 3."""
    tower = pair[1]
    learned = tower.pos_embed.weight.unflatten(0, (4, 4))
    (a, b, c), (d, e, f) = _unmerged(tower, 2, 3)
    for got, expected in [(a, learned[0, 0]), (c, learned[0, 3]), (d, learned[3, 0]), (f, learned[3, 3]),
                          (b, (learned[0, 1] + learned[0, 2]) / 2), (e, (learned[3, 1] + learned[3, 2]) / 2)]:
        torch.testing.assert_close(got, expected)


def _unmerged(tower, h, w):
    merge, tower.merge = tower.merge, 1
    positions = tower.positions([(h, w)]).unflatten(0, (h, w))
    tower.merge = merge
    return positions


def test_positions_are_copied_on_the_learned_grid(pair):
    tower = pair[1]
    assert torch.equal(tower.positions([(4, 4)]), merge_order(tower.pos_embed.weight.unflatten(0, (4, 4)), 2))


def test_what_the_tap_returns_is_used(pair):
    tower = pair[1]
    pixels, grids = make_images([(1, 4, 6)])
    plain = tower(pixels, grids)
    stopped = tower(pixels, grids, lambda layer, name, x: x * 0 if (layer, name) == (1, "vision_resid") else x)
    assert torch.equal(stopped.deepstack[0], plain.deepstack[0])  # made before block 1
    assert (stopped.rows - stopped.rows[0]).abs().max() < 1e-5 < gap(stopped.rows, plain.rows)  # every patch is now the same
    ones = tower(pixels, grids, lambda layer, name, x: x if name == "vision_resid" else torch.full_like(x, layer))
    assert bool((ones.rows == 2).all()) and bool((ones.deepstack[0] == 0).all()) and bool((ones.deepstack[1] == 2).all())


def test_table_names_every_parameter_of_both_sides_once():
    theirs = [name for names in expand(WEIGHTS, i=3, t=2).values() for name in names]
    assert sorted(theirs) == sorted(make_reference().state_dict())
    assert sorted(expand(WEIGHTS, i=3, t=2)) == sorted(name for name, _ in QwenVisionTower(make_config()).named_parameters())


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_the_right_prefix_is_found(prefix):
    names = {name for group in expand(WEIGHTS, prefix, i=1, t=1).values() for name in group}
    assert find_prefix(names, PREFIXES, "patch_embed.proj.weight") == prefix


def test_prefix_of_a_whole_checkpoint():
    text = dict(hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
                head_dim=8, vocab_size=10)
    config = Qwen3VLConfig(text_config=text, vision_config={**SIZES, "deepstack_visual_indexes": [0, 2]})
    inside = [name for name in Qwen3VLForConditionalGeneration(config).state_dict() if "visual" in name]
    prefix = find_prefix(inside, PREFIXES, "patch_embed.proj.weight")
    assert sorted(inside) == sorted(name for names in expand(WEIGHTS, prefix, i=3, t=2).values() for name in names)


@pytest.mark.parametrize("shape, grids, message", [
    ((24, 96), [[1, 4, 4]], "16 patches in 1 image.* 24 rows"),
    ((24, 96), [[1, 4, 6], [1, 2, 2]], "28 patches in 2 image.* 24 rows"),
    ((24, 96), [], "0 patches in 0 image.* 24 rows"),
    ((24, 48), [[1, 4, 6]], r"\[patches, 96\].*\[24, 48\]"),
    ((1, 24, 96), [[1, 4, 6]], r"\[patches, 96\].*\[1, 24, 96\]"),
    ((24, 96), [[1, 3, 8]], "image 1 has 3 x 8 patches.*multiples of 2"),
    ((24, 96), [[1, 2, 2], [1, 4, 5]], "image 2 has 4 x 5 patches.*multiples of 2"),
    ((0, 96), [[1, 0, 4]], "image 1 has 0 x 4 patches"),
    ((24, 96), [[1, -4, -6]], "image 1 has -4 x -6 patches"),
    ((48, 96), [[2, 4, 6]], "image 1 has 2 frames.*no video"),
    ((24, 96), [[4, 6]], r"\[images, 3\].*\[1, 2\]"),
    ((24, 96), [1, 4, 6], r"\[images, 3\].*\[3\]"),
    ((24, 96), [[1.0, 4.0, 6.0]], r"\[images, 3\].*float32"),
], ids=str)
def test_bad_input(pair, shape, grids, message):
    grids = torch.tensor(grids) if grids else torch.zeros(0, 3, dtype=torch.long)
    with pytest.raises(PromptError, match=message) as caught:
        pair[1](torch.zeros(shape), grids)
    assert "\n" not in str(caught.value)
    with pytest.raises(PromptError, match=message):
        pair[1].count_rows(torch.zeros(shape), grids)


def test_head_width_must_hold_row_and_column_pairs():
    with pytest.raises(ConfigError, match="30 / num_heads 5 = 6 must be a multiple of 4"):
        QwenVisionTower(make_config(hidden_size=30, num_heads=5))
