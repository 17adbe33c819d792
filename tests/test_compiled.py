"""One token as compiled loops against the plain form: as written, for every family, and compiled, where there is a C++ compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from minipop import MinipopError, PrefillPlan, Runner, SamplingParams, compiled
from minipop.baselines import slicegpt
from minipop.compiled import compile_decoding
from minipop.packing import pack

from .test_evaluate import tokenizer_files
from .test_inspect import save_tiny
from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

DEPTH = 6
POP = PrefillPlan.deepest(DEPTH, 1 / 3)
COMPILER = (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")) and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler, or Python's headers are missing")


@pytest.fixture
def as_written(monkeypatch):
    """The functions as they are, not compiled."""
    monkeypatch.setattr(compiled, "compiled", lambda function: function)


def pair(model, plan=POP, max_seq_len=64):
    """Two runners: with the compiled form, and the plain one."""
    return Runner(model, plan, max_seq_len=max_seq_len), Runner(model, plan, max_seq_len=64, fused=False)


def agree(fast, plain, prompt, tokens=12, tolerance=1e-5):
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens)
    close(fast.prefill(prompt), plain.prefill(prompt), tolerance)
    for token in random_ids(tokens, seed=7):
        close(fast.decode([token]), plain.decode([token]), tolerance)
    rows = plain.cache.length
    close(fast.cache.keys[:, :, :, :rows], plain.cache.keys[:, :, :, :rows], tolerance)
    close(fast.cache.values[:, :, :, :rows], plain.cache.values[:, :, :, :rows], tolerance)
    for runner in (fast, plain):
        runner.reset()
    assert list(fast.generate(prompt, params)) == list(plain.generate(prompt, params))


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "gemma3", "qwen3_vl"])
def test_the_arithmetic_is_the_plain_forms(family, as_written):
    """Through sliding windows of 5 and beyond them, from the shortest prompts on."""
    model = tiny_model(family)
    compile_decoding(model)
    for length in (1, 2, 9):
        agree(*pair(model), random_ids(length))


def test_every_optional_part(as_written):
    """Biases everywhere, a cap on the logits, a head of its own, another activation."""
    model = tiny_model("llama", qkv_bias=True, o_bias=True, mlp_bias=True, final_logit_softcapping=3.0, hidden_act="gelu_pytorch_tanh")
    compile_decoding(model)
    agree(*pair(model), random_ids(9))


def test_a_packed_model(as_written):
    model = pack(tiny_model("llama", dtype=torch.bfloat16))
    compile_decoding(model)
    agree(*pair(model), random_ids(9), tokens=0, tolerance=0.05)


def test_bfloat16_is_nearer_to_float32_than_the_plain_form(as_written):
    exact, narrow = tiny_model("llama"), tiny_model("llama", dtype=torch.bfloat16)
    for mine, its in zip(exact.parameters(), narrow.parameters()):
        mine.data.copy_(its)  # the same numbers in both
    compile_decoding(narrow)
    fast, plain = pair(narrow)
    truth = Runner(exact, POP, max_seq_len=64)
    for runner in (fast, plain, truth):
        runner.prefill(random_ids(30))
        for _ in range(3):
            runner.logits = runner.decode([5])
    error, plains = ((runner.logits - truth.logits).square().mean() for runner in (fast, plain))
    assert 0 < error < plains


def test_what_it_is_not_for_goes_as_ever(as_written, monkeypatch):
    model = tiny_model()
    compile_decoding(model)
    monkeypatch.setattr(model.compiled, "_layer", None)  # would fail if it were called
    runner = Runner(model, POP, max_seq_len=64, batch_size=2)
    runner.prefill([random_ids(5), random_ids(9)])
    runner.decode([1, 2])
    for options in ({"fused": False}, {"tap": lambda layer, name, x: x}):
        runner = Runner(model, POP, max_seq_len=64, **options)
        runner.prefill(random_ids(5))
        runner.decode([1])
    runner = Runner(model, POP, max_seq_len=64)
    runner.compiled = None
    runner.prefill(random_ids(5))
    with pytest.raises(TypeError):
        Runner(model, POP, max_seq_len=64).prefill(random_ids(5))


def test_models_it_does_not_know():
    model = tiny_model()
    with pytest.raises(MinipopError, match="not those that SliceGPT made"):
        compile_decoding(slicegpt(model, [random_ids(40, seed=s) for s in range(4)], 0.25))
    with pytest.raises(MinipopError, match="for CPUs"):
        compile_decoding(model.to("meta"))


@needs_compiler
def test_compiled():
    """Several models in one process, caches of several sizes, windows: nothing is mixed up, though nothing is checked at run time."""
    models = [tiny_model("llama"), tiny_model("llama", seed=1, norm_eps=0.5), tiny_model("gemma3_text"), tiny_model("llama", seed=2)]
    for model in models:
        assert compile_decoding(model) > 0
    for model in models:
        for max_seq_len in (64, 100):
            agree(*pair(model, max_seq_len=max_seq_len), random_ids(9), tokens=20)


@needs_compiler
def test_chat_compiles(tmp_path):
    save_tiny(tmp_path / "tiny", "llama", extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    done = subprocess.run([sys.executable, "-m", "minipop.chat", "--ckpt", tmp_path / "tiny", "--compile", "--prompt", "a b", "--max-new-tokens", "3"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("decode steps compiled in ")


def test_without_a_compiler(tmp_path):
    save_tiny(tmp_path / "tiny", "llama", extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    done = subprocess.run([sys.executable, "-m", "minipop.chat", "--ckpt", tmp_path / "tiny", "--compile", "--prompt", "a b"], capture_output=True,
                          text=True, env=os.environ | {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --compile: ") and "it needs a C++ compiler" in done.stderr


def test_a_compiler_that_is_wrong_is_noticed(monkeypatch):
    def with_sine_for_cosine(function):
        return function if function is compiled.head_step else lambda x, w, keys, values, cos, sin, *rest: function(x, w, keys, values, sin, sin, *rest)

    monkeypatch.setattr(compiled, "compiled", with_sine_for_cosine)
    with pytest.raises(MinipopError, match="computes something else"):
        compile_decoding(tiny_model())
