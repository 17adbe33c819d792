"""SmolLM2-135M-Instruct, the real one (dequantised from Q4_1): run where `scripts/fetch_weights.py` has put it."""

import argparse
import inspect
import math
import sys
from pathlib import Path

import pytest

import minipop
from minipop import PrefillPlan, Runner, SamplingParams

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "weights" / "smollm2-135m-instruct"
sys.path.insert(0, str(ROOT / "scripts"))
import perplexity  # noqa: E402
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
    pieces = perplexity.documents(tokenizer.encode(inspect.getsource(argparse)), 8)
    plans = perplexity.standard_plans(30)
    result = {}
    for name in ("full", "POP 1/3", "1/3, no K/V", "1/3, no boundary"):
        nll = perplexity.losses(model, plans[name], pieces)
        result[name] = nll.mean().item(), nll[:, 0].mean().item()
    return result


def test_pruned_prefill_costs_a_little(losses):
    """Neither nothing nor everything: both would mean that the plan is not what it says."""
    full, pop = math.exp(losses["full"][0]), math.exp(losses["POP 1/3"][0])
    assert 1.02 * full < pop < 1.6 * full


def test_skipped_layers_need_their_kv(losses):
    assert losses["1/3, no K/V"][0] > losses["POP 1/3"][0] + 1


def test_the_first_token_needs_the_boundary(losses):
    assert losses["1/3, no boundary"][1] > losses["POP 1/3"][1] + 3


def test_rows_below_the_cut_are_exact(model, tokenizer):
    """K/V rows of the layers below the cut are the full model's, on real weights and text."""
    ids = tokenizer.encode(inspect.getsource(argparse))[:200]
    full, pop = Runner(model, max_seq_len=256), Runner(model, PrefillPlan.deepest(30), max_seq_len=256)
    full.prefill(ids), pop.prefill(ids)
    for ours, theirs in ((pop.cache.keys, full.cache.keys), (pop.cache.values, full.cache.values)):
        assert (ours[:20] - theirs[:20]).abs().max() <= 1e-5 * theirs[:20].abs().max()
