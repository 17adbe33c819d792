"""Virtual-gate importance against exact oracles, finite differences and the runner itself."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minipop.importance
from minipop import MinipopError, ModelInputs, PlanError, PrefillPlan, PromptError, Runner, SamplingParams
from minipop.importance import (Importance, Sample, draw_importance, gate_gradients, main, measure_importance, rank_correlation,
                                removal_loss, rollouts, sample_responses, table)
from minipop.layers import no_tap
from minipop.packing import PackedLinear, can_pack, pack
from minipop.sampling import log_probs

from .tiny import close, random_ids, tiny_model

LAYERS = 6
TINY_VL = str(Path(__file__).parent.parent / "weights" / "tiny-qwen3-vl")
CASES = ("llama", "long llama", "mistral", "qwen3", "gemma3_text", "qwen3_vl", "gemma3", "gemma3 ends in its image")


def case(name, dtype=torch.float32):
    """A model, a prompt (with an image for the vision families) and a response."""
    family = name.split()[-1] if name.startswith("long") else name.split()[0]
    model, generator = tiny_model(family, dtype=dtype), torch.Generator().manual_seed(3)
    response = random_ids(5, seed=1)
    if family == "qwen3_vl":
        pixels = torch.rand(16, 96, generator=generator)  # 4 x 4 patches, merged to 4 tokens
        return model, ModelInputs([5, 59, 60, 60, 60, 60, 9, 11, 3], pixels, torch.tensor([[1, 4, 4]])), response
    if family == "gemma3":
        ids = [5, 9, 60, 60, 60, 60] + ([] if "ends" in name else [7, 3, 8])
        return model, ModelInputs(ids, torch.rand(1, 3, 16, 16, generator=generator)), response
    return model, ModelInputs(random_ids(70 if name.startswith("long") else 9)), response


def run_plan(model, inputs, response, plan=None):
    """The response's losses [R] as the runner gives them, and its cache's keys and values [L, K, T, E]."""
    runner = Runner(model, plan, max_seq_len=100)
    logits = [runner.prefill(inputs)]
    if len(response) > 1:
        logits.append(runner.extend(torch.tensor([response[:-1]]))[0])
    rows = slice(0, runner.cache.length)
    return -log_probs(torch.cat(logits), torch.tensor(response)), runner.cache.keys[:, 0, :, rows], runner.cache.values[:, 0, :, rows]


def gates_with(sample, stage, layers, value):
    gates = sample.open_gates()
    gates[stage, list(layers)] = value
    return sample.gated(gates)


def compute_in_double(monkeypatch):
    """Norms and logits go through float32, too coarse for finite differences: from here on they stay in float64."""
    lerp = torch.lerp
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "lerp", lambda a, b, weight: lerp(a, b, weight.to(a.dtype)))


# --- what a gate is -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_open_gates_are_the_model(name):
    model, inputs, response = case(name)
    expected, _, _ = run_plan(model, inputs, response)
    close(Sample(model, inputs, response).losses(no_tap), expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("skip", [{3, 4, 5}, {0, 2, 4}], ids=str)
def test_closed_prefill_gates_are_pop(name, skip):
    """The same losses, and the same cache in every layer and row: the gates act on exactly the tokens that POP prunes."""
    model, inputs, response = case(name)
    sample, seen = Sample(model, inputs, response), {}
    gated = gates_with(sample, 0, skip, 0.0)

    def tap(layer, name, tensor):
        seen[layer, name] = tensor
        return gated(layer, name, tensor)

    losses = sample.losses(tap)
    expected, keys, values = run_plan(model, inputs, response, PrefillPlan(LAYERS, skip))
    close(losses, expected)
    close(torch.cat([seen[i, "k"] for i in range(LAYERS)]), keys)
    close(torch.cat([seen[i, "v"] for i in range(LAYERS)]), values)


def test_closing_both_gates_removes_the_layer():
    model, inputs, response = case("llama")
    sample = Sample(model, inputs, response)
    losses = sample.losses(gates_with(sample, slice(None), [2], 0.0))
    for module in (model.layers[2].attn.o, model.layers[2].mlp.down):
        module.weight.zero_()
    close(losses, run_plan(model, inputs, response)[0])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_gate_scales_both_branches(name):
    """0.7 in both stages is the model whose branches are 0.7 times as large, in Gemma after their post-norms."""
    model, inputs, response = case(name)
    sample = Sample(model, inputs, response)
    losses = sample.losses(gates_with(sample, slice(None), [2], 0.7))
    layer = model.layers[2]
    if name == "llama":
        for weight in (layer.attn.o.weight, layer.mlp.down.weight):
            weight.mul_(0.7)
    else:
        for weight in (layer.attn_post_norm.weight, layer.mlp_post_norm.weight):
            weight.copy_((1 + weight) * 0.7 - 1)
    close(losses, run_plan(model, inputs, response)[0])


def test_a_sampled_image_token_is_text():
    model, inputs, _ = case("qwen3_vl")
    response = [4, 60, 60, 2]
    close(Sample(model, inputs, response).losses(no_tap), run_plan(model, inputs, response)[0])


# --- gradients ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name, monkeypatch):
    compute_in_double(monkeypatch)
    model, inputs, response = case(name, torch.float64)
    gradients, sample = gate_gradients(model, inputs, response), Sample(model, inputs, response)
    assert gradients.shape == (2, LAYERS) and gradients.dtype == torch.float64
    step = 1e-5

    def loss(stage, layer, value):
        with torch.no_grad():
            return sample.losses(gates_with(sample, stage, [layer], value)).sum()

    expected = torch.tensor([[(loss(stage, layer, 1 + step) - loss(stage, layer, 1 - step)) / (2 * step) for layer in range(LAYERS)]
                             for stage in (0, 1)])
    close(gradients, expected, 1e-7)


@pytest.mark.parametrize("name", CASES)
def test_float32_gradients_are_the_float64_ones(name, monkeypatch):
    single = gate_gradients(*case(name))
    compute_in_double(monkeypatch)
    close(single.double(), gate_gradients(*case(name, torch.float64)), 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_without_gate_parameters(name):
    """The paper's other form: the sum over a stage's positions of <d loss / d branch, branch>."""
    model, inputs, response = case(name)
    sample, branches = Sample(model, inputs, response), {}

    def tap(layer, name, tensor):
        if name in ("attn_out", "mlp_out"):
            branches[layer, name] = tensor = tensor.detach().requires_grad_() + 0 if (layer, name) == (0, "attn_out") else tensor + 0
            tensor.retain_grad()
        return tensor

    with torch.enable_grad():
        sample.losses(tap).sum().backward()
    expected = torch.zeros(2, LAYERS)
    for (layer, _), branch in branches.items():
        products = (branch.grad * branch.detach())[0].sum(-1) if branch.grad is not None else torch.zeros(branch.shape[1])
        expected[0, layer] += products[: sample.prefill_length].sum()
        expected[1, layer] += products[sample.prefill_length :].sum()
    close(gate_gradients(model, inputs, response), expected, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_last_layers_prefill_importance_is_zero(name):
    model, inputs, response = case(name)
    gradients = gate_gradients(model, inputs, response)
    assert gradients[0, -1] == 0
    assert gradients[0, :-1].abs().min() > 0 and gradients[1].abs().min() > 0


def test_a_one_token_prompt_has_no_prefill():
    gradients = gate_gradients(tiny_model(), [7], random_ids(6))
    assert (gradients[0] == 0).all() and (gradients[1] != 0).all()


def test_an_empty_prompt_is_the_bos():
    assert torch.equal(gate_gradients(tiny_model(), [], [3, 4]), gate_gradients(tiny_model(), [1], [3, 4]))
    with pytest.raises(PromptError, match="empty, and this family has no BOS"):
        gate_gradients(tiny_model("qwen2"), [], [3, 4])


def test_fisher_information(monkeypatch):
    """Over all one-token responses, weighed by the model: the mean gradient is 0, the mean square is the curvature of the KL divergence."""
    compute_in_double(monkeypatch)
    vocab = 12
    model, prompt = tiny_model(dtype=torch.float64, vocab_size=vocab, num_token_ids=vocab), random_ids(6, vocab=vocab)
    samples = [Sample(model, prompt, [v]) for v in range(vocab)]

    def log_p(stage, layer, value):
        with torch.no_grad():
            return -torch.cat([s.losses(gates_with(s, stage, [layer], value)) for s in samples])

    p = Runner(model, max_seq_len=8).prefill(prompt)[0].softmax(-1)
    gradients = torch.stack([gate_gradients(model, prompt, [v]) for v in range(vocab)])  # [V, 2, L]
    assert torch.einsum("v,vsl->sl", p, gradients).abs().max() < 1e-10
    fisher = torch.einsum("v,vsl->sl", p, gradients.square())
    step = 1e-3
    for stage, layer in ((0, 1), (0, 4), (1, 5)):
        divergence = [(p * (p.log() - log_p(stage, layer, 1 + h))).sum() for h in (step, -step)]
        assert sum(divergence) / step**2 == pytest.approx(fisher[stage, layer].item(), rel=1e-3)


def test_gradients_need_nothing_but_the_weights():
    """Also under no_grad, and no weight ever gets a gradient."""
    model = tiny_model()
    with torch.no_grad():
        inside = gate_gradients(model, random_ids(5), [1, 2])
    assert torch.equal(inside, gate_gradients(model, random_ids(5), [1, 2])) and not inside.requires_grad
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("prompt, response, message", [
    ([1, 2], [], "response is empty"), ([1, 2], [61], "outside the vocabulary"), ([61], [1], "outside the vocabulary"),
    ([1] * 500, [1] * 14, "together have 513 tokens.*made for 512"), ([1], ["a"], "whole numbers")])
def test_refuses(prompt, response, message):
    with pytest.raises(PromptError, match=message):
        gate_gradients(tiny_model(), prompt, response)


def test_the_longest_sample():
    assert gate_gradients(tiny_model(), [1] * 500, [1] * 13).isfinite().all()


@pytest.mark.skipif(not can_pack(torch.zeros(8, 8, dtype=torch.bfloat16)), reason="this CPU has no packed bfloat16 form")
def test_refuses_packed_weights():
    model = pack(tiny_model(dtype=torch.bfloat16))
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    with pytest.raises(MinipopError, match="packed weights have no gradients"):
        gate_gradients(model, [1, 2, 3], [4])


def test_bfloat16_gates_are_float32():
    coarse = gate_gradients(tiny_model(dtype=torch.bfloat16), random_ids(9), random_ids(5, 1))
    assert coarse.dtype == torch.float32
    close(coarse, gate_gradients(tiny_model(), random_ids(9), random_ids(5, 1)), 0.2)


def test_broken_weights_are_named():
    model = tiny_model()
    model.layers[1].mlp.down.weight.fill_(math.nan)
    with pytest.raises(MinipopError, match="not finite"):
        measure_importance(model, [random_ids(4)], max_new_tokens=3)


# --- sampling and averaging ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_vl"])
def test_responses_are_the_runners(family):
    model = tiny_model(family, eos_token_ids=tuple(range(0, 60, 6)))
    prompts = [ModelInputs(random_ids(n, n)) for n in (4, 9, 1, 6)]
    solo = [list(Runner(model, max_seq_len=64).generate(p, SamplingParams(seed=s, max_new_tokens=12))) for s, p in enumerate(prompts)]
    assert sample_responses(model, prompts, 12, [0, 1, 2, 3]) == solo
    assert len({len(response) for response in solo}) > 1  # some end early


def test_a_sample_depends_on_its_number_and_seed_alone():
    model, prompts = tiny_model(), [random_ids(4, 1), random_ids(7, 2)] * 10
    samples = list(rollouts(model, prompts, 9, seed=5))
    assert [len(inputs) for inputs, _ in samples] == [4, 7] * 10
    assert [r for _, r in rollouts(model, prompts[3:], 9, seed=5, first=3)] == [r for _, r in samples[3:]]  # other groups
    assert len({tuple(r) for _, r in samples}) == 20  # the same prompt is answered anew
    assert [r for _, r in rollouts(model, prompts, 9, seed=6)] != [r for _, r in samples]


def test_squares_are_taken_sample_by_sample():
    model, prompts, seen = tiny_model(), [random_ids(5, i) for i in range(11)], []
    importance = measure_importance(model, prompts, 6, seed=2, on_sample=lambda i, squares: seen.append((i, squares)))
    gradients = torch.stack([gate_gradients(model, *sample) for sample in rollouts(model, prompts, 6, 2)]).double()  # [11, 2, L]
    close(torch.stack([importance.prefill, importance.decode]), gradients.square().mean(0), 1e-9)
    close(torch.stack([importance.prefill_error, importance.decode_error]), gradients.square().std(0) / math.sqrt(11), 1e-9)
    assert (importance.prefill[:-1] > 1.5 * gradients[:, 0, :-1].mean(0).square()).all()  # the square of the mean is another number
    assert [i for i, _ in seen] == list(range(11)) and importance.samples == 11
    close(torch.stack([squares for _, squares in seen]), gradients.square(), 1e-9)
    assert importance.prefill[-1] == 0 == importance.prefill_error[-1]


def test_responses_that_end_at_once():
    model = tiny_model(eos_token_ids=tuple(range(61)))
    assert [r for _, r in rollouts(model, [random_ids(4), random_ids(6)], 20) if len(r) != 1] == []
    importance = measure_importance(model, [random_ids(4), random_ids(6)], 20)
    assert (importance.decode > 0).all() and (importance.prefill[:-1] > 0).all() and importance.prefill[-1] == 0


def test_a_full_context_ends_the_response():
    (_, response), = rollouts(tiny_model(), [[1] * 509], 64)
    assert len(response) == 4  # three that fit and the one that is sampled last
    with pytest.raises(PromptError, match="do not fit"):
        measure_importance(tiny_model(), [[1] * 513])


def test_images():
    model, inputs, _ = case("qwen3_vl")
    importance = measure_importance(model, [inputs, [1, 2, 3]], 4)
    assert importance.samples == 2 and importance.prefill[-1] == 0 and (importance.decode > 0).all()


def test_no_prompts():
    with pytest.raises(PromptError, match="no prompts"):
        measure_importance(tiny_model(), [])
    with pytest.raises(PromptError, match="no samples"):
        removal_loss(tiny_model(), [])


# --- the real thing -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_removal_is_the_runner_with_one_layer_skipped(name):
    model, inputs, response = case(name)
    base = run_plan(model, inputs, response)[0].double().sum()
    expected = [run_plan(model, inputs, response, PrefillPlan(LAYERS, {i}))[0].double().sum() - base for i in range(LAYERS)]
    rises = removal_loss(model, [(inputs, response)])
    close(rises, torch.tensor(expected), 1e-4)
    assert rises[-1].abs() < 1e-4
    assert torch.equal(removal_loss(model, [(inputs, response)], layers=[4, 1]), rises[[4, 1]])


def test_removal_in_decode():
    model, inputs, response = case("llama")
    sample = Sample(model, inputs, response)
    base = sample.losses(no_tap).double().sum()
    expected = torch.stack([sample.losses(gates_with(sample, 1, [i], 0.0)).double().sum() - base for i in range(LAYERS)])
    close(removal_loss(model, [(inputs, response)], stage="decode"), expected, 1e-5)
    with pytest.raises(PlanError, match="prefill or decode"):
        removal_loss(model, [(inputs, response)], stage="both")


def test_removal_is_a_mean_over_samples():
    model = tiny_model()
    samples = list(rollouts(model, [random_ids(4), random_ids(6)], 5))
    close(removal_loss(model, samples), (removal_loss(model, samples[:1]) + removal_loss(model, samples[1:])) / 2, 1e-9)


@pytest.mark.parametrize("a, b, expected", [
    ([1, 2, 3, 4], [10, 20, 30, 31], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
    ([1, 1, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5))])  # ties share a rank
def test_rank_correlation(a, b, expected):
    assert rank_correlation(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)


# --- results ------------------------------------------------------------------------------------------------------------------

def some_importance(samples=5):
    squares = torch.rand(samples, 2, LAYERS, generator=torch.Generator().manual_seed(0)).double()
    squares[:, 0] = torch.tensor([9.0, 0.1, 8, 0.2, 0, 0]) * squares[:, 0]
    return Importance.of(squares)


def test_least_important():
    importance = some_importance()
    assert importance.least_important(1 / 3) == PrefillPlan(LAYERS, {4, 5})
    assert importance.least_important("1/6").skip == {5}  # of equals the deeper
    assert importance.least_important(0.5).skip == {1, 4, 5} and importance.least_important(0).skip == set()
    order = importance.decode.argsort().tolist()
    assert importance.least_important(1 / 3, stage="decode").skip == set(order[:2])
    with pytest.raises(PlanError, match="prefill or decode"):
        importance.least_important(1 / 3, stage="samples")
    with pytest.raises(PlanError, match="ratio"):
        importance.least_important(2)


@pytest.mark.parametrize("samples", [5, 1])
def test_save_and_load(tmp_path, samples):
    importance = some_importance(samples)
    importance.save(tmp_path / "a.json", checkpoint="tiny", seed=3)
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["prefill"] == importance.prefill.tolist() and len(values["decode_stderr"]) == LAYERS
    assert values["samples"] == samples and values["checkpoint"] == "tiny" and values["seed"] == 3
    again = Importance.load(tmp_path / "a.json")
    for name in ("prefill", "decode", "prefill_error", "decode_error"):
        assert torch.equal(getattr(again, name).nan_to_num(7.0), getattr(importance, name).nan_to_num(7.0))
    assert again.prefill.dtype == torch.float64 and again.samples == samples
    assert again.prefill_error.isnan().all() == (samples == 1)


@pytest.mark.parametrize("change", [{"prefill": None}, {"prefill": [1, 2]}, {"decode": "abcdef"}, {"samples": 1.5},
                                    {"prefill": [[1]] * LAYERS}])
def test_load_refuses(tmp_path, change):
    some_importance().save(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(json.loads((tmp_path / "a.json").read_text()) | change))
    with pytest.raises(PlanError, match="a.json: not an importance file"):
        Importance.load(tmp_path / "a.json")


def test_table_and_figure(tmp_path):
    importance = some_importance()
    assert len(table(importance).splitlines()) == LAYERS + 1
    draw_importance(importance, tmp_path / "a.png", "tiny")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MinipopError, match="cannot be written"):
        draw_importance(importance, tmp_path / "a.nothing")
    assert [f.name for f in tmp_path.iterdir()] == ["a.png"]


def test_matplotlib_is_named_where_it_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--ckpt", TINY_VL, "--out", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.png")]) == 2
    assert "--figure needs matplotlib" in capsys.readouterr().err


# --- the command --------------------------------------------------------------------------------------------------------------

def command(tmp_path, *arguments, out="importance.json"):
    return main(["--ckpt", TINY_VL, "--out", str(tmp_path / out), "--samples", "5", "--response-tokens", "6", *arguments])


def test_command(tmp_path, capsys):
    plan, figure = tmp_path / "plan.json", tmp_path / "figure.png"
    assert command(tmp_path, "--validate", "2", "--plan-out", str(plan), "--ratio", "1/2", "--figure", str(figure)) == 0
    values = json.loads((tmp_path / "importance.json").read_text())
    importance = Importance.load(tmp_path / "importance.json")
    assert values["checkpoint"] == "tiny-qwen3-vl" and values["seed"] == 0 and values["response_tokens"] == 6 and values["samples"] == 5
    assert importance.prefill[-1] == 0 and (importance.decode > 0).all()
    assert PrefillPlan.load(plan) == importance.least_important(0.5) and len(PrefillPlan.load(plan).skip) == 4
    assert values["validation"]["samples"] == 2 and -1 <= values["validation"]["prefill_rank_correlation"] <= 1
    assert values["validation"]["prefill_removal"][-1] == pytest.approx(0, abs=1e-4)
    assert {f.name for f in tmp_path.iterdir()} == {"importance.json", "plan.json", "figure.png"}
    out = capsys.readouterr().out
    assert "rank correlation" in out and "least important: 4 of 8 layers" in out


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    assert command(tmp_path, out="whole.json") == 0
    real, calls = gate_gradients, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(minipop.importance, "gate_gradients", interrupted)
    assert command(tmp_path) == 130
    assert {f.name for f in tmp_path.iterdir()} == {"whole.json", "importance.json.partial"}
    assert command(tmp_path, "--seed", "1") == 2
    assert "another checkpoint, other prompts or other settings" in capsys.readouterr().err
    assert command(tmp_path) == 0 and len(calls) == 6  # three before, the interrupted one, the two that were left
    assert {f.name for f in tmp_path.iterdir()} == {"whole.json", "importance.json"}
    close(Importance.load(tmp_path / "importance.json").prefill, Importance.load(tmp_path / "whole.json").prefill)


def test_prompts_of_the_user(tmp_path):
    (tmp_path / "a.txt").write_text("What is left\nof the star?\n\n\n \nDescribe the picture.\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "red"}\n{"messages": [{"role": "user", "content": "blue?"}]}\n')
    for name in ("a.txt", "a.jsonl"):
        assert command(tmp_path, "--prompts", str(tmp_path / name)) == 0
        values = json.loads((tmp_path / "importance.json").read_text())
        assert values["prompts"] == 2 and values["prompt_source"] == name


@pytest.mark.parametrize("arguments, message", [
    (["--prompts", "nowhere.txt"], "nowhere.txt: no such file"), (["--samples", "0"], "above 0"), (["--seed", "-1"], "seed"),
    (["--ratio", "3"], "ratio"), (["--response-tokens", "5000"], "leaves no room for a prompt"),
    (["--max-seq-len", "20"], "built-in picture 1: .* do not fit")])
def test_command_refuses(tmp_path, capsys, arguments, message):
    assert command(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_as_a_program(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    done = subprocess.run([sys.executable, "-m", "minipop.importance", "--ckpt", TINY_VL, "--out", str(tmp_path / "a.json"),
                           "--prompts", str(tmp_path / "empty.txt")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "there is no text in it" in done.stderr
