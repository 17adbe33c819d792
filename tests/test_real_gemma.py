"""Gemma-3-270M, the real one (dequantised from Q4_K_M), against transformers: run where `scripts/fetch_weights.py` has put it."""

from pathlib import Path

import pytest

import minipop
from minipop import ModelInputs, PrefillPlan
from minipop.compare import compare, load_reference

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "weights" / "gemma-3-270m"
pytestmark = [pytest.mark.real, pytest.mark.skipif(not FOLDER.is_dir(), reason="weights/gemma-3-270m is not there")]


@pytest.fixture(scope="module")
def pair():
    pytest.importorskip("transformers")
    return minipop.load_model(FOLDER, dtype="float32"), load_reference(FOLDER), minipop.load_tokenizer(FOLDER)


@pytest.mark.parametrize("ratio", [0, 1 / 3])
@pytest.mark.parametrize("text, longer_than_window", [("The capital of France is", False), ((ROOT / "LICENSE").read_text()[:4000], True)],
                         ids=["short", "beyond the window"])
def test_equals_the_reference(pair, ratio, text, longer_than_window):
    model, reference, tokenizer = pair
    ids = tokenizer.encode(text)
    assert (len(ids) > 512) == longer_than_window and ids.count(model.config.bos_token_id) == 1
    report = compare(model, reference, ModelInputs(ids), PrefillPlan.deepest(18, ratio), max_new_tokens=100)
    assert report.passed, str(report)
    assert report.our_ids == report.reference_ids
