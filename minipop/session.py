"""A conversation with a model: what was said, and the cache that remembers it. No terminal here; chat.py has that.

    session = ChatSession(Runner(model, plan), tokenizer)
    for piece in session.ask("What is the capital of France?"):
        print(piece, end="", flush=True)

Every question renders the whole conversation anew and then looks for the beginning of it that is in the cache already
(`shared_prefix`): the second question prefills only what is new, and so do a retry or a question after an undo. Under a pruning
plan (arXiv 2602.03295) rows stay as they were made: those of questions by the pruned prefill, those of answers by the full model.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from .errors import MinipopError, PlanError, PromptError
from .files import quote, read_json, write_text
from .inputs import ModelInputs, place_images
from .plan import PrefillPlan
from .processing import Processor, load_image
from .runner import Runner
from .sampling import SamplingParams
from .tokenizer import Tokenizer

SAVED_MARK = "minipop_chat"  # the key by which /save knows a file of its own; its value is the format's version


@dataclass
class Exchange:
    """A question and its answer. question: a message's content, a string or parts; start: the cache rows that came before it."""

    question: str | list[dict]
    plan: PrefillPlan
    answer: str = ""
    start: int = 0
    attempt: int = 0  # how often it was asked again


@dataclass(frozen=True)
class _Prompt:
    """A rendered conversation, its pictures in order, and where they are: (first token, number of tokens) each."""

    inputs: ModelInputs
    pictures: list[Any]
    places: tuple[tuple[int, int], ...]

    def rest(self, used: int) -> ModelInputs:
        """Without the first `used` tokens and the pictures in them."""
        ids, pixels, grid = self.inputs.token_ids[used:], self.inputs.pixel_values, self.inputs.image_grid_thw
        images = sum(first < used for first, _ in self.places)  # those that are left out
        if images == len(self.places):
            return ModelInputs(ids)
        if grid is None:
            return ModelInputs(ids, pixels[images:])  # [images, 3, S, S]
        return ModelInputs(ids, pixels[int(grid[:images].prod(1).sum()):], grid[images:])  # [patches, ...], [images, 3]


@dataclass(frozen=True)
class AnswerStats:
    """What one answer took. Times in seconds; first_token_s counts from the question, with rendering and pictures."""

    prompt_tokens: int  # the conversation up to where the answer begins
    new_tokens: int  # those of them that were prefilled; the others were in the cache
    plan: PrefillPlan
    answer_tokens: int
    first_token_s: float
    decode_s: float  # from the first token to the last
    ended: str  # "end of turn", "stop string", "max_new_tokens reached", "context full" or "interrupted"

    @property
    def tokens_per_s(self) -> float | None:
        return (self.answer_tokens - 1) / self.decode_s if self.answer_tokens > 1 and self.decode_s > 0 else None

    def __str__(self) -> str:
        reused = self.prompt_tokens - self.new_tokens
        parts = [f"{self.prompt_tokens} prompt tokens" + (f" ({self.new_tokens} new)" if reused else ""),
                 f"{len(self.plan.skip)} of {self.plan.num_layers} layers skipped{' (calibrated K/V)' if self.plan.kv else ''}"]
        if self.answer_tokens:
            rate = "" if self.tokens_per_s is None else f" at {self.tokens_per_s:.1f} tokens/s"
            parts += [f"first token {self.first_token_s:.2f} s", f"{self.answer_tokens} answer tokens{rate}"]
        return ", ".join(parts + ([] if self.ended == "end of turn" else [self.ended]))


class ChatSession:
    """One conversation, with one runner whose cache belongs to it.

    tokenizer: has a chat template (else TokenizerError). processor: for pictures, or None. system: the system message, or None.
    stop: strings that end an answer; they are not part of it. sampling: its seed is the first attempt's; every retry adds one.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, processor: Processor | None = None, *, system: str | None = None,
                 sampling: SamplingParams = SamplingParams(temperature=0.0), stop: Sequence[str] = ()):
        if not all(stop):
            raise PromptError("a stop string must not be empty")
        self.runner, self.tokenizer, self.processor = runner, tokenizer, processor
        self.system, self.sampling, self.stop = system, sampling, tuple(stop)
        self.kv = runner.plan.kv  # calibrated K/V that the chat was started with: plans may use them, or not
        self.exchanges: list[Exchange] = []
        self.log: list[AnswerStats] = []  # of all answers, also those taken back later
        self._pictures: list[Any] = []  # the pictures behind the cache's image rows come first in this list
        if not tokenizer.has_chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}])  # raises, with the reason

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, text: str, images: Sequence[Any] = ()) -> Iterator[str]:
        """Answer a message with its pictures (paths, or Pillow images); yields the text as it comes.

        Closing the iterator, or an exception such as KeyboardInterrupt, stops the answer: what was yielded by then stays in the
        history as what was said; if that is nothing, the question is taken back. `log[-1]` tells what it took. One answer at a
        time: use up or close an iterator before the next call.
        Raises PromptError, before anything changes, when the conversation does not fit; ImageError for an unusable picture.
        """
        if not text.strip() and not images:
            raise PromptError("the message is empty: write something")
        content = text if not images else [*map(self.picture, images), {"type": "text", "text": text}]
        return self._answer(Exchange(content, self.runner.plan))

    def retry(self) -> Iterator[str]:
        """Answer the last question again, with other random numbers, and under the plan that holds now."""
        if not self.exchanges:
            raise PromptError("there is nothing to retry yet")
        last = self.exchanges[-1]
        return self._answer(replace(last, plan=self.runner.plan, answer="", attempt=last.attempt + 1), replaces=last)

    def picture(self, source: Any) -> dict:
        """A picture as a part of a message. Raises PromptError if the model takes none, ImageError if it cannot be read."""
        if self.processor is None:
            raise PromptError("this model takes no pictures: use a vision-language checkpoint")
        if isinstance(source, dict):  # a part already
            return source
        if not isinstance(source, (str, os.PathLike)):
            return {"type": "image", "image": load_image(source), "path": None}
        name = os.path.expanduser(os.fspath(source))  # not a Path yet: it would make a file's name of https://...
        return {"type": "image", "image": load_image(name), "path": str(Path(name).absolute())}

    def _answer(self, exchange: Exchange, replaces: Exchange | None = None) -> Iterator[str]:
        clock = _Clock()
        earlier = self.exchanges[:-1] if replaces else self.exchanges
        question = {"role": "user", "content": exchange.question}
        prompt = self._render([*self._opening(), *self._turns(earlier), question])
        # Rows of the same question that another plan made are of no use to this one.
        limit = replaces.start if replaces and replaces.plan != exchange.plan else None
        keep, used = self._shared(prompt, limit)
        self._check_room(keep + len(prompt.inputs) - used)
        exchange.start = min(keep, replaces.start) if replaces else keep
        return self._run(exchange, replaces, prompt, keep, used, clock)

    def _run(self, exchange: Exchange, replaces: Exchange | None, prompt: "_Prompt", keep: int, used: int,
             clock: "_Clock") -> Iterator[str]:
        """Nothing has changed until the first piece is asked for; from then on the history is right however this ends."""
        finished = False
        if replaces:
            self.exchanges.pop()
        try:
            if keep < self.runner.cache.length:
                self.runner.rewind(keep)
            self._pictures = prompt.pictures
            for piece in self._stream(prompt.rest(used), exchange, clock):
                exchange.answer += piece
                yield piece
            finished = True
        finally:
            if finished or exchange.answer:
                self.exchanges.append(exchange)
            else:
                self._forget_rows(exchange)
                self.exchanges += [replaces] if replaces else []
            new = len(prompt.inputs) - used
            self.log.append(clock.stats(keep + new, new, exchange.plan))

    def _stream(self, prompt: ModelInputs, exchange: Exchange, clock: "_Clock") -> Iterator[str]:
        params, ends = self.sampling, {*self.runner.model.config.eos_token_ids, *self.sampling.stop_token_ids}
        if params.seed is not None:
            params = replace(params, seed=(params.seed + exchange.attempt) % 2**64)
        decoder, cutter = self.tokenizer.stream(), StopStrings(self.stop)
        token_id = None
        with closing(self.runner.generate(prompt, params)) as token_ids:
            for token_id in token_ids:
                clock.tick()
                if piece := cutter.push("" if token_id in ends else decoder.push(token_id)):
                    yield piece
                if cutter.found:
                    clock.ended = "stop string"
                    return
        if piece := cutter.push(decoder.flush()) + cutter.flush():
            yield piece
        full = self.runner.cache.length == self.runner.cache.max_seq_len
        clock.ended = "end of turn" if token_id in ends else "context full" if full else "max_new_tokens reached"

    def _render(self, messages: list[dict]) -> "_Prompt":
        """The conversation up to where the answer begins."""
        parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        inputs = self.processor(messages) if self.processor else ModelInputs(self.tokenizer.apply_chat_template(messages))
        model = self.runner.model
        rows = model.image_counts(inputs.pixel_values, inputs.image_grid_thw)
        return _Prompt(inputs, pictures, place_images(inputs.token_ids, model.config.image_token_id, rows))

    def _check_room(self, needed: int) -> None:
        room, largest = self.runner.cache.max_seq_len, self.runner.model.config.max_position_embeddings
        if needed > room:
            more = f", or start with a larger --max-seq-len (this model allows {largest})" if room < largest else ""
            raise PromptError(f"with this message the conversation has {needed} tokens, but the context holds {room}: shorten "
                              f"the message, take back earlier ones (/undo, /reset){more}")

    # --- the cache ---------------------------------------------------------------------------------------------------

    def _shared(self, prompt: "_Prompt", limit: int | None = None) -> tuple[int, int]:
        """(cache rows to keep, prompt tokens they stand for). Never inside a picture, nor beyond one that is not the same."""
        inside = {token for first, count in prompt.places for token in range(first + 1, first + count)}
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(prompt.pictures, self._pictures)))
        end = len(prompt.inputs) - 1 if same == len(prompt.places) else prompt.places[same][0]  # at least one token is left
        return shared_prefix(self.runner.token_ids()[:limit], prompt.inputs.token_ids.tolist(), self._spell,
                             lambda token: token <= end and token not in inside)

    def _spell(self, token_id: int) -> str | None:
        """The text of a token, as its vocabulary writes it; None for one that is no text (a special token, a single byte)."""
        token = None if token_id in self.tokenizer.special_ids else self.tokenizer.id_to_token(token_id)
        return None if token is None or (token.startswith("<0x") and len(token) == 6) else token

    def _forget_rows(self, exchange: Exchange) -> None:
        self.runner.rewind(min(exchange.start, self.runner.cache.length))

    # --- the conversation ----------------------------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict]:
        """The conversation in the form chat templates take."""
        return [*self._opening(), *self._turns(self.exchanges)]

    def _opening(self) -> list[dict]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _turns(self, exchanges: list[Exchange]) -> list[dict]:
        pairs = [(("user", exchange.question), ("assistant", exchange.answer)) for exchange in exchanges]
        return [{"role": role, "content": content} for pair in pairs for role, content in pair]

    def undo(self) -> Exchange:
        """Take back the last question and its answer, from history and cache. Raises PromptError if there is none."""
        if not self.exchanges:
            raise PromptError("there is nothing to take back yet")
        exchange = self.exchanges.pop()
        self._forget_rows(exchange)
        return exchange

    def reset(self) -> None:
        """Begin anew: no messages, an empty cache. The system message, plan and sampling stay."""
        self.exchanges.clear()
        self.runner.reset()

    def set_system(self, text: str | None) -> None:
        """Change the system message. The conversation goes on as if it had always been there: the next question prefills all."""
        self.system = text

    def set_plan(self, plan: PrefillPlan) -> None:
        """Use another plan for the questions to come (and for `retry`); rows that are in the cache stay as they were made."""
        if plan.num_layers != self.runner.plan.num_layers:
            raise PlanError(f"the plan is for {plan.num_layers} layers, the model has {self.runner.plan.num_layers}")
        if plan.kv not in (None, self.kv):
            raise PlanError(f"the plan uses the calibrated K/V in {plan.kv}: start the chat with --kv {plan.kv}")
        before, self.runner.plan = self.runner.plan, plan
        try:
            self.runner.stacked_kv()  # raises PlanError where the calibrated K/V are for another cut
        except PlanError:
            self.runner.plan = before
            raise

    # --- files -----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write messages, system message, plan and sampling as JSON. Overwrites only a file that it wrote itself."""
        path = _path(path)
        if os.path.lexists(path):
            try:
                ours = SAVED_MARK in read_json(path, PromptError)
            except PromptError:
                ours = False
            if not ours:
                raise PromptError(f"{path} is there already and is no saved chat: choose another name")
        plan = {**asdict(self.runner.plan), "skip": sorted(self.runner.plan.skip)}
        values = {SAVED_MARK: 1, "system": self.system, "plan": plan, "sampling": asdict(self.sampling),
                  "messages": [{**message, "content": _to_json(message["content"])} for message in self._turns(self.exchanges)]}
        write_text(path, json.dumps(values, indent=1) + "\n")

    def load(self, path: str | Path) -> None:
        """Go on with a saved conversation, its plan and its sampling. Raises, and changes nothing, if the file is not one.

        Its answers are prompt text now: the next question prefills them by the plan, like everything else.
        """
        path = _path(path)
        values = read_json(path, PromptError)
        if set(values) != {SAVED_MARK, "system", "plan", "sampling", "messages"} or values[SAVED_MARK] != 1:
            raise PromptError(f"{path} is not a chat that this version of minipop saved")
        try:
            plan = PrefillPlan(**values["plan"])
            sampling = SamplingParams(**values["sampling"])
            system = None if values["system"] is None else _text(values["system"], "system")
            exchanges = [Exchange(question, plan, answer) for question, answer in self._pairs(values["messages"])]
        except MinipopError as problem:
            raise PromptError(f"{path}: {problem}") from None
        except TypeError as problem:  # fields that plan or sampling do not have, or must have
            raise PromptError(f"{path}: {quote(str(problem))}") from None
        self.set_plan(plan)  # the last thing that can fail
        self.reset()
        self.system, self.sampling, self.exchanges = system, sampling, exchanges

    def _pairs(self, messages: Any) -> list[tuple[str | list[dict], str]]:
        """Saved messages -> (question, answer) pairs."""
        if not isinstance(messages, list) or len(messages) % 2:
            raise PromptError("messages must be a list of questions and answers in turn")
        contents = []
        for number, message in enumerate(messages):
            role = ("user", "assistant")[number % 2]
            if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] != role:
                raise PromptError(f'message {number} must be {{"role": "{role}", "content": ...}}')
            contents.append(self._from_json(message["content"], f"message {number}", parts=role == "user"))
        return list(zip(contents[::2], contents[1::2]))

    def _from_json(self, content: Any, where: str, parts: bool) -> str | list[dict]:
        if not parts or not isinstance(content, list):
            return _text(content, where)
        read = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and set(part) == {"type", "text"}:
                read.append({"type": "text", "text": _text(part["text"], where)})
            elif kind == "image" and set(part) == {"type", "path"}:
                read.append(self.picture(_text(part["path"], where)))
            else:
                raise PromptError(f"{where} has a part that is neither text nor the path of a picture")
        return read


# --- the parts --------------------------------------------------------------------------------------------------------


def shared_prefix(cached: Sequence[int], prompt: Sequence[int], spell: Callable[[int], str | None],
                  may_cut: Callable[[int], bool]) -> tuple[int, int]:
    """The longest beginning of the cache that says the same as a prompt's beginning: (its rows, the prompt tokens they replace).

    The ids need not be the same: a model may write "Par" "is" where its tokenizer has one token for "Paris". Rows of the answer
    are worth keeping then too, so ids that differ are compared by what they spell, and a cut is made where both have read the
    same text. spell(id) is None for tokens that equal nothing but themselves; may_cut(n): may the prompt be cut after n tokens?
    """
    i = j = kept = replaced = 0
    ours = theirs = ""  # what the cache and the prompt say since their last common boundary
    while ours.startswith(theirs) or theirs.startswith(ours):
        if ours == theirs:
            ours = theirs = ""
            if may_cut(j):
                kept, replaced = i, j
            if i < len(cached) and j < len(prompt) and cached[i] == prompt[j]:
                i, j = i + 1, j + 1
                continue
        if len(ours) <= len(theirs):  # whoever has said less says its next token
            text = spell(cached[i]) if i < len(cached) else None
            ours, i = ours + (text or ""), i + 1
        else:
            text = spell(prompt[j]) if j < len(prompt) else None
            theirs, j = theirs + (text or ""), j + 1
        if not text:
            break
    return kept, replaced


class StopStrings:
    """Text in pieces, cut before the first stop string. What might be the beginning of one is held back until it is known."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.found = stops, "", False

    def push(self, text: str) -> str:
        """The text that became certain; nothing more once `found`."""
        if self.found:
            return ""
        self.held += text
        starts = [start for stop in self.stops if (start := self.held.find(stop)) >= 0]
        if starts:
            self.found = True
            return self.held[: min(starts)]
        open_end = max((n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)
        certain = len(self.held) - open_end
        text, self.held = self.held[:certain], self.held[certain:]
        return text

    def flush(self) -> str:
        """At the end of the text: what was held back for nothing."""
        text, self.held = "" if self.found else self.held, ""
        return text


class _Clock:
    """When the question came, when the first and the last token."""

    def __init__(self):
        self.start = self.first = self.last = time.perf_counter()
        self.tokens, self.ended = 0, "interrupted"

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.last if self.tokens == 0 else self.first
        self.tokens += 1

    def stats(self, prompt_tokens: int, new_tokens: int, plan: PrefillPlan) -> AnswerStats:
        first_token, decode = self.first - self.start, self.last - self.first
        return AnswerStats(prompt_tokens, new_tokens, plan, self.tokens, first_token, decode, self.ended)


def _to_json(content: str | list[dict]) -> str | list[dict]:
    """A message's content with pictures by their paths."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" and part["path"] is None for part in content):
        raise PromptError("a picture that is in no file cannot be saved")
    return [{"type": "image", "path": part["path"]} if part["type"] == "image" else part for part in content]


def _path(name: str | os.PathLike) -> Path:
    """A path that the user typed, with ~ for the home folder."""
    name = os.path.expanduser(os.fspath(name))
    if "\0" in name:
        raise PromptError(f"{name!r} is not the name of a file")
    return Path(name)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where} must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where} has a lone surrogate: that is no text") from None
    return value
