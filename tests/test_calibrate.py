"""Calibrated K/V: what is measured, the regression against a literal one, what it buys, and the command."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch

import minipop
from minipop import MinipopError, ModelInputs, PlanError, PrefillPlan, PromptError, Runner, SamplingParams, generate
from minipop.baselines import slicegpt
from minipop.calibrate import (CLIP, PENALTIES, NaturalGradient, Observed, Statistics, calibrate, calibrate_cuts, continuation_loss,
                               damped_inverse, line_search, main, mean_divergence, rows_of, token_weights, with_one)
from minipop.importance import Sample
from minipop.packing import pack
from minipop.projection import KVProjection

from .test_generate import tokenizer_files
from .test_inspect import save_tiny
from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

DEPTH, CUT = 6, 4
POP = PrefillPlan.deepest(DEPTH, 1 / 3)


def samples(count, seed=0, prompt=20, response=8):
    return [(random_ids(prompt, 2 * i + 1000 * seed), random_ids(response, 2 * i + 1 + 1000 * seed)) for i in range(count)]


def observed(model, prompt, response):
    return Observed.at(model, [CUT], Sample(model, prompt, response))[0]


def own_map(model):
    """POP's own projection: weight [L', 2, K * E, D], bias [L', 2, K * E]."""
    own = KVProjection.of(model, CUT)
    weight = own.weight.double().view(DEPTH - CUT, 2, -1, own.weight.shape[1])
    return weight, torch.zeros_like(weight[..., 0]) if own.bias is None else own.bias.double().view(weight.shape[:3])


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_observed_rows_are_the_full_models(family):
    model, (prompt, response) = tiny_model(family), samples(1)[0]
    seen = observed(model, prompt, response)
    runner = Runner(model, max_seq_len=40)
    runner.prefill(prompt)
    assert seen.n.shape == (19, model.config.hidden_size) and seen.targets.shape == (19, DEPTH - CUT, 2, model.config.kv_width)
    for i in range(CUT, DEPTH):
        close(seen.targets[:, i - CUT, 1], runner.cache.values[i, 0, :, :19].transpose(0, 1).flatten(1))
        if model.layers[i].attn.k_norm is None:  # RoPE keeps lengths
            close(seen.targets[:, i - CUT, 0].norm(dim=1), runner.cache.keys[i, 0, :, :19].transpose(0, 1).flatten(1).norm(dim=1))
    weight, bias = own_map(model)
    rows = rows_of(torch.cat((weight.transpose(2, 3), bias[:, :, None]), 2), seen.n)
    close(rows[:, 0], seen.targets[:, 0])  # the first skipped layer's own input is the stream at the cut


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_predictions_are_the_runners(family):
    """With the full model's rows those of the full model, and with POP's own those of POP."""
    model, (prompt, response) = tiny_model(family), samples(1)[0]
    seen = observed(model, prompt, response)
    weight, bias = own_map(model)
    for rows, plan in ((seen.targets, PrefillPlan.full(DEPTH)), (rows_of(torch.cat((weight.transpose(2, 3), bias[:, :, None]), 2), seen.n), POP)):
        runner = Runner(model, plan, max_seq_len=40)
        logits = torch.cat((runner.prefill(prompt), runner.extend(torch.tensor([response[:-1]]))[0]))
        close(seen.log_predictions(rows), logits.log_softmax(-1))
    assert float(seen.divergence(seen.targets)) == pytest.approx(0, abs=1e-5) and float(seen.divergence(rows)) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_gradients_are_those_of_nudged_rows(family):
    """Central differences, keys before k-norm and RoPE."""
    model, (prompt, response) = tiny_model(family, dtype=torch.float64), samples(1)[0]
    seen = observed(model, prompt, response)
    gradient = seen.loss_gradient()
    for place in ((16, 0, 0, 3), (18, 1, 1, 30), (3, 1, 0, 7)):
        step = torch.zeros_like(seen.targets)
        step[place] = 1e-2
        losses = [-seen.log_predictions(seen.targets + sign * step).gather(1, torch.tensor(response)[:, None]).sum() for sign in (1, -1)]
        assert float(gradient[place]) == pytest.approx(float(losses[0] - losses[1]) / 2e-2, rel=2e-2, abs=1e-4)  # logits are float32


def test_weights_are_relative_to_the_prompt_and_clipped():
    gradients = torch.randn(50, 2, 2, 8, generator=torch.Generator().manual_seed(0))
    weights, norms = token_weights(gradients), gradients.norm(dim=-1)
    close(weights, norms / norms.square().mean(0).sqrt())
    close(token_weights(7 * gradients), weights)
    spike = torch.zeros(1000, 1, 1, 8)
    spike[0] = 1
    assert float(token_weights(spike)[0]) == CLIP
    assert token_weights(torch.zeros(5, 1, 2, 8)).eq(0).all()  # nothing follows that reads them


def test_the_regression_is_the_literal_one():
    """Against a least-squares solution with the penalty as extra rows, and its error computed row by row."""
    model = tiny_model("qwen2")  # has biases
    weight, bias = own_map(model)
    statistics, seen, gradients = Statistics(weight, bias), [], []
    for prompt, response in samples(6):
        seen.append(observed(model, prompt, response))
        gradients.append(seen[-1].loss_gradient())
        statistics.add(seen[-1].n, seen[-1].targets, gradients[-1])
    n = torch.cat([one.n for one in seen]).double()
    inputs, weights = with_one(n), torch.cat([token_weights(one) for one in gradients]).double()
    residuals = torch.cat([one.targets for one in seen]).double() - torch.einsum("td,lpod->tlpo", n, weight) - bias
    for layer, part, penalty in ((0, 0, 1e-2), (1, 0, 1e-3), (1, 1, 1e-2)):
        w = weights[:, layer, part, None].sqrt()
        diagonal = (inputs * w).square().sum(0)
        rows = torch.cat((inputs * w, (penalty * diagonal).sqrt().diag()))
        wanted = torch.cat((residuals[:, layer, part] * w, torch.zeros(len(diagonal), residuals.shape[-1], dtype=torch.float64)))
        expected = torch.linalg.lstsq(rows, wanted).solution
        correction, = statistics.solve(layer, part, [penalty])
        if layer:  # in layer 0, the cut, there is nothing to correct: all residuals are rounding
            close(correction, expected, 1e-6)
            left = ((residuals[:, layer, part] - inputs @ correction) * w).square().sum() / (residuals[:, layer, part] * w).square().sum()
            assert statistics.error(layer, part, correction) == pytest.approx(float(left), rel=1e-6)
        gradient = torch.cat(gradients)[:, layer, part].double()
        close(statistics.moments[layer, part], gradient.T @ gradient)


def test_the_direction_is_the_divergences_preconditioned_gradient():
    """Without the factors it is the gradient: central differences of the mean divergence along single coordinates of the map."""
    model = tiny_model(dtype=torch.float64)
    weight, bias = own_map(model)
    map_ = torch.cat((weight.transpose(2, 3), bias[:, :, None]), 2)
    seen, statistics = [observed(model, *sample) for sample in samples(3)], Statistics(weight, bias)
    for one in seen:
        statistics.add(one.n, one.targets, one.loss_gradient())
    natural = NaturalGradient(statistics)
    ascent = natural.direction(seen, map_)
    count = sum(len(one.response) for one in seen)
    for layer, part, i, o in ((0, 0, 5, 3), (1, 1, 32, 8)):  # 32: the bias
        step = torch.zeros_like(map_)
        step[layer, part, i, o] = 1e-2
        slope = count * (mean_divergence(seen, map_ + step) - mean_divergence(seen, map_ - step)) / 2e-2
        plain = torch.linalg.inv(natural.inputs[layer][part]) @ ascent[layer, part] @ torch.linalg.inv(natural.outputs[layer][part])
        assert float(plain[i, o]) == pytest.approx(slope, rel=2e-2, abs=1e-3)
    matrix = torch.tensor([[2.0, 0.5], [0.5, 6.0]], dtype=torch.float64)
    inverse = damped_inverse(matrix)
    assert torch.equal(inverse, inverse.T) and (torch.linalg.eigvalsh(inverse) > 0).all()


def test_line_search():
    for start in (1e-3, 1.0, 100.0, 3.0):
        size, value = line_search(lambda x: (x - 3) ** 2, start)
        assert 1.5 <= size <= 5 and value == (size - 3) ** 2
    assert line_search(lambda x: math.nan if x > 2 else -x, 1.0) == (2.0, -2.0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_it_brings_the_pruned_model_closer_to_the_full_one(family, tmp_path):
    """On prompts it has not seen. The layers do little (as deep layers do), or there would be nothing linear to find."""
    model = tiny_model(family)
    for layer in model.layers[CUT:]:
        if family.startswith("gemma"):  # what comes after a block is normed: scale the norms, which are stored as w - 1
            for norm in (layer.attn_post_norm, layer.mlp_post_norm):
                norm.weight.mul_(0.3).sub_(0.7)
        else:
            layer.attn.o.weight.mul_(0.3)
            layer.mlp.down.weight.mul_(0.3)
    made = calibrate(model, samples(32, prompt=40), CUT)
    path = str(tmp_path / "kv.safetensors")
    made.projection.save(path)
    kv = PrefillPlan.deepest(DEPTH, 1 / 3, kv=path)

    def predictions(plan, ids, response):
        runner = Runner(model, plan, max_seq_len=48)
        return torch.cat((runner.prefill(ids), runner.extend(torch.tensor([response]))[0])).log_softmax(-1)

    def distance(plan):
        pairs = [(predictions(PrefillPlan.full(DEPTH), *one), predictions(plan, *one)) for one in samples(12, seed=1, prompt=40)]
        return sum(float((full.exp() * (full - other)).sum()) for full, other in pairs)

    assert distance(kv) < (0.95 if family.startswith("gemma") else 0.85) * distance(POP)  # few tokens see far in Gemma's sliding layers
    assert (made.error[0] == 0).all() and (0 < made.error[1:]).all() and (made.error[1:] < 0.95).all()
    assert set(made.penalty[1:].flatten().tolist()) <= set(PENALTIES)
    assert made.divergences == sorted(made.divergences, reverse=True) and len(made.divergences) > 2
    assert torch.equal(calibrate(model, samples(32, prompt=40), CUT).projection.weight, made.projection.weight)


def test_two_cuts_at_once_are_each_by_itself():
    model = tiny_model()
    for cut, together in zip((5, 3), calibrate_cuts(model, samples(8), (5, 3))):
        alone = calibrate(model, samples(8), cut)
        assert torch.equal(together.projection.weight, alone.projection.weight) and together.divergences == alone.divergences
        assert together.projection.cut == cut and len(together.error) == DEPTH - cut


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_prompts_with_pictures(family):
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    rows = 4
    if family == "gemma3":
        pictures = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    else:
        pictures = {"pixel_values": torch.randn(16, 96, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    image = model.config.image_token_id
    made = [(ModelInputs([1, 2, *[image] * rows, *random_ids(6, seed)], **pictures), random_ids(5, seed + 50)) for seed in range(6)]
    seen = observed(model, *made[0])
    runner = Runner(model, max_seq_len=40)
    runner.prefill(made[0][0])
    close(seen.targets[:, 1, 1], runner.cache.values[CUT + 1, 0, :, : 2 + rows + 5].transpose(0, 1).flatten(1))
    assert calibrate(model, made, CUT).projection.weight.isfinite().all()


def test_what_it_refuses():
    model = tiny_model()
    with pytest.raises(PlanError, match="cannot calibrate a cut at layer 6: it must lie in 0 to 5"):
        calibrate(model, samples(4), DEPTH)
    with pytest.raises(PlanError, match="must lie in 2 to 5"):
        calibrate(tiny_model("qwen3_vl"), samples(4), 1)
    with pytest.raises(PromptError, match="at least two samples"):
        calibrate(model, samples(1), CUT)
    with pytest.raises(PromptError, match="too short"):
        calibrate(model, samples(4, prompt=1), CUT)
    with pytest.raises(MinipopError, match="packed"):
        calibrate(pack(tiny_model(dtype=torch.bfloat16)), samples(4), CUT)
    with pytest.raises(PromptError, match="held_out must lie between 0 and 1, not nan"):
        calibrate(model, samples(4), CUT, held_out=math.nan)
    with pytest.raises(PlanError, match="SliceGPT"):
        calibrate(slicegpt(model, [random_ids(20)], 0.25), samples(4), CUT)


def test_what_does_not_help_is_not_kept():
    """Held-out samples whose regression is worse than nothing: the projection stays POP's own."""
    model = tiny_model()
    made = calibrate(model, samples(2, prompt=3), CUT)
    assert len(made.divergences) == 1, made.divergences
    close(made.projection.weight, KVProjection.of(model, CUT).weight)


def test_continuation_loss_is_that_of_one_pass():
    model, made = tiny_model(), samples(3)
    losses = continuation_loss(model, PrefillPlan.full(DEPTH), made)
    for loss, (prompt, response) in zip(losses, made):
        runner = Runner(model, max_seq_len=40)
        runner.prefill(prompt[:1])
        logits = runner.extend(torch.tensor([prompt[1:] + response]))[0, len(prompt) - 2 : -1]
        assert float(loss) == pytest.approx(float(-logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).mean()), rel=1e-5)


# --- the command ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_tiny(folder, "llama", extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=1)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60)
    return file


def run_main(folder, out, *arguments):
    return main(["--ckpt", str(folder), "--out", str(out), "--length", "24", "--samples", "12", "--steps", "1", *map(str, arguments)])


def test_the_command_writes_a_file_that_every_plan_takes(folder, text, tmp_path, capsys):
    out = tmp_path / "kv.safetensors"
    assert run_main(folder, out, "--text", text) == 0
    shown = capsys.readouterr().out
    assert "of the gap closed" in shown or "nats a token: full" in shown
    assert f"--skip-layers 4-5 --kv {out}" in shown and "12 samples, 216 prompt tokens" in shown
    model = minipop.load_model(folder)
    first = Runner(model, PrefillPlan.deepest(DEPTH, "1/3", kv=out), 40).prefill(random_ids(20))
    assert run_main(folder, tmp_path / "again.safetensors", "--text", text, "--skip-layers", "4-5") == 0
    assert torch.equal(Runner(model, PrefillPlan.deepest(DEPTH, kv=tmp_path / "again.safetensors"), 40).prefill(random_ids(20)), first)
    made = KVProjection.load(out)
    assert made.notes == {"checkpoint": "tiny", "samples": "12", "dtype": "float32", "sources": "text.txt"}
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "the lazy dog"}')
    options = ["--ckpt", str(folder), "--input", str(prompts), "--output", str(answers), "--max-new-tokens", "3", "--temperature", "0"]
    assert generate.main([*options, "--kv", str(out)]) == 0
    expected = Runner(model, PrefillPlan.deepest(DEPTH, kv=out), 40)
    ids = minipop.load_tokenizer(folder).encode("the lazy dog")
    assert json.loads(answers.read_text())["token_ids"] == list(expected.generate(ids, SamplingParams(temperature=0.0, max_new_tokens=3)))


def test_prompts_get_responses_of_the_model(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(["a quick fox", "the lazy dog sleeps", "jumps over it", "brown and quick"]))
    assert run_main(folder, tmp_path / "kv", "--prompts", prompts, "--response-tokens", 4) == 0
    assert KVProjection.load(tmp_path / "kv").notes["sources"] == "prompts.txt"


@pytest.mark.parametrize("arguments, words", [
    ([], "nothing to calibrate with"), (["--text", "missing.txt"], "missing.txt"), (["--text", "TEXT", "--ratio", "0"], "this plan has"),
    (["--text", "TEXT", "--skip-layers", "1-2"], "the deepest layers"), (["--text", "TEXT", "--length", "9999"], "9999 exceeds"),
    (["--text", "TEXT", "--held-out", "1"], "--held-out"), (["--text", "TEXT", "--steps", "-1"], "--steps"),
    (["--text", "TEXT", "--samples", "1"], "at least two samples"), (["--text", "TEXT", "--length", "3"], "--length 3 is too short"),
    (["--text", "TEXT", "--max-seq-len", "64"], "--max-seq-len is for --prompts"),
    (["--text", "TEXT", "--seed", "-1"], "--seed: must be a whole number"), (["--text", "TEXT", "--seed", "9" * 20], "--seed: must be a whole number"), (["--text", "TEXT", "--ratio", "2"], "between 0 and 1")])
def test_mistakes_are_one_line(folder, text, tmp_path, capsys, arguments, words):
    out = tmp_path / "kv"
    assert run_main(folder, out, *(str(text) if a == "TEXT" else a for a in arguments)) == 2
    shown = capsys.readouterr()
    assert re.search(words, shown.err) and shown.err.splitlines()[-1].startswith("error: ") and not out.exists()


def test_as_a_program(folder, text, tmp_path):
    command = [sys.executable, "-m", "minipop.calibrate", "--ckpt", str(folder), "--out", str(tmp_path / "no" / "kv"), "--text", str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "there is no folder" in done.stderr and done.stderr.count("\n") == 1
