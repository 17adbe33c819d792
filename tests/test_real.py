"""SmolLM2-135M-Instruct, the real one (dequantised from Q4_1): run where `scripts/fetch_weights.py` has put it."""

import argparse
import inspect
import math
from pathlib import Path

import pytest
import torch

import minipop
from minipop import PrefillPlan, Runner, SamplingParams

FOLDER = Path(__file__).parents[1] / "weights" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.real, pytest.mark.skipif(not FOLDER.is_dir(), reason="weights/smollm2-135m-instruct is not there")]


@pytest.fixture(scope="module")
def tokenizer():
    return minipop.load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def model():
    return minipop.load_model(FOLDER, dtype="float32")


@pytest.mark.parametrize("ratio", [0, 1 / 3])
def test_knows_the_capital_of_france(tokenizer, ratio):
    model = minipop.load_model(FOLDER)  # bfloat16, as the file says
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    runner = Runner(model, PrefillPlan.deepest(30, ratio), max_seq_len=128)
    answer = list(runner.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=32)))
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in model.config.eos_token_ids


@pytest.fixture(scope="module")
def losses(model, tokenizer):
    """Mean negative log-likelihood of the 64 tokens after 384-token prompts (Python source), and of their first token alone."""
    ids = tokenizer.encode(inspect.getsource(argparse))
    skip = range(20, 30)
    plans = {"full": PrefillPlan.full(30), "pop": PrefillPlan.deepest(30, 1 / 3), "no kv": PrefillPlan(30, skip, project_kv=False),
             "no boundary": PrefillPlan(30, skip, split_boundary=False)}
    result = {}
    for name, plan in plans.items():
        runner, nll = Runner(model, plan, max_seq_len=512), []
        for start in range(0, 8 * 2400, 2400):
            prompt, rest = ids[start : start + 384], torch.tensor(ids[start + 384 : start + 448])
            runner.reset()
            logits = torch.cat((runner.prefill(prompt), runner.extend(rest[None, :-1])[0]))  # [64, vocab]
            nll.append(-logits.log_softmax(-1).gather(1, rest[:, None])[:, 0])
        nll = torch.stack(nll)
        result[name] = nll.mean().item(), nll[:, 0].mean().item()
    return result


def test_pruned_prefill_costs_a_little(losses):
    """Neither nothing nor everything: both would mean that the plan is not what it says."""
    full, pop = math.exp(losses["full"][0]), math.exp(losses["pop"][0])
    assert 1.02 * full < pop < 1.6 * full


def test_skipped_layers_need_their_kv(losses):
    assert losses["no kv"][0] > losses["pop"][0] + 1


def test_the_first_token_needs_the_boundary(losses):
    assert losses["no boundary"][1] > losses["pop"][1] + 3


def test_rows_below_the_cut_are_exact(model, tokenizer):
    """K/V rows of the layers below the cut are the full model's, on real weights and text."""
    ids = tokenizer.encode(inspect.getsource(argparse))[:200]
    full, pop = Runner(model, max_seq_len=256), Runner(model, PrefillPlan.deepest(30), max_seq_len=256)
    full.prefill(ids), pop.prefill(ids)
    for ours, theirs in ((pop.cache.keys, full.cache.keys), (pop.cache.values, full.cache.values)):
        assert (ours[:20] - theirs[:20]).abs().max() <= 1e-5 * theirs[:20].abs().max()
