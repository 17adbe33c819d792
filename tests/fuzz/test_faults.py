"""The faults people and attackers really bring, one by one: each is one line that names what is wrong and what to do, and exit code 2.

They go through `python -m minipop.chat`, the whole road from the folder to the first token.
"""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minipop import chat, load_model

from . import worlds
from .core import attempt
from .files import folder_of, sentencepiece_models
from .talk import call, new_session
from .worlds import world

FIRST, SECOND, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def ask(folder, *arguments):
    return call(chat.main, ["--ckpt", str(folder), "--prompt", "hi", "--max-new-tokens", "2", *arguments])


@pytest.fixture
def folder(tmp_path):
    return worlds.write(tmp_path / "checkpoint", world("llama").files)


def refused(folder, *words, arguments=()):
    code, out, err = ask(folder, *arguments)
    assert (code, out) == (2, ""), (code, out, err)
    for word in words:
        assert re.search(word, err, re.I), f"{word!r} is not in {err!r}"


def test_the_undamaged_checkpoint_answers(folder):
    code, out, err = ask(folder)
    assert code == 0 and out and "answer tokens" in err


# --- weights ------------------------------------------------------------------------------------------------------------------------


def with_header(content: bytes, change) -> bytes:
    """A safetensors file whose header went through `change` (a dict, in place; or it gives the new header's text)."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    raw = (json.dumps(header) if text is None else text).encode()
    return len(raw).to_bytes(8, "little") + raw + content[8 + length :]


def entry(header):
    return header["model.norm.weight"] if "model.norm.weight" in header else next(v for k, v in header.items() if k != "__metadata__")


HEADERS = {
    "length above the file": (lambda c: (2**40).to_bytes(8, "little") + c[8:], "header claims"),
    "length above the file, allowed size": (lambda c: (10**7).to_bytes(8, "little") + c[8:], "truncated"),
    "length of zero": (lambda c: bytes(8) + c[8:], "header"),
    "offsets backwards": (lambda c: with_header(c, lambda h: entry(h)["data_offsets"].reverse()), "data_offsets"),
    "offsets far away": (lambda c: with_header(c, lambda h: entry(h).update(data_offsets=[2**40, 2**40 + 128])), "hole|truncated"),
    "overlap": (lambda c: with_header(c, lambda h: [v.update(data_offsets=[0, v["data_offsets"][1] - v["data_offsets"][0]])
                                                     for k, v in h.items() if k != "__metadata__"] and None), "overlaps"),
    "a hole": (lambda c: with_header(c, lambda h: h.pop("model.embed_tokens.weight") and None), "hole|belong to no tensor"),
    "dtype lie": (lambda c: with_header(c, lambda h: entry(h).update(dtype="F16")), "needs"),
    "unknown dtype": (lambda c: with_header(c, lambda h: entry(h).update(dtype="F4")), "dtype"),
    "shape lie": (lambda c: with_header(c, lambda h: entry(h).update(shape=[7])), "needs"),
    "negative shape": (lambda c: with_header(c, lambda h: entry(h).update(shape=[-1])), "shape"),
    "shape beyond 64 bits": (lambda c: with_header(c, lambda h: entry(h).update(shape=[2**40, 2**40])), "shape"),
    "a key twice": (lambda c: with_header(c, lambda h: '{"a": 1, "a": 2, ' + json.dumps(h)[1:]), "twice"),
    "deep JSON": (lambda c: with_header(c, lambda h: '{"a": ' * 5000 + "1" + "}" * 5000), "nested"),
    "no JSON": (lambda c: with_header(c, lambda h: "{nonsense}"), "JSON"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_headers(folder, kind):
    change, words = HEADERS[kind]
    (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes()))
    refused(folder, FIRST, words)


def test_missing_truncated_empty_and_swapped_shards(folder):
    first, second = (folder / FIRST).read_bytes(), (folder / SECOND).read_bytes()
    (folder / SECOND).unlink()
    refused(folder, SECOND, "lacks shards", "download")
    (folder / SECOND).write_bytes(second[:-100])
    refused(folder, SECOND, "truncated")
    (folder / SECOND).write_bytes(b"")
    refused(folder, SECOND, "0 bytes")
    (folder / FIRST).write_bytes(second)
    (folder / SECOND).write_bytes(first)
    refused(folder, "lacks tensors", "swapped shards")
    (folder / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, "Git LFS", "git lfs pull")


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors", 3, None, "x.bin", ""])
def test_an_index_cannot_name_files_elsewhere(folder, file):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, INDEX, "relative path|no \\*.safetensors file")


def test_index_and_shards_that_disagree(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = FIRST
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "model.extra.weight", "lacks tensors")
    del index["weight_map"]["model.extra.weight"], index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "model.norm.weight", "does not list")


def test_links(folder):
    """A cache full of links is good, also the folder itself; a link to nowhere is named."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(os.path.join("..", "blobs", path.name))
    (folder.parent / "link").symlink_to(folder)
    assert ask(folder.parent / "link")[0] == 0
    (blobs / SECOND).unlink()
    refused(folder, SECOND, "a link to .*which does not exist")
    (folder.parent / "dangling").symlink_to(folder.parent / "nowhere")
    refused(folder.parent / "dangling", "a link to .*which does not exist")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(folder, bad):
    tensors = load_file(folder / FIRST)
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name][1, 2] = bad
    save_file(tensors, folder / FIRST)
    refused(folder, re.escape(name), FIRST, "NaN or infinity")


def test_weights_that_the_dtype_cannot_hold_are_named(folder):
    tensors = load_file(folder / FIRST)
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name][1, 2] = 1e30
    save_file(tensors, folder / FIRST)
    refused(folder, re.escape(name), "too large for torch.float16", arguments=["--dtype", "float16"])


# --- folders that are something else -----------------------------------------------------------------------------------------------------


def keep(folder, *names):
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def test_pickles_are_never_opened(folder):
    keep(folder, "config.json", "tokenizer.json", "tokenizer_config.json")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR.")
    refused(folder, "pickled", "original safetensors release|save_pretrained")
    assert not (folder / "owned").exists()
    (folder / "pytorch_model.bin").rename(folder / "model.pth")
    refused(folder, "pickled")


def test_a_lora_adapter(folder):
    keep(folder, "config.json")
    (folder / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    refused(folder, "LoRA adapter", "merge_and_unload")


def test_a_gguf_file_or_folder(folder):
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(folder / "model.gguf", "GGUF", "original safetensors release")
    keep(folder, "model.gguf")
    refused(folder, "GGUF")


def test_paths_that_are_no_folder(folder):
    refused(folder / FIRST, "one file of a checkpoint; give the folder")
    refused(folder / "config.json", "not a folder")
    refused(folder / "missing", "is not a folder")
    refused("/dev/null", "not a folder")
    refused("no\nfolder", "not a folder")
    refused("", "does not name a checkpoint")
    keep(folder)
    refused(folder, "the folder is empty")


QUANTISED = {
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
    "bitsandbytes": ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
    "FP8": ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "MXFP4": ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    "compressed-tensors": ({"compression_config": {"format": "pack-quantized"}}, "quantised"),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_configs_are_named(folder, method):
    more, word = QUANTISED[method]
    (folder / "config.json").write_text(json.dumps(worlds.config("llama") | more))
    refused(folder, word, "quantised", "unquantised")


@pytest.mark.parametrize("suffix, method", [("qweight", "GPTQ or AWQ"), ("SCB", "bitsandbytes"), ("weight_scale_inv", "FP8")])
def test_quantised_tensors_are_named(folder, suffix, method):
    tensors = load_file(folder / FIRST)
    tensors["model.layers.0.mlp.down_proj." + suffix] = torch.zeros(2)
    save_file(tensors, folder / FIRST)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.0.mlp.down_proj." + suffix] = FIRST
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, method, "unquantised")


# --- config.json ------------------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "no family": ({"model_type": None}, "model_type is missing"),
    "another family": ({"model_type": "mixtral"}, "'mixtral' is not supported; supported are .*llama.*qwen3_vl"),
    "another activation": ({"hidden_act": "relu"}, "'relu' is not supported; supported are silu"),
    "another rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported; supported are default, linear, llama3"),
    "null": ({"hidden_size": None}, "hidden_size is missing"),
    "a word": ({"num_hidden_layers": "three"}, "num_hidden_layers must be"),
    "a fraction": ({"num_attention_heads": 4.0}, "num_attention_heads must be"),
    "a flag": ({"intermediate_size": True}, "intermediate_size must be"),
    "a list": ({"vocab_size": [1]}, "vocab_size must be"),
    "negative": ({"num_key_value_heads": -2}, "num_key_value_heads must be"),
    "zero": ({"head_dim": 0}, "head_dim must be"),
    "more layers than memory": ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
    "a layer too many": ({"num_hidden_layers": 4}, "weights and model do not fit"),
    "sizes beyond 64 bits": ({"hidden_size": 2**31, "intermediate_size": 2**31, "vocab_size": 2**31}, "config.json|do not fit"),
    "beyond any number": ({"hidden_size": 10**400}, "hidden_size must be"),
    "epsilon of minus one": ({"rms_norm_eps": -1}, "rms_norm_eps must be"),
    "theta of zero": ({"rope_theta": 0}, "rope_theta must be"),
    "a dtype nobody has": ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "another width": ({"hidden_size": 64, "head_dim": 16}, "wrong shape"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_that_cannot_be(folder, kind):
    change, words = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(worlds.config("llama") | change))
    refused(folder, words)


def test_sizes_of_a_vision_tower_beyond_64_bits():
    """A side, not only a product, of a weight that no tensor can have."""
    for part, size in (("spatial_merge_size", 2**31 - 1), ("patch_size", 2**31 - 1), ("num_position_embeddings", 2**30), ("intermediate_size", 2**31)):
        values = worlds.config("qwen3_vl")
        values["vision_config"][part] = size
        with folder_of(world("qwen3_vl").files | {"config.json": json.dumps(values).encode()}) as folder:
            _, refusal = attempt(load_model, folder)
        assert re.search("asks for weights larger than any memory|weights and model do not fit", str(refusal)), refusal


@pytest.mark.parametrize("text, words", [("", "JSON"), ("[]", "object"), ("{", "JSON"), ('{"rope_theta": NaN}', "NaN"), ('{"a": 1e999}', "1e999"),
                                         ('{"a": 1, "a": 2}', "twice"), ("\ud800", "UTF-8"), ('{"a": "\\ud800"}', "surrogate"), ("[" * 3000, "nested")])
def test_configs_that_are_no_json(folder, text, words):
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    refused(folder, "config.json", words)


def test_a_config_that_is_not_there(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json", "no such file")
    (folder / "config.json").mkdir()
    refused(folder, "config.json", "not a regular file")


# --- tokenizers ----------------------------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(folder):
    """Ids that the model does not have are an error, never another token."""
    tokenizer = worlds.byte_tokenizer()
    tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(20)] + ["<|user|>"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(folder, "outside the vocabulary of 268", "do not belong together")


def test_tokenizers_that_are_missing_or_damaged(folder):
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    refused(folder, "neither tokenizer.json nor tokenizer.model")


REGEX = {"Regex": "(a+)+$"}  # on many a's and a b, it tries every way to cut the a's up
STEPS = {"pre_tokenizer": {"type": "Split", "pattern": REGEX, "behavior": "Isolated", "invert": False},
         "normalizer": {"type": "Replace", "pattern": REGEX, "content": "x"}}


@pytest.mark.parametrize("step", STEPS)
def test_a_regular_expression_without_end(folder, step):
    """The library gives up and panics, which is no Exception in Python. (It prints a line of its own.)"""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer[step] = STEPS[step]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(folder, "the text cannot be (encoded|normalized)", "retry-limit", arguments=["--system", "a" * 30 + "b"])


def test_sentencepiece_models_that_are_damaged(folder):
    keep(folder, "config.json", "generation_config.json", "tokenizer_config.json", FIRST, SECOND, INDEX)
    good = sentencepiece_models()[1]
    rules = good.index(b"nmt_nfkc") + 200_000  # in the text of the normalization rules: not UTF-8
    for content, words in ((b"", "not a sentencepiece model"), (b"PK\x03\x04", "not a sentencepiece model"), (good[:200], "not a sentencepiece model"),
                           (good[:rules] + b"\xff" + good[rules + 1 :], "of which no tokenizer can be made")):
        (folder / "tokenizer.model").write_bytes(content)
        refused(folder, "tokenizer.model", words)


def test_a_template_that_writes_to_the_terminal(folder):
    """A refusal's own words may hold anything; they reach the terminal without control characters."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('\x1b]0;owned\x07\x1b[2J no') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(folder, "refuses this conversation.* no")


# --- pictures ------------------------------------------------------------------------------------------------------------------------------

BOMB = b"P6 60000 60000 255\n"
PICTURES = {
    "nothing": (None, "no image file"), "empty": (b"", "empty"), "text": (b"hello", "known format"), "a bomb": (BOMB, "pixels"),
    "cut": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0", "damaged|known format"), "an SVG": (b"<svg/>", "known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "known format"),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_that_are_none(kind, tmp_path):
    content, words = PICTURES[kind]
    if content is not None:
        (tmp_path / "x.png").write_bytes(content)
    code, out, err = call(chat.main, ["--ckpt", str(world("qwen3_vl").folder), "--prompt", "hi", "--image", str(tmp_path / "x.png")])
    assert (code, out) == (2, "") and re.search(words, err) and "x.png" in err, err


def test_pictures_that_are_folders_devices_or_addresses(tmp_path):
    for path, words in ((tmp_path, "folder"), ("/dev/zero", "regular file"), ("https://example.org/a.png", "address"), ("a\x1b[2J\n", "no image file")):
        code, _, err = call(chat.main, ["--ckpt", str(world("qwen3_vl").folder), "--prompt", "hi", "--image", str(path)])
        assert code == 2 and words in err


def test_a_text_model_takes_no_pictures(folder, tmp_path):
    refused(folder, "no pictures", arguments=["--image", str(tmp_path)])


# --- room -----------------------------------------------------------------------------------------------------------------------------------


def test_memory_for_the_cache_is_predicted(folder, monkeypatch):
    monkeypatch.setattr("minipop.cli.available_memory", lambda: 1000)
    refused(folder, "takes .*KiB|takes .*MiB", "lower --max-seq-len")
    monkeypatch.undo()
    (folder / "config.json").write_text(json.dumps(worlds.config("llama") | {"max_position_embeddings": 2**31}))
    refused(folder, "GiB", "lower --max-seq-len", arguments=["--max-seq-len", str(2**31)])


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."


@pytest.mark.parametrize("problem", [RuntimeError(NO_MEMORY), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError()])
def test_memory_that_runs_out_all_the_same(folder, problem, monkeypatch, capsys):
    """One line; and in a chat the session goes on."""
    session = new_session()
    prefill = session.runner.prefill
    monkeypatch.setattr(session.runner, "prefill", lambda _: (_ for _ in ()).throw(problem))
    terminal = chat.Terminal(session, "tiny", [])
    terminal.handle("hello")
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: not enough memory: lower --max-seq-len") and err.count("\n") == 1
    monkeypatch.setattr(session.runner, "prefill", prefill)
    terminal.handle("hello")
    assert len(session.exchanges) == 1
    monkeypatch.setattr("minipop.runner.Runner.prefill", lambda *_: (_ for _ in ()).throw(problem))
    refused(folder, "not enough memory")


def test_other_errors_of_pytorch_are_bugs_and_stay_loud(monkeypatch):
    session = new_session()
    monkeypatch.setattr(session.runner, "prefill", lambda _: (_ for _ in ()).throw(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="mat1"):
        chat.Terminal(session, "tiny", []).handle("hello")


def test_a_prompt_that_does_not_fit(folder):
    refused(folder, "tokens", "context holds", arguments=["--max-seq-len", "5"])
    refused(folder, "512 positions", arguments=["--max-seq-len", "513"])


def test_a_folder_that_vanishes_between_two_looks(folder):
    shutil.rmtree(folder)
    refused(folder, "is not a folder")
