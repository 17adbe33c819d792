"""The tokenizer's files in a checkpoint's folder, read into one object.

Whatever the folder holds, the result is a backend of the `tokenizers` library, the one that drives Hugging Face's AutoTokenizer:
the same pipeline gives the same ids. tokenizer.json is such a backend, written down; tokenizer.model, from sentencepiece,
is translated.
"""

from __future__ import annotations

import gc
import json
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import TokenizerError

MAX_PIECE = 1000  # characters of a piece of a sentencepiece vocabulary; those of published ones stay below 100
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    folder: Path
    backend: Tokenizer
    names: dict[str, str]  # bos_token: "<s>", ...
    special: frozenset[str]  # the contents of the special tokens
    before: list[int]  # the ids the tokenizer adds before a text (BOS, or nothing)
    after: list[int]  # and after it (mostly nothing)
    template: tuple[str, str] | None  # the chat template, and the file it stands in
    vocab_size: int  # the model's, from config.json; 0 if unknown


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The collector would walk again and again through the million lists and strings of a large vocabulary, none of which is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def has_tokenizer(path) -> bool:
    """Whether a folder holds a tokenizer that `load_tokenizer` reads."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def read_tokenizer_files(path, merges: bool = True) -> TokenizerFiles:
    """See `minipop.tokenizer.load_tokenizer`. Raises TokenizerError that names the file and the field.

    merges: False leaves out the merges of tokenizer.json's BPE, which are most of it: what is left knows its ids but cannot encode.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such folder; pass the folder that holds tokenizer.json or tokenizer.model")
    config = _read_object(folder / "tokenizer_config.json")
    older = _read_object(folder / "special_tokens_map.json")  # the same fields, from before tokenizer_config.json had them
    config |= {key: value for key, value in older.items() if config.get(key) is None}
    model = _read_object(folder / "config.json")

    names = _named_tokens(config, f"{folder}/tokenizer_config.json")
    style = _pipeline_style(config, model)
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder / "tokenizer.json", merges)
        llama_style = style == "LlamaTokenizer" and not _is_byte_level(backend)
        default_bos = False
    elif (folder / "tokenizer.model").is_file():
        llama_style = style in ("LlamaTokenizer", "")
        by_class = llama_style or style == "GemmaTokenizer"
        with native_errors(f"{folder}/tokenizer.model: a sentencepiece model of which no tokenizer can be made"):
            backend, own_names = _read_sentencepiece(folder / "tokenizer.model", by_class, bool(config.get("legacy", True)))
        names = own_names | names
        default_bos = True  # sentencepiece families (Llama 1 and 2, Mistral) start with BOS unless their config says no
    else:
        raise TokenizerError(f"{folder}: neither tokenizer.json nor tokenizer.model is there; fetch what the weights came with")
    if llama_style:
        _use_llama_pipeline(backend, config)

    special = _merge_added_tokens(backend, folder, config, names)
    if backend.post_processor is None:
        add_bos = config.get("add_bos_token")
        _add_post_processor(backend, names, default_bos if add_bos is None else add_bos, config.get("add_eos_token"))
    before, after = _added_around(backend, f"{folder}/tokenizer.json: post_processor")

    vocab_sizes = [part.get("vocab_size") for part in (model, model.get("text_config")) if isinstance(part, dict)]
    vocab_size = max((size for size in vocab_sizes if isinstance(size, int)), default=0)
    return TokenizerFiles(folder, backend, names, special, before, after, _find_template(folder, config), vocab_size)


# ---- JSON ----------------------------------------------------------------------------------------------------------------------


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8 text (byte {error.start}); download the file again") from None
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read: {error.strerror}") from None


def _read_object(file: Path) -> dict:
    """A JSON object; an empty one when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # "\\ud800", half a character, is legal JSON but no text
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file}: not JSON (line {error.lineno}: {error.msg}); download the file again") from None
    except (RecursionError, ValueError):  # nested a thousand times, half a character, a number of thousands of digits
        raise TokenizerError(f"{file}: no JSON that a tokenizer would have; download the file again") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_text(value: Any, where: str) -> str | None:
    """A token named in a config: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise TokenizerError(f"{where}: expected a string or an object with a string `content`, found {value!r:.80}")
    return text


def component_state(component: Any) -> Any:
    """The JSON of one component (decoder, pre-tokenizer, ...) of a backend; None when it has none."""
    return None if component is None else json.loads(component.__getstate__())


def one_line(error: BaseException | str) -> str:
    """An error of a library, fit for the end of ours."""
    return " ".join(str(error).split())[:300]


@contextmanager
def native_errors(what: str) -> Iterator[None]:
    """Whatever the libraries raise inside becomes the TokenizerError `what: ...`.

    tokenizers raises plain Exception; panics of its Rust code are not even that, and their class cannot be imported.
    """
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {one_line(error)}") from None


# ---- tokenizer.json and the configs --------------------------------------------------------------------------------------------


def _read_tokenizer_json(file: Path, merges: bool) -> Tokenizer:
    text = _read_text(file)
    with native_errors(f"{file}: not a tokenizer file"):
        content = json.loads(text)
        added = content.get("added_tokens") or []
        if not merges and "merges" in content["model"]:
            content["model"]["merges"] = []
            text = json.dumps(content, ensure_ascii=False)
        del content  # of a large vocabulary some hundred megabytes, which should not stand beside the backend
        backend = Tokenizer.from_str(text)
    backend.no_truncation()  # settings for training batches that can be baked into the file
    backend.no_padding()
    for token in added:
        if (found := backend.token_to_id(token["content"])) != token["id"]:  # tokenizers renumbers without a word
            text, number = token["content"], token["id"]
            raise TokenizerError(f"{file}: added_tokens: {text!r} has id {number}, but the vocabulary makes it {found}")
    return backend


def _pipeline_style(config: dict, model: dict) -> str:
    """Which of the reference's classes sets up the pipeline; "" if the config does not say.

    tokenizer.json holds the whole pipeline, but for LlamaTokenizer the reference goes by the config (`legacy`,
    `add_prefix_space`) instead. Mistral checkpoints name that class too, yet the reference takes their files as they are.
    """
    name = config.get("tokenizer_class")
    mistral = str(model.get("model_type")).startswith(("mistral", "mixtral", "ministral", "pixtral", "voxtral"))
    return "as it is" if mistral else name.removesuffix("Fast") if isinstance(name, str) else ""


def _is_byte_level(backend: Tokenizer) -> bool:
    """Llama-3 checkpoints can name LlamaTokenizer, but have nothing to do with sentencepiece."""
    return '"ByteLevel"' in json.dumps([component_state(backend.pre_tokenizer), component_state(backend.decoder)])


def _use_llama_pipeline(backend: Tokenizer, config: dict) -> None:
    """LlamaTokenizer's rule for spaces, after transformers 5: one is put before the text; in `legacy` mode also before each text
    that follows a special token."""
    prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.decoder = _sentencepiece_decoder(prefix)


def _named_tokens(config: dict, where: str) -> dict[str, str]:
    """bos_token, eos_token, ..., and what a checkpoint names besides (Gemma-3's boi_token). Chat templates see them all."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))}
    named |= {key: config.get(key) for key in NAMED_TOKENS}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    texts = {key: _token_text(value, f"{where}: {key}") for key, value in named.items()}
    return {key: text for key, text in texts.items() if text}


def _merge_added_tokens(backend: Tokenizer, folder: Path, config: dict, names: dict[str, str]) -> frozenset[str]:
    """Add the tokens that only the other files declare. Gives the contents of all special tokens.

    Flags in tokenizer_config.json win over those in tokenizer.json, as in the reference; a token that either calls special is so.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wished = [*names.values(), *_extra_tokens(config, f"{folder}/tokenizer_config.json")]  # special, but with no id given

    # content -> (id, token, the field it stands in)
    declared = {
        token.content: (number, token, f"{folder}/tokenizer_config.json: added_tokens_decoder")
        for number, token in _declared_tokens(config, f"{folder}/tokenizer_config.json: added_tokens_decoder")
    }
    for text, number in _read_object(folder / "added_tokens.json").items():
        if type(number) is not int or not text:
            raise TokenizerError(f"{folder}/added_tokens.json: expected token: id, found {text!r}: {number!r:.80}")
        if text not in declared and text not in known:
            token = AddedToken(text, special=text in wished, normalized=text not in wished)
            declared[text] = (number, token, f"{folder}/added_tokens.json")

    in_order = [token for _, token, _ in sorted(declared.values(), key=lambda entry: entry[0])]
    flags = {text: token.__getstate__() for text, token in known.items()}
    new = [token for token in in_order if token.__getstate__() != flags.get(token.content)]
    for text in dict.fromkeys(wished):
        token = declared[text][1] if text in declared else known.get(text)
        if token is None:
            new.append(AddedToken(text, special=True, normalized=False))
        elif not token.special and text in names.values():
            new.append(AddedToken(**{**token.__getstate__(), "special": True}))
    backend.add_tokens(new)
    for text, (number, _, where) in declared.items():
        if (found := backend.token_to_id(text)) != number:
            raise TokenizerError(f"{where}: {text!r} has id {number}, but the vocabulary makes it {found}")
    return frozenset(token.content for token in (*known.values(), *backend.get_added_tokens_decoder().values()) if token.special)


def _extra_tokens(config: dict, where: str) -> list[str]:
    extras = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if not isinstance(extras, (list, dict)):
        raise TokenizerError(f"{where}: additional_special_tokens: expected a list, found {extras!r:.80}")
    extras = extras.values() if isinstance(extras, dict) else extras
    return [text for extra in extras if (text := _token_text(extra, f"{where}: additional_special_tokens"))]


def _declared_tokens(config: dict, where: str) -> Iterator[tuple[int, AddedToken]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise TokenizerError(f"{where}: expected an object of id: token, found {type(entries).__name__}")
    for key, entry in entries.items():
        text = _token_text(entry, f"{where}: {key}")
        if not text or not isinstance(entry, dict) or not key.isdecimal():
            raise TokenizerError(f'{where}: expected "id": {{"content": ...}}, found {key!r}: {entry!r:.80}')
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        yield int(key), AddedToken(text, **{flag: bool(entry[flag]) for flag in flags if flag in entry})


def _add_post_processor(backend: Tokenizer, names: dict[str, str], add_bos: Any, add_eos: Any) -> None:
    bos = [names["bos_token"]] if add_bos and "bos_token" in names else []
    eos = [names["eos_token"]] if add_eos and "eos_token" in names else []
    if bos or eos:
        special = [(text, backend.token_to_id(text)) for text in (*bos, *eos)]
        backend.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=special)


def _added_around(backend: Tokenizer, where: str) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    state = component_state(backend.post_processor)
    for step in [] if state is None else state.get("processors", [state]):
        if step["type"] == "TemplateProcessing":
            pieces = [piece.get("SpecialToken", {}).get("id") for piece in step["single"]]  # None stands for the text
            if pieces.count(None) != 1 or not set(pieces) - {None} <= set(step["special_tokens"]):
                raise TokenizerError(f"{where}: `single` needs one sequence, and every token in it in `special_tokens`")
            ids = [[] if piece is None else step["special_tokens"][piece]["ids"] for piece in pieces]
            text = pieces.index(None)
            before, after = sum(ids[:text], []) + before, after + sum(ids[text:], [])
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            before, after = [step["cls"][1], *before], [*after, step["sep"][1]]
        elif step["type"] != "ByteLevel":  # which only changes offsets
            raise TokenizerError(f"{where}: {step['type']} is not supported")
    for token_id in (*before, *after):
        if backend.id_to_token(token_id) is None:
            raise TokenizerError(f"{where}: adds the id {token_id}, which the vocabulary does not have")
    return before, after


def _find_template(folder: Path, config: dict) -> tuple[str, str] | None:
    """(template, the file it stands in), or None. chat_template.jinja wins over tokenizer_config.json, as in the reference; some
    older vision-language checkpoints have only chat_template.json."""
    if (folder / "chat_template.jinja").is_file():
        return _read_text(folder / "chat_template.jinja"), f"{folder}/chat_template.jinja"
    for name, content in (("tokenizer_config.json", config), ("chat_template.json", _read_object(folder / "chat_template.json"))):
        template, where = content.get("chat_template"), f"{folder}/{name}: chat_template"
        if isinstance(template, list):  # several templates, by name
            try:
                template = {entry["name"]: entry["template"] for entry in template}
            except (TypeError, KeyError):
                raise TokenizerError(f'{where}: expected a list of {{"name": ..., "template": ...}}') from None
        if isinstance(template, dict) and template:
            if "default" not in template and len(template) > 1:
                raise TokenizerError(f"{where}: none of the templates {sorted(map(str, template))} is named `default`")
            template = template.get("default", next(iter(template.values())))
        if not template:
            continue
        if not isinstance(template, str):
            raise TokenizerError(f"{where}: expected a string, found {type(template).__name__}")
        return template, where
    return None


# ---- tokenizer.model -----------------------------------------------------------------------------------------------------------

# The kinds of piece in a sentencepiece model (sentencepiece_model.proto, SentencePiece.Type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def _read_sentencepiece(file: Path, by_class: bool, legacy: bool) -> tuple[Tokenizer, dict[str, str]]:
    """A sentencepiece model as a backend, and its named tokens.

    The two libraries agree on the algorithms, so only tables move: BPE merges are all the ways to cut a piece into two pieces,
    those of the piece with the best score first. The sentencepiece library checks the file; how text is normalized, and which
    pieces its makers defined themselves, stands only in the file's protobuf.
    by_class: the reference has a class for this family, which takes pieces so defined as added tokens; otherwise they are kept
        whole after the space before the text was put in, as in sentencepiece itself.
    legacy: put that space before each text between added tokens, not only before the first.
    """
    import sentencepiece  # here, for the few checkpoints that need it

    data = file.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        fields = list(_protobuf_fields(data))
        pieces = [dict(_protobuf_fields(value)) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_protobuf_fields(dict(fields)[number])) for number in (2, 3))  # last: a cut file lacks them
        texts = [piece[1].decode("utf-8") for piece in pieces]
        scores = [struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0 for piece in pieces]
        kinds = [piece.get(3, NORMAL) for piece in pieces]
        unknown = processor.unk_id()
        texts[unknown]
    except (RuntimeError, TypeError, KeyError, IndexError, ValueError, AttributeError, struct.error):
        raise TokenizerError(f"{file}: not a sentencepiece model; download the file again") from None
    if (longest := max(map(len, texts))) > MAX_PIECE:  # every way to cut a piece in two is looked at
        raise TokenizerError(f"{file}: has a piece of {longest} characters; at most {MAX_PIECE} are supported")
    byte_fallback = bool(trainer.get(35, 0))
    whole = [] if by_class else [text for text, kind in zip(texts, kinds) if kind == USER_DEFINED]

    if (model_type := trainer.get(3, 1)) == 1:
        model = models.Unigram(list(zip(texts, scores)), unk_id=unknown, byte_fallback=byte_fallback)
    elif model_type == 2:
        model = models.BPE(
            {text: i for i, text in enumerate(texts)},
            _merges(texts, scores, kinds),
            unk_token=texts[unknown],
            fuse_unk=True,
            byte_fallback=byte_fallback,
            ignore_merges=bool(whole),
        )
    else:
        raise TokenizerError(f"{file}: a word or character model (type {model_type}) is not supported; only unigram and BPE are")
    backend = Tokenizer(model)

    prefix = bool(normalizer.get(3, 1))
    steps = [normalizers.Precompiled(normalizer[2])] if normalizer.get(2) else []
    if normalizer.get(4, 1):  # remove_extra_whitespaces: only spaces; newlines stay
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", "▁"))
    if prefix and legacy:  # Metaspace puts no space before a text that starts with one; sentencepiece does
        steps.append(normalizers.Replace(Regex(r"\A▁"), "▁▁"))
    backend.normalizer = normalizers.Sequence(steps)

    scheme = "always" if legacy else "first"
    steps = [pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)] if prefix else []
    if whole:
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if steps:
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = _sentencepiece_decoder(prefix)

    added = [(text, kind) for text, kind in zip(texts, kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text not in whole]
    backend.add_tokens([AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in added])
    ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "unk_token": unknown}
    return backend, {key: texts[i] for key, i in ids.items() if i >= 0}


def _merges(texts: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    ranks = {text: (-score, i) for i, (text, score, kind) in enumerate(zip(texts, scores, kinds)) if kind == NORMAL}
    ranked = []  # (rank of the whole, id of the left part, id of the right part, left, right)
    for whole, rank in ranks.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in ranks and right in ranks:
                ranked.append((rank, ranks[left][1], ranks[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _sentencepiece_decoder(prefix: bool):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of one protobuf message: an int for a varint, bytes for all else. Raises IndexError or ValueError."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("varint too long")

    while position < len(data):
        key = varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            yield number, varint()
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError("unknown wire type")
        size = varint() if wire_type == 2 else 8 if wire_type == 1 else 4
        if position + size > len(data):
            raise ValueError("cut short")
        yield number, data[position : position + size]
        position += size
