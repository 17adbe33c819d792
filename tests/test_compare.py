"""The comparison itself: it finds what is wrong and where, its POP oracle is what it says, and the command line ends well."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import minipop
from minipop import CheckpointError, MinipopError, ModelInputs, PlanError, PrefillPlan, PromptError, Runner, load_model
from minipop import compare as tool
from minipop.compare import LayerDifference, Report, compare, main, random_inputs, random_pair, run_reference
from tests.reference import FAMILIES, edit_config, load_reference, token_ids

HALF = PrefillPlan.deepest(6, 0.5)
WEIGHTS = Path(minipop.__file__).parent.parent / "weights"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    return random_pair("llama", 0, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen_vl(tmp_path_factory):
    return random_pair("qwen3_vl", 0, tmp_path_factory.mktemp("qwen3_vl"))


class changed:
    """A parameter multiplied by a number for a while."""

    def __init__(self, parameter, factor):
        self.parameter, self.factor = parameter, factor

    def __enter__(self):
        self.saved = self.parameter.clone()
        self.parameter.mul_(self.factor)

    def __exit__(self, *_):
        self.parameter.copy_(self.saved)


def failing(report):
    return {(d.name, d.layer) for d in report.differences if not d.passed}


# --- numbers ------------------------------------------------------------------------------------------------------------------

def difference(max=0.0, largest=1.0, allowed=1e-4, name="resid", layer=0):
    return LayerDifference(name, layer, max, max, largest, allowed)


def report(*differences, ours=(1, 2), theirs=(1, 2), dtype="float32", texts=(None, None)):
    return Report("llama", dtype, "full", 5, 1, differences, list(ours), list(theirs), *texts)


def test_relative_to_the_largest_magnitude():
    assert difference(2e-4, 2.0).relative == 1e-4 and difference(2e-4, 2.0).passed
    assert not difference(3e-4, 2.0).passed
    assert difference(0.0, 0.0).relative == 0.0 and difference(0.0, 0.0).passed
    assert difference(1e-30, 0.0).relative == math.inf and not difference(1e-30, 0.0).passed
    for value in (math.nan, math.inf):
        assert not difference(value, 1.0).passed and not difference(1.0, math.nan).passed


def test_verdict():
    fine, bad = difference(1e-5), difference(1e-3, layer=1)
    assert report(fine).passed and not report(fine, bad).passed and report(fine, bad).worst is bad
    assert not report(fine, theirs=(1, 3)).passed and report(fine, theirs=(1, 3), dtype="bfloat16").passed
    nan = difference(math.nan, layer=2)
    assert report(bad, nan, fine).worst is nan and not report(nan).passed
    assert report(fine, bad).of("resid") == {0: fine, 1: bad} and report(fine).of("k") == {}


def test_report_as_text_and_as_json():
    odd = report(difference(math.nan), difference(1e-3, layer=None, name="logits"), texts=("a\n", "b"))
    lines = str(odd).splitlines()
    assert any(line.startswith("layer 0") and line.endswith("!") for line in lines)
    assert any(line.startswith("our text") and line.endswith(r"'a\n'") for line in lines)
    assert lines[-1].startswith("DIFFERENT") and "layer 0" in lines[-1] and "the same" in lines[-1]
    values = json.loads(json.dumps(odd.to_dict(), allow_nan=False))
    assert values["passed"] is False and values["differences"][0]["max"] == "nan" and values["differences"][1]["relative"] == 1e-3
    assert str(report(difference())).splitlines()[-1].startswith("EQUAL")


# --- it finds what is wrong ---------------------------------------------------------------------------------------------------

def test_a_wrong_mlp_shows_from_its_layer_on(llama):
    model, reference = llama
    with changed(model.layers[2].mlp.down.weight, 1.001):
        wrong = failing(compare(model, reference, random_inputs(model.config)))
    assert wrong == {("resid", i) for i in range(2, 6)} | {(name, i) for name in "kv" for i in range(3, 6)} | {("logits", None)}


def test_a_wrong_key_shows_in_its_layer_first(llama):
    model, reference = llama
    keys = model.layers[4].attn.qkv.weight[model.layers[4].attn.q_width:][: model.config.kv_width]
    with changed(keys, 1.01):
        wrong = failing(compare(model, reference, random_inputs(model.config)))
    assert ("k", 4) in wrong and ("v", 4) not in wrong and not [layer for _, layer in wrong if layer is not None and layer < 4]


def test_a_wrong_head_shows_in_the_logits_alone_and_ends_the_common_answer(llama):
    model, reference = llama
    with changed(model.head.weight, -1.0):
        result = compare(model, reference, random_inputs(model.config))
    assert failing(result) == {("logits", None)} and not result.same_answer and not result.passed
    assert result.answer_tokens == 0 and len(result.our_ids) == len(result.reference_ids) == 20


def test_a_wrong_tower_shows_in_its_block_and_in_the_embedding(qwen_vl):
    model, reference = qwen_vl
    with changed(model.vision.blocks[1].fc2.weight, 1.01):
        wrong = failing(compare(model, reference, random_inputs(model.config)))
    assert {("vision_resid", 1), ("vision_deepstack", 2), ("vision_out", 3), ("resid", -1), ("logits", None)} <= wrong
    assert not {("vision_resid", -1), ("vision_resid", 0), ("vision_deepstack", 0)} & wrong


def test_a_wrong_way_of_skipping_shows_only_under_a_plan(llama, monkeypatch):
    model, reference = llama
    inputs = random_inputs(model.config)
    monkeypatch.setattr(type(model.layers[0]), "project_kv",  # without the input norm
                        lambda layer, x, rope, kv, tap: layer.attn.project_kv(x, rope, kv, tap))
    assert compare(model, reference, inputs).passed
    wrong = failing(compare(model, reference, inputs, HALF))
    assert {("k", 3), ("v", 3)} <= wrong and not {("k", 2), ("v", 2), ("resid", 2)} & wrong


def test_another_plan_is_not_equal(llama, monkeypatch):
    model, reference = llama
    inputs = random_inputs(model.config)
    monkeypatch.setattr(tool, "Runner", lambda model, plan, **settings: Runner(model, PrefillPlan(6, {4, 5}), **settings))
    assert ("resid", 3) in failing(compare(model, reference, inputs, HALF))
    boundary = replace(HALF, split_boundary=False)
    monkeypatch.setattr(tool, "Runner", lambda model, plan, **settings: Runner(model, boundary, **settings))
    assert not compare(model, reference, inputs, HALF).passed
    bare = replace(HALF, project_kv=False)
    monkeypatch.setattr(tool, "Runner", lambda model, plan, **settings: Runner(model, HALF, **settings))
    assert not compare(model, reference, inputs, bare).passed


def test_tolerance(llama):
    model, reference = llama
    inputs = random_inputs(model.config)
    assert not compare(model, reference, inputs, tolerance=0.0).passed
    with changed(model.head.weight, 1.01):
        assert not compare(model, reference, inputs).passed
        loose = compare(model, reference, inputs, tolerance=0.02)
        assert loose.passed and {d.allowed for d in loose.differences} == {0.02}


def test_low_precision_is_judged_by_the_references_own_rounding(llama, tmp_path):
    llama[1].save_pretrained(tmp_path)
    model, reference = load_model(tmp_path, "bfloat16"), load_reference(tmp_path, torch.bfloat16)
    inputs = random_inputs(model.config)
    result = compare(model, reference, inputs, max_new_tokens=4)
    assert result.passed and result.dtype == "bfloat16"
    with changed(model.layers[1].mlp.down.weight, 1.2):
        assert ("resid", 1) in failing(compare(model, reference, inputs, max_new_tokens=4))
    assert {d.allowed for d in compare(model, reference, inputs, max_new_tokens=1, tolerance=1e-3).differences} == {1e-3}
    assert reference.dtype == torch.bfloat16


# --- the oracle ---------------------------------------------------------------------------------------------------------------

def test_the_oracles_skipped_rows_are_projections_of_the_stream_at_the_cut(llama):
    """Against the paper's formula written out: k = RoPE(norm(x) W_K), v = norm(x) W_V, for every prompt token but the last."""
    model, reference = llama
    inputs = random_inputs(model.config)
    _, seen = run_reference(reference, model.config, inputs, HALF, 0)
    assert seen["resid", 2].shape == (23, 40) and seen["k", 3].shape == (23, 2, 16)
    stream = seen["resid", 2][:-1]
    angles = torch.arange(22.0)[:, None] / 1e4 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = (f(torch.cat((angles, angles), 1))[:, None] for f in (torch.cos, torch.sin))
    for i in (3, 4, 5):
        torch.testing.assert_close(seen["resid", i][:-1], stream)
        assert (seen["resid", i][-1] - seen["resid", i - 1][-1]).abs().max() > 0.1  # the boundary runs
        layer = reference.model.layers[i]
        normed = stream / (stream.square().mean(-1, keepdim=True) + 1e-2).sqrt() * layer.input_layernorm.weight
        k, v = (layer.self_attn.get_submodule(name)(normed).unflatten(-1, (2, 16)) for name in ("k_proj", "v_proj"))
        k = k * cos + torch.cat((-k[..., 8:], k[..., :8]), -1) * sin
        torch.testing.assert_close(seen["k", i][:-1], k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(seen["v", i][:-1], v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plan", [PrefillPlan.full(6), HALF, PrefillPlan(6, {0, 4}, project_kv=False)],
                         ids=lambda plan: plan.describe())
def test_the_reference_is_left_as_it_was(llama, plan):
    model, reference = llama
    ids = token_ids(9)
    before = reference(torch.tensor([ids])).logits
    run_reference(reference, model.config, ModelInputs(ids), plan, 3)
    with pytest.raises(IndexError):
        run_reference(reference, model.config, ModelInputs([5, 6, 1000]), plan, 3)
    assert torch.equal(reference(torch.tensor([ids])).logits, before)
    for module in reference.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)


def test_without_a_plan_the_oracle_is_the_references_own_forward(qwen_vl):
    model, reference = qwen_vl
    inputs = random_inputs(model.config)
    ids, seen = run_reference(reference, model.config, inputs, PrefillPlan.full(6), 1)
    logits = reference(input_ids=inputs.token_ids[None], pixel_values=inputs.pixel_values, image_grid_thw=inputs.image_grid_thw,
                       mm_token_type_ids=(inputs.token_ids == 95).long()[None]).logits[0, -1]
    torch.testing.assert_close(seen["logits", None][0], logits, atol=1e-5, rtol=1e-5)
    assert ids == [int(logits.argmax())]


def test_both_stop_at_the_same_end_of_text(llama, monkeypatch):
    model, reference = llama
    inputs = random_inputs(model.config)
    free = compare(model, reference, inputs)
    stop = free.our_ids[4]
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(stop,)))
    stopped = compare(model, reference, inputs)
    assert stopped.our_ids == stopped.reference_ids == free.our_ids[: free.our_ids.index(stop) + 1] and stopped.passed
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(), num_token_ids=60))  # the rest is padding
    padded = compare(model, reference, inputs)
    assert padded.passed and max(padded.our_ids) < 60 <= max(free.our_ids)


@pytest.mark.parametrize("count, tokens", [(0, 0), (1, 0), (2, 1)])
def test_answers_of_few_tokens(llama, count, tokens):
    model, reference = llama
    result = compare(model, reference, random_inputs(model.config), HALF, count)
    assert result.passed and len(result.our_ids) == count and result.answer_tokens == tokens


def test_what_cannot_be_compared(llama):
    model, reference = llama
    inputs = random_inputs(model.config)
    with pytest.raises(PlanError, match="calibrated"):
        compare(model, reference, inputs, replace(HALF, kv="file"))
    with pytest.raises(PlanError, match="5 layers"):
        compare(model, reference, inputs, PrefillPlan.full(5))
    with pytest.raises(PromptError, match="empty"):
        compare(model, reference, ModelInputs([]))
    with pytest.raises(PromptError, match="positions"):
        compare(model, reference, inputs, max_new_tokens=1000)
    with pytest.raises(PromptError, match="vocabulary"):
        compare(model, reference, ModelInputs([99]))


# --- pairs --------------------------------------------------------------------------------------------------------------------

def test_pairs_are_decided_by_their_seed(tmp_path):
    first, again, other = (random_pair("qwen3", seed, tmp_path / name)[1] for seed, name in ((1, "a"), (1, "b"), (2, "c")))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters()))
    assert not any(torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_in_a_pair_is_neutral(tmp_path, family):
    """A norm or bias left at its initial value could be forgotten without anyone noticing."""
    model, _ = random_pair(family, 0, tmp_path, num_hidden_layers=1)
    for name, weight in model.named_parameters():
        for neutral in (0.0, 1.0):
            assert (weight - neutral).abs().mean() > 0.03, name


def test_unknown_family():
    with pytest.raises(MinipopError, match="gpt2.*llama"):
        tool.random_config("gpt2")


def test_a_checkpoint_that_transformers_cannot_load(llama, tmp_path):
    llama[1].save_pretrained(tmp_path)
    edit_config(tmp_path, top={"model_type": "no-such-model"})
    with pytest.raises(CheckpointError, match="transformers cannot load") as caught:
        load_reference(tmp_path)
    assert "\n" not in str(caught.value)


# --- the command line ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_random_pair_from_the_command_line(family, capsys):
    assert main(["--random", family, "--skip-layers", "1,4-5", "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("EQUAL") and "3 of 6 layers skipped in prefill (1,4-5)" in out and "error" not in err
    assert ("vision tower" in out) == family.endswith("_vl") and "layer 5" in out


def test_difference_is_exit_code_1(capsys, tmp_path):
    path = tmp_path / "report.json"
    assert main(["--random", "llama", "--max-new-tokens", "2", "--tolerance", "0", "--json", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("DIFFERENT")
    values = json.loads(path.read_text())
    assert values["passed"] is False and values["same_answer"] is True and len(values["our_ids"]) == 2
    assert [d["layer"] for d in values["differences"] if d["name"] == "resid"] == [-1, 0, 1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_plan_files_and_ratios(capsys, tmp_path):
    PrefillPlan(6, {0, 5}, project_kv=False).save(tmp_path / "plan.json")
    assert main(["--random", "qwen2", "--plan", str(tmp_path / "plan.json"), "--max-new-tokens", "2"]) == 0
    assert "(0,5), no K/V in skipped layers" in capsys.readouterr().out
    assert main(["--random", "qwen2", "--ratio", "1/3", "--seed", "5", "--max-new-tokens", "2"]) == 0
    assert "(4-5)" in capsys.readouterr().out


def test_low_precision_from_the_command_line(capsys):
    assert main(["--random", "gemma3", "--dtype", "bfloat16", "--max-new-tokens", "2"]) == 0
    assert "in bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, words", [
    ([], ["--ckpt", "--random"]),
    (["--random", "gpt2"], ["gpt2", "llama"]),
    (["--random", "llama", "--ckpt", "x"], ["not allowed"]),
    (["--random", "llama", "--ratio", "0.5", "--skip-layers", "1"], ["not allowed"]),
    (["--random", "llama", "--ratio", "0.5", "--kv", "x"], ["calibrated"]),
    (["--random", "llama", "--kv", "x"], ["--kv"]),
    (["--random", "llama", "--ratio", "2"], ["ratio", "between 0 and 1"]),
    (["--random", "llama", "--ratio", "half"], ["ratio", "half"]),
    (["--random", "llama", "--skip-layers", "4-6"], ["layer 6", "0 to 5"]),
    (["--random", "llama", "--skip-layers", "a"], ["layers"]),
    (["--random", "llama", "--plan", "no-such-file"], ["no-such-file"]),
    (["--random", "llama", "--max-new-tokens", "-1"], ["--max-new-tokens"]),
    (["--random", "llama", "--max-new-tokens", "1000"], ["positions"]),
    (["--random", "llama", "--max-new-tokens", "x"], ["--max-new-tokens"]),
    (["--random", "llama", "--tolerance", "nan"], ["--tolerance"]),
    (["--random", "llama", "--tolerance", "-1"], ["--tolerance"]),
    (["--random", "llama", "--dtype", "int8"], ["int8", "float32"]),
    (["--random", "gemma3", "--dtype", "float16"], ["float16", "bfloat16"]),
    (["--random", "llama", "--image", "x.png"], ["--image", "--ckpt"]),
    (["--random", "llama", "--device", "abacus"], ["--device abacus"]),
    (["--random", "llama", "--device", "meta"], ["--device meta"]),
    (["--random", "llama", "--json", "no/such/folder/report.json"], ["no/such/folder"]),
    (["--ckpt", "/no/such/folder"], ["/no/such/folder"]),
    (["--nonsense"], ["--help"]),
], ids=" ".join)
def test_mistakes_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and len(lines) == 1 and all(word in lines[0] for word in words), err
    assert "Traceback" not in err


def test_a_report_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "report.json").mkdir()
    assert main(["--random", "llama", "--max-new-tokens", "1", "--json", str(tmp_path / "report.json")]) == 2
    assert "report.json: cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["--random", "llama"]) == 2
    assert capsys.readouterr().err == "error: compare needs transformers, which is not installed: pip install -e '.[test]' in the repository\n"


def test_interrupted(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(tool, "_compare", interrupt)
    assert main(["--random", "llama"]) == 130


def test_texts_that_a_terminal_cannot_show(monkeypatch):
    monkeypatch.setattr(tool, "_compare", lambda _: report(difference(), texts=("naïve", "世界")))
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["--random", "llama"]) == 0
    stream.flush()
    assert b"our text" in buffer.getvalue() and buffer.getvalue().strip().endswith(b"the same")


def test_help_as_a_module():
    """Nothing but the standard library and minipop's own dependencies is imported for it."""
    code = "import sys; sys.modules['transformers'] = None; import minipop.compare as tool; tool.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=WEIGHTS.parent)
    assert done.returncode == 0 and "--skip-layers" in done.stdout and done.stderr == ""


# --- checkpoints with a tokenizer ---------------------------------------------------------------------------------------------

def save_tokenizer(folder, specials=(), template=None):
    """99 words "w0" .. "w98", the last of them replaced by the special tokens."""
    words = [f"w{i}" for i in range(99)]
    words[99 - len(specials):] = specials
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_checkpoint_with_a_prompt(llama, tmp_path, capsys):
    llama[1].save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert main(["--ckpt", str(tmp_path), "--prompt", "w5 w6 w7 w8", "--ratio", "0.5", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 tokens of the prompt and 3 of the answer" in out
    texts = [line.split(maxsplit=2)[2] for line in out.splitlines() if line.startswith(("our text", "reference text"))]
    assert len(texts) == 2 and texts[0] == texts[1] and texts[0].startswith("'w")


def test_checkpoint_without_a_tokenizer(llama, tmp_path, capsys):
    llama[1].save_pretrained(tmp_path)
    assert main(["--ckpt", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


CHAT = ("{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<vs><|image_pad|><ve>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %} w9")


@pytest.mark.parametrize("template", [CHAT, None], ids=["chat", "plain"])
def test_checkpoint_with_pictures(qwen_vl, tmp_path, capsys, template):
    qwen_vl[1].save_pretrained(tmp_path)
    save_tokenizer(tmp_path, ("<|image_pad|>", "<|video_pad|>", "<vs>", "<ve>"), template)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(
        {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}))
    pictures = []
    for name, size in (("a.png", (24, 16)), ("b.png", (8, 32))):
        pictures.append(str(tmp_path / name))
        Image.effect_noise(size, 90).convert("RGB").save(pictures[-1])
    command = ["--ckpt", str(tmp_path), "--prompt", "w5 w6", "--skip-layers", "0,4", "--max-new-tokens", "3", "--image"]
    if template is None:  # the tokenizer drops the line break that would part two pictures
        assert main(command + pictures) == 2
        assert "side by side" in capsys.readouterr().err
        del pictures[1]
    assert main(command + pictures) == 0
    out = capsys.readouterr().out
    tokens = 6 + 2 + (4 + 5 if template else 0)  # a picture, the text; another picture, and what the template adds
    assert f"compared: {tokens} tokens of the prompt" in out and "vision_deepstack" in out
    assert main(["--ckpt", str(tmp_path), "--image", str(tmp_path / "none.png")]) == 2
    assert "none.png" in capsys.readouterr().err


def test_pictures_for_a_text_model(llama, tmp_path, capsys):
    llama[1].save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert main(["--ckpt", str(tmp_path), "--image", "x.png"]) == 2
    assert "text-only" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.skipif(not (WEIGHTS / "smollm2-135m-instruct" / "model.safetensors").exists(), reason="the weights are not there")
def test_real_weights_under_a_plan(capsys):
    assert main(["--ckpt", str(WEIGHTS / "smollm2-135m-instruct"), "--ratio", "1/3", "--max-new-tokens", "4"]) == 0
    assert "10 of 30 layers" in capsys.readouterr().out
