"""bfloat16: within the reference's own rounding, and exact where the order of roundings is part of the definition."""

from dataclasses import replace

import pytest
import torch

from minipop import PrefillPlan, Runner, load_model
from minipop.config import DTYPES
from minipop.models.gemma import embedding_scale
from tests.reference import (FAMILIES, check, compare, edit_config, gap, load_reference, random_inputs, read_tensors, rewrite,
                             token_ids)


@pytest.fixture(scope="module")
def bfloat16(pair):
    made = {}

    def get(family):
        if family not in made:
            folder = pair.folder(family)
            made[family] = load_model(folder, "bfloat16"), load_reference(folder, torch.bfloat16)
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [None, PrefillPlan(6, {0, 3, 5})], ids=["full", "pruned"])
def test_within_the_references_own_rounding(bfloat16, family, plan):
    model, reference = bfloat16(family)
    before = [p.clone() for p in reference.parameters()]
    report = compare(model, reference, random_inputs(model.config), plan, max_new_tokens=4)
    assert report.passed and report.dtype == "bfloat16", f"\n{report}"
    assert 2 ** -7 <= min(d.allowed for d in report.differences) and max(d.allowed for d in report.differences) < 0.3
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(before, reference.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_roundings_that_are_part_of_the_definition(bfloat16, family):
    """The embedding (with Gemma's rounded scale), the first norm and the first K and V are equal bit by bit."""
    model, reference = bfloat16(family)
    ids = token_ids(9)
    seen = {}
    Runner(model, max_seq_len=9, tap=lambda layer, name, x: seen.setdefault((layer, name), x)).prefill(ids)
    text = getattr(reference.model, "language_model", reference.model)
    theirs = {}
    layer = text.layers[0]
    hooks = [module.register_forward_hook(lambda _, __, out, name=name: theirs.setdefault(name, out))
             for name, module in (("attn_in", layer.input_layernorm), ("k_proj", layer.self_attn.k_proj),
                                  ("v", layer.self_attn.v_proj))]
    hooks.append(layer.register_forward_pre_hook(lambda _, args: theirs.setdefault("x", args[0])))
    with torch.no_grad():
        reference(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    assert torch.equal(seen[-1, "resid"], theirs["x"]) and seen[-1, "resid"].dtype == torch.bfloat16
    assert torch.equal(seen[0, "attn_in"], theirs["attn_in"])
    for name in ("k_proj", "v"):
        assert torch.equal(seen[0, name].transpose(1, 2).flatten(2), theirs[name])


@pytest.mark.parametrize("hidden, scale", [(640, 25.25), (1152, 34.0), (2560, 50.5), (3840, 62.0), (5376, 73.5)])
def test_gemmas_embedding_scale_is_rounded_to_bfloat16(pair, hidden, scale):
    config = replace(pair("gemma3")[0].config, embedding_scale=hidden ** 0.5)
    assert embedding_scale(config, torch.bfloat16) == scale
    assert embedding_scale(config, torch.float32) == pytest.approx(hidden ** 0.5, rel=1e-7)


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("gemma")])
def test_float16(pair, family):
    folder = pair.folder(family)
    model, reference = load_model(folder, torch.float16), load_reference(folder, torch.float16)
    report = compare(model, reference, random_inputs(model.config), max_new_tokens=2)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("family", ["gemma3", "gemma3_vl"])
def test_gemma_in_bfloat16_from_float32_weights_equals_bfloat16_weights(pair, tmp_path, family):
    model, _ = pair(family)
    wide = load_model(pair.folder(family), "bfloat16")
    narrow = tmp_path / "narrow"
    tensors = {name: tensor.bfloat16() for name, tensor in read_tensors(pair.folder(family)).items()}
    rewrite(pair.folder(family), narrow, extra=tensors)
    inputs = random_inputs(model.config)
    assert torch.equal(Runner(load_model(narrow, "bfloat16"), max_seq_len=32).prefill(inputs),
                       Runner(wide, max_seq_len=32).prefill(inputs))


@pytest.mark.parametrize("config, expected", [
    ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "torch.float16"}, "float16"),
    ({"dtype": "auto"}, "float32"), ({"dtype": None, "torch_dtype": None}, "float32"),
    ({"dtype": None, "torch_dtype": "float64"}, "float64"),
], ids=str)
def test_dtype_of_the_config_and_else_of_the_weights(pair, tmp_path, config, expected):
    model, reference = pair("llama")
    rewritten = rewrite(pair.folder("llama"), tmp_path, config={"dtype": None} | config)
    assert rewritten.head.weight.dtype == rewritten.embedding.weight.dtype == DTYPES[expected]
    check(load_model(tmp_path, "float32"), reference, max_new_tokens=1)


def test_dtype_only_in_the_text_config(pair, tmp_path):
    rewrite(pair.folder("qwen3_vl"), tmp_path)
    edit_config(tmp_path, drop=["dtype", "torch_dtype"], text_config={"dtype": "bfloat16"})
    assert load_model(tmp_path).vision.patch_embed.weight.dtype == torch.bfloat16


def test_float64_is_no_worse_than_float32(pair):
    """Norms are computed in float32 in every dtype, here and in the reference."""
    model, reference = pair("llama")
    wide, theirs = load_model(pair.folder("llama"), "float64"), load_reference(pair.folder("llama"), torch.float64)
    check(wide, theirs, max_new_tokens=2, tolerance=1e-6)
    ids = token_ids(20)
    assert gap(Runner(wide, max_seq_len=20).prefill(ids), Runner(model, max_seq_len=20).prefill(ids)) < 1e-5
