"""The bench: what it measures and counts, and the command. Never how long anything takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minipop import ModelInputs, PrefillPlan, PromptError, Runner, compiled, costs, measuring
from minipop.bench import Row, bench_decode, bench_prefill, image_prompt, main, text_prompt
from minipop.cli import run
from minipop.errors import MinipopError
from minipop.measuring import Timing, peak_memory, random_model, ratio, shape_config, take_turns
from minipop.models import load_model
from minipop.processing import GemmaImageProcessor, QwenImageProcessor
from minipop.projection import KVProjection, fingerprint

from .test_inspect import save_tiny
from .tiny import CONFIGS, random_ids, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@pytest.fixture
def shape(tmp_path):
    """A folder with nothing but a config.json."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return folder


# --- measuring ------------------------------------------------------------------------------------------------------------------

def test_contenders_take_turns_and_only_work_counts():
    calls = []
    contenders = {name: (lambda name=name: calls.append(f"prepare {name}"), lambda name=name: calls.append(name)) for name in "ab"}
    timings = take_turns(contenders, repeats=2, warmup=1, device=CPU)
    assert calls == ["prepare a", "a", "prepare b", "b"] * 3
    assert [(t.name, len(t.seconds)) for t in timings] == [("a", 2), ("b", 2)]


def test_ratios_are_those_within_a_turn():
    assert ratio(Timing("slow", [4.0, 10.0, 9.0]), Timing("fast", [2.0, 2.0, 3.0])) == (3.0, 2.0, 5.0)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell")
def test_peak_memory_is_what_the_block_adds():
    held = torch.ones(2**24)  # in use before: does not count
    with peak_memory(CPU) as peak:
        held * 2  # 64 MiB more, gone at once
    assert 60 * 2**20 < peak.bytes < 90 * 2**20
    with peak_memory(CPU) as peak:
        pass
    assert peak.bytes < 10 * 2**20


@pytest.mark.parametrize("name, billions", [("llama-3.1-8b", 8.030), ("gemma-3-12b", 12.187), ("qwen3-vl-8b", 8.767)])
def test_published_shapes(name, billions):
    """Parameters as the model cards count them."""
    from minipop.models import build_model
    config = shape_config(name)
    total = sum(p.numel() for p in build_model(config).parameters())
    total -= config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0  # tied when weights are there
    assert round(total / 1e9, 3) == billions
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3_vl"])
def test_random_models_run(family):
    model = random_model(tiny_config(family), torch.float32, "cpu")
    assert (model.head.weight is model.embedding.weight) == model.config.tie_word_embeddings
    logits = Runner(model, max_seq_len=32).prefill(random_ids(9))
    assert torch.isfinite(logits).all() and logits.std() > 0


# --- what a line is about -------------------------------------------------------------------------------------------------------

def test_ragged_prompts():
    prompt = text_prompt(tiny_model(), 8, 4, ragged=True)
    assert prompt.lengths == [2, 4, 6, 8] == [len(row) for row in prompt.inputs] and prompt.ragged
    assert not text_prompt(tiny_model(), 8, 4).ragged


@pytest.mark.parametrize("family, processor, size, rows", [("qwen3_vl", QwenImageProcessor(4, 2, 2, min_pixels=64), "16x24", 6),
                                                           ("gemma3", GemmaImageProcessor(16, 4), "30x20", 4)])
def test_vision_operations_are_those_pytorch_counts(family, processor, size, rows):
    model = tiny_model(family)
    prompt = image_prompt(model, processor, size, 2)
    assert prompt.lengths == [32 + rows] * 2 and prompt.image[1] == rows
    inputs = prompt.inputs[0]
    assert isinstance(inputs, ModelInputs) and int((inputs.token_ids == model.config.image_token_id).sum()) == rows
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the CPU's own kernel is not counted
        if inputs.image_grid_thw is None:
            model.vision(inputs.pixel_values)
        else:
            model.vision(inputs.pixel_values, inputs.image_grid_thw)
    assert costs.vision_flops(model.config.vision, *prompt.image) == counter.get_total_flops()


def test_a_step_is_a_prefill_that_grows_by_one():
    config = tiny_config("gemma3_text")
    full = PrefillPlan.full(6)
    head = 2 * config.hidden_size * config.vocab_size
    for rows in (1, 4, 5, 20):
        grown = costs.prefill_flops(config, rows + 1, full) - costs.prefill_flops(config, rows, full)
        assert costs.step_flops(config, rows) == grown + head


def test_a_prefill_row():
    model = tiny_model()
    plans = {"full": PrefillPlan.full(6), "POP 2/6": PrefillPlan.deepest(6)}
    row = bench_prefill(model, plans, text_prompt(model, 20, 3, ragged=True), repeats=2, warmup=0, plain_forms=True)
    assert [t.name for t in row.timings] == ["full", "full, plain", "POP 2/6", "POP 2/6, plain", "full, one by one"]
    assert row.flops["full"] == row.flops["full, one by one"] == sum(costs.prefill_flops(model.config, n, plans["full"]) for n in row.lengths)
    assert row.ideal("POP 2/6") == row.ideal("POP 2/6, plain") > 1
    assert Row("x", [1], 1, [Timing("full", [3.0]), Timing("p", [2.0])], {"full": 6, "p": 4}).speedup("p") == (1.5, 1.5, 1.5)


def test_decoding_counts_its_steps():
    model, steps = tiny_model(), []
    embed = model.embed_tokens
    model.embed_tokens = lambda ids: (steps.append(ids.shape[1]), embed(ids))[1]
    timings = bench_decode(model, text_prompt(model, 6, 2), steps=3, repeats=2)
    assert len(timings[0].seconds) == 2 and steps == [6, 1, 1, 1] * 3  # a warm-up and two repeats


def test_the_compiled_form_is_a_contender_of_its_own(monkeypatch):
    monkeypatch.setattr(compiled, "compiled", lambda function: function)  # as written
    model = tiny_model()
    assert compiled.compile_decoding(model) > 0
    row = bench_prefill(model, {"full": PrefillPlan.full(6), "POP 2/6": PrefillPlan.deepest(6)}, text_prompt(model, 20, 1), repeats=1, warmup=0)
    assert [t.name for t in row.timings] == ["full", "full, compiled", "POP 2/6", "POP 2/6, compiled"]
    assert row.ideal("POP 2/6") == row.ideal("POP 2/6, compiled") > 1
    assert [t.name for t in bench_decode(model, text_prompt(model, 6, 1), steps=3, repeats=1)] == ["minipop", "minipop, compiled"]
    assert [t.name for t in bench_decode(model, text_prompt(model, 6, 2), steps=3, repeats=1)] == ["minipop"]


# --- the command ----------------------------------------------------------------------------------------------------------------

def bench(*arguments) -> int:
    return run(lambda: main([*map(str, arguments), "--dtype", "float32", "--repeats", "1", "--warmup", "0", "--threads", "1"]))


def test_command(shape, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measuring, "machine_rates", lambda *args: {"matmul_flops": 1e9, "copy_bytes": 1e9, "read_bytes": 1e9})
    report, figure = tmp_path / "report.json", tmp_path / "figure.png"
    assert bench("--random", shape, "--lengths", "8,16", "--batch", "1,2", "--ragged", "--decode-tokens", 2, "--decode-prompt", "3,9",
                 "--json", report, "--figure", figure) == 0
    out = capsys.readouterr().out
    result = json.loads(report.read_text())
    assert [(row["label"], row["batch"]) for row in result["prefill"]] == [
        ("8", 1), ("16", 1), ("8", 2), ("16", 2), ("8 ragged", 2), ("16 ragged", 2)]
    assert [(row["prompt"], row["batch"]) for row in result["decode"]] == [
        ([3], 1), ([9], 1), ([3, 3], 2), ([1, 3], 2), ([9, 9], 2), ([4, 9], 2)]
    assert all(line in out for line in ("POP 2/6", "one by one", "us/token", "8 ragged", "of reading rate"))
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_against_transformers_the_compiled_form_takes_part_where_it_can(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(measuring, "machine_rates", lambda *args: {"matmul_flops": 1e9, "copy_bytes": 1e9, "read_bytes": 1e9})
    monkeypatch.setattr(compiled, "compiled", lambda function: function)  # as written
    save_tiny(tmp_path / "tiny", "llama")

    def names(*options) -> list[str]:
        arguments = ("--ckpt", tmp_path / "tiny", "--against", "transformers", "--lengths", "4", "--decode-tokens", "2", "--decode-prompt", "3", "--repeats", "1")
        assert bench(*arguments, *options, "--json", tmp_path / "report.json") == 0
        result = json.loads((tmp_path / "report.json").read_text())
        assert [t["name"] for t in result["decode"][0]["timings"]][-1] == "transformers"
        return [t["name"] for t in result["prefill"][0]["timings"]]

    assert names() == ["full", "full, compiled", "POP 2/6", "POP 2/6, compiled", "transformers"]
    assert names("--no-compile") == ["full", "POP 2/6", "transformers"]
    monkeypatch.setattr(compiled, "compiled", lambda function: 1 / 0)  # stands for all that may go wrong
    capsys.readouterr()
    assert names() == ["full", "POP 2/6", "transformers"]
    assert "the compiled form is left out: PyTorch could not compile a decode step; it needs a C++ compiler" in capsys.readouterr().err
    assert bench("--ckpt", tmp_path / "tiny", "--compile", "--lengths", "4") == 2


def test_calibrated_rows(tmp_path, capsys):
    save_tiny(tmp_path / "tiny", "llama")
    model = load_model(tmp_path / "tiny")
    weight = KVProjection.of(model, 3).weight
    KVProjection(weight, torch.zeros(len(weight)), 3, 6, fingerprint(model, 3)).save(tmp_path / "kv")
    assert bench("--ckpt", tmp_path / "tiny", "--lengths", "4", "--decode-tokens", "0", "--kv", tmp_path / "kv") == 0
    assert "calibrated 3/6" in capsys.readouterr().out
    KVProjection(weight, torch.zeros(len(weight)), 3, 6, "of another").save(tmp_path / "kv")
    assert bench("--ckpt", tmp_path / "tiny", "--lengths", "4", "--decode-tokens", "0", "--kv", tmp_path / "kv") == 2
    assert "made for another checkpoint" in capsys.readouterr().err


def test_a_plan_file_may_have_any_name(shape, tmp_path, capsys):
    PrefillPlan(6, {5}).save(tmp_path / "full.json")
    assert bench("--random", shape, "--lengths", "4", "--decode-tokens", "0", "--plan", tmp_path / "full.json") == 0
    names = [name.strip() for name in re.findall(r"^ +4 +1 (.{16})", capsys.readouterr().out, re.M)]
    assert names == ["full", "POP 2/6", "plan full"]


def test_a_checkpoint_is_loaded_beside_a_plain_read_of_it(capsys, monkeypatch):
    monkeypatch.setattr(measuring, "machine_rates", lambda *args: {"matmul_flops": 1e9, "copy_bytes": 1e9, "read_bytes": 1e9})
    folder = ROOT / "weights" / "tiny-qwen3-vl"
    assert bench("--ckpt", folder, "--lengths", 8, "--decode-tokens", 0, "--image-sizes", "64x64") == 0
    out = capsys.readouterr().out
    assert "a plain read of the 6 MiB file" in out and "64x64" in out


@pytest.mark.parametrize("arguments, message", [
    (["--random", "llama-9"], "choose one of gemma-3-12b, llama-3.1-8b, qwen3-vl-8b"),
    (["--random", "SHAPE", "--lengths", "8", "--image-sizes", "640x480"], "reads text only"),
    (["--random", "SHAPE", "--image-sizes", "640"], "sizes like 640x480"),
    (["--random", "SHAPE", "--image-sizes", "0x48"], "sizes like 640x480"),
    (["--random", "SHAPE", "--lengths", "513"], "the model was made for 512"),
    (["--random", "SHAPE", "--decode-prompt", "x"], "--decode-prompt takes whole numbers"),
    (["--random", "SHAPE", "--chunk-size", "0"], "at least 1"),
    (["--random", "SHAPE", "--against", "transformers"], "has no files"),
    (["--random", "SHAPE", "--ckpt", "x"], "not allowed with"),
])
def test_mistakes(arguments, message, shape, capsys):
    assert bench(*(str(shape) if a == "SHAPE" else a for a in arguments)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_prompt_list_must_hold_numbers():
    from minipop.bench import whole_numbers
    assert whole_numbers("32,128", "lengths") == [32, 128]
    for wrong in ("", "3,", "0", "-1", "1.5"):
        with pytest.raises(PromptError):
            whole_numbers(wrong, "lengths")


def test_shapes_may_be_files(shape):
    assert shape_config(str(shape / "config.json")) == shape_config(str(shape))
    with pytest.raises(MinipopError, match="no shape"):
        shape_config(str(shape / "missing"))


# --- the GPU script, without a GPU ----------------------------------------------------------------------------------------------

def test_gpu_script(shape, tmp_path):
    """The whole script on the CPU with tiny models; the table has a line a prompt, and the paper's column where it has a figure."""
    script = ROOT / "scripts" / "bench_gpu.sh"
    subprocess.run(["bash", "-n", script], check=True)
    settings = {"DEVICE": "cpu", "DTYPE": "float32", "BATCH": "2", "LENGTHS": "4,8", "IMAGE_SIZES": "64x64", "REPEATS": "1", "PYTHON": sys.executable,
                "TEXT_SHAPES": str(shape), "VISION_SHAPES": str(ROOT / "weights" / "tiny-qwen3-vl"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", script, tmp_path / "out"], env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "table.md").read_text()
    assert [line.split(" | ")[:3] for line in table.splitlines()[2:7]] == [
        ["| tiny-llama", "4", "2"], ["| tiny-llama", "8", "2"],
        ["| tiny-qwen3-vl", "4", "2"], ["| tiny-qwen3-vl", "8", "2"], ["| tiny-qwen3-vl", "64x64", "2"]]

    # The same files as the tables of docs/PERFORMANCE.md
    tables = subprocess.run([sys.executable, ROOT / "scripts" / "performance_tables.py", tmp_path / "out" / "tiny-llama.json"],
                            capture_output=True, text=True, check=True).stdout
    assert [line.count("|") for line in tables.splitlines() if line.startswith("| 4 |")] == [13, 13]
    assert "| after | batch |" in tables and "tiny-llama, float32" in tables

    (tmp_path / "out" / "llama-3.1-8b.json").write_text((tmp_path / "out" / "tiny-llama.json").read_text().replace(str(shape), "llama-3.1-8b")
                                                        .replace('"label": "8"', '"label": "128"'))
    table = subprocess.run([sys.executable, ROOT / "scripts" / "paper_table.py", tmp_path / "out" / "llama-3.1-8b.json"],
                           capture_output=True, text=True, check=True).stdout
    assert table.splitlines()[3].endswith("| 1.27x |") and table.splitlines()[2].endswith("|  |")
