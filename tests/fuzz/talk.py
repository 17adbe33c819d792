"""Targets that people type: lines of a chat, saved chats, interruptions at any line of code, command lines, files of prompts."""

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st

import minipop
from minipop import PrefillPlan, Runner, SamplingParams, chat, generate, inspect, load_model, load_processor, load_tokenizer
from minipop.cli import clean_text
from minipop.session import ChatSession

from .core import Target, attempt, check_message
from .files import LAYER_TEXTS, PICTURES, RATIO_TEXTS, altered, damaged
from .oracle import WatchedRunner, compare
from .worlds import LAYERS, world

ENGINE_FOLDER = os.path.dirname(minipop.__file__) + os.sep


@functools.cache
def _loaded(family: str):
    folder = world(family).folder
    model = load_model(folder)
    processor = None if model.config.vision is None else load_processor(folder)
    return model, load_tokenizer(folder) if processor is None else processor.tokenizer, processor


def new_session(family: str = "llama", plan: PrefillPlan | None = None, columns: int = 160, **options) -> ChatSession:
    model, tokenizer, processor = _loaded(family)
    sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 6, **options})
    return ChatSession(WatchedRunner(model, plan or PrefillPlan.deepest(LAYERS), columns), tokenizer, processor, sampling=sampling)


def check_session(session: ChatSession) -> None:
    """History and cache are sound: the cache is what its calls make it, and the next question is answered or refused in one line."""
    runner = session.runner
    if runner.model.config.vision is None:
        runner.check()
    elif runner.cache.length:
        n, other = runner.cache.length, runner.replayed()
        assert other.token_ids() == runner.token_ids()
        compare(runner.cache.keys[..., :n, :], other.cache.keys[..., :n, :], 1e-4, "replayed keys")
    assert all(isinstance(e.answer, str) and e.answer.encode() is not None for e in session.exchanges)
    before = len(session.exchanges)
    answer, refusal = attempt(lambda: "".join(session.ask("and?")))
    assert len(session.exchanges) == before + (refusal is None)
    if refusal:
        assert "context holds" in str(refusal) or "refuses" in str(refusal), refusal
        return
    if not any(row.skip for row in runner.rows[0]) and runner.model.config.vision is None:
        n, fresh = runner.cache.length, Runner(runner.model, max_seq_len=runner.cache.max_seq_len)
        fresh.prefill(runner.token_ids())
        compare(runner.cache.values[..., :n, :], fresh.cache.values[..., :n, :], 1e-4, "one fresh prefill of the history")


# --- a chat's lines --------------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, str]:
    """Names that commands are given, by what they are."""
    (folder / "notes.txt").write_text("not a chat")
    (folder / "good.png").write_bytes(PICTURES[0])
    (folder / "cut.png").write_bytes(PICTURES[0][:40])
    (folder / "empty.png").write_bytes(b"")
    (folder / "link").symlink_to(folder / "nowhere")
    names = {name: str(folder / name) for name in ("a.json", "b c.json", "notes.txt", "good.png", "cut.png", "empty.png", "link", "no/x.json")}
    return names | {"folder": str(folder), "root": "/", "nothing": "", "nul": "a\0b", "long": "x" * 5000, "half": "\udcff", "user": "~nobody-at-all/x",
                    "address": "https://example.org/x.png", "device": "/dev/zero", "quoted": f"'{folder}/good.png'"}


@contextlib.contextmanager
def inside(folder: Path):
    """Names without a folder are files of this one, and not of wherever the test was started."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def check_chat(case) -> str:
    """Any lines: none raises, every mistake is one line on stderr, and the session goes on."""
    session = new_session(case["family"], columns=case["columns"], temperature=case["temperature"], seed=1)
    said, told = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        (folder := Path(temporary) / "files").mkdir()
        names = _files(folder)
        terminal = chat.Terminal(session, "tiny", [])
        with inside(folder):
            for name, text in case["lines"]:
                line = f"/{name} {names.get(text, text)}" if name in ("save", "load", "image") else f"/{name} {text}" if name else text
                terminal.handle(clean_text(line))
        left = sorted(path.name for path in folder.iterdir())
    assert not [name for name in left if name.startswith(".")], f"temporary files are left: {left}"
    for line in told.getvalue().split("\n"):
        if line.startswith("error: "):
            check_message(line)
    said.getvalue().encode()
    check_session(session)
    return "refused in part" if "error: " in told.getvalue() else "fine"


FILE_KINDS = ["a.json", "b c.json", "notes.txt", "good.png", "cut.png", "empty.png", "link", "no/x.json", "folder", "root", "nothing", "nul", "long",
              "half", "user", "address", "device", "quoted"]
LINES = st.one_of(
    st.tuples(st.just(""), st.text(max_size=12)), st.tuples(st.just(""), st.sampled_from(["hello", "x" * 300, "<|im_end|>", "\x1b[2J", "\0", "//a", "/", "\ud800"])),
    st.tuples(st.sampled_from(["save", "load", "image"]), st.sampled_from(FILE_KINDS)),
    st.tuples(st.just("plan"), st.one_of(LAYER_TEXTS, RATIO_TEXTS, st.sampled_from(["full", "", "1/3", "0", "1", "1.0", "2"]))),
    st.tuples(st.just("system"), st.sampled_from(["", "-", "Be brief.", "<|im_start|>", "\x1b]0;x\x07", "y" * 400])),
    st.tuples(st.sampled_from(["undo", "retry", "reset", "stats", "help", "plan"]), st.sampled_from(["", "x"])),
    st.tuples(st.text(alphabet="abc_/. \u00e9", max_size=5), st.just("")))
CHAT_CASES = st.fixed_dictionaries({"family": st.sampled_from(["llama", "llama", "qwen3_vl", "gemma3"]), "columns": st.sampled_from([60, 160, 400]),
                                    "temperature": st.sampled_from([0.0, 1.0]), "lines": st.lists(LINES, min_size=1, max_size=8)})


# --- interruptions ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted_at(line: int, exception: type[BaseException] = KeyboardInterrupt):
    """Raise where the engine's code executes its `line`-th line from here on, as a signal would. Gives a function: was it raised?"""
    left = [line]

    def in_engine(frame, event, argument):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise exception
        return in_engine

    def on_call(frame, event, argument):
        return in_engine if frame.f_code.co_filename.startswith(ENGINE_FOLDER) and left[0] > 0 else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: left[0] <= 0
    finally:
        sys.settrace(before)


def check_interrupt(case) -> str:
    """Ctrl-C between any two lines of the engine's code, in an answer, a retry or an undo: history and cache stay sound."""
    session = new_session(case["family"], PrefillPlan(LAYERS, case["skip"]), 300)
    hit = False
    for action, line in case["actions"]:
        before = [(e.question, e.answer) for e in session.exchanges]
        with interrupted_at(line) as was_hit:
            try:
                if action == "ask":
                    "".join(session.ask(f"question {line}"))
                elif action == "retry":
                    "".join(session.retry())
                elif action == "undo":
                    session.undo()
            except (KeyboardInterrupt, minipop.PromptError):
                pass
        hit = hit or was_hit()
        after = [(e.question, e.answer) for e in session.exchanges]
        if action == "ask":
            assert after[: len(before)] == before and len(after) <= len(before) + 1, "a stopped answer changed what was said before it"
        elif action == "retry" and before:
            assert after[:-1] == before[:-1] and after[-1][0] == before[-1][0], "a stopped retry lost the question"
        elif action == "undo":
            assert after in (before, before[:-1])
        session.runner.check()
    check_session(session)
    return "interrupted" if hit else "fine"


INTERRUPT_CASES = st.fixed_dictionaries({
    "family": st.sampled_from(["llama", "qwen3"]), "skip": st.sampled_from([[], [2], [0, 1], [0, 1, 2]]),
    "actions": st.lists(st.tuples(st.sampled_from(["ask", "ask", "retry", "undo"]), st.one_of(st.integers(1, 200), st.integers(1, 4000))),
                        min_size=1, max_size=4)})


# --- files of a chat and of prompts ----------------------------------------------------------------------------------------------------------

SAVED = {"minipop_chat": 1, "system": "Be brief.", "plan": {"num_layers": LAYERS, "skip": [2], "project_kv": True, "split_boundary": True, "kv": None},
         "sampling": {"temperature": 0.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 4, "seed": 3,
                      "stop_token_ids": []},
         "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def check_saved_chat(case) -> str:
    """A saved chat is refused and changes nothing, or the conversation goes on from it."""
    session = new_session()
    "".join(session.ask("earlier"))
    before = (session.messages, session.runner.token_ids(), session.runner.plan, session.sampling)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "chat.json"
        path.write_bytes(case)
        _, refusal = attempt(session.load, path)
    if refusal:
        assert (session.messages, session.runner.token_ids(), session.runner.plan, session.sampling) == before
        return "refused"
    if session.sampling.max_new_tokens > 20:
        session.sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
    check_session(session)
    return "fine"


def check_prompts(case) -> str:
    """`generate` on a damaged file of prompts: one line about it, or an answer to every prompt."""
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "prompts.jsonl", Path(temporary) / "answers.jsonl"
        source.write_bytes(case["input"])
        if case["output"] is not None:
            target.write_bytes(case["output"])
        code, _, err = call(generate.main, ["--ckpt", str(world("llama").folder), "--input", str(source), "--output", str(target), "--max-new-tokens", "2",
                                            "--batch-size", "2"])
        if code == 2:
            assert case["output"] is None or target.read_bytes() == case["output"], "a refused run changed the output"
            assert case["output"] is not None or not target.exists() or target.read_bytes() == b""
            return "refused"
        assert code == 0, (code, err)
        answers = [json.loads(line) for line in target.read_bytes().splitlines()]
        assert [answer["index"] for answer in answers] == list(range(len(answers)))
        assert all(0 < len(answer["token_ids"]) <= 2 for answer in answers[-1:])
    return "fine"


PROMPT_FILE = b'{"prompt": "hello", "id": 1}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "a"}\n'
PROMPT_LINES = st.lists(st.one_of(altered({"prompt": "hello", "id": "a"}), altered({"messages": [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]}]})), min_size=1, max_size=3).map(b"\n".join)
PROMPT_CASES = st.fixed_dictionaries({"input": st.one_of(damaged(PROMPT_FILE), PROMPT_LINES),
                                      "output": st.one_of(st.none(), st.none(), st.binary(max_size=20), st.just(b'{"index": 0, '), st.just(b""))})


# --- command lines ------------------------------------------------------------------------------------------------------------------------


def call(main, arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process: (exit code, stdout, stderr). A mistake is one line."""
    said, told = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.TextIOWrapper(io.BytesIO(), "utf-8", newline="")
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        try:
            code = main(arguments)
        except SystemExit as end:  # --help
            code = end.code or 0
        finally:
            torch.set_num_threads(threads)
            said.flush(), told.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in (said, told))
    assert code in (0, 2), (code, err)
    if code == 2:
        line, end = err[:-1], err[-1:]
        assert line.startswith("error: ") and end == "\n", err
        check_message(line)
    return code, out, err


COMMANDS = {"chat": chat.main, "inspect": inspect.main, "generate": generate.main}


def check_arguments(case) -> str:
    """Any arguments: exit code 0, or 2 with one line on stderr; never a traceback."""
    arguments = [str(world(case["family"]).folder) if text == "CKPT" else text for text in case["arguments"]]
    if case["command"] == "chat":
        arguments += ["--prompt", "hi", "--max-new-tokens", "2"]
    elif case["command"] == "generate":
        arguments += ["--input", "/dev/null", "--output", "-"]
    code, _, _ = call(COMMANDS[case["command"]], [text.replace("\0", "0") for text in arguments])
    return "refused" if code else "fine"


OPTIONS = ["--ckpt", "--dtype", "--threads", "--max-seq-len", "--full", "--ratio", "--skip-layers", "--plan", "--kv", "--temperature", "--top-k", "--top-p",
           "--min-p", "--repetition-penalty", "--seed", "--max-new-tokens", "--image", "--system", "--stop", "--prompt", "--help", "--lengths", "--ratios",
           "--batch-size", "--input", "--logprobs", "--nonsense", "-x", "--"]
NICE = {"--dtype": ["float32", "bfloat16"], "--threads": ["1"], "--max-seq-len": ["64", "512"], "--ratio": ["1/3", "0"], "--skip-layers": ["1", "0-2"],
        "--temperature": ["0", "1"], "--top-k": ["3"], "--top-p": ["0.5"], "--min-p": ["0.1"], "--repetition-penalty": ["1.2"], "--seed": ["4"],
        "--system": ["s"], "--stop": ["a"], "--lengths": ["1,8"], "--ratios": ["1/2"]}
WILD = st.one_of(st.text(alphabet=st.characters(exclude_characters="\0"), max_size=6), LAYER_TEXTS, RATIO_TEXTS,
                 st.sampled_from(["-1", "0", "1e400", "nan", "inf", "9" * 30, "/", "/dev/null", "CKPT", "", "\udcff", "\x1b[2J", "a\nb", "cuda:99", "meta"]))
PAIRS = st.one_of(st.sampled_from(list(NICE)).flatmap(lambda o: st.tuples(st.just(o), st.sampled_from(NICE[o])).map(list)),
                  st.tuples(st.sampled_from(OPTIONS), WILD).map(list), st.just(["--full"]))
ARGUMENT_CASES = st.fixed_dictionaries({
    "command": st.sampled_from(list(COMMANDS)), "family": st.sampled_from(["llama", "qwen3_vl"]),
    "arguments": st.lists(PAIRS, max_size=3).map(lambda pairs: ["--ckpt", "CKPT", *(text for pair in pairs for text in pair)])})


TALK = [
    Target("chat", "lines typed into a chat, its commands with files and words of every kind", CHAT_CASES, check_chat, 60, ("fine", "refused in part")),
    Target("interrupt", "Ctrl-C between any two lines of the engine's code, in answers, retries and undos", INTERRUPT_CASES, check_interrupt, 60,
           ("interrupted", "fine")),
    Target("saved chat", "saved conversations, for /load", altered(SAVED) | damaged(json.dumps(SAVED).encode()), check_saved_chat, 100),
    Target("prompts", "files of prompts and of earlier answers, for generate", PROMPT_CASES, check_prompts, 60),
    Target("arguments", "command lines of chat, generate and inspect", ARGUMENT_CASES, check_arguments, 100),
]
