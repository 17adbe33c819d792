"""Drift between full and pruned prefill against oracles and a comparison by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity as cosine

from minipop import MinipopError, ModelInputs, PlanError, PrefillPlan, PromptError, Runner
from minipop.drift import draw_drift, main, measure_drift, table
from minipop.plan import ablations

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

LAYERS = 6
TINY_VL = str(Path(__file__).parent.parent / "weights" / "tiny-qwen3-vl")
NAMES = ("hidden", "keys", "values", "attention")


def prompts(family):
    texts = [random_ids(9), random_ids(2, 1), random_ids(14, 2)]
    generator = torch.Generator().manual_seed(3)
    if family == "qwen3_vl":
        pixels = torch.rand(16, 96, generator=generator)
        return [*texts, ModelInputs([5, 59, 60, 60, 60, 60, 9], pixels, torch.tensor([[1, 4, 4]]))]
    if family == "gemma3":  # the second ends in its image: the whole of it is the boundary
        pixels = torch.rand(1, 3, 16, 16, generator=generator)
        return [*texts, ModelInputs([5, 60, 60, 60, 60, 7], pixels), ModelInputs([5, 9, 60, 60, 60, 60], pixels)]
    return texts


ALL_FAMILIES = [*TEXT_FAMILIES, "gemma3", "qwen3_vl"]


def stacked(drift):
    return torch.stack([getattr(drift, name) for name in NAMES])  # [4, L]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_full_plan_does_not_drift(family):
    drift = measure_drift(tiny_model(family), PrefillPlan.full(LAYERS), prompts(family))
    close(stacked(drift), torch.ones(4, LAYERS, dtype=torch.float64), 1e-12)
    assert drift.prompts == len(prompts(family)) and drift.hidden.dtype == torch.float64


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_drift_begins_after_the_cut(family):
    drift = measure_drift(tiny_model(family), PrefillPlan(LAYERS, {3, 4, 5}), prompts(family))
    close(stacked(drift)[:, :4], torch.ones(4, 4, dtype=torch.float64), 1e-6)  # at the cut K/V come from an exact stream
    assert (stacked(drift)[:, 4:] < 0.999).all() and (stacked(drift) > -1).all()


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_skipping_the_last_layer_alone_is_lossless(family):
    drift = measure_drift(tiny_model(family), PrefillPlan(LAYERS, {5}), prompts(family))
    close(stacked(drift), torch.ones(4, LAYERS, dtype=torch.float64), 1e-6)


def test_by_hand():
    """One prompt of a Llama, from the two caches and from streams and attention outputs read off in separate runs."""
    model, ids, plan = tiny_model(), random_ids(9), PrefillPlan(LAYERS, {1, 3, 4})
    taps = {}

    def run(name, plan):
        def tap(layer, what, tensor):
            taps.setdefault((name, layer, what), []).append(tensor[0])
            return tensor
        runner = Runner(model, plan, max_seq_len=9, tap=tap)
        runner.prefill(ids)
        return runner.cache

    full, pruned = run("full", PrefillPlan.full(LAYERS)), run("pruned", plan)
    drift = measure_drift(model, plan, [ids])
    for layer in range(LAYERS):
        keys = [c.keys[layer, 0, :, :8].transpose(0, 1).reshape(8, -1) for c in (full, pruned)]  # [8, K * E]
        values = [c.values[layer, 0, :, :8].transpose(0, 1).reshape(8, -1) for c in (full, pruned)]
        streams = [taps[name, layer - 1, "resid"][0][:8] for name in ("full", "pruned")]  # of the first pass
        attention = [taps[name, layer, "attn_out"][-1][-1:] for name in ("full", "pruned")]  # of the last pass's last token
        for name, (a, b) in zip(NAMES, (streams, keys, values, attention)):
            assert getattr(drift, name)[layer].item() == pytest.approx(cosine(a, b).mean().item(), abs=1e-5)
    assert drift.tokens == 8
    # A skipped layer hands the stream on as it is.
    assert torch.equal(taps["pruned", 0, "resid"][0], taps["pruned", 1, "resid"][0])


def test_means_are_over_tokens():
    model, plan = tiny_model(), PrefillPlan(LAYERS, {2, 3, 4, 5})
    a, b, both = (measure_drift(model, plan, s) for s in ([random_ids(9)], [random_ids(4, 1)], [random_ids(9), random_ids(4, 1)]))
    close(both.values, (8 * a.values + 3 * b.values) / 11, 1e-9)
    close(both.attention, (a.attention + b.attention) / 2, 1e-9)
    assert both.tokens == 11 and both.prompts == 2


def test_long_prompts_in_chunks():
    """Beyond the runner's chunk the passes follow one another; 2,100 tokens need two."""
    model = tiny_model(max_position_embeddings=4096)
    drift = measure_drift(model, PrefillPlan(LAYERS, {3, 4, 5}), [random_ids(2100)])
    assert drift.tokens == 2099
    close(stacked(drift)[:, :4], torch.ones(4, 4, dtype=torch.float64), 1e-5)


def test_where_there_is_nothing_to_compare():
    plans, model = ablations(LAYERS), tiny_model()
    no_kv, no_boundary = (measure_drift(model, plans[name], [random_ids(9)]) for name in ("no K/V", "no boundary"))
    skipped = torch.tensor([i in plans["POP"].skip for i in range(LAYERS)])
    assert torch.equal(no_kv.keys.isnan(), skipped) and torch.equal(no_kv.values.isnan(), skipped)
    assert not no_kv.attention.isnan().any() and not no_kv.hidden.isnan().any()
    assert torch.equal(no_boundary.attention.isnan(), skipped) and not no_boundary.values.isnan().any()


def test_a_later_cut_drifts_less():
    model = tiny_model()
    drifts = [measure_drift(model, PrefillPlan.deepest(LAYERS, n / LAYERS), prompts("llama")) for n in (2, 4)]
    assert drifts[0].hidden[-1] > drifts[1].hidden[-1]


def test_refuses():
    model = tiny_model("gemma3")
    with pytest.raises(PromptError, match="1 token has none"):
        measure_drift(model, PrefillPlan(LAYERS, {5}), [[3]])
    with pytest.raises(PromptError, match="4 tokens has none"):
        measure_drift(model, PrefillPlan(LAYERS, {5}), [ModelInputs([60] * 4, torch.rand(1, 3, 16, 16))])
    with pytest.raises(PlanError, match="4 layers, the model has 6"):
        measure_drift(model, PrefillPlan(4, {3}), [[3, 4]])
    with pytest.raises(PromptError, match="no prompts"):
        measure_drift(model, PrefillPlan(LAYERS, {5}), [])


def test_save_table_and_figure(tmp_path):
    plan = ablations(LAYERS)["no K/V"]
    drift = measure_drift(tiny_model(), plan, prompts("llama"))
    drift.save(tmp_path / "a.json", checkpoint="tiny")
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["hidden"] == drift.hidden.tolist() and values["keys"][5] is None and values["checkpoint"] == "tiny"
    assert values["prompts"] == 3 and values["tokens"] == drift.tokens
    lines = table(drift, plan).splitlines()
    assert len(lines) == LAYERS + 2 and lines[-1].startswith("lowest in the skipped layers (4-5): hidden ")
    assert len(table(drift, PrefillPlan.full(LAYERS)).splitlines()) == LAYERS + 1
    draw_drift(drift, plan, tmp_path / "a.png", "tiny")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MinipopError, match="cannot be written"):
        draw_drift(drift, plan, tmp_path / "nowhere" / "a.png")


# --- the command --------------------------------------------------------------------------------------------------------------

def test_command(tmp_path, capsys):
    arguments = ["--ckpt", TINY_VL, "--ratio", "1/2", "--dtype", "float32"]
    assert main([*arguments, "--count", "3", "--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.png")]) == 0
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["prompts"] == 3 and values["skip"] == [4, 5, 6, 7] and values["checkpoint"] == "tiny-qwen3-vl"
    assert values["hidden"][:5] == pytest.approx([1] * 5, abs=1e-5) and values["hidden"][7] < 0.99
    assert "4 of 8 layers skipped" in capsys.readouterr().out and (tmp_path / "a.png").exists()
    (tmp_path / "a.txt").write_text("What is left of the star? " * 40)
    assert main([*arguments, "--text", str(tmp_path / "a.txt"), "--prompt-tokens", "20", "--count", "4"]) == 0
    assert "4 prompts, 76 pruned tokens" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--text", "nowhere"], "nowhere: no such file"), (["--text", __file__, "--prompts", __file__], "not allowed with"),
    (["--text", __file__, "--prompt-tokens", "1"], "1 token has none"), (["--ratio", "2"], "ratio must lie")])
def test_command_refuses(capsys, arguments, message):
    assert main(["--ckpt", TINY_VL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_as_a_program(tmp_path):
    (tmp_path / "a.txt").write_text("star")
    done = subprocess.run([sys.executable, "-m", "minipop.drift", "--ckpt", TINY_VL, "--text", str(tmp_path / "a.txt")],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "too few for a prompt of 256" in done.stderr and done.stderr.startswith("error: ")
