"""Qwen3-VL with pictures against transformers: the tower, DeepStack, M-RoPE positions, and decoding after a picture."""

import json

import pytest
import torch

from minipop import ModelInputs, PrefillPlan, PromptError, Runner, SamplingParams
from minipop.inputs import Batch
from tests.reference import check, image_prompt, our_answer, reference_answer, rewrite, token_ids

A, B, C = token_ids(6, seed=1), token_ids(8, seed=2), token_ids(5, seed=3)
PROMPTS = {  # a picture is its grid of patches; 2 x 2 patches make one token
    "none": A + B,
    "first": [(4, 6)] + A + B,
    "middle": A + [(4, 6)] + B,
    "last": A + B + [(6, 4)],
    "only": [(4, 2)],
    "one token": A + [(2, 2)] + B,
    "wide": A + [(2, 12)] + B,
    "two": A + [(4, 6)] + B + [(8, 2)] + C,
    "two alike": A + [(4, 6)] + B + [(4, 6)] + C,
    "neighbours": A + [97, (4, 6), 98, 97, (6, 8), 98] + B,
    "two at the end": A + [(2, 4), 98, 97, (4, 4)],
}
PLANS = [PrefillPlan.deepest(6, 0.5), PrefillPlan(6, {0, 3}), PrefillPlan(6, {1, 4, 5}), PrefillPlan(6, set(range(6))),
         PrefillPlan(6, {0, 5}, project_kv=False), PrefillPlan(6, {1, 4}, split_boundary=False)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pictures_anywhere(pair, prompt):
    model, reference = pair("qwen3_vl")
    report = check(model, reference, image_prompt(model.config, PROMPTS[prompt]))
    if prompt != "none":
        assert set(report.of("vision_resid")) == {-1, 0, 1, 2, 3} and set(report.of("vision_deepstack")) == {0, 2}


@pytest.mark.parametrize("prompt", ["none", "two", "neighbours"])
def test_greedy_answers(pair, prompt):
    """Not of a prompt that ends with a picture: there, transformers' generate (5.24) counts each axis on from the last image
    token, while its own forward, like the model's definition, goes on after the largest position."""
    model, reference = pair("qwen3_vl")
    inputs = image_prompt(model.config, PROMPTS[prompt])
    assert our_answer(model, inputs) == reference_answer(reference, inputs)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
@pytest.mark.parametrize("prompt", ["middle", "two at the end"])
def test_pop(pair, plan, prompt):
    """DeepStack rows are added after a layer whether the plan skips it or not; the boundary may be an image token."""
    model, reference = pair("qwen3_vl")
    check(model, reference, image_prompt(model.config, PROMPTS[prompt]), plan, max_new_tokens=4)


@pytest.mark.parametrize("settings", [{"fused": False}, {"chunk_size": 4}, {"chunk_size": 7, "fused": False}], ids=str)
@pytest.mark.parametrize("prompt", ["first", "two", "two at the end"])
def test_pop_in_other_forms(pair, prompt, settings):
    """In two passes, and in chunks that cut a picture."""
    model, reference = pair("qwen3_vl")
    check(model, reference, image_prompt(model.config, PROMPTS[prompt]), PLANS[0], max_new_tokens=2, **settings)


@pytest.mark.parametrize("settings", [
    {"num_hidden_layers": 2, "vision_config": {"deepstack_visual_indexes": [3]}},
    {"num_hidden_layers": 4, "vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3]}},  # one for each text layer
    {"num_hidden_layers": 2, "vision_config": {"num_position_embeddings": 9, "spatial_merge_size": 1}},
    {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}},
    {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 0, 0]}},
    {"num_hidden_layers": 2, "tie_word_embeddings": True, "top": {"tie_word_embeddings": True}},
    {"num_hidden_layers": 2, "attention_bias": True},
], ids=["one tap", "four taps", "no merging", "section", "time only", "tied", "biases"])
def test_variants(pair, settings):
    model, reference = pair("qwen3_vl", **settings)
    check(model, reference, image_prompt(model.config, PROMPTS["two"]))


@pytest.mark.parametrize("config", [
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [3, 3, 2]}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}},
    {"rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2]}},  # the family's theta is 5e5
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
], ids=["published", "older", "theta by default", "new"])
def test_old_and_new_spellings_are_one_model(pair, tmp_path, config):
    model, _ = pair("qwen3_vl")
    saved = json.loads((pair.folder("qwen3_vl") / "config.json").read_text())["text_config"]
    text = {**saved, "rope_parameters": None, **config}
    rewritten = rewrite(pair.folder("qwen3_vl"), tmp_path, config={"text_config": text})
    inputs = image_prompt(model.config, PROMPTS["two"])
    assert torch.equal(Runner(rewritten, max_seq_len=64).prefill(inputs), Runner(model, max_seq_len=64).prefill(inputs))


# --- positions ----------------------------------------------------------------------------------------------------------------

def test_positions_of_a_picture_and_after_it(pair):
    """4 text tokens, a grid of 4 x 6 patches (2 x 3 tokens), 3 text tokens: 13 cache rows, but the next position is 10."""
    model, _ = pair("qwen3_vl")
    batch = Batch.of([image_prompt(model.config, A[:4] + [(4, 6)] + C[:3])], model)
    positions, following = model.positions(batch, torch.tensor([0]))
    assert positions[0].T.tolist() == [[0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9],
                                       [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9],
                                       [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]]
    assert following.tolist() == [10]


def test_pictures_side_by_side(pair):
    """The second begins where the first ends, though no token lies between them."""
    model, _ = pair("qwen3_vl")
    batch = Batch.of([image_prompt(model.config, [5, (4, 4), (2, 4), 6])], model)
    positions, following = model.positions(batch, torch.tensor([3]))
    assert positions[0].T.tolist() == [[3, 4, 4, 4, 4, 6, 6, 8], [3, 4, 4, 5, 5, 6, 6, 8], [3, 4, 5, 4, 5, 6, 7, 8]]
    assert following.tolist() == [9]


def test_frequencies_alternate_between_time_height_and_width(pair):
    model, _ = pair("qwen3_vl")
    angles = []
    for axis in range(3):
        place = torch.zeros(1, 1, 3)
        place[..., axis] = 1
        _, sin = model.rope_table(place, model.config.rope)
        angles.append(sin[0, 0, 0, :8] != 0)  # the second half repeats the first
    assert ["THW"[axis] for axis in torch.stack(angles).long().argmax(0).tolist()] == list("THWTHWTH")


# --- several requests ---------------------------------------------------------------------------------------------------------

def test_text_after_a_picture_in_the_same_runner(pair):
    model, _ = pair("qwen3_vl")
    fresh, used = (Runner(model, max_seq_len=64) for _ in range(2))
    used.prefill(image_prompt(model.config, PROMPTS["two"]))
    used.decode([5])
    used.reset()
    for step in (lambda runner: runner.prefill(A + B), lambda runner: runner.decode([7]), lambda runner: runner.prefill(C)):
        assert torch.equal(step(used), step(fresh))


@pytest.mark.parametrize("plan", [None, PrefillPlan.deepest(6, 0.5), PrefillPlan(6, {0, 3})], ids=["full", "suffix", "any"])
def test_rows_with_and_without_pictures_equal_solo_runs(pair, plan):
    model, _ = pair("qwen3_vl")
    rows = [image_prompt(model.config, PROMPTS[name], seed) for seed, name in enumerate(("two", "none", "last", "wide"))]
    batch = Runner(model, plan, max_seq_len=64, batch_size=4)
    together = [batch.prefill(rows)] + [batch.decode([7, 8, 9, 10]) for _ in range(3)]
    for b, row in enumerate(rows):
        solo = Runner(model, plan, max_seq_len=64)
        alone = [solo.prefill(row)] + [solo.decode([7 + b]) for _ in range(3)]
        torch.testing.assert_close(torch.cat([step[b : b + 1] for step in together]), torch.cat(alone), atol=2e-5, rtol=1e-5)
    params = SamplingParams(temperature=0, max_new_tokens=6)
    answers = Runner(model, plan, max_seq_len=64, batch_size=2).generate_batch(rows, params)
    assert answers == [our_answer(model, row, 6, plan) for row in rows]


def test_a_second_turn_with_a_picture_equals_the_whole_prompt(pair):
    """Its positions go on from where the first turn's picture left them, and its own picture moves them again."""
    model, _ = pair("qwen3_vl")
    first, second = image_prompt(model.config, A + [(4, 6)] + B), image_prompt(model.config, C + [(6, 2)] + A, seed=2)
    runner, at_once = (Runner(model, max_seq_len=64) for _ in range(2))
    runner.prefill(first)
    whole = ModelInputs(*(torch.cat((getattr(first, name), getattr(second, name)))
                          for name in ("token_ids", "pixel_values", "image_grid_thw")))
    torch.testing.assert_close(runner.prefill(second), at_once.prefill(whole), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(runner.decode([9]), at_once.decode([9]), atol=2e-5, rtol=1e-5)


# --- names and mistakes -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("language, tower, head", [
    ("model.language_model.", "model.visual.", "lm_head.weight"),
    ("language_model.model.", "visual.", "language_model.lm_head.weight"),
    ("model.", "visual.", "lm_head.weight"),
])
def test_spellings_of_names_are_one_model(pair, tmp_path, language, tower, head):
    model, _ = pair("qwen3_vl")

    def rename(name):
        if name == "lm_head.weight":
            return head
        return name.replace("model.language_model.", language).replace("model.visual.", tower)

    rewritten = rewrite(pair.folder("qwen3_vl"), tmp_path, rename)
    inputs = image_prompt(model.config, PROMPTS["two"])
    assert torch.equal(Runner(rewritten, max_seq_len=64).prefill(inputs), Runner(model, max_seq_len=64).prefill(inputs))


@pytest.mark.parametrize("spoil", [
    lambda p: ModelInputs(p.token_ids[p.token_ids != 95], p.pixel_values, p.image_grid_thw),
    lambda p: ModelInputs(p.token_ids),
    lambda p: ModelInputs(p.token_ids, p.pixel_values),
    lambda p: ModelInputs(p.token_ids, None, p.image_grid_thw),
    lambda p: ModelInputs(p.token_ids, p.pixel_values[:24], p.image_grid_thw[:1]),
    lambda p: ModelInputs(p.token_ids, p.pixel_values[:-1], p.image_grid_thw),
    lambda p: ModelInputs(p.token_ids, p.pixel_values[:, :-1], p.image_grid_thw),
    lambda p: ModelInputs(p.token_ids, p.pixel_values, p.image_grid_thw.flip(0)),
    lambda p: ModelInputs(p.token_ids, p.pixel_values, torch.tensor([[2, 4, 3], [1, 8, 2]])),
    lambda p: ModelInputs(p.token_ids, p.pixel_values, torch.tensor([[1, 3, 8], [1, 8, 2]])),
    lambda p: ModelInputs(p.token_ids, p.pixel_values, torch.tensor([[1, -4, -6], [1, 8, 2]])),
], ids=["no placeholders", "no picture", "no grid", "no pixels", "picture missing", "patch missing", "narrow patches",
        "grids swapped", "two frames", "odd grid", "negative grid"])
def test_pictures_that_do_not_match_touch_nothing(pair, spoil):
    model, _ = pair("qwen3_vl")
    runner = Runner(model, max_seq_len=64)
    runner.prefill([5, 6])
    before = runner.cache.keys.clone()
    with pytest.raises(PromptError):
        runner.prefill(spoil(image_prompt(model.config, PROMPTS["two"])))
    assert runner.cache.length == 2 and torch.equal(runner.cache.keys, before)
