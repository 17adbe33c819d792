"""Gemma-3 with pictures against transformers: the tower, the spliced stream, blocks that see themselves both ways, decoding."""

import pytest
import torch

from minipop import ModelInputs, PrefillPlan, PromptError, Runner, SamplingParams
from tests.reference import check, image_prompt, our_answer, reference_answer, rewrite, token_ids

A, B, C = token_ids(6, seed=1), token_ids(8, seed=2), token_ids(5, seed=3)
PROMPTS = {  # a picture is 4 tokens, the window 5
    "none": A + B,
    "first": ["image"] + A + B,
    "middle": A + ["image"] + B,
    "last": A + B + ["image"],
    "only": ["image"],
    "two": A + ["image"] + B + ["image"] + C,
    "adjacent": A + ["image", "image"] + B,  # one run of image tokens is one block
    "neighbours": A + ["image"] + [97] + ["image"] + B,
    "two at the end": A + ["image", 97, "image"],
}
PLANS = [PrefillPlan.deepest(6, 0.5), PrefillPlan(6, {0, 3}), PrefillPlan(6, {1, 4, 5}), PrefillPlan(6, set(range(6))),
         PrefillPlan(6, {2, 5}, project_kv=False), PrefillPlan(6, {3, 4}, split_boundary=False)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pictures_anywhere(pair, prompt):
    model, reference = pair("gemma3_vl")
    inputs = image_prompt(model.config, PROMPTS[prompt])
    report = check(model, reference, inputs)
    assert bool(report.of("vision_out")) == bool(report.of("vision_resid")) == ("image" in PROMPTS[prompt])


@pytest.mark.parametrize("prompt", ["none", "two", "last"])
def test_greedy_answers(pair, prompt):
    model, reference = pair("gemma3_vl")
    inputs = image_prompt(model.config, PROMPTS[prompt])
    assert our_answer(model, inputs) == reference_answer(reference, inputs)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
@pytest.mark.parametrize("prompt", ["middle", "two at the end"])
def test_pop(pair, plan, prompt):
    """A picture at the end of the prompt is the boundary as a whole."""
    model, reference = pair("gemma3_vl")
    check(model, reference, image_prompt(model.config, PROMPTS[prompt]), plan, max_new_tokens=4)


@pytest.mark.parametrize("settings", [{"fused": False}, {"chunk_size": 3}, {"chunk_size": 8, "fused": False}], ids=str)
@pytest.mark.parametrize("prompt", ["only", "first", "last", "adjacent"])
def test_pop_in_other_forms(pair, prompt, settings):
    """In two passes, and in chunks that must not cut a picture: a chunk of 3 tokens is shorter than one."""
    model, reference = pair("gemma3_vl")
    check(model, reference, image_prompt(model.config, PROMPTS[prompt]), PLANS[0], max_new_tokens=2, **settings)


@pytest.mark.parametrize("settings", [
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]},
    {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 2},  # below a picture's 4 tokens
    {"num_hidden_layers": 2, "top": {"mm_tokens_per_image": 9}},
    {"num_hidden_layers": 2, "top": {"image_token_index": 95}},  # inside the vocabulary
    {"num_hidden_layers": 2, "tie_word_embeddings": False, "top": {"tie_word_embeddings": False}},
    {"num_hidden_layers": 2, "vision_config": {"image_size": 33}},  # not a multiple of the patches
], ids=["full", "narrow window", "nine tokens", "id in vocabulary", "untied", "odd pixels"])
def test_variants(pair, settings):
    model, reference = pair("gemma3_vl", **settings)
    check(model, reference, image_prompt(model.config, PROMPTS["two"]))


def test_a_picture_sees_itself_both_ways_but_not_the_next_one(pair):
    model, _ = pair("gemma3_vl", num_hidden_layers=1, layer_types=["full_attention"])
    prompt = image_prompt(model.config, [5, "image", 97, "image", 6])
    changed = image_prompt(model.config, [5, "image", 97, "image", 6])
    changed.pixel_values[1] += 1  # the second picture
    streams = []
    for inputs in (prompt, changed):
        seen = {}
        Runner(model, max_seq_len=16, tap=lambda layer, name, x: seen.setdefault((layer, name), x)).prefill(inputs)
        streams.append(seen[0, "resid"][0])
    same = (streams[0] == streams[1]).all(dim=1)
    assert same[:6].all() and not same[6:].any()
    blocks = model.image_blocks(prompt.token_ids[None])
    assert blocks.tolist() == [[-1, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1]]


def test_text_after_a_picture_in_the_same_runner(pair):
    model, _ = pair("gemma3_vl")
    text = A + B
    fresh = Runner(model, max_seq_len=64).prefill(text)
    runner = Runner(model, max_seq_len=64)
    runner.prefill(image_prompt(model.config, PROMPTS["two"]))
    runner.reset()
    assert torch.equal(runner.prefill(text), fresh)


@pytest.mark.parametrize("plan", [None, PrefillPlan.deepest(6, 0.5), PrefillPlan(6, {0, 3})], ids=["full", "suffix", "any"])
def test_rows_with_and_without_pictures_equal_solo_runs(pair, plan):
    model, _ = pair("gemma3_vl")
    rows = [image_prompt(model.config, PROMPTS[name], seed) for seed, name in enumerate(("two", "none", "last", "first"))]
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
    model, _ = pair("gemma3_vl")
    first, second = (image_prompt(model.config, PROMPTS["middle"], seed) for seed in (1, 2))
    runner = Runner(model, max_seq_len=64)
    runner.prefill(first)
    whole = ModelInputs(torch.cat((first.token_ids, second.token_ids)), torch.cat((first.pixel_values, second.pixel_values)))
    torch.testing.assert_close(runner.prefill(second), Runner(model, max_seq_len=64).prefill(whole), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("language, tower, projector, head", [
    ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector.", "language_model.lm_head.weight"),
    ("model.language_model.", "model.vision_tower.vision_model.", "model.multi_modal_projector.", "lm_head.weight"),
    ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector.", "lm_head.weight"),
    ("language_model.model.", "vision_tower.", "multi_modal_projector.", "language_model.lm_head.weight"),
], ids=["published", "newer", "newest", "mixed"])
def test_spellings_of_names_are_one_model(pair, tmp_path, language, tower, projector, head):
    settings = {"num_hidden_layers": 2, "tie_word_embeddings": False, "top": {"tie_word_embeddings": False}}
    model, _ = pair("gemma3_vl", **settings)

    def rename(name):
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        for part, prefix in (("language_model.", language), ("vision_tower.", tower), ("multi_modal_projector.", projector)):
            if name.startswith(part) and "lm_head" not in name:
                return prefix + name.removeprefix(part).removeprefix("model.")
        return head

    rewritten = rewrite(pair.folder("gemma3_vl", **settings), tmp_path, rename)
    inputs = image_prompt(model.config, PROMPTS["two"])
    assert torch.equal(Runner(rewritten, max_seq_len=64).prefill(inputs), Runner(model, max_seq_len=64).prefill(inputs))


@pytest.mark.parametrize("spoil", [
    lambda p: ModelInputs(p.token_ids[p.token_ids != 99], p.pixel_values),
    lambda p: ModelInputs(p.token_ids),
    lambda p: ModelInputs(p.token_ids, p.pixel_values[:1]),
    lambda p: ModelInputs(p.token_ids[:-5], torch.cat((p.pixel_values, p.pixel_values))),
    lambda p: ModelInputs(p.token_ids, p.pixel_values[..., :-1]),
    lambda p: ModelInputs(p.token_ids.roll(-7), p.pixel_values),  # the first picture is cut in two
], ids=["no placeholders", "no picture", "picture missing", "pictures too many", "wrong size", "cut"])
def test_pictures_that_do_not_match_touch_nothing(pair, spoil):
    model, _ = pair("gemma3_vl")
    prompt = image_prompt(model.config, PROMPTS["two"])
    runner = Runner(model, max_seq_len=64)
    runner.prefill([5, 6])
    before = runner.cache.keys.clone()
    with pytest.raises(PromptError):
        runner.prefill(spoil(prompt))
    assert runner.cache.length == 2 and torch.equal(runner.cache.keys, before)


def test_an_image_token_cannot_be_decoded(pair):
    model, _ = pair("gemma3_vl")
    runner = Runner(model, max_seq_len=64)
    runner.prefill([5, 6])
    with pytest.raises(PromptError):
        runner.decode([99])
