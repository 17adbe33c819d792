"""Answer a file of prompts under Prefill-Only Pruning (arXiv 2602.03295), several at a time.

    python -m minipop.generate --ckpt path/to/checkpoint --input prompts.jsonl --output answers.jsonl

Each line of the input is a JSON object with a `prompt` (text, continued as it is) or `messages` (a conversation, rendered by the
chat template; a message's content may hold {"type": "image", "image": "file.png"}, relative to the input's folder). Its `id`, if
it has one, is copied into the answer; other keys are ignored. The output has a line for each prompt, in the input's order:

    index, id         the prompt's number, counted from 0, and its id or null
    text              the answer, without the token that ended it
    token_ids         the answer as it was sampled, that token included
    finish_reason     "stop" (an end-of-text token), "length" (--max-new-tokens) or "context" (the cache is full)
    logprobs          with --logprobs: for each id its log-probability under the model, before temperature and filters
    prompt_tokens     the prompt's length
    fingerprint       of the prompt and of the settings; by it a later run knows its own answers

Everything is checked before the first prompt runs. A run that was stopped leaves whole lines only, and the same command goes on
after the last of them. --input - and --output - are stdin and stdout.
"""

import argparse
import codecs
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .cli import (DEFAULT_SEQ_LEN, Parser, add_model_arguments, add_parallel_argument, add_plan_arguments, add_sampling_arguments,
                  load_from, plan_from, positive, run, runner_from, sampling_from)
from .errors import MinipopError, PromptError
from .files import parse_json
from .inputs import Batch, ModelInputs
from .packing import plain_weights
from .parallel import join
from .plan import PrefillPlan
from .processing import IMAGE_KEYS, Processor, split_images
from .runner import Runner
from .sampling import SamplingParams, log_probs
from .tokenizer import Tokenizer

ADDRESS = re.compile("(https?|data|file):")  # refused as pictures; not to be mistaken for paths on the way there
WINDOW = 4  # batches that are sorted by length together: more waste less padding, but answers wait longer until they are written


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _generate(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.generate", description=first, epilog=rest)
    parser.add_argument("--input", metavar="FILE", required=True, help="the prompts, one JSON object a line; - is stdin")
    parser.add_argument("--output", metavar="FILE", required=True,
                        help="the answers; if it holds some already, the run goes on after them; - is stdout")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="prompts answered at a time (default: 8)")
    parser.add_argument("--logprobs", action="store_true", help="add the log-probability of every sampled token")
    add_model_arguments(parser)
    add_plan_arguments(parser)
    add_sampling_arguments(parser)
    add_parallel_argument(parser)
    return parser


def _generate(args: argparse.Namespace) -> int:
    args.team = join(args.tp, args.device)
    prompts = read_prompts(args.input)
    folder, model, tokenizer, processor = load_from(args)
    plan, params = plan_from(args, model.config.num_layers), sampling_from(args, folder)
    settings = settings_digest(model, plan, params, args.logprobs)
    done, kept = (0, 0) if args.output == "-" else finished(Path(args.output), prompts, settings)
    todo = prompts[done:]

    largest = model.config.max_position_embeddings
    limit = args.max_seq_len or min(DEFAULT_SEQ_LEN, largest)
    if limit > largest:
        raise PromptError(f"--max-seq-len {limit} exceeds the {largest} positions the model was made for: lower it")
    lengths = measure(todo, model, tokenizer, processor, limit)
    if not todo:
        return 0
    needed = max(lengths.values()) + params.max_new_tokens - 1  # an answer's last token is not cached; a longer cache is not used
    runner = runner_from(argparse.Namespace(max_seq_len=min(limit, needed)), model, plan, min(args.batch_size, len(todo)))
    with (open_output(args.output, kept) as write,
          tqdm(total=len(prompts), initial=done, unit="prompt", file=sys.stderr) as bar):
        for answer in answer_all(runner, tokenizer, processor, todo, lengths, params, args.logprobs, bar):
            answer["fingerprint"] = f"{prompts[answer['index']].digest}-{settings}"
            write(json.dumps(answer, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return 0


# --- prompts --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One line of the input. content: raw text, or the messages of a conversation, whose pictures are looked for in `folder`."""

    where: str  # file and line, for errors
    index: int
    id: str | int | None
    content: str | list
    folder: Path

    @property
    def digest(self) -> str:
        return _digest(self.content)

    def inputs(self, tokenizer: Tokenizer, processor: Processor | None) -> ModelInputs:
        """Ids and pixels, made anew at each call: the pictures of a whole file need not fit into memory.

        Raises TokenizerError, PromptError or ImageError, naming the line.
        """
        with _located(self.where):
            if isinstance(self.content, str):
                return ModelInputs(tokenizer.encode(self.content))
            if processor is not None:
                return processor([_with_paths(message, self.folder) for message in self.content])
            if split_images(self.content)[1]:
                raise PromptError("the messages hold an image, but this checkpoint reads text only")
            return ModelInputs(tokenizer.apply_chat_template(self.content))


def read_prompts(path: str) -> list[Prompt]:
    """All prompts of a JSON-lines file, "-" for stdin; blank lines do not count. Raises PromptError with file and line."""
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    name, folder = ("stdin", Path()) if path == "-" else (path, Path(path).parent)
    prompts = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            where = f"{name} line {number}"
            prompts.append(_prompt(parse_json(line, where, PromptError), where, len(prompts), folder))
    if not prompts:
        raise PromptError(f"{name}: there are no prompts in it; a line looks like {{\"prompt\": \"...\"}}")
    return prompts


def _prompt(fields: dict, where: str, index: int, folder: Path) -> Prompt:
    prompt, messages, name = fields.get("prompt"), fields.get("messages"), fields.get("id")
    if (prompt is None) == (messages is None):
        raise PromptError(f"{where}: needs either a `prompt` or `messages`, and has {'neither' if prompt is None else 'both'}")
    if prompt is not None and not isinstance(prompt, str):
        raise PromptError(f"{where}: `prompt` must be a string, not {type(prompt).__name__}")
    if messages is not None and not isinstance(messages, list):
        raise PromptError(f"{where}: `messages` must be a list of messages, not {type(messages).__name__}")
    if name is not None and type(name) not in (str, int):
        raise PromptError(f"{where}: `id` must be a string or a whole number, not {type(name).__name__}")
    return Prompt(where, index, name, prompt if messages is None else messages, folder)


def _with_paths(message: Any, folder: Path) -> Any:
    """A message with its pictures' paths taken from `folder`. Whatever is odd about it is left for the tokenizer to refuse."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message

    def place(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "image":
            return part
        paths = {key: path for key in IMAGE_KEYS if isinstance(path := part.get(key), str) and not ADDRESS.match(path)}
        return {**part, **{key: str(folder / path) for key, path in paths.items()}}

    return {**message, "content": [place(part) for part in message["content"]]}


def measure(prompts: Sequence[Prompt], model: nn.Module, tokenizer: Tokenizer, processor: Processor | None,
            limit: int) -> dict[int, int]:
    """Index -> tokens of each prompt. Raises MinipopError, naming the line, for the first one that the model cannot take."""
    lengths = {}
    for prompt in prompts:
        inputs = prompt.inputs(tokenizer, processor)
        with _located(prompt.where):
            Batch.of([inputs], model)  # ids and pictures
            if not len(inputs) and model.config.bos_token_id is None:
                raise PromptError("the prompt is empty, and this family has no BOS to start from")
            lengths[prompt.index] = max(1, len(inputs))  # an empty prompt becomes the BOS
            if len(inputs) > limit:
                raise PromptError(f"{len(inputs)} tokens do not fit: the cache has room for {limit}; shorten the prompt or raise "
                                  "--max-seq-len")
    return lengths


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors from here say which line they are about."""
    try:
        yield
    except MinipopError as problem:
        raise type(problem)(f"{where}: {problem}") from None


# --- answers --------------------------------------------------------------------------------------------------------------------


def answer_all(runner: Runner, tokenizer: Tokenizer, processor: Processor | None, prompts: Sequence[Prompt],
               lengths: dict[int, int], params: SamplingParams, logprobs: bool = False,
               bar: tqdm | None = None) -> Iterator[dict]:
    """Answer the prompts, the runner's batch_size at a time; yields the answers' JSON objects in order.

    Prompts of similar length share a batch: those of a window of WINDOW batches are sorted, and come out in order again.
    """
    size = len(runner.cache.lengths)
    for window in _cut(prompts, WINDOW * size):
        ready: dict[int, dict] = {}
        following = window[0].index
        for group in _cut(sorted(window, key=lambda prompt: lengths[prompt.index]), size):
            for answer in answer_group(runner, tokenizer, processor, group, params, logprobs):
                ready[answer["index"]] = answer
            if bar is not None:
                bar.update(len(group))
            while following in ready:
                yield ready.pop(following)
                following += 1


def answer_group(runner: Runner, tokenizer: Tokenizer, processor: Processor | None, prompts: Sequence[Prompt],
                 params: SamplingParams, logprobs: bool = False) -> list[dict]:
    """The answers to one batch of prompts."""
    values: list[list[float]] = [[] for _ in prompts]

    def note(row: int, token_id: int, logits: Tensor) -> None:
        values[row].append(log_probs(logits, torch.tensor(token_id, device=logits.device)).item())

    inputs = [prompt.inputs(tokenizer, processor) for prompt in prompts]
    lists = runner.generate_batch(inputs, params, note if logprobs else None)
    ends = {*runner.model.config.eos_token_ids, *params.stop_token_ids}
    answers = []
    for prompt, sequence, token_ids, row in zip(prompts, inputs, lists, values):
        stopped = token_ids[-1] in ends
        reason = "stop" if stopped else "length" if len(token_ids) == params.max_new_tokens else "context"
        text = tokenizer.decode(token_ids[:-1] if stopped else token_ids)
        # The index comes first: it is how a line that was cut short is known again.
        answers.append({"index": prompt.index, "id": prompt.id, "text": text, "token_ids": token_ids, "finish_reason": reason,
                        **({"logprobs": row} if logprobs else {}), "prompt_tokens": max(1, len(sequence))})
    return answers


def _cut(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[first : first + size] for first in range(0, len(items), size))


# --- the output file ------------------------------------------------------------------------------------------------------------


def finished(path: Path, prompts: Sequence[Prompt], settings: str) -> tuple[int, int]:
    """Answers that an earlier run left in the output file, and the bytes they take: (0, 0) if there is no file.

    What follows the last whole line is the beginning of an answer that was never finished; it does not count.
    Raises PromptError when the file holds anything else, or answers to other prompts or with other settings.
    """
    if not os.path.lexists(path):
        return 0, 0
    if not path.is_file():
        raise PromptError(f"{path}: not a regular file; --output - writes to stdout")
    *lines, tail = path.read_bytes().split(b"\n")
    if len(lines) > len(prompts):
        raise PromptError(f"{path}: has {len(lines)} lines, but there are only {len(prompts)} prompts; choose another --output")
    for number, (line, prompt) in enumerate(zip(lines, prompts), 1):
        where = f"{path} line {number}"
        answer = parse_json(line, where, PromptError)
        if answer.get("index") != prompt.index or not isinstance(answer.get("fingerprint"), str):
            raise PromptError(f"{where}: is no answer that this command wrote; choose another --output")
        made_from, _, made_with = answer["fingerprint"].partition("-")
        if answer.get("id") != prompt.id or made_from != prompt.digest:
            raise PromptError(f"{where}: answers another prompt than {prompt.where}; choose another --output, or remove the file")
        if made_with != settings:
            raise PromptError(f"{where}: was made with another checkpoint or other settings (dtype, plan, sampling, --logprobs); "
                              "choose another --output, or remove the file")
    begin = b'{"index": %d, ' % len(lines)
    if not begin.startswith(tail[: len(begin)]):
        raise PromptError(f"{path} line {len(lines) + 1}: is not the beginning of an answer; choose another --output")
    return len(lines), sum(len(line) + 1 for line in lines)


@contextmanager
def open_output(path: str, kept: int = 0):
    """A function that writes one line, whole or not at all; "-" is stdout. kept: bytes of the file that stay."""
    if path == "-":
        def write(line: bytes) -> None:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

        yield write
        return
    with open(path, "ab", buffering=0) as file:  # unbuffered: what could not be written is not tried again at the end
        file.truncate(kept)

        def write(line: bytes) -> None:
            end = os.fstat(file.fileno()).st_size
            try:
                while line:
                    line = line[file.write(line):]
            except BaseException:  # the disk is full, Ctrl-C
                file.truncate(end)
                raise

        yield write


def settings_digest(model: nn.Module, plan: PrefillPlan, params: SamplingParams, logprobs: bool) -> str:
    """Stands for all that decides about an answer beside its prompt. Weights count by a few values of each tensor."""
    weights = [(name, p.flatten()[:: max(1, p.numel() // 8)].float().tolist()) for name, p in plain_weights(model)]
    kv = None if plan.kv is None else hashlib.sha256(Path(plan.kv).read_bytes()).hexdigest()  # what the file holds, not its name
    dtype, skipping = str(model.embedding.weight.dtype), {**asdict(plan), "skip": sorted(plan.skip), "kv": kv}
    return _digest([dtype, weights, skipping, asdict(params), logprobs])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
