"""What minipop's command lines share: groups of arguments, what is made from them, one-line errors, exit codes.

    def main(argv=None) -> int:
        return run(lambda: _command(_parser().parse_args(argv)))

Exit codes: 0 fine, 1 a comparison failed, 2 the user's mistake (one line on stderr), 130 interrupted, 143 terminated.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .checkpoint import resolve_checkpoint
from .config import DTYPES, read_config
from .errors import CheckpointError, MinipopError, PlanError, PromptError
from .files import check_writable, read_json
from .models import load_model
from .packing import pack
from .plan import PrefillPlan, parse_layers
from .processing import Processor, load_processor
from .runner import Runner
from .sampling import SamplingParams
from .tokenizer import Tokenizer, load_tokenizer

DEFAULT_SEQ_LEN = 4096


# --- the frame of a command -----------------------------------------------------------------------------------------------------


def run(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; a user's mistake becomes one line on stderr."""
    prepare_streams()
    main_thread = threading.current_thread() is threading.main_thread()
    polite_kill = signal.signal(signal.SIGTERM, _terminate) if main_thread else None
    if main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set while we were imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with memory_errors():
            code = command()
        sys.stdout.flush()
        return code
    except MinipopError as problem:
        return fail(problem)
    except BrokenPipeError:  # whoever read our output has seen enough; Python's own flush at exit must not fail again
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        return fail(": ".join(str(part) for part in (problem.filename, problem.strerror or problem) if part))
    except KeyboardInterrupt:
        return 130
    finally:
        if polite_kill is not None:
            signal.signal(signal.SIGTERM, polite_kill)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """To run out of memory is a mistake like any other. (PyTorch's allocators raise RuntimeErrors.)"""
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not isinstance(problem, MemoryError) and not re.search("can't allocate memory|out of memory", str(problem)):
            raise
        raise MinipopError("not enough memory: lower --max-seq-len or --batch-size, shorten the prompt, or choose --dtype "
                           "bfloat16") from None


def fail(problem: object) -> int:
    """Print `error: ...` as one line on stderr; the exit code of a user's mistake."""
    text = " ".join(str(problem).split())
    text = text if len(text) <= 3000 else text[:2000] + " ... " + text[-500:]  # somebody gave a book for a name
    # Names and words from files may hold anything: no character of theirs moves the terminal's cursor.
    print("error:", "".join(c if c.isprintable() else "\ufffd" for c in text), file=sys.stderr)
    return 2


def prepare_streams() -> None:
    """Output never fails for what the encoding lacks, input never for bytes that are no text; a closed stream is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us (`>&-`)
            setattr(sys, name, open(os.devnull, mode))
        elif getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def clean_text(text: str) -> str:
    """Text from the command line. Bytes that were no UTF-8 arrive as lone surrogates, which no tokenizer takes: now U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _terminate(signum, frame):
    sys.exit(128 + signum)  # an exception, so that everything is cleaned up on the way out


# --- arguments ------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are MinipopErrors, so that `run` prints them like any other mistake."""

    def __init__(self, **kwargs):
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str):
        raise MinipopError(f"{message} (see {self.prog} --help)")


def check_outputs(outputs: dict[str, str | None], inputs: Iterable[str | Path | None] = ()) -> None:
    """Before the work, not after it: every output can be written, and none is an input or another output.

    outputs: option -> file, None where it is not wanted. inputs: files and folders that are read. Raises PromptError.
    """
    taken = {os.path.realpath(path): f"{path}, which is read" for path in inputs if path}
    for folder in [path for path in taken if os.path.isdir(path)]:
        taken |= {os.path.join(folder, name): f"{name} of {folder}, which is read" for name in os.listdir(folder)}
    for option, path in outputs.items():
        if path is None:
            continue
        parent = os.path.dirname(os.path.abspath(path))
        if not path or os.path.isdir(path) or os.path.lexists(path) and not os.path.isfile(path):
            raise PromptError(f"{option} {path!r} is not the name of a file: choose another")
        try:
            check_writable(parent)
        except OSError:
            raise PromptError(f"{option} {path}: there is no folder {parent} that can be written to") from None
        real = os.path.realpath(path)
        if real in taken:
            raise PromptError(f"{option} {path} would overwrite {taken[real]}: choose another name")
        taken[real] = f"what {option} writes"


def seed(text: str) -> int:
    """An argument's type: what every generator of random numbers takes."""
    if not text.strip().isdecimal() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, not {text!r:.60}")
    return int(text)


def positive(text: str) -> int:
    """An argument's type: a whole number above 0."""
    if not text.strip().isdecimal() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None = None, dtype: str = "the checkpoint's") -> None:
    """--ckpt, --dtype, --device, --threads, --max-seq-len. default: what happens without --ckpt; None = it is required. dtype: without --dtype."""
    group = parser.add_argument_group("model")
    group.add_argument("--ckpt", metavar="PATH", required=default is None,
                       help="a Hugging Face checkpoint folder, or org/model" + (f" (default: {default})" if default else ""))
    group.add_argument("--dtype", choices=tuple(DTYPES), help=f"of weights, cache and arithmetic (default: {dtype})")
    group.add_argument("--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1, ...")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    group.add_argument("--max-seq-len", type=positive, metavar="N",
                       help="tokens the cache holds, prompt and answer together "
                       f"(default: {DEFAULT_SEQ_LEN}, or what the model allows)")


def add_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """--tp. A command that has it begins with `args.team = parallel.join(args.tp, args.device)`."""
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="divide the model over N processes, which "
                        "`python -m torch.distributed.run --nproc-per-node N -m ...` starts (default: 1)")


def add_plan_arguments(parser: argparse.ArgumentParser, default: str = "the deepest 1/3", calibrated: bool = True) -> None:
    """--full, --ratio, --skip-layers, --plan (one of them), --kv. calibrated: whether the help speaks of --kv; a command that refuses it says why."""
    group = parser.add_argument_group("prefill plan", "which layers the prompt skips; the answer always runs through all of them")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--full", action="store_true", help="skip nothing: the plain model")
    one.add_argument("--ratio", metavar="R", help=f"skip this share of the layers, the deepest: 0.25 or 1/3 (default: {default})")
    one.add_argument("--skip-layers", metavar="LIST", help="skip these layers, counted from 0: 20-29 or 3,6,9-11")
    one.add_argument("--plan", metavar="FILE", help="a plan file, as importance --plan-out and PrefillPlan.save write it")
    group.add_argument("--kv", metavar="FILE", help="calibrated K/V for the skipped layers, a file that minipop.calibrate made" if calibrated
                       else argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: str = "256") -> None:
    """--temperature, --top-k, --top-p, --min-p, --repetition-penalty, --seed, --max-new-tokens; all None when not given."""
    group = parser.add_argument_group("sampling", "defaults are the checkpoint's generation_config.json where it samples; "
                                      "otherwise the most likely token is taken (temperature 0)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token; higher is more varied")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens (0: all)")
    group.add_argument("--top-p", type=float, metavar="P", help="only the fewest tokens with probability P together (1: all)")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the first (0: all)")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: what was said is less likely (1: off)")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text")
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help=f"longest answer (default: {max_new_tokens})")


# --- what is made from them -----------------------------------------------------------------------------------------------------


def load_from(args: argparse.Namespace, packed: bool = True) -> tuple[Path, nn.Module, Tokenizer, Processor | None]:
    """The folder, model, tokenizer and, for a vision-language checkpoint, processor that the model arguments name.

    packed: rearrange the weights for speed where that is possible; the model has no gradients then (packing.py).
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    check_device(args.device)
    folder = resolve_checkpoint(args.ckpt)
    processor = None if read_config(folder).vision is None else load_processor(folder)
    tokenizer = load_tokenizer(folder) if processor is None else processor.tokenizer  # first: it is the quicker one to fail
    team = getattr(args, "team", None)
    load = load_model if team is None else team.load
    model = load(folder, args.dtype, args.device)
    return folder, pack(model) if packed else model, tokenizer, processor


def check_device(name: str) -> None:
    """Raises MinipopError for a device that is unknown or not there."""
    try:
        torch.zeros(1, device=name).item()  # .item(): a device without storage (meta) cannot run anything
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise MinipopError(f"--device {name} cannot be used: {str(problem).splitlines()[0]}") from None


def plan_from(args: argparse.Namespace, num_layers: int, ratio: float | str = 1 / 3) -> PrefillPlan:
    """The plan that the arguments ask for; the deepest `ratio` of the layers when they do not."""
    if args.full:
        plan = PrefillPlan.full(num_layers)
    elif args.plan is not None:
        plan = PrefillPlan.load(args.plan)
    elif args.skip_layers is not None:
        plan = PrefillPlan(num_layers, parse_layers(args.skip_layers))
    else:
        plan = PrefillPlan.deepest(num_layers, ratio if args.ratio is None else args.ratio)
    if args.kv is None:
        return plan
    if not plan.skip:
        raise PlanError("--kv is for the layers that are skipped, but this plan skips none")
    return replace(plan, kv=args.kv)


def parse_plan(text: str, num_layers: int) -> PrefillPlan:
    """A plan in one word: full, a share of the layers like 1/3 or 0.25, layers like 20-29 or 5, or a plan file NAME.json."""
    if text == "full":
        return PrefillPlan.full(num_layers)
    if text.endswith(".json"):
        return PrefillPlan.load(text)
    if "/" in text or "." in text:
        return PrefillPlan.deepest(num_layers, text)
    return PrefillPlan(num_layers, parse_layers(text))


def sampling_from(args: argparse.Namespace, folder: Path, max_new_tokens: int = 256) -> SamplingParams:
    """The sampling that the arguments ask for, on top of the checkpoint's own (`generation_defaults`)."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_new_tokens")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams(**{"max_new_tokens": max_new_tokens, **generation_defaults(folder), **given})


def generation_defaults(folder: Path) -> dict:
    """SamplingParams fields from generation_config.json: its values if it says `do_sample`, otherwise temperature 0."""
    file = folder / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    if config.get("do_sample") is not True:
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: config[name] for name in names if config.get(name) is not None}
    try:
        SamplingParams(**values)
    except PromptError as problem:
        raise CheckpointError(f"{file}: {problem}") from None
    return values


def runner_from(args: argparse.Namespace, model: nn.Module, plan: PrefillPlan, batch_size: int = 1) -> Runner:
    """A runner whose cache is as long as the arguments say. Raises MinipopError when there is not enough memory for it."""
    config = model.config
    max_seq_len = args.max_seq_len or min(DEFAULT_SEQ_LEN, config.max_position_embeddings)
    weight = model.embedding.weight
    needed = cache_bytes(config, max_seq_len, weight.dtype, batch_size)
    free = available_memory() if weight.device.type == "cpu" else None
    if max_seq_len <= config.max_position_embeddings and free is not None and needed > free:
        raise MinipopError(f"a cache of {max_seq_len} tokens{f' for {batch_size} rows' if batch_size > 1 else ''} takes "
                           f"{show_bytes(needed)}, but only {show_bytes(free)} of memory are free: lower --max-seq-len")
    return Runner(model, plan, max_seq_len, batch_size)


def cache_bytes(config, rows: int, dtype: torch.dtype, batch_size: int = 1) -> int:
    """Keys and values of `rows` tokens in all layers."""
    return 2 * config.num_layers * batch_size * config.kv_width * rows * dtype.itemsize


def available_memory(meminfo: str | Path = "/proc/meminfo") -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        text = Path(meminfo).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def show_bytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"
