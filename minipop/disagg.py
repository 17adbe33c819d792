"""Prefill and decode in different processes: where Prefill-Only Pruning (arXiv 2602.03295) saves memory too.

    python -m torch.distributed.run --nproc-per-node 2 -m minipop.disagg --ckpt path/to/checkpoint --prompt "Why is the sky blue?"

Rank 0 decodes and holds the whole model; all other ranks prefill. Before the boundary a prompt takes nothing of a skipped layer but K and
V, so a prefill rank loads the layers that the plan runs, and of the others the input norm, W_K, W_V (and k-norm) alone. It never samples:
final norm and head stay on rank 0, too.

    rank 0                                        ranks 1, 2, ...
    reads the prompts and hands them out  ---->   tokens 1 .. N-1 through the pruned model
    puts the rows into a cache            <----   K and V of a layer as soon as it has them, while the next one runs;
    runs the boundary token N as the              those of the skipped layers, one product, come last
    first decode step, and decodes                (meanwhile the next prompt)

Each prefill rank takes the next prompt as soon as it is free, and rank 0 decodes the prompts that are complete in turns, a token of each.
What it writes is what one process writes under the same plan (generate.py describes the files; `prefill` in an answer says which rank
made the rows, how many bytes they were, and how much of their way took place behind the computation).

A rank that dies, or is silent for --timeout seconds, ends the prompt it was at with one line; the others go on, and so does a rank that
was only late. One that has died cannot be replaced in a run. torch.distributed.run itself ends all ranks when one dies: who wants the
others to survive starts each rank alone, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

Shapes: N tokens, L layers (L' of one message), K kv heads, n rows of one message, E head_dim.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .cache import CachePass, Visible
from .checkpoint import resolve_checkpoint
from .cli import (DEFAULT_SEQ_LEN, Parser, add_model_arguments, add_plan_arguments, add_sampling_arguments, clean_text, fail,
                  check_device, check_outputs, load_from, memory_errors, plan_from, run, sampling_from, show_bytes)
from .config import read_config
from .errors import MinipopError, PromptError
from .files import one_line
from .generate import Prompt, measure, open_output, read_prompts
from .inputs import Batch, ModelInputs
from .links import Link, LinkError, Sender
from .models import load_model
from .packing import pack
from .parallel import local_device, network_reason, signals_that_end
from .plan import PrefillPlan
from .projection import fingerprint
from .runner import Runner, _Prompt, boundary_lengths, chunk_counts
from .sampling import SamplingParams
from .shards import PrefillPart

LOADING = 600.0  # seconds for a rank to load its weights
ENDING = 5.0  # seconds for the prefill ranks to hear that it is over
IDLE = 365 * 86400.0  # a prefill rank waits for work as long as rank 0 lives
END = {"end": True}


# --- the two runners ------------------------------------------------------------------------------------------------------------


class PrefillRunner(Runner):
    """Runs prompts up to the boundary, and hands the rows on as the layers make them."""

    @torch.no_grad()
    def stream(self, inputs: ModelInputs, push: Callable[[int, int, Tensor], None]) -> None:
        """push(first layer, first row, [2, L', K, n, E] keys and values): called for each layer, or for all skipped ones at once."""
        batch, starts = Batch.of([inputs], self.model), torch.zeros(1, dtype=torch.long)
        self._check_room(starts, batch.counts)
        prompt = _Prompt(self, batch, starts, self.model.positions(batch, starts)[0])
        before = replace(batch, counts=batch.counts - boundary_lengths(batch, prompt.blocks))
        done = starts
        for counts in chunk_counts(before, prompt.blocks, self.chunk_size) if int(before.counts) else ():
            part = prompt.part(done, counts)
            part.kv = StreamedPass(part.kv, self.plan, push)
            part.run(self.plan)
            done = done + counts


class StreamedPass:
    """A pass over the cache that also hands its rows on (a `layers.KV`). Those of skipped layers are not kept: nobody reads them here."""

    def __init__(self, kv: CachePass, plan: PrefillPlan, push: Callable[[int, int, Tensor], None]):
        self.kv, self.plan, self.push, self.start = kv, plan, push, int(kv.span.starts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.push(layer, self.start, torch.stack((k, v)))  # [1, K, n, E] each: a batch of one is a layer of one
        return (k, v) if layer in self.plan.skip else self.kv.write(layer, k, v)

    def write_stacked(self, first: int, k: Tensor, v: Tensor) -> None:
        self.push(first, self.start, torch.stack((k[:, 0], v[:, 0])))

    def visible(self, layer: int, window: int | None) -> Visible:
        return self.kv.visible(layer, window)


class DecodeRunner(Runner):
    """A runner whose prompts arrive as rows: `put` them into the cache, then `prefill` runs the boundary alone."""

    def put(self, first: int, start: int, rows: Tensor) -> None:
        """What `PrefillRunner.stream` pushed."""
        layers, columns = slice(first, first + rows.shape[1]), slice(start, start + rows.shape[3])
        for store, new in zip((self.cache.keys, self.cache.values), rows):
            store[layers, 0, :, columns] = new.to(store.device)

    @torch.no_grad()
    def prefill(self, inputs) -> Tensor:
        """The second of the paper's two passes: the boundary through every layer. Returns its logits, float32 [1, vocab]."""
        batch, starts = Batch.of(self._sequences(inputs), self.model), torch.zeros(1, dtype=torch.long)
        positions, following = self.model.positions(batch, starts)
        boundary = boundary_lengths(batch, self.model.image_blocks(batch.token_ids))
        # Images were encoded by the prefill rank; only one that the prompt ends with is needed here again.
        pixels = batch.pixel_values if batch.token_ids[0, -1] == self.model.config.image_token_id else None
        prompt = _Prompt(self, replace(batch, pixel_values=pixels), starts, positions)
        last = prompt.part(batch.counts - boundary, boundary).run()[:, -1:]  # [1, 1, D]
        logits = self.model.logits(last)[:, 0]
        self._remember(batch, starts, positions, following)
        self.cache.commit(batch.counts)
        return logits


# --- a prefill rank -------------------------------------------------------------------------------------------------------------


def serve(link: Link, runner: PrefillRunner) -> None:
    """Take prompts and stream their rows until rank 0 says stop. Raises LinkError when it is gone."""
    while True:
        try:
            request = link.receive_json(limit=IDLE)
            if request == END:
                return
            pixels = None
            if request["pixels"] is not None:
                pixels = link.receive(torch.empty(request["pixels"], dtype=torch.float32))
            grid = request["grid"] and torch.tensor(request["grid"])
            inputs = ModelInputs(torch.tensor(request["ids"]), pixels, grid)
            sender, problem = Sender(link), None
            try:
                with memory_errors():
                    runner.stream(inputs, sender.push)
            except LinkError:
                raise
            except MinipopError as mistake:  # rank 0 reports it
                problem = str(mistake)
            report = sender.finish()
            link.send(torch.tensor([0, 0, 0, 0]))
            link.send_json({"error": problem, **report})
        except LinkError as problem:
            try:
                link.connect(link.timeout)
            except LinkError:
                raise problem from None
            print(f"{problem}; connected again", file=sys.stderr, flush=True)


# --- the decode rank ------------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt on its way: where its rows are, and what became of it."""

    prompt: Prompt
    inputs: ModelInputs
    runner: DecodeRunner | None = None
    report: dict[str, float] = field(default_factory=dict)  # of its prefill
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


def fetch(link: Link, request: Request) -> None:
    """Have a prefill rank run the prompt, and put the rows into the request's runner as they come."""
    ids, pixels, grid = request.inputs.token_ids, request.inputs.pixel_values, request.inputs.image_grid_thw
    link.send_json({"ids": ids.tolist(), "pixels": None if pixels is None else list(pixels.shape),
                    "grid": None if grid is None else grid.tolist()})
    if pixels is not None:
        link.send(pixels.float().contiguous())
    cache = request.runner.cache.keys
    while True:
        first, start, layers, rows = link.receive(torch.empty(4, dtype=torch.long)).tolist()
        if layers == 0:
            break
        request.runner.put(first, start, link.receive(torch.empty(2, layers, cache.shape[2], rows, cache.shape[4], dtype=cache.dtype)))
    request.report = {"rank": link.number, **link.receive_json()}
    request.error = request.report.pop("error")


def feed(link: Link, waiting: SimpleQueue, free: SimpleQueue, events: SimpleQueue) -> None:
    """The thread that rank 0 has for each link: fetch prompts as long as there are any and the link can be made to work.

    events: each Request, fetched or failed; at the end the link, or the LinkError that ended it.
    """
    try:
        while True:
            runner = free.get()
            try:
                request = waiting.get_nowait()
            except Empty:
                free.put(runner)
                link.send_json(END)
                return events.put(link)
            request.runner = runner
            try:
                fetch(link, request)
            except Exception as problem:  # whatever it is: who is not told waits for ever
                request.error = str(problem) if isinstance(problem, LinkError) else one_line(problem)
                events.put(request)
                link.connect(link.timeout)  # in the middle of a message, nothing else can be said on the old one
            else:
                events.put(request)
    except LinkError as problem:
        events.put(problem)


def answer_all(links: Sequence[Link], runners: Sequence[DecodeRunner], requests: Sequence[Request],
               params: SamplingParams) -> Iterator[Request]:
    """Prefill on the links, decode here; yields each request when its answer is complete or it has failed.

    runners: more than links, so that rows can arrive for one prompt while another is decoded.
    """
    waiting, free, events = SimpleQueue(), SimpleQueue(), SimpleQueue()
    for queue, items in ((waiting, requests), (free, runners)):
        for item in items:
            queue.put(item)
    threads = [threading.Thread(target=feed, args=(link, waiting, free, events), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    open_links, unanswered, running = len(links), len(requests), []
    while unanswered:
        ended: list[Request] = []
        while not events.empty() or not running and not ended:
            event = events.get()  # ends within the timeout, as every thread does
            if not isinstance(event, Request):
                open_links -= 1
                if isinstance(event, LinkError):
                    print(f"{event}; {open_links} prefill rank{'s' * (open_links != 1)} left", file=sys.stderr, flush=True)
                if open_links == 0:  # whatever is left will never be fetched
                    while not waiting.empty():
                        ended.append(waiting.get())
                        ended[-1].error = f"there is no prefill rank left: {event}"
            elif event.error is None:
                running.append((event, event.runner.generate(event.inputs, params)))
            else:
                ended.append(event)
        for request, stream in running[:]:
            try:
                with memory_errors():
                    token_id = next(stream, None)
            except MinipopError as problem:
                token_id, request.error = None, str(problem)
            if token_id is not None:
                request.token_ids.append(token_id)
            else:
                running.remove((request, stream))
                ended.append(request)
        for request in ended:
            if request.runner is not None:
                request.runner.reset()
                free.put(request.runner)
            unanswered -= 1
            yield request
    end = time.monotonic() + ENDING
    for thread in threads:  # they say goodbye; one whose rank does not listen is left behind
        thread.join(max(0.0, end - time.monotonic()))


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _disagg(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.disagg", description=first, epilog=rest)
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[],
                        help="answer this: a message where the checkpoint has a chat template, else text to continue (repeatable)")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="a picture for every --prompt (repeatable)")
    parser.add_argument("--input", metavar="FILE", help="prompts as minipop.generate takes them, one JSON object a line; - is stdin")
    parser.add_argument("--output", metavar="FILE", default="-", help="the answers to --input; - is stdout (default)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S",
                        help="seconds without a sign of the other side that end a request (default: 60)")
    parser.add_argument("--wait", type=float, default=120.0, metavar="S", help="seconds for the other ranks to appear (default: 120)")
    add_model_arguments(parser)
    add_plan_arguments(parser)
    add_sampling_arguments(parser)
    return parser


def _disagg(args: argparse.Namespace) -> int:
    for name, seconds in (("--timeout", args.timeout), ("--wait", args.wait)):
        if not 0 < seconds <= 86400:
            raise MinipopError(f"{name} must be above 0 and at most 86400 seconds, not {seconds:g}")
    if bool(args.prompt) == bool(args.input) and os.environ.get("RANK", "0") == "0":  # only the decode rank reads them
        raise PromptError("give either --prompt or --input")
    if args.input and args.image:
        raise PromptError("--image goes with --prompt; the lines of --input name pictures of their own")
    rank, size = rank_and_size()
    folder = resolve_checkpoint(args.ckpt)
    config = read_config(folder)
    plan = plan_from(args, config.num_layers)
    PrefillPart(plan).config(config)  # refuses what cannot be done
    if (args.max_seq_len or 0) > config.max_position_embeddings:
        raise PromptError(f"--max-seq-len {args.max_seq_len} exceeds the {config.max_position_embeddings} positions the model was made for: lower it")
    prompts = [] if rank else read_prompts(args.input) if args.input else []
    if args.output != "-" and os.path.lexists(args.output) and not rank:
        raise PromptError(f"{args.output} is there already: choose another --output")
    if rank == 0 and args.output != "-":
        check_outputs({"--output": args.output})
    args.device = local_device(args.device)
    check_device(args.device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # started by hand, as the others will be
        others = "the decode rank, rank 0" if rank else "rank 1" if size == 2 else f"ranks 1 to {size - 1}"
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"rank {rank} waits for {others}, at {place}, {args.wait:g} s at most", file=sys.stderr, flush=True)
    with signals_that_end():
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=args.wait)))
        except (RuntimeError, ValueError) as problem:
            raise MinipopError(f"rank {rank} cannot reach the others: {network_reason(problem)}") from None
        links = [Link(store, number, rank, args.timeout) for number in (range(1, size) if rank == 0 else [rank])]
        for link in links:
            link.connect(args.wait)
    return _decode(args, folder, plan, prompts, links) if rank == 0 else _prefill(args, folder, plan, links[0])


def rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE. Raises MinipopError unless they are those of one of two processes or more."""
    texts = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if not texts[0] or texts[1] in ("", "0", "1"):
        raise MinipopError("prefill and decode are two processes or more: start them with python -m torch.distributed.run "
                           "--nproc-per-node 2 -m minipop.disagg ...")
    if not all(text.isdecimal() and len(text) < 6 for text in texts) or int(texts[0]) >= int(texts[1]):
        raise MinipopError(f"RANK must be a number from 0 to WORLD_SIZE - 1; they are {texts[0]!r} and {texts[1]!r}")
    return int(texts[0]), int(texts[1])


def _prefill(args: argparse.Namespace, folder: Path, plan: PrefillPlan, link: Link) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    part = PrefillPart(plan)
    model = pack(load_model(folder, args.dtype, args.device, part=part))
    link.send_json({"share": part.share, **_identity(model, plan)}, limit=LOADING)
    runner = PrefillRunner(model, plan, link.receive_json(limit=LOADING)["max_seq_len"])
    if runner.stacked_kv() is not None:  # it has a copy of them
        for i in plan.skip:
            model.layers[i].attn.qkv = None
    serve(link, runner)
    return 0


def _identity(model: nn.Module, plan: PrefillPlan) -> dict[str, Any]:
    """What both sides must have in common for rows of one to be of use to the other."""
    config = model.config
    return {"plan": plan.describe(), "calibrated K/V": None if plan.kv is None else sha256(Path(plan.kv).read_bytes()).hexdigest()[:16],
            "dtype": str(model.embedding.weight.dtype), "weights": fingerprint(model, 0),
            "model": [config.family, config.num_layers, config.hidden_size, config.num_kv_heads, config.head_dim, config.vocab_size]}


def _decode(args: argparse.Namespace, folder: Path, plan: PrefillPlan, prompts: list[Prompt], links: list[Link]) -> int:
    _, model, tokenizer, processor = load_from(args)
    params = sampling_from(args, folder)
    for index, text in enumerate(map(clean_text, args.prompt)):
        pictures = [{"type": "image", "image": file} for file in args.image]
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        chat = tokenizer.has_chat_template
        prompts.append(Prompt(f"--prompt {index + 1}", index, None, [{"role": "user", "content": content}] if chat else text, Path()))
    largest = model.config.max_position_embeddings
    limit = args.max_seq_len or min(DEFAULT_SEQ_LEN, largest)
    lengths = measure(prompts, model, tokenizer, processor, limit)
    max_seq_len = min(limit, max(lengths.values()) + params.max_new_tokens - 1)  # an answer's last token is not cached
    runners = [DecodeRunner(model, replace(plan, kv=None), max_seq_len) for _ in range(len(links) + 1)]
    requests = [Request(prompt, runners[0]._sequences(prompt.inputs(tokenizer, processor))[0]) for prompt in prompts]
    for link in links:
        hello = link.receive_json(limit=LOADING)
        share = hello.pop("share")
        mine = _identity(model, plan)
        different = [f"{key} ({hello.get(key)} there, {mine[key]} here)" for key in mine if hello.get(key) != mine[key]]
        if different:
            raise MinipopError(f"{link.other} was started with another model, dtype or plan: {', '.join(different)}")
        link.send_json({"max_seq_len": max_seq_len})
        print(f"{link.other} holds {share:.1%} of the weights ({plan.describe()})", file=sys.stderr, flush=True)

    ready: dict[int, Request] = {}
    written = 0
    with open_output(args.output) if args.input else _show_answers() as write:
        for request in answer_all(links, runners, requests, params):
            ready[request.prompt.index] = request
            while written in ready:
                answer = _answer(request := ready[written], model, tokenizer, params)
                write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
                if request.error is not None:
                    fail(f"{request.prompt.where}: {request.error}")
                written += 1
    _report(requests)
    return 2 if any(request.error for request in requests) else 0


@contextmanager
def _show_answers():
    """For --prompt: the text alone."""
    yield lambda line: print(json.loads(line).get("text", ""), flush=True)


def _answer(request: Request, model: nn.Module, tokenizer, params: SamplingParams) -> dict:
    """The line that generate.py would write, and about the prefill; or the error."""
    about = {"index": request.prompt.index, "id": request.prompt.id}
    if request.error is not None:
        return {**about, "error": request.error}
    ids = request.token_ids
    stopped = bool(ids) and ids[-1] in {*model.config.eos_token_ids, *params.stop_token_ids}
    reason = "stop" if stopped else "length" if len(ids) == params.max_new_tokens else "context"
    return {**about, "text": tokenizer.decode(ids[:-1] if stopped else ids), "token_ids": ids, "finish_reason": reason,
            "prompt_tokens": len(request.inputs), "prefill": request.report}


def _report(requests: Sequence[Request]) -> None:
    """A line a prefill rank: what it sent, and how much of that took no time of its own."""
    reports = [request.report for request in requests if request.error is None]
    for rank in sorted({report["rank"] for report in reports}):
        mine = [report for report in reports if report["rank"] == rank]
        total = {key: sum(report[key] for report in mine) for key in ("kv_bytes", "compute_s", "transfer_s", "hidden_s")}
        hidden = total["hidden_s"] / total["transfer_s"] if total["transfer_s"] else 1.0
        print(f"prefill rank {rank}: {len(mine)} prompt{'s' * (len(mine) != 1)}, {show_bytes(total['kv_bytes'])} of K/V sent in "
              f"{total['transfer_s']:.3f} s, {hidden:.0%} of it hidden behind {total['compute_s']:.3f} s of computation",
              file=sys.stderr, flush=True)


def _program() -> None:
    """The command as a process of its own, without the interpreter's farewell: a thread that gloo still holds, for a rank that is gone, would abort it."""
    try:
        code = main()
    except SystemExit as end:  # --help, SIGTERM
        code = end.code if isinstance(end.code, int) else 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _program()
