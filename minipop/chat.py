"""Chat with a checkpoint under Prefill-Only Pruning (arXiv 2602.03295).

    python -m minipop.chat                                  a small model that is fetched when it is not there
    python -m minipop.chat --ckpt path/to/checkpoint        a folder, or org/model
    python -m minipop.chat --prompt "Why is the sky blue?"  one answer; so does `echo ... | python -m minipop.chat`

Answers go to stdout, everything else to stderr. Commands start with a slash: /help lists them. Ctrl-C stops an answer; what it
said by then stays in the conversation (/undo takes it back). Ctrl-C twice at the prompt leaves, as do /quit and the end of input.

Here is the terminal; the conversation itself is session.py.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .cli import (Parser, add_model_arguments, add_parallel_argument, add_plan_arguments, add_sampling_arguments, cache_bytes,
                  clean_text, fail, load_from, memory_errors, parse_plan, plan_from, run, runner_from, sampling_from, show_bytes)
from .compiled import compile_decoding
from .errors import CheckpointError, MinipopError, PromptError
from .parallel import join
from .session import ChatSession

DEFAULT_MODEL = "smollm2-135m-instruct"
HISTORY_FILE = "~/.minipop_history"
HISTORY_LINES = 1000
HELP = """\
/help          this list
/reset         begin a new conversation
/undo          take back the last question and its answer
/retry         answer the last question again: another answer at a temperature above 0, or under another plan
/plan          show the plan; /plan full, /plan 1/3, /plan 0.25, /plan 20-29, /plan FILE.json: another one
               from the next question on (what was prefilled stays; /retry answers the last question under it)
/system        show the system message; /system TEXT: change it, /system -: remove it (the conversation goes on)
/image FILE    attach a picture to the next message
/stats         the cache, the settings, what the answers took
/save FILE     write the conversation, the plan and the sampling to a file
/load FILE     go on with a saved conversation
/quit          leave (also: Ctrl-D, or Ctrl-C twice)
A message that begins with a slash: write // for the first one."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _chat(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minipop.chat", description="Chat with a checkpoint under Prefill-Only Pruning: the prompt "
                    "skips deep layers, the answer runs through all of them.",
                    epilog="With --prompt, or with text piped into stdin, one answer is written to stdout.\n\n"
                    f"commands of the chat:\n{HELP}")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and stop")
    parser.add_argument("--image", metavar="FILE", action="append", default=[],
                        help="attach a picture to the first message (repeatable)")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[],
                        help="end the answer before this text (repeatable)")
    parser.add_argument("--compile", action="store_true", help="compile the decode steps: some seconds before the first token and more memory, "
                        "for answers that come faster; on CPUs, with a C++ compiler")
    add_model_arguments(parser, default=f"{DEFAULT_MODEL}, fetched when it is not there")
    add_plan_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens="what fits")
    add_parallel_argument(parser)
    return parser


def _chat(args: argparse.Namespace) -> int:
    args.team = join(args.tp, args.device)
    interactive = args.prompt is None and sys.stdin.isatty()
    prompt = None if interactive else read_prompt(args.prompt)
    args.ckpt = default_checkpoint() if args.ckpt is None else args.ckpt
    folder, model, tokenizer, processor = load_from(args)
    plan = plan_from(args, model.config.num_layers)
    if args.compile:
        note(f"decode steps compiled in {compile_decoding(model):.1f} s")
    runner = runner_from(args, model, plan)
    session = ChatSession(runner, tokenizer, processor, system=None if args.system is None else clean_text(args.system),
                          sampling=sampling_from(args, folder, max_new_tokens=runner.cache.max_seq_len),
                          stop=[clean_text(stop) for stop in args.stop])
    pictures = [session.picture(file) for file in args.image]
    if not session.sampling.temperature and any((args.top_k, args.top_p, args.min_p)):
        note("--top-k, --top-p and --min-p do nothing at temperature 0: add --temperature 1")
    if interactive:
        return Terminal(session, folder.name, pictures).run()
    show_answer(session.ask(prompt, pictures))
    note(session.log[-1])
    return 0


def read_prompt(prompt: str | None) -> str:
    """The prompt of a single answer: the argument, or all of stdin. Raises PromptError when that is empty."""
    if prompt is None:
        stream = getattr(sys.stdin, "buffer", None)
        prompt = sys.stdin.read() if stream is None else stream.read().decode("utf-8-sig", errors="replace")
        prompt = prompt.rstrip("\r\n")
        if not prompt.strip():
            raise PromptError("there is no prompt: give --prompt TEXT, or pipe text into stdin, or start in a terminal to chat")
    return clean_text(prompt)


def default_checkpoint(root: Path = Path(__file__).resolve().parent.parent) -> Path:
    """The folder of the model that is used when none is named; the repository's script makes it when it is not there."""
    folder, script = root / "weights" / DEFAULT_MODEL, root / "scripts" / "fetch_weights.py"
    if folder.is_dir() and any(folder.iterdir()):
        return folder
    if not script.is_file():
        raise CheckpointError("no checkpoint is named: give --ckpt with a folder or org/model (only a checkout of the "
                              "repository can fetch a default model)")
    note(f"fetching {DEFAULT_MODEL} into {folder}; this happens once")
    # What the script prints goes to stderr: stdout is for the answer.
    fetch = subprocess.Popen([sys.executable, str(script), DEFAULT_MODEL], stdin=subprocess.DEVNULL, stdout=2)
    try:
        code = fetch.wait()
    except BaseException:  # Ctrl-C reaches the script too, which cleans up; whatever else stops us does not
        with contextlib.suppress(subprocess.TimeoutExpired):
            fetch.wait(timeout=2)
        fetch.terminate()
        fetch.wait()
        raise
    if code:
        raise CheckpointError(f"{DEFAULT_MODEL} could not be fetched, see above; --ckpt names another checkpoint")
    return folder


# --- output ---------------------------------------------------------------------------------------------------------------------


def note(text: object) -> None:
    """A quiet line beside the conversation, on stderr."""
    quiet = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    text = str(text).translate(_CONTROLS)
    print(f"\033[2m{text}\033[0m" if quiet else text, file=sys.stderr, flush=True)


# Models and files can hold any character; on a terminal, control characters could move the cursor or worse.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show_answer(pieces: Iterator[str]) -> None:
    """Write an answer to stdout as it comes, and end the line."""
    terminal, last = sys.stdout.isatty(), None
    with contextlib.closing(pieces):
        try:
            for piece in pieces:
                sys.stdout.write(piece.translate(_CONTROLS) if terminal else piece)
                sys.stdout.flush()
                last = piece
            last = last or ""
        finally:  # of an answer that failed before it began, nothing is seen
            if last is not None and not last.endswith("\n"):
                print(flush=True)


# --- the terminal ---------------------------------------------------------------------------------------------------------------


class Terminal:
    """Reads messages and commands until the end. pictures: parts to attach to the first message."""

    def __init__(self, session: ChatSession, name: str, pictures: list[dict]):
        self.session, self.name, self.pictures = session, name, pictures
        self.leaving = False

    def run(self) -> int:
        self.greet()
        with line_editing():
            interrupts = 0
            while not self.leaving:
                try:
                    line = read_line("> ")
                except KeyboardInterrupt:
                    interrupts += 1
                    print(file=sys.stderr)
                    if interrupts == 2:
                        return 130
                    note("Ctrl-C again leaves, as does /quit")
                    continue
                except EOFError:
                    print(file=sys.stderr)
                    break
                interrupts = 0
                self.handle(clean_text(line))
        return 0

    def greet(self) -> None:
        runner = self.session.runner
        weight = runner.model.embedding.weight
        size = cache_bytes(runner.model.config, runner.cache.max_seq_len, weight.dtype)
        note(f"{self.name}: {str(weight.dtype).removeprefix('torch.')} on {weight.device}, {runner.plan.describe()}, "
             f"context {runner.cache.max_seq_len} tokens ({show_bytes(size)}). /help lists the commands.")

    def handle(self, line: str) -> None:
        """One line of input. Mistakes and Ctrl-C end here: the session goes on."""
        try:
            with memory_errors():
                self.obey(line)
        except MinipopError as problem:
            fail(problem)
        except KeyboardInterrupt:
            note("stopped")

    def obey(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            return self.say(line)
        if line.startswith("//"):
            return self.say(line[1:])
        name, _, argument = line[1:].partition(" ")
        command = getattr(self, f"do_{name}", None) if name.isidentifier() else None
        if command is None:
            raise PromptError(f"there is no command /{name}: /help lists them, and // begins a message with a slash")
        command(argument.strip())

    def say(self, text: str) -> None:
        pieces = self.session.ask(text, self.pictures)
        self.answer(pieces)
        self.pictures = []

    def answer(self, pieces: Iterator[str]) -> None:
        try:
            show_answer(pieces)
        except KeyboardInterrupt:
            if not self.session.log[-1].answer_tokens:
                return note("stopped before the answer began")
        note(self.session.log[-1])

    # The commands: /name ARGUMENT calls do_name(argument).

    def do_help(self, _: str) -> None:
        note(HELP)

    def do_quit(self, _: str) -> None:
        self.leaving = True

    def do_reset(self, _: str) -> None:
        self.session.reset()
        self.pictures = []
        note("a new conversation")

    def do_undo(self, _: str) -> None:
        taken = self.session.undo().question
        text = taken if isinstance(taken, str) else taken[-1]["text"]
        note(f"taken back: {text if len(text) <= 60 else text[:60] + '...'}")

    def do_retry(self, _: str) -> None:
        pieces = self.session.retry()
        if not self.session.sampling.temperature and self.session.exchanges[-1].plan == self.session.runner.plan:
            note("at temperature 0 the same question gets the same answer")
        self.answer(pieces)

    def do_plan(self, text: str) -> None:
        if text:
            self.session.set_plan(parse_plan(text, self.session.runner.plan.num_layers))
        note(self.session.runner.plan.describe())

    def do_system(self, text: str) -> None:
        if text:
            self.session.set_system(None if text == "-" else text)
        note("no system message" if self.session.system is None else f"system message: {self.session.system}")

    def do_image(self, path: str) -> None:
        if not path:
            raise PromptError("/image needs the path of a picture")
        if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"":
            path = path[1:-1]
        self.pictures.append(self.session.picture(path))
        width, height = self.pictures[-1]["image"].size
        note(f"attached to the next message: {path} ({width} x {height})")

    def do_save(self, path: str) -> None:
        if not path:
            raise PromptError("/save needs the name of a file")
        self.session.save(path)
        note(f"saved {len(self.session.exchanges)} questions and answers")

    def do_load(self, path: str) -> None:
        if not path:
            raise PromptError("/load needs the name of a file")
        self.session.load(path)
        self.pictures = []
        note(f"loaded {len(self.session.exchanges)} questions and answers; {self.session.runner.plan.describe()}")

    def do_stats(self, _: str) -> None:
        session, cache, log = self.session, self.session.runner.cache, self.session.log
        config = session.runner.model.config
        used, size = (show_bytes(cache_bytes(config, rows, cache.keys.dtype)) for rows in (cache.length, cache.max_seq_len))
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        prefilled, prompted = sum(stats.new_tokens for stats in log), sum(stats.prompt_tokens for stats in log)
        note(f"cache     {cache.length} of {cache.max_seq_len} rows used ({used} of {size})\n"
             f"plan      {session.runner.plan.describe()}\n"
             f"sampling  {', '.join(f'{name} {getattr(session.sampling, name)}' for name in names)}\n"
             f"system    {session.system or '(none)'}\n"
             f"answers   {len(log)}, with {prefilled} prompt tokens prefilled, {prompted - prefilled} reused from the cache, "
             f"{sum(stats.answer_tokens for stats in log)} tokens generated\n"
             f"last      {log[-1] if log else '(none)'}")


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Arrow keys and a history that outlives the session, where the readline module is there; a history that fails is none."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = Path(os.path.expanduser(HISTORY_FILE))
    usable = not os.path.lexists(file) or file.is_file()  # not a device or a folder
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        if usable and file.exists():
            readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if usable:
                readline.write_history_file(file)


def read_line(prompt: str) -> str:
    """A line of input. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
    if sys.stdout.isatty():
        return input(prompt)  # with line editing
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for the answers
    return input()


if __name__ == "__main__":
    sys.exit(main())
