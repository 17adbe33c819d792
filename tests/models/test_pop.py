"""Prefill-Only Pruning of every text family against two literal passes with transformers' own layers (see minipop.compare)."""

import pytest
import torch

from minipop import PrefillPlan, Runner
from tests.reference import TEXT_FAMILIES, check, gap, our_answer, random_inputs, reference_answer, token_ids

PLANS = {
    "third": PrefillPlan.deepest(6),
    "half": PrefillPlan.deepest(6, 0.5),
    "last": PrefillPlan(6, {5}),
    "first": PrefillPlan(6, {0}),
    "every other": PrefillPlan(6, {0, 2, 4}),
    "scattered": PrefillPlan(6, {1, 2, 5}),
    "all": PrefillPlan(6, set(range(6))),
    "no K/V": PrefillPlan(6, {4, 5}, project_kv=False),
    "no K/V anywhere": PrefillPlan(6, set(range(6)), project_kv=False),
    "no boundary": PrefillPlan(6, {3, 5}, split_boundary=False),
    "neither": PrefillPlan(6, {1, 4}, project_kv=False, split_boundary=False),
}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
def test_two_passes_with_the_references_layers(pair, family, plan):
    report = check(*pair(family), plan=PLANS[plan], max_new_tokens=4)
    assert len(report.of("resid")) == 7
    if plan == "no K/V":  # what is compared in those layers are the rows of the boundary and after it
        assert len(report.of("k")) == 6


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_twenty_tokens_after_a_pruned_prompt(pair, family):
    assert check(*pair(family), plan=PLANS["half"], max_new_tokens=20).answer_tokens == 19


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("plan", ["half", "scattered", "no K/V", "no boundary"])
@pytest.mark.parametrize("settings", [{"fused": False}, {"chunk_size": 6}, {"chunk_size": 1}], ids=str)
def test_other_forms_of_the_prefill(pair, family, plan, settings):
    check(*pair(family), plan=PLANS[plan], max_new_tokens=2, **settings)


@pytest.mark.parametrize("plan", ["half", "scattered", "no K/V", "no boundary", "neither"])
@pytest.mark.parametrize("count", [1, 2])
def test_shortest_prompts(pair, plan, count):
    check(*pair("qwen3"), token_ids(count), PLANS[plan], max_new_tokens=4)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_skipping_only_the_last_layer_is_lossless(pair, family):
    """Its K and V come from its input, which is exact, and its output for the prompt feeds nothing."""
    model, reference = pair(family)
    inputs = random_inputs(model.config)
    assert our_answer(model, inputs, plan=PLANS["last"]) == reference_answer(reference, inputs)


def test_a_plan_changes_the_answer_so_the_oracle_can_tell(pair):
    """The full model is not within any tolerance of the pruned one: what passes above was really pruned, on both sides."""
    model, reference = pair("llama")
    inputs = random_inputs(model.config)
    full = Runner(model, max_seq_len=32).prefill(inputs)
    for plan in ("third", "first", "every other", "no K/V", "no boundary"):
        pruned = Runner(model, PLANS[plan], max_seq_len=32).prefill(inputs)
        assert gap(pruned, full) > 1e-2
    assert torch.equal(full, Runner(model, PrefillPlan.full(6), max_seq_len=32).prefill(inputs))
