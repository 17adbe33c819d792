"""Text to token ids and back, and chats to token ids.

    the files -> load_tokenizer -> Tokenizer.encode, .decode, .stream, .apply_chat_template

Two promises shape this file.

1. The ids are the reference's. The work (normalizing, splitting, merging) is done by the `tokenizers` library, the one that
   drives Hugging Face's AutoTokenizer, and text without control tokens reaches it just as AutoTokenizer would pass it on.
2. User text never becomes a control token. `<|im_end|>` in a message is ten characters of text, not the end of a turn. But a chat
   template mixes its own control tokens and the users' words in one string. So the words are marked before: a guard, an invisible
   character, splits each control token in them. A control token that is whole in the rendered string was written by the
   template. Encoding takes the guards out again.

`tokenizer_files` reads the files, `chat_template` runs the templates.
"""

from __future__ import annotations

import codecs
import functools
import operator
import re
from pathlib import Path
from typing import Any, Iterable, Iterator

from .chat_template import ChatTemplate, Refusal
from .errors import TokenizerError
from .tokenizer_files import TokenizerFiles, component_state, has_tokenizer, native_errors, no_garbage_collection, read_tokenizer_files

__all__ = ["StreamDecoder", "Tokenizer", "has_tokenizer", "load_token_ids", "load_tokenizer"]

ROLES = ("system", "user", "assistant")
_KEYWORDS = (*ROLES, "text", "image")  # words of a conversation that templates compare, so they are left as they are
# Tokens that end an assistant's turn. A checkpoint's eos_token is often another one: the end of a document.
TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_BRACKETED = re.compile(r"<\S+>|\[\S+\]")


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    path: the checkpoint's folder. Read are tokenizer.json, or tokenizer.model when there is none, and, where they exist,
    tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja, chat_template.json, and config.json
    (for the size of the model's vocabulary, which can be padded beyond the tokenizer's).
    Raises TokenizerError for files that are missing or malformed, by name and field.
    """
    with no_garbage_collection():
        return Tokenizer(read_tokenizer_files(path))


def load_token_ids(path) -> tuple[int, tuple[int, ...]]:
    """`num_token_ids` and `eos_token_ids` of the tokenizer in a folder, for a fraction of the memory that reading all of it takes."""
    with no_garbage_collection():
        tokenizer = Tokenizer(read_tokenizer_files(path, merges=False))
    return tokenizer.num_token_ids, tokenizer.eos_token_ids


class Tokenizer:
    """Made by `load_tokenizer`.

    Attributes
        bos_token_id, pad_token_id: int or None.
        eos_token_ids: tuple; the configured eos token, then the turn-end tokens (<|im_end|>, ...) that are special tokens here.
        num_token_ids: the largest id the tokenizer knows, plus one.
        special_ids: frozenset, the ids of the special tokens; `decode` leaves them out.
        adds_bos: whether `encode` puts BOS first. has_chat_template: whether the checkpoint brings a chat template.
        chat_template: the template's source, or None.
    """

    def __init__(self, files: TokenizerFiles):
        backend = files.backend
        self._backend, self._folder = backend, files.folder
        self.num_token_ids: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._id_limit = max(self.num_token_ids, files.vocab_size)
        self.special_ids = frozenset(map(backend.token_to_id, files.special))
        self._before, self._after = files.before, files.after

        self._names = dict(files.names)
        if "bos_token" not in self._names and files.before:
            self._names["bos_token"] = backend.id_to_token(files.before[0])
        ids = {key: backend.token_to_id(text) for key, text in self._names.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.pad_token_id: int | None = ids.get("pad_token")
        self.adds_bos: bool = bool(files.before) and files.before[0] == self.bos_token_id
        ends = [ids.get("eos_token"), *(backend.token_to_id(text) for text in TURN_END_TOKENS if text in files.special)]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))

        self._token_bytes = _TokenBytes(component_state(backend.decoder), f"{files.folder}/tokenizer.json: decoder")
        self.chat_template: str | None = None if files.template is None else files.template[0]
        self._template = None if files.template is None else ChatTemplate(*files.template)
        # Control tokens: the special tokens, and added tokens in brackets that the template writes (Qwen3's <think>). Other added
        # tokens, such as Gemma's "\n\n", are text.
        literals = self._template.literals if self._template else ""
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        markers = {text for text in added if _BRACKETED.fullmatch(text) and text in literals}
        # No method of this object: it would hold itself, and a large tokenizer's memory would wait for the garbage collector.
        normalize = None if backend.normalizer is None else functools.partial(_normalize, backend, self._folder)
        self._special = _ControlTokens(files.special, normalize)
        self._controls = _ControlTokens(files.special | markers, normalize)

    def __repr__(self) -> str:
        return f"Tokenizer({str(self._folder)!r}, num_token_ids={self.num_token_ids})"

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġhello`, `▁hello`, `<0xF0>`); None for an id the tokenizer does not know."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.num_token_ids else None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The ids of plain text. What looks like a control token stays text.

        add_bos: add what the tokenizer's configuration puts around a text: one BOS or nothing (and EOS if it says so).
        Raises TokenizerError for text that cannot be encoded.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"encode takes a string, not {type(text).__name__}")
        ids = self.encode_rendered(self._controls.guard(text))
        return [*self._before, *ids, *self._after] if add_bos else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD; ids that only pad the model's vocabulary add nothing.

        Raises TokenizerError for ids outside the vocabulary.
        """
        stream = self.stream(skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.flush()

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """An incremental decoder: push ids one by one, get whole characters."""
        return StreamDecoder(self, skip_special)

    # ---- chats

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True, **extra) -> list[int]:
        """The ids of a conversation: `encode_rendered(render_chat(messages, add_generation_prompt, **extra))`."""
        return self.encode_rendered(self.render_chat(messages, add_generation_prompt, **extra))

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = True, **extra) -> str:
        """A conversation as the chat template writes it, with guards in what users typed. For `encode_rendered`.

        messages: dicts with `role` (system, user, assistant) and `content`: a string, or a list of parts, {"type": "image"} and
            {"type": "text", "text": ...}. A template that only knows strings gets the texts of the parts joined.
        add_generation_prompt: end with the header that makes the model answer.
        extra: more variables for the template, such as enable_thinking=False.

        If the template refuses system messages (Gemma-2), the system text and a blank line go before the first user message.
        In assistant messages only special tokens are guarded: other markers (<think>) are the model's own, and templates look for
        them.
        Raises TokenizerError: no template, a malformed conversation, or one the template refuses (in its own words).
        """
        if self._template is None:
            raise TokenizerError(f"{self._folder}: no chat template; use a chat checkpoint, or encode() for plain completion")
        messages = self._checked(messages)
        variables = {key: _guarded(value, self._controls) for key, value in extra.items()}
        try:
            rendered = self._render(messages, add_generation_prompt, variables)
        except Refusal:
            if messages[0]["role"] != "system" or self._takes_system:
                raise
            rendered = self._render(_fold_system(messages), add_generation_prompt, variables)
        if all(message["role"] == "system" for message in messages):  # Gemma-3's template drops them when no user message follows
            texts = [text for message in messages for text in _texts(message["content"])]
            if not all(text.strip() in rendered for text in texts):
                raise TokenizerError("the chat template drops the system text when no user message follows; add a user message")
        return rendered

    def encode_rendered(self, rendered: str) -> list[int]:
        """The ids of a rendered chat: the template's control tokens by id, what users typed as text; no BOS is added."""
        text, guards = _without_guards(rendered)
        _check_unicode(text)
        # A guard that keeps no control token apart (the one after a final "<", say) is ignored, so that the text around it is
        # encoded as one. At the others the text is cut, and no piece holds the control token that was typed.
        cuts = [guard for guard in guards if self._controls.covers(text, guard)]
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)]):
            ids += self._encode_piece(text[start:end], first=start == 0)
        return ids

    def count_special(self, rendered: str, token: str) -> int:
        """How often the template wrote a control token into a rendered chat. The same characters typed by a user do not count."""
        self._check_control(token)
        return rendered.count(token)

    def replace_special(self, rendered: str, token: str, replacements: list[str]) -> str:
        """A rendered chat in which each control token that the template wrote is replaced by the next of the replacements."""
        self._check_control(token)
        first, *rest = rendered.split(token)
        if len(rest) != len(replacements):
            raise TokenizerError(f"the chat has {len(rest)} {token} but {len(replacements)} replacements are given")
        return first + "".join(new + text for new, text in zip(replacements, rest))

    # ---- inside

    def _ids(self, text: str) -> list[int]:
        with native_errors(f"{self._folder}: the text cannot be encoded"):  # say, a word when there is no unknown token
            return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_piece(self, piece: str, first: bool) -> list[int]:
        if first:
            return self._ids(piece)
        # A later piece goes on in the middle of a word, but sentencepiece tokenizers put a space before all they encode. Behind a
        # newline they put it before the newline, which is then taken off again.
        newline, ids = self._ids("\n"), self._ids("\n" + piece)
        return ids[len(newline) :] if newline and ids[: len(newline)] == newline else self._ids(piece)

    def _checked(self, messages: Any) -> list[dict]:
        """The conversation as the template gets it. Raises TokenizerError for what no template should see."""
        if not isinstance(messages, (list, tuple)):
            raise TokenizerError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
        if not messages:
            raise TokenizerError("the conversation is empty; give at least one message")
        checked = []
        for i, message in enumerate(messages):
            if not isinstance(message, dict):
                raise TokenizerError(f"message {i}: expected a dict with role and content, found {type(message).__name__}")
            for key in ("role", "content"):
                if message.get(key) is None:
                    raise TokenizerError(f"message {i}: `{key}` is missing" + (" (it is null)" if key in message else ""))
            if message["role"] not in ROLES:
                raise TokenizerError(f"message {i}: role {message['role']!r:.80} is not supported; use one of {', '.join(ROLES)}")
            message = {key: value for key, value in message.items() if value is not None}
            message["content"] = self._checked_content(message["content"], f"message {i}: content")
            controls = self._special if message["role"] == "assistant" else self._controls
            checked.append(_guarded(message, controls))
        return checked

    def _checked_content(self, content: Any, where: str) -> str | list[dict]:
        if isinstance(content, str):
            return content
        if not isinstance(content, (list, tuple)):
            raise TokenizerError(f"{where}: expected a string or a list of parts, found {type(content).__name__}")
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "image"):
                raise TokenizerError(f'{where}: part {j}: expected {{"type": "text", "text": ...}} or {{"type": "image"}}')
            if kind == "text" and not isinstance(part.get("text"), str):
                raise TokenizerError(f"{where}: part {j}: `text` must be a string")
        if self._takes_parts:
            return list(content)
        if any(part["type"] == "image" for part in content):
            raise TokenizerError(f"{where}: this checkpoint's chat template takes text only, but the message has an image")
        return "".join(part["text"] for part in content)

    def _render(self, messages: list[dict], add_generation_prompt: bool, variables: dict) -> str:
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render({"tools": None, "documents": None, **self._names, **variables, **fixed})

    def _probe(self, *messages: dict) -> str | None:
        """What the template makes of a made-up conversation; None if it refuses it or fails."""
        try:
            return self._render(list(messages), True, {})
        except TokenizerError:
            return None

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template knows content that is a list. One that does not fails, or prints the list as Python would."""
        rendered = self._probe({"role": "user", "content": [{"type": "text", "text": "probe7"}]}) or ""
        return "probe7" in rendered and "'probe7'" not in rendered and '"probe7"' not in rendered

    @functools.cached_property
    def _takes_system(self) -> bool:
        user = {"role": "user", "content": "probe"}
        return self._probe(user) is None or self._probe({"role": "system", "content": "probe"}, user) is not None

    def _check_control(self, token: str) -> None:
        if token not in self._controls.tokens:
            raise TokenizerError(f"{token!r} is no control token here, so one typed by a user cannot be told from the template's")


def _normalize(backend, folder: Path, text: str) -> str:
    with native_errors(f"{folder}: the text cannot be normalized"):
        return backend.normalizer.normalize_str(text)


def _texts(content: str | list[dict]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _fold_system(messages: list[dict]) -> list[dict]:
    """The conversation with its system text put before the text of the first user message, a blank line between."""
    system, *rest = messages
    i = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if i is None:
        raise TokenizerError("the chat template takes no system message, and there is no user message to put its text into")
    text, content = "".join(_texts(system["content"])) + "\n\n", rest[i]["content"]
    content = text + content if isinstance(content, str) else [{"type": "text", "text": text}, *content]
    return [*rest[:i], {**rest[i], "content": content}, *rest[i + 1 :]]


# ---- guards --------------------------------------------------------------------------------------------------------------------

# Two Unicode noncharacters: fine in a Python string, never assigned, meant for a program's own use. One that stands in the text
# itself is escaped, so that nothing typed can forge a guard and nothing typed is lost.
_GUARD, _ESCAPE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"[{_GUARD}{_ESCAPE}]")
_GUARD_OR_ESCAPED = re.compile(f"{_ESCAPE}([{_GUARD}{_ESCAPE}])|{_GUARD}")


class _ControlTokens:
    """A set of control tokens, found in text and guarded there. (Gemma has 6,400: a set beats one large regular expression.)"""

    def __init__(self, tokens: Iterable[str], normalize=None):
        """normalize: the tokenizer's normalizer of text, or None."""
        self.tokens = frozenset(tokens) - {""}
        self._by_first: dict[str, list[str]] = {}
        for token in self.tokens:
            self._by_first.setdefault(token[0], []).append(token)
        self._lengths = {first: sorted({len(token) for token in group}) for first, group in self._by_first.items()}
        self._longest = max(map(len, self.tokens), default=0)
        self._firsts = re.compile("[" + "".join(map(re.escape, self._by_first)) + "]" if self.tokens else "(?!)")
        self._normalize = normalize
        self._normalized = _ControlTokens(self.tokens | set(map(normalize, self.tokens))) if normalize else None

    def guard(self, text: str) -> str:
        """The text with a guard inside each control token, and one at its end if what follows could complete a control token.

        Raises TokenizerError for text that cannot be kept apart from a control token.
        """
        _check_unicode(text)
        text = _MARK.sub(_ESCAPE + r"\g<0>", text)
        parts, last = [], 0
        for start in self._starts(text):
            if text[start] in self.tokens:
                raise TokenizerError(f"{text[start]!r} is a control token of this tokenizer and cannot be part of a text")
            parts.append(text[last : start + 1])
            last = start + 1
        guarded = _GUARD.join([*parts, text[last:]]) + (_GUARD if self._is_open(text) else "")
        if self._normalized and any(True for _ in self._normalized._starts(self._normalize(guarded))):
            raise TokenizerError("the text turns into a control token when the tokenizer normalizes it (full-width letters?)")
        return guarded

    def covers(self, text: str, cut: int) -> bool:
        """Whether a control token begins before the cut and ends after it."""
        for i in range(max(0, cut - self._longest + 1), cut):
            if any(i + length > cut and text[i : i + length] in self.tokens for length in self._lengths.get(text[i], ())):
                return True
        return False

    def _starts(self, text: str) -> Iterator[int]:
        """The places where a control token begins."""
        for match in self._firsts.finditer(text):
            i = match.start()
            if any(text[i : i + length] in self.tokens for length in self._lengths[text[i]]):
                yield i

    def _is_open(self, text: str) -> bool:
        """Whether the text ends with the beginning of a control token."""
        for i in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(len(token) > len(text) - i and token.startswith(text[i:]) for token in self._by_first.get(text[i], ())):
                return True
        return False


def _guarded(value: Any, controls: _ControlTokens) -> Any:
    """Plain data for the template: its strings guarded, what is no plain data (a PIL image) replaced by the name of its type."""
    if isinstance(value, str):
        value = str.__str__(value)
        return value if value in _KEYWORDS else controls.guard(value)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, dict):
        return {str(key): _guarded(item, controls) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guarded(item, controls) for item in value]
    return f"<{type(value).__name__}>"


def _without_guards(rendered: str) -> tuple[str, list[int]]:
    """The text without guards, and where in it they stood."""
    parts, guards, length, last = [], [], 0, 0
    for mark in _GUARD_OR_ESCAPED.finditer(rendered):
        parts.append(rendered[last : mark.start()] + (mark[1] or ""))
        length += len(parts[-1])
        last = mark.end()
        if mark[1] is None:
            guards.append(length)
    return "".join([*parts, rendered[last:]]), guards


def _check_unicode(text: str) -> None:
    if (surrogate := re.search("[\ud800-\udfff]", text)) is not None:
        where = surrogate.start()
        raise TokenizerError(f"the text has a lone surrogate at character {where}; decode your input with errors='replace'")


# ---- decoding ------------------------------------------------------------------------------------------------------------------


class StreamDecoder:
    """Token ids to text as they come; made by `Tokenizer.stream`. The joined results equal `Tokenizer.decode` of all the ids.

    A character can be spread over several tokens (byte-level F0 9F, then 98 80). Its bytes are held back until it is whole, so
    half a character is never shown. These bytes, three at most, and whether the text has begun are all the state: a token costs
    the same however long the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._start()

    def _start(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._to_strip = self._tokenizer._token_bytes.strip_count

    def push(self, token_id: int) -> str:
        """The text that is certain with this token: mostly the token's, sometimes none. Raises TokenizerError for a bad id."""
        tokenizer = self._tokenizer
        try:
            token_id = operator.index(token_id)
        except TypeError:
            raise TokenizerError(f"token ids are integers, not {type(token_id).__name__}") from None
        if not 0 <= token_id < tokenizer._id_limit:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {tokenizer._id_limit}")
        token = tokenizer.id_to_token(token_id)
        if token is None or (self._skip_special and token_id in tokenizer.special_ids):
            return ""
        data = tokenizer._token_bytes(token, self._first)
        self._first = False
        return self._strip(self._utf8.decode(data))

    def flush(self) -> str:
        """The rest: U+FFFD if the ids end in the middle of a character. The decoder is as new afterwards."""
        text = self._strip(self._utf8.decode(b"", final=True))
        self._start()
        return text

    def _strip(self, text: str) -> str:
        """Take off the space that sentencepiece put before the text."""
        while text and self._to_strip:
            if text[0] != self._tokenizer._token_bytes.strip_char:
                self._to_strip = 0
            else:
                text, self._to_strip = text[1:], self._to_strip - 1
        return text


def _byte_level_chars() -> dict[str, int]:
    """GPT-2's spelling of bytes as visible characters: printable Latin-1 stands for itself, the others come from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_chars()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORDPIECE_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class _TokenBytes:
    """The bytes that a token adds to the text, by the steps of the decoder in tokenizer.json.

    Bytes, not text, let a stream tell an unfinished character from a real U+FFFD, and keep good characters whole next to bad
    bytes. (The library's ByteFallback makes U+FFFDs of a whole run of byte tokens when one of them is bad.)
    """

    def __init__(self, decoder: dict | None, where: str):
        """decoder: its JSON; None for words with spaces between. Raises TokenizerError for a step not known here."""
        self.words = decoder is None
        self.strip_char, self.strip_count = " ", 0  # at the start of the whole text
        self.steps: list[dict] = []
        fused = False  # from here on, steps see the whole text
        for step in _flat(decoder):
            kind = step["type"]
            if kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["stop"] == 0:
                self.strip_char, self.strip_count = step["content"], step["start"]
            elif kind == "Replace" and "String" not in step["pattern"]:
                raise TokenizerError(f"{where}: Replace by a regular expression is not supported")
            elif kind in ("Replace", "ByteFallback", "ByteLevel", "Metaspace", "WordPiece") or (kind == "Strip" and not fused):
                self.steps.append(step)
            else:
                raise TokenizerError(f"{where}: {kind} is not supported here")

    def __call__(self, token: str, first: bool) -> bytes:
        """first: no token that is shown came before this one."""
        if self.words:
            token = token if first else " " + token
        for step in self.steps:
            kind = step["type"]
            if kind == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            elif kind == "ByteFallback":
                if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
                    return bytes([int(byte[1], 16)])
            elif kind == "ByteLevel":
                if all(char in _BYTE_LEVEL for char in token):
                    return bytes([_BYTE_LEVEL[char] for char in token])
            elif kind == "Metaspace":
                token = token.replace(step["replacement"], "" if first and step["prepend_scheme"] != "never" else " ")
            elif kind == "WordPiece":
                if not first:
                    token = token.removeprefix(step["prefix"]) if token.startswith(step["prefix"]) else " " + token
                for before, after in _WORDPIECE_CLEANUP if step["cleanup"] else ():
                    token = token.replace(before, after)
            else:  # Strip
                start = min(len(token) - len(token.lstrip(step["content"])), step["start"])
                stop = min(len(token) - len(token.rstrip(step["content"])), step["stop"])
                token = token[start : max(start, len(token) - stop)]
        return token.encode("utf-8")


def _flat(decoder: dict | None) -> Iterator[dict]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder
