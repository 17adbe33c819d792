"""Calibrated K/V at run time: the file, what is checked about it, and that the runner applies exactly what it holds."""

import pytest
import torch
from safetensors.torch import save_file

from minipop import PlanError, PrefillPlan, Runner
from minipop.layers import rotate
from minipop.packing import pack
from minipop.projection import FORMAT, KVProjection, fingerprint

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

CUT, DEPTH = 4, 6


def made_up(model, path, seed=0, **changes):
    """A projection near the model's own, saved."""
    projection = KVProjection.of(model, CUT)
    generator = torch.Generator().manual_seed(seed)
    projection.weight = projection.weight + 0.1 * torch.randn(projection.weight.shape, generator=generator)
    projection.bias = torch.randn(len(projection.weight), generator=generator)
    projection.fingerprint = fingerprint(model, CUT)
    projection.notes = {"checkpoint": "tiny"}
    for name, value in changes.items():
        setattr(projection, name, value)
    projection.save(path)
    return projection


def plan(path, depth=DEPTH, skipped=2):
    return PrefillPlan(depth, range(depth - skipped, depth), kv=str(path))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_models_own_projection_from_a_file_is_plain_pop(family, tmp_path):
    model = tiny_model(family)
    own = KVProjection.of(model, CUT)
    bias = torch.zeros(len(own.weight)) if own.bias is None else own.bias
    KVProjection(own.weight, bias, CUT, DEPTH, fingerprint(model, CUT)).save(tmp_path / "kv.safetensors")
    a = Runner(model, PrefillPlan.deepest(DEPTH, 1 / 3), 40)
    b = Runner(model, plan(tmp_path / "kv.safetensors"), 40)
    close(b.prefill(random_ids(20)), a.prefill(random_ids(20)), 1e-6)
    close(b.cache.keys, a.cache.keys, 1e-6)
    close(b.decode([3]), a.decode([3]), 1e-6)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_rows_are_the_files_map_of_the_stream_at_the_cut(family, tmp_path):
    """Spelled out: W n + b, k-norm, RoPE, for every prompt token but the last; the last one's rows are the full model's."""
    model, ids = tiny_model(family), random_ids(20)
    projection = made_up(model, tmp_path / "kv.safetensors")
    streams = {}
    full = Runner(model, max_seq_len=40, tap=lambda layer, name, x: streams.setdefault((layer, name), x))
    full.prefill(ids)
    runner = Runner(model, plan(tmp_path / "kv.safetensors"), 40)
    runner.prefill(ids)
    close(runner.cache.keys[:CUT], full.cache.keys[:CUT])
    x = streams[CUT - 1, "resid"]
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.norm_eps)
    rows = (n @ projection.weight.T + projection.bias).unflatten(-1, (DEPTH - CUT, 2, model.config.num_kv_heads, model.config.head_dim))
    tables = model.rope(torch.arange(20)[None])
    for i in range(CUT, DEPTH):
        k, v = rows[:, :, i - CUT].permute(2, 0, 3, 1, 4)  # each [B, K, N, E]
        norm = model.layers[i].attn.k_norm
        k = rotate(k if norm is None else norm(k), tables[i])
        close(runner.cache.keys[i, :, :, :19], k[:, :, :19])
        close(runner.cache.values[i, :, :, :19], v[:, :, :19])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_form_of_the_runner_agrees(family, tmp_path):
    """Fused, two passes, in chunks, watched by a tap, in a ragged batch, packed or not."""
    model = tiny_model(family)
    made_up(model, tmp_path / "kv.safetensors")
    chosen, prompts = plan(tmp_path / "kv.safetensors"), [random_ids(20), random_ids(9, seed=1)]
    fused = Runner(model, chosen, 40)
    expected = fused.prefill(prompts[0])
    seen = []

    def tap(layer, name, x):
        seen.append((layer, name))
        return x

    for options in ({"fused": False}, {"chunk_size": 6}, {"tap": tap}):
        runner = Runner(model, chosen, 40, **options)
        close(runner.prefill(prompts[0]), expected)
        close(runner.cache.values[:, :, :, :20], fused.cache.values[:, :, :, :20])
    assert {(CUT, "k_proj"), (DEPTH - 1, "v"), (DEPTH - 1, "resid")} <= set(seen)
    batch = Runner(model, chosen, 40, batch_size=2)
    close(batch.prefill(prompts)[:1], expected)
    plain = Runner(model, PrefillPlan.deepest(DEPTH, 1 / 3), 40).prefill(prompts[0])
    assert (plain - expected).abs().max() > 1e-2  # it does something
    bf16 = tiny_model(family, dtype=torch.bfloat16)
    a = Runner(bf16, chosen, 40).prefill(prompts[0])
    close(Runner(pack(bf16), chosen, 40).prefill(prompts[0]), a, 2e-2)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_fingerprint_is_the_same_in_every_dtype_and_differs_between_models(family):
    as_saved = tiny_model(family).bfloat16()
    digest = fingerprint(as_saved, CUT)
    assert digest == fingerprint(tiny_model(family).bfloat16().float(), CUT) == fingerprint(pack(tiny_model(family).bfloat16()), CUT)
    assert digest != fingerprint(tiny_model(family, seed=1).bfloat16(), CUT) and digest != fingerprint(as_saved, CUT - 1)


def test_a_file_for_another_checkpoint_or_cut_is_refused(tmp_path):
    model, path = tiny_model(), tmp_path / "kv.safetensors"
    made_up(model, path)
    with pytest.raises(PlanError, match=r"another checkpoint \('tiny'\)"):
        Runner(tiny_model(seed=1), plan(path), 40)
    with pytest.raises(PlanError, match="layers 4-5 of 6 skipped, the plan has 3 of 6"):
        Runner(model, plan(path, skipped=3), 40)
    with pytest.raises(PlanError, match="no such file.*minipop.calibrate"):
        Runner(model, plan(tmp_path / "missing.safetensors"), 40)


def test_files_that_are_no_calibration_are_refused(tmp_path):
    model, path = tiny_model(), tmp_path / "kv.safetensors"
    projection = made_up(model, path)
    with open(path, "rb") as file:
        good = file.read()
    for damage in (b"", b"not safetensors", good[:100], good[:-5]):
        path.write_bytes(damage)
        with pytest.raises(PlanError, match="not a calibrated K/V file"):
            Runner(model, plan(path), 40)
    save_file({"weight": projection.weight}, path)
    with pytest.raises(PlanError, match="not a calibrated K/V file of this version"):
        Runner(model, plan(path), 40)
    about = {"minipop": FORMAT, "cut": "4", "num_layers": "6", "fingerprint": "x", "notes": "{}"}
    for change in ({"notes": "[1]"}, {"notes": "[" * 100_000}, {"cut": "-1"}, {"cut": "x"}):
        save_file({"weight": projection.weight, "bias": projection.bias}, path, about | change)
        with pytest.raises(PlanError, match="not a calibrated K/V file"):
            Runner(model, plan(path), 40)
    with pytest.raises(PlanError, match="not a file"):
        Runner(model, plan(tmp_path), 40)
    made_up(model, path, bias=torch.full((len(projection.weight),), float("nan")))
    with pytest.raises(PlanError, match="damaged"):
        Runner(model, plan(path), 40)
    made_up(model, path, weight=projection.weight[:-1], bias=projection.bias[:-1])
    with pytest.raises(PlanError, match="another checkpoint"):
        Runner(model, plan(path), 40)


def test_plans_that_have_no_use_for_a_file(tmp_path):
    path = str(tmp_path / "kv.safetensors")
    made_up(tiny_model(), path)
    for other in (PrefillPlan(6, {1, 2}, kv=path), PrefillPlan(6, kv=path), PrefillPlan(6, {4, 5}, project_kv=False, kv=path)):
        with pytest.raises(PlanError, match="calibrated K/V belong to a plan that skips the deepest layers"):
            Runner(tiny_model(), other, 40)


def test_below_the_deepstack_layers_there_is_no_one_stream(tmp_path):
    model = tiny_model("qwen3_vl")
    assert model.deepstack_layers == 2
    with pytest.raises(PlanError, match="DeepStack"):
        Runner(model, PrefillPlan(DEPTH, range(1, DEPTH), kv=str(tmp_path / "kv")), 40)
