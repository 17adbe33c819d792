"""Targets that are files: checkpoints and their configs, tokenizers, chat templates, pictures, plans, saved chats."""

import copy
import functools
import io
import json
import math
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jinja2.debug  # noqa: F401  jinja2 imports it at the first error in a template: not while we watch
import safetensors
import torch
from hypothesis import strategies as st
from PIL import Image

from minipop import PrefillPlan, Runner, SamplingParams, load_model, load_processor, load_tokenizer
from minipop.chat_template import ChatTemplate
from minipop.checkpoint import DTYPES, Checkpoint
from minipop.config import ACTIVATIONS, read_config
from minipop.models import build_model
from minipop.plan import format_layers, parse_layers, parse_ratio
from minipop.processing import load_image

from . import worlds
from .core import Target, attempt
from .worlds import world

PROMPT = list(range(60, 72))

# --- strategies -------------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([16, 17, 64, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, -(10**30)]),
    st.sampled_from([0.5, 1.0, -0.0, 1e-300, 1e-30, 1e29, 1e300, math.inf, math.nan]))
WORDS = st.sampled_from(["", "a", "silu", "relu", "gelu", "llama3", "linear", "yarn", "dynamic", "default", "mrope", "float16", "float8_e4m3fn",
                         "auto", "qwen3", "mixtral", "gemma3", "full_attention", "sliding_attention", "<|im_end|>", "../x", "a\nb", "\x1b[2J",
                         "\ud800", "é", "null", "model", "<bos>", "BPE", "WordPiece", "Unigram", "ByteLevel", "Metaspace", "True", "(a+)+$", "(", "[^a]*?"])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=4))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6)
FRAGMENTS = st.one_of(st.binary(max_size=4), st.sampled_from(
    [b'"', b"0", b"-1", b"9999", b"[", b"]", b"{", b"}", b",", b":", b"null", b"NaN", b"1e999", b"\\ud800", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf"]))


def damaged(base: bytes) -> st.SearchStrategy:
    """The bytes with some overwritten, inserted, cut out or cut off."""
    edit = st.tuples(st.integers(0, len(base)), st.integers(0, 6), FRAGMENTS)

    def apply(edits, keep):
        content = bytearray(base)
        for start, cut, insert in edits:
            content[start : start + cut] = insert
        return bytes(content[:keep])

    return st.builds(apply, st.lists(edit, min_size=1, max_size=4), st.one_of(st.just(len(base) + 16), st.integers(0, len(base))))


def overwritten(base: bytes) -> st.SearchStrategy:
    """The bytes with one to three of them changed: lengths and most of the structure stay."""
    def apply(edits):
        content = bytearray(base)
        for start, value in edits:
            content[start] = value
        return bytes(content)

    value = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 4, 127, 128, 255]))
    return st.lists(st.tuples(st.integers(0, len(base) - 1), value), min_size=1, max_size=3).map(apply)


def places(value, path=()) -> list[list]:
    """The paths to everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [list(path)] * bool(path) + [place for key, item in inner for place in places(item, (*path, key))]


def altered(base) -> st.SearchStrategy:
    """Files (bytes) of the JSON value with some of its parts replaced, left out or added, or with damaged text."""
    everywhere = [place for place in places(base) if len(place) < 5][:400]
    edit = st.tuples(st.sampled_from(everywhere), st.sampled_from(["like", "like", "set", "drop", "add"]), VALUES, WORDS, NUMBERS)

    def apply(edits):
        value = copy.deepcopy(base)
        for path, how, new, key, number in edits:
            try:
                parent = at(value, path[:-1])
                if how == "like":  # of the same type
                    old = parent[path[-1]]
                    new = not old if type(old) is bool else number if type(old) in (int, float) else key if type(old) is str else new
                if how == "drop":
                    del parent[path[-1]]
                else:
                    parent[key if how == "add" else path[-1]] = new
            except (TypeError, KeyError, IndexError):
                pass  # an earlier edit took that place away
        return json.dumps(value).encode()

    return st.lists(edit, min_size=1, max_size=3).map(apply) | damaged(json.dumps(base).encode())


def tweaked(base: dict) -> st.SearchStrategy:
    """The JSON value as a file, with some numbers, flags and words changed for others of their kind, and some keys left out."""
    leaves = [place for place in places(base) if not isinstance(at(base, place), (dict, list))]
    numbers = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 61, 0.5, 2.0, 1e-6, 1e6, 2**20, 2**31 - 1])
    edit = st.tuples(st.sampled_from(leaves), st.sampled_from(["like", "like", "drop", "null"]), numbers, WORDS)

    def apply(edits):
        value = copy.deepcopy(base)
        for path, how, number, word in edits:
            old, parent = at(base, path), at(value, path[:-1])
            if how == "drop" and isinstance(parent, dict):
                parent.pop(path[-1], None)
            elif how != "drop":
                parent[path[-1]] = None if how == "null" else not old if type(old) is bool else word if type(old) is str else number
        return json.dumps(value).encode()

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def at(value, path: list):
    for step in path:
        value = value[step]
    return value


@contextmanager
def folder_of(files: dict[str, bytes]):
    with tempfile.TemporaryDirectory() as temporary:
        yield worlds.write(Path(temporary) / "checkpoint", files)


# --- config.json ------------------------------------------------------------------------------------------------------------------

RICH = {  # settings that published configs have and the tiny ones leave out
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_theta": 1e6, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}
RICH_FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3", "qwen3_vl"]


def rich_config(family: str) -> dict:
    values = copy.deepcopy(worlds.CONFIGS[family])
    if "text_config" not in values:
        values |= {key: value for key, value in RICH.items() if key != "rope_scaling" or family == "llama"}
    return values


def check_config(case) -> str:
    """A config is refused, or every number in it makes sense and a small model made of it runs."""
    with folder_of({"config.json": case["text"]}) as folder:
        config, refusal = attempt(read_config, folder)
    if refusal:
        return "refused"
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads,
             config.head_dim, config.max_position_embeddings, config.num_token_ids)
    assert all(type(size) is int and size > 0 for size in sizes), sizes
    assert config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0 and config.hidden_act in ACTIVATIONS
    assert len(config.layer_windows) == config.num_layers and all(window is None or window > 0 for window in config.layer_windows)
    assert all(math.isfinite(x) and x > 0 for x in (config.norm_eps, config.attention_scale, config.rope.theta, config.rope.factor))
    model, refusal = attempt(build_model, config)
    if refusal:
        return "refused"
    if sum(parameter.numel() for parameter in model.parameters()) > 300_000:
        return "too large to run here"
    model = model.to_empty(device="cpu").float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    prompt = [i % config.vocab_size for i in range(9) if i % config.vocab_size != config.image_token_id]
    if not prompt:
        return "fine"
    runner, refusal = attempt(Runner, model, PrefillPlan.deepest(config.num_layers), max_seq_len=min(12, config.max_position_embeddings))
    tokens, refusal = (None, refusal) if refusal else attempt(list, runner.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=2)))
    return "refused when run" if refusal else "fine"


# --- whole checkpoints --------------------------------------------------------------------------------------------------------------

TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")  # nothing in them changes the weights
NAMES = ["config.json", *TEXT_FILES, "preprocessor_config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
         "model-00002-of-00002.safetensors"]
EXTRA_NAMES = ["pytorch_model.bin", "adapter_config.json", "model.gguf", "model.safetensors", "chat_template.jinja", "added_tokens.json",
               "special_tokens_map.json", "chat_template.json", "tokenizer.model", "processor_config.json", "x.safetensors"]
FILE_EDITS = st.one_of(
    st.tuples(st.just("bytes"), st.sampled_from(NAMES), st.integers(0, 100_000), st.integers(0, 6), FRAGMENTS),
    st.tuples(st.just("bytes"), st.sampled_from(NAMES[-3:]), st.integers(0, 3000), st.integers(0, 6), FRAGMENTS),
    st.tuples(st.just("cut"), st.sampled_from(NAMES), st.integers(0, 100_000)),
    st.tuples(st.sampled_from(["delete", "empty", "folder", "dangling link", "link"]), st.sampled_from(NAMES)),
    st.tuples(st.just("swap"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("add"), st.sampled_from(EXTRA_NAMES), st.sampled_from([b"", b"{}", b"GGUF\x03\0\0\0", b"\x80\x02}q\0.", b"[]"])),
    st.tuples(st.just("set"), st.sampled_from(["config.json", *TEXT_FILES, "preprocessor_config.json"]), st.integers(0, 400), VALUES),
    st.tuples(st.just("borrow"), st.sampled_from(NAMES), st.sampled_from(worlds.FAMILIES)),  # from another model
)


def edit_folder(folder: Path, files: dict[str, bytes], edits) -> set[str]:
    """Write the files, damaged. Gives the names of those that are not as they were."""
    files, after, changed = dict(files), [], set()
    for how, name, *arguments in edits:
        before = dict(files)
        if how == "add":
            files[name] = arguments[0]
        elif name not in files:
            continue
        elif how == "bytes":
            start, cut, insert = arguments
            start = min(start, len(files[name]))
            files[name] = files[name][:start] + insert + files[name][start + cut :]
        elif how == "cut":
            files[name] = files[name][: arguments[0]]
        elif how == "empty":
            files[name] = b""
        elif how == "swap" and arguments[0] in files:
            files[name], files[arguments[0]] = files[arguments[0]], files[name]
        elif how == "set":
            with_change = _set(files[name], *arguments)
            files[name] = files[name] if with_change is None else with_change
        elif how == "borrow":
            files[name] = world(arguments[0]).files.get(name, files[name])
        elif how in ("delete", "folder", "dangling link", "link"):
            after.append((how, name))
        changed |= {key for key in files if files[key] != before.get(key)}
    worlds.write(folder, files)
    for how, name in after:
        path = folder / name
        if not path.is_file() or path.is_symlink():
            continue
        if how == "link":  # a good one, as in the cache of huggingface_hub: nothing changes
            path.rename(folder.parent / f"blob-{name}")
            path.symlink_to(folder.parent / f"blob-{name}")
            continue
        changed.add(name)
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "dangling link":
            path.symlink_to(folder / "nowhere")
    return changed


def _set(content: bytes, number: int, value) -> bytes | None:
    """A JSON file with its part `number` replaced."""
    try:
        whole = json.loads(content)
        path = places(whole)[number % len(places(whole))]
        at(whole, path[:-1])[path[-1]] = value
        return json.dumps(whole).encode()
    except (ValueError, TypeError, ZeroDivisionError):
        return None


def logits_of(model) -> torch.Tensor:
    return Runner(model, PrefillPlan.deepest(model.config.num_layers), max_seq_len=16).prefill(PROMPT)


def check_folder(case) -> str:
    """A damaged checkpoint is refused, or it works; and where the damage is not in the weights, it gives the very same logits."""
    base = world(case["family"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        changed = edit_folder(folder, base.files, case["edits"])
        config, refusal = attempt(read_config, folder)
        vision = config is not None and config.vision is not None
        processor, refused_processor = attempt(load_processor, folder) if vision else (None, None)
        tokenizer, refused_tokenizer = attempt(load_tokenizer, folder)
        model, refused_model = attempt(load_model, folder)
        if tokenizer is not None:
            exercise_tokenizer(tokenizer)
        if processor is not None:
            picture = {"type": "image", "image": Image.new("RGB", (20, 9), (200, 30, 40))}
            inputs, refusal = attempt(processor, [{"role": "user", "content": [picture, {"type": "text", "text": "what?"}]}])
            if model is not None and inputs is not None:
                attempt(Runner(model, max_seq_len=min(256, model.config.max_position_embeddings)).prefill, inputs)
        if model is None:
            return "refused"
        if not changed:
            assert not (refused_tokenizer or refused_processor), "an undamaged folder was refused"
        if changed <= {*TEXT_FILES, "preprocessor_config.json"}:
            assert torch.equal(logits_of(model), logits_of(load_model(base.folder))), f"other logits, though only {changed} differ"
        _, refusal = attempt(list, Runner(model, max_seq_len=16).generate(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=2)))
        return "refused when run" if refusal else "refused in part" if refused_tokenizer or refused_processor else "fine"


# --- safetensors --------------------------------------------------------------------------------------------------------------------


def small_file() -> bytes:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
              "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}, "c": {"dtype": "F32", "shape": [0], "data_offsets": [32, 32]}}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(range(32))


def with_length(raw: bytes) -> bytes:
    """A header that is as long as it says it is, and data behind it."""
    return len(raw).to_bytes(8, "little") + raw + bytes(range(32))


def check_safetensors(case) -> str:
    """A file is refused, or the reference reader accepts it too and reads the same."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.safetensors"
        path.write_bytes(case)
        checkpoint, refusal = attempt(Checkpoint.open, temporary)
        if refusal:
            assert "model.safetensors" in str(refusal)
            return "refused"
        reference = dict(safetensors.deserialize(case))
        assert set(reference) == set(checkpoint)
        for name in checkpoint:
            tensor = checkpoint.tensor(name)
            assert list(tensor.shape) == reference[name]["shape"] and tensor.dtype == DTYPES[reference[name]["dtype"]]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(reference[name]["data"])
    return "fine"


# --- tokenizers and templates ---------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|> é \U0001f600"},
        {"role": "assistant", "content": "yes"}, {"role": "user", "content": "a\nb"}]


def exercise_tokenizer(tokenizer) -> bool:
    """Encode, decode, stream and render; whether anything was refused."""
    ids, refusal = attempt(tokenizer.encode, "Hello, w\u00f6rld <|im_end|>\n\U0001f600")
    if ids is not None:
        assert all(type(i) is int and i >= 0 for i in ids)
        text, refused_text = attempt(tokenizer.decode, ids)
        stream = tokenizer.stream()
        pieces, refused_stream = attempt(lambda: "".join([stream.push(i) for i in ids]) + stream.flush())
        assert pieces == text and bool(refused_text) == bool(refused_stream)
        (text or "").encode()  # no half characters
    for i in (-1, 0, tokenizer.num_token_ids - 1, tokenizer.num_token_ids, 2**31):
        attempt(tokenizer.decode, [i])
    if tokenizer.has_chat_template:
        chat, refused_chat = attempt(tokenizer.apply_chat_template, CHAT)
        assert chat is None or all(type(i) is int and i >= 0 for i in chat)
        refusal = refusal or refused_chat
    return refusal is not None


def check_tokenizer(case) -> str:
    """Tokenizer files are refused, or what they give can be used."""
    files = {name: content for name, content in world("llama").files.items() if not name.startswith("model")}
    with folder_of(files | case) as folder:
        tokenizer, refusal = attempt(load_tokenizer, folder)
        if refusal:
            return "refused"
        return "refused when used" if exercise_tokenizer(tokenizer) else "fine"


@functools.cache
def sentencepiece_models() -> list[bytes]:
    """A BPE and a unigram model; the second with normalization rules."""
    import sentencepiece

    made = []
    for kind, rules in (("bpe", "identity"), ("unigram", "nmt_nfkc")):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a cat and a hat", "what is it?"] * 5), model_writer=file, model_type=kind,
            vocab_size=60, hard_vocab_limit=False, normalization_rule_name=rules, user_defined_symbols=["<x>"], minloglevel=2, num_threads=1)
        made.append(file.getvalue())
    return made


def sentencepiece_cases() -> st.SearchStrategy:
    return st.fixed_dictionaries({
        "model": st.one_of(*(overwritten(model) | damaged(model) for model in sentencepiece_models()), st.binary(max_size=30)),
        "config": st.sampled_from([{}, {"legacy": False}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "GemmaTokenizer"}])})


def check_sentencepiece(case) -> str:
    """A tokenizer.model is refused, or what it gives can be used."""
    with folder_of({"tokenizer.model": case["model"], "tokenizer_config.json": json.dumps(case["config"]).encode()}) as folder:
        tokenizer, refusal = attempt(load_tokenizer, folder)
        if refusal:
            return "refused"
        return "refused when used" if exercise_tokenizer(tokenizer) else "fine"


ATTRIBUTES = ["__class__", "__globals__", "__init__", "mro", "format", "format_map", "join", "append", "pop", "update", "items", "content", "role",
              "upper", "center", "ljust", "zfill", "encode", "translate", "gi_frame", "f_globals", "func_globals", "_fuel", "environment", "loop",
              "cycle", "changed", "x", "__call__", "count", "split", "expandtabs"]
FILTERS = ["join", "list", "length", "string", "tojson", "replace('a', 'aa')", "indent(9)", "batch(2)", "map(attribute='__class__')", "map('upper')",
           "sort", "unique", "attr('__class__')", "format(1)", "center(99)", "trim", "first", "last", "groupby('role')", "sum", "random", "pprint",
           "select", "reject('none')", "dictsort", "safe", "e", "int", "float", "max", "reverse", "slice(3)", "truncate(3)", "wordcount", "xmlattr"]
EXPRESSIONS = st.recursive(
    st.sampled_from(["messages", "messages[0]", "messages[0].content", "'a'", "'%s %9d'", "'{0.__class__}'", "9", "10 ** 9", "'a' * 99", "[]", "[1, 2]",
                     "{}", "x", "n", "n.x", "loop", "loop.index", "namespace", "namespace(x='a')", "range(9)", "range(99999)", "raise_exception",
                     "strftime_now", "strftime_now('%Y')", "bos_token", "self", "cycler", "joiner", "lipsum", "dict", "tools", "none", "true", "m"]),
    lambda e: st.one_of(
        st.tuples(e, st.sampled_from(["+", "*", "**", "%", "~", "//", "-", "and", "or", "==", "in", "<"]), e).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(e, st.sampled_from(ATTRIBUTES)).map(".".join), st.tuples(e, st.sampled_from(ATTRIBUTES)).map(lambda t: f"{t[0]}['{t[1]}']"),
        st.tuples(e, e).map(lambda t: f"{t[0]}({t[1]})"), st.tuples(e, e).map(lambda t: f"{t[0]}[{t[1]}]"), e.map(lambda x: f"{x}[::-1]"),
        st.tuples(e, st.sampled_from(FILTERS)).map(lambda t: f"({t[0]} | {t[1]})"), e.map(lambda x: f"[{x}, {x}]"), e.map(lambda x: f"({x})()"),
        st.tuples(e, e).map(lambda t: f"({t[0]} if {t[1]} else 1)")), max_leaves=5)
STATEMENTS = st.recursive(
    st.one_of(EXPRESSIONS.map(lambda e: "{{ " + e + " }}"), EXPRESSIONS.map(lambda e: "{% set n.x = " + e + " %}"), st.just("text"),
              st.sampled_from(["{% include 'config.json' %}", "{% import 'a' as b %}", "{% extends 'a' %}", "{{ m(1) }}", "{% break %}", "{% do 1 %}",
                               "{% autoescape true %}x{% endautoescape %}", "{{ super() }}", "{% from 'os' import path %}", "{{ loop(x) }}"])),
    lambda s: st.one_of(
        st.tuples(EXPRESSIONS, s).map(lambda t: "{% for x in " + t[0] + " %}" + t[1] + "{% endfor %}"),
        st.tuples(EXPRESSIONS, s).map(lambda t: "{% for x in " + t[0] + " recursive %}" + t[1] + "{% endfor %}"),
        st.tuples(EXPRESSIONS, s).map(lambda t: "{% if " + t[0] + " %}" + t[1] + "{% endif %}"),
        s.map(lambda x: "{% macro m(x) %}" + x + "{% endmacro %}{{ m(2) }}"), s.map(lambda x: "{% set x %}" + x + "{% endset %}"),
        st.tuples(s, s).map("".join), s.map(lambda x: "{% filter upper %}" + x + "{% endfilter %}"),
        s.map(lambda x: "{% call m(1) %}" + x + "{% endcall %}"), s.map(lambda x: "{% block b %}" + x + "{% endblock %}")), max_leaves=4)
TEMPLATES = st.tuples(st.sampled_from(["", "{% set n = namespace(x='a') %}", "{% set n = namespace(x=[1]) %}"]), STATEMENTS).map("".join)

_watched: list[str] | None = None  # events of the interpreter, while a template runs


def _hook(event: str, arguments: tuple) -> None:
    if _watched is None or event.partition(".")[0] not in ("open", "os", "subprocess", "socket", "compile", "ctypes", "shutil", "marshal"):
        return
    if event == "compile" and isinstance(arguments[0], (str, bytes)) and "raise __jinja_exception__" in str(arguments[0]):
        return  # jinja2 rewrites the traceback of an error in a template
    _watched.append(f"{event} {arguments!r:.200}")


_hooked = False


@contextmanager
def watching():
    """The events by which Python code reaches outside: files, processes, sockets, new code. Hooks cannot be removed; there is one."""
    global _watched, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _watched = events = []
    try:
        yield events
    finally:
        _watched = None


def check_template(case) -> str:
    """A template ends, within its limits, with text or a refusal, and touches nothing outside."""
    template, refusal = attempt(ChatTemplate, case, "template")
    if refusal:
        return "refused"
    variables = {"messages": CHAT, "add_generation_prompt": True, "tools": None, "documents": None, "bos_token": "<bos>"}
    with watching() as events:
        text, refusal = attempt(template.render, variables)
    assert not events, f"the template caused {events}"
    assert CHAT[0] == {"role": "system", "content": "Be brief."} and len(CHAT) == 4, "the template changed the conversation"
    if refusal:
        return "refused when run"
    assert type(text) is str and len(text) <= 2_000_000
    return "fine"


# --- pictures -------------------------------------------------------------------------------------------------------------------------


def picture(format: str, mode: str = "RGB", size=(7, 5), **options) -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", size, bytes(i * 37 % 256 for i in range(3 * size[0] * size[1]))).convert(mode).save(file, format, **options)
    return file.getvalue()


PICTURES = [picture("PNG"), picture("PNG", "RGBA"), picture("PNG", "P"), picture("PNG", "1"), picture("PNG", "L"),
            picture("JPEG"), picture("JPEG", "CMYK"), picture("GIF"), picture("WEBP"), picture("WEBP", lossless=True), picture("BMP"), picture("TIFF"),
            picture("TIFF", "F"), picture("TIFF", compression="tiff_lzw"), picture("PPM"), picture("PPM", "L")]
MAX_PIXELS = 100_000


def check_image(case) -> str:
    """Bytes are refused, or become an RGB picture of a possible size that both families' processors take or refuse."""
    image, refusal = attempt(load_image, case, MAX_PIXELS)
    if refusal:
        assert "image" in str(refusal)
        return "refused"
    assert image.mode == "RGB" and 0 < image.width * image.height <= MAX_PIXELS
    assert len(image.tobytes()) == 3 * image.width * image.height
    for family in ("qwen3_vl", "gemma3"):
        processor = _processor(family)
        made, refusal = attempt(processor.image_processor, [image])
        if refusal:
            assert family == "qwen3_vl" and max(image.size) > 200 * min(image.size)
            continue
        pixels, grid = made
        assert bool(pixels.isfinite().all()) and (family == "gemma3" or int(grid.prod()) == len(pixels))
    return "fine"


@functools.cache
def _processor(family: str):
    return load_processor(world(family).folder)


SIZES = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 201, 5000])
DRAWN = st.tuples(SIZES, SIZES, st.sampled_from(["RGB", "L"])).filter(lambda t: 0 < t[0] * t[1] <= 40_000).map(
    lambda t: picture("PPM", t[2], (t[0], t[1])))
HEADERS = st.tuples(st.integers(-1, 10**9), st.integers(-1, 10**9), st.integers(0, 70000)).map(lambda t: b"P6 %d %d %d\n" % t + bytes(30))


# --- plans ----------------------------------------------------------------------------------------------------------------------------

LAYER_TEXTS = st.one_of(
    st.text(alphabet="0123456789,-  x", max_size=12), st.text(max_size=6), st.lists(st.integers(0, 40), max_size=6).map(format_layers),
    st.sampled_from(["9" * 5000, "0-99999", "0-999999999", "5-4", "-1", "٣", "1e3", "0x1", "0-99999," * 400, ",,", "1_0", "²", " 1 - 2 "]))
RATIO_TEXTS = st.one_of(
    st.text(alphabet="0123456789./e+-_ ", max_size=8), st.text(max_size=5), st.floats(0, 1).map(repr),
    st.sampled_from(["1/3", "0.25", "1/0", "nan", "inf", "1e999999999", "1e-999999999", "9" * 5000, "1/" + "9" * 5000, "٣", "1_0/3_0", "--", "1e-400"]))
PLAN = {"num_layers": 6, "skip": [3, 5], "project_kv": True, "split_boundary": True, "kv": None}


def check_plan(case) -> str:
    kind, text = case
    if kind == "layers":
        layers, refusal = attempt(parse_layers, text)
        if layers is not None:
            assert parse_layers(format_layers(layers)) == layers
    elif kind == "ratio":
        ratio, refusal = attempt(parse_ratio, text)
        if ratio is not None:
            plan = PrefillPlan.deepest(30, text)
            assert 0 <= ratio <= 1 and plan.is_suffix and abs(len(plan.skip) - ratio * 30) <= 1
    else:
        with folder_of({"plan.json": text}) as folder:
            plan, refusal = attempt(PrefillPlan.load, folder / "plan.json")
            if plan is not None:
                assert all(type(i) is int and 0 <= i < plan.num_layers for i in plan.skip) and plan.describe()
                plan.save(folder / "again.json")
                assert PrefillPlan.load(folder / "again.json") == plan
    return "refused" if refusal else "fine"


# --- all of them ------------------------------------------------------------------------------------------------------------------------


def tokenizer_files() -> st.SearchStrategy:
    base = world("llama")
    whole = base.json("tokenizer.json")
    steps = whole | {  # what tokenizers of published models have, all at once
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "y"}, {"type": "Prepend", "prepend": "."}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "Digits", "individual_digits": True}, whole["pre_tokenizer"]]},
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"},
                                                     {"type": "Fuse"}, whole["decoder"]]}}
    small = {key: value for key, value in steps.items() if key != "model"}  # the vocabulary would be most of the places to change
    rich = base.json("tokenizer_config.json") | {
        "pad_token": {"content": "<|im_end|>", "special": True}, "additional_special_tokens": ["<|im_start|>"], "add_eos_token": False,
        "added_tokens_decoder": {"256": {"content": "<bos>", "special": True}}, "legacy": True, "model_max_length": 1e30}
    entry = st.one_of(
        st.tuples(st.just("tokenizer.json"), altered(whole)),
        st.tuples(st.just("tokenizer.json"), altered(small).map(lambda text: _with_model(text, whole["model"]))), st.tuples(st.just("tokenizer_config.json"), altered(rich)),
        st.tuples(st.just("special_tokens_map.json"), altered({"eos_token": "<|im_end|>", "bos_token": {"content": "<bos>"}})),
        st.tuples(st.just("added_tokens.json"), altered({"<|im_end|>": 258, "<new>": 265})),
        st.tuples(st.just("chat_template.jinja"), damaged(worlds.TEMPLATE.encode())),
        st.tuples(st.just("chat_template.json"), altered({"chat_template": worlds.TEMPLATE})),
        st.tuples(st.just("config.json"), altered(worlds.config("llama"))))
    return st.lists(entry, min_size=1, max_size=2).map(dict)


def _with_model(text: bytes, model: dict) -> bytes:
    try:
        return json.dumps({**json.loads(text), "model": model}).encode()
    except (ValueError, TypeError):
        return text


def config_cases() -> st.SearchStrategy:
    return st.sampled_from(RICH_FAMILIES).flatmap(
        lambda family: st.fixed_dictionaries({"family": st.just(family), "text": altered(rich_config(family)) | tweaked(rich_config(family))}))


FILES = [
    Target("safetensors", "a weights file, mostly its header, against the reference reader",
           st.one_of(damaged(small_file()), altered(json.loads(small_file()[8:-32])).map(with_length), st.binary(max_size=40)), check_safetensors, 150),
    Target("config", "config.json of every family; a small model made of what is accepted must run", config_cases(), check_config, 200,
           ("refused", "fine", "too large to run here")),
    Target("folder", "a whole checkpoint with files damaged, cut, swapped, linked, missing, or from another model",
           st.fixed_dictionaries({"family": st.sampled_from(worlds.FAMILIES), "edits": st.lists(FILE_EDITS, min_size=1, max_size=3)}),
           check_folder, 80, ("refused", "fine")),
    Target("tokenizer", "tokenizer.json, tokenizer_config.json and their relatives; what is accepted must encode, decode and render",
           st.deferred(tokenizer_files), check_tokenizer, 120, ("refused", "fine")),
    Target("sentencepiece", "tokenizer.model, sentencepiece's format, damaged", st.deferred(sentencepiece_cases), check_sentencepiece, 60),
    Target("template", "chat templates put together from what jinja2 knows, the forbidden parts too", TEMPLATES, check_template, 150,
           ("refused when run", "fine")),
    Target("image", "pictures of every format, damaged, and headers of any size",
           st.one_of(st.sampled_from(PICTURES).flatmap(damaged), st.sampled_from(PICTURES).flatmap(overwritten), DRAWN, HEADERS, st.binary(max_size=60)), check_image, 150),
    Target("plan", "layer lists, ratios and plan files",
           st.one_of(st.tuples(st.just("layers"), LAYER_TEXTS), st.tuples(st.just("ratio"), RATIO_TEXTS), st.tuples(st.just("file"), altered(PLAN))),
           check_plan, 150),
]
