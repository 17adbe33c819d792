"""Tensor parallelism: a model that does not fit one device, over several processes.

    python -m torch.distributed.run --nproc-per-node 2 -m minipop.chat --ckpt path/to/checkpoint --tp 2

Every rank runs every layer, with its share of it (the division is that of Megatron-LM, arXiv 1909.08053):

    W_Q, W_K, W_V, gate, up   by rows: some of the heads, whose K/V alone this rank's cache holds; a slice of the MLP
    o, down                   by columns: each rank has a summand of the output, and `all_reduce` adds them up
    head                      by rows: a slice of the vocabulary, and `all_gather` puts the logits together
    the rest                  everywhere: embedding, norms, vision tower

So all ranks hold the same stream between the layers, and each rank's model is an ordinary one: a config with fewer heads and a narrower
MLP, and two linears a layer that end in a sum. Runner, cache and prefill plans do not know. Where there are fewer kv heads than ranks,
several ranks hold the same one.

A program that does the same on every rank calls `load_parallel` after `init_process_group` and goes on as usual. In a command line rank
0 leads: it alone reads input, samples and writes, and tells the others which calls of its runners to repeat (`join`, `Team`).

Shapes: B batch, n tokens, D hidden, V vocabulary, H heads, K kv heads, E head_dim.
"""

import atexit
import contextlib
import itertools
import os
import re
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ConfigError, MinipopError, PlanError
from .files import one_line
from .layers import Tap, no_tap
from .models import load_model
from .models.names import Sources
from .packing import pack
from .plan import PrefillPlan
from .runner import Runner, as_token_ids
from .shards import PartialCheckpoint

PASS = timedelta(minutes=10)  # a rank that waits longer than this for the others in the middle of a pass gives up
IDLE = timedelta(days=365)  # between passes: a user may think for as long as they like


# --- a rank's share of the model ------------------------------------------------------------------------------------------------


def load_parallel(path: str | Path, dtype: torch.dtype | str | None = None, device: str | torch.device = "cpu") -> nn.Module:
    """This rank's share of a checkpoint, each tensor's slice read alone. Every rank of the default process group calls it alike.

    Arguments as in `load_model`; "cuda" is the GPU of this rank. `model.config` is that of the share. Raises ConfigError where heads
    or MLP cannot be divided, and on every rank what went wrong on any of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model, problem = None, None
    try:
        model = load_model(path, dtype, local_device(device), part=TensorPart(rank, size))
    except MinipopError as caught:
        problem = caught
    problems: list[MinipopError | None] = [None] * size
    dist.all_gather_object(problems, problem)
    for other, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"rank {other}: {problem}" if other else str(problem))
    return model


def local_device(device: str | torch.device) -> str | torch.device:
    """One GPU a process, by its number on its machine; a device with a number, and the CPU, stay what they are."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if str(device) == "cuda" else device


def network_reason(problem: BaseException) -> str:
    """The sentence of an error of torch.distributed that says what happened, without the place in its source."""
    return re.sub(r"^\w+: (\[[^]]*\] )?", "", one_line(problem)).partition(". ")[0]


class TensorPart:
    """The share of rank `rank` of `size` (a `shards.Part`)."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def config(self, config: ModelConfig) -> ModelConfig:
        heads, kv_heads, mlp = config.num_heads, config.num_kv_heads, config.intermediate_size
        if not _divides(config, self.size):
            possible = ", ".join(str(n) for n in range(1, heads + 1) if _divides(config, n))
            raise ConfigError(f"this model cannot be divided over {self.size} ranks: it has {heads} heads, {kv_heads} kv heads and "
                              f"{mlp} rows in its MLP; possible are {possible}")
        self.whole = config
        return replace(config, num_heads=heads // self.size, num_kv_heads=max(1, kv_heads // self.size),
                       intermediate_size=mlp // self.size)

    def cut(self, model: nn.Module, checkpoint: Checkpoint, sources: Sources) -> tuple[Checkpoint, Sources]:
        whole, own = self.whole, model.config
        kv_head = self.rank * whole.num_kv_heads // self.size  # the first one of this rank; neighbours may have the same
        queries = self._span(own.queries_width, whole.queries_width)
        kv = (kv_head * own.head_dim, kv_head * own.head_dim + own.kv_width, whole.kv_width)
        mlp = self._span(own.intermediate_size, whole.intermediate_size)
        by_rows = {"attn.qkv": (queries, kv, kv), "mlp.gate_up": (mlp, mlp)}
        by_columns = {"attn.o.weight": queries, "mlp.down.weight": mlp}
        slices = {}
        for i in range(own.num_layers):
            for name, spans in by_rows.items():
                for kind in ("weight", "bias"):
                    slices |= {tensor: (0, *span) for tensor, span in zip(sources.get(f"layers.{i}.{name}.{kind}", ()), spans)}
            for name, span in by_columns.items():
                slices[sources[f"layers.{i}.{name}"][0]] = (1, *span)
        if "head.weight" in sources:
            first, end = self._vocabulary()
            model.head = nn.Linear(own.hidden_size, end - first, bias=False, device="meta")
            slices[sources["head.weight"][0]] = (0, first, end, own.vocab_size)
        return PartialCheckpoint(checkpoint, slices), sources

    def finish(self, model: nn.Module, sources: Sources) -> None:
        first, end = self._vocabulary()
        if "head.weight" not in sources:  # tied: rows of the embedding, which is whole on every rank
            model.head = nn.Linear(model.config.hidden_size, end - first, bias=False, device="meta")
            model.head.weight = nn.Parameter(model.embedding.weight[first:end], requires_grad=False)
        model.head = GatheredLinear(model.head, model.config.vocab_size, self.size)
        for layer in model.layers:
            layer.attn.o = SummedLinear(layer.attn.o, self.rank)
            layer.mlp.down = SummedLinear(layer.mlp.down, self.rank)

    def _span(self, own: int, whole: int) -> tuple[int, int, int]:
        return self.rank * own, (self.rank + 1) * own, whole

    def _vocabulary(self) -> tuple[int, int]:
        """First and end of this rank's ids; the last ranks have fewer where the ids cannot be divided evenly."""
        vocabulary = self.whole.vocab_size
        rows = -(-vocabulary // self.size)
        return min(self.rank * rows, vocabulary), min((self.rank + 1) * rows, vocabulary)


def _divides(config: ModelConfig, size: int) -> bool:
    """Whether every rank gets the same number of heads, each with its kv head, and the same slice of the MLP."""
    kv_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return config.num_heads % size == 0 and kv_heads and config.intermediate_size % size == 0


class SummedLinear(nn.Module):
    """sum over ranks of x_r W_r^T, + b: rank r has the columns W_r of W and the part x_r of the input."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        if rank:
            linear.bias = None  # rank 0 adds it, once

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, columns / ranks] -> [B, n, D], the same on every rank."""
        out = self.linear(x)
        dist.all_reduce(out)
        return out


class GatheredLinear(nn.Module):
    """x W^T, of which each rank computes the columns that its rows of W give."""

    def __init__(self, linear: nn.Linear, width: int, size: int):
        super().__init__()
        self.linear, self.width, self.size = linear, width, size

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, D] -> [B, n, V], the same on every rank."""
        own = self.linear(x)
        own = F.pad(own, (0, -(-self.width // self.size) - own.shape[-1]))  # the last ranks may have fewer rows
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)[..., : self.width]


# --- command lines: rank 0 leads ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_that_end() -> Iterator[None]:
    """While ranks wait for each other, inside PyTorch, Python's handlers do not run: SIGTERM and Ctrl-C end the process by themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join(tp: int, device: str = "cpu") -> "Team | None":
    """For `--tp`: None for one process, the team on rank 0 of several. The other ranks stay in here until rank 0 ends.

    Raises MinipopError, on rank 0 alone, unless there are as many processes as `tp` says.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if tp > 1 or dist.is_torchelastic_launched() else 1
    if tp != world:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        raise MinipopError(f"--tp {tp} takes {tp} process{'es' * (tp > 1)}, but there {'is one' if world == 1 else f'are {world}'}: "
                           + (f"start with python -m torch.distributed.run --nproc-per-node {tp} -m ..." if tp > 1 else
                              f"add --tp {world}, or start without torch.distributed.run"))
    if tp == 1:
        return None
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        raise MinipopError(f"--device {device} cannot be used: PyTorch finds no GPU here")
    try:
        if str(device).startswith("cuda"):
            torch.cuda.set_device(local_device(device))
        with signals_that_end():
            dist.init_process_group("nccl" if str(device).startswith("cuda") else "gloo", timeout=PASS)
        team = Team()
    except (RuntimeError, ValueError) as problem:  # no network, no such GPU, no address in the environment
        raise MinipopError(f"--tp {tp}: the processes do not find each other: {one_line(problem)}") from None
    if team.rank:
        team.follow()
    atexit.register(team.dismiss)
    return team


class Team:
    """The processes behind one command line. Rank 0 gives orders; the others carry them out, each on its share of the model."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.orders = dist.new_group(backend="gloo", timeout=IDLE)
        self.numbers = itertools.count()
        self.dropped: list[int] = []  # runners that rank 0 has no more use for
        self.lost: str | None = None  # why the ranks are out of step

    # rank 0

    def load(self, path: str | Path, dtype: torch.dtype | str | None = None, device: str = "cpu") -> nn.Module:
        """Everybody's share of the model. Runners made for it lead those of the other ranks."""
        self.tell("load", str(path), dtype, device)
        try:
            model = load_parallel(path, dtype, device)
        except MinipopError as problem:
            self.lost = str(problem)
            raise
        model.team, model.runner_class = self, LeadingRunner
        return model

    def tell(self, *order: Any) -> None:
        if self.lost is not None:
            raise MinipopError(self.lost)
        dropped = self.dropped[:]
        del self.dropped[: len(dropped)]
        with self.in_step():
            dist.broadcast_object_list([(dropped, *order)], src=0, group=self.orders)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What stops one rank in the middle of a pass leaves the others waiting: nothing can go on after that.

        A MinipopError is no such thing: it comes before a pass begins, on every rank alike.
        """
        try:
            yield
        except MinipopError:
            raise
        except BaseException as problem:
            if not isinstance(problem, RuntimeError) or not re.search("gloo|nccl|distributed", str(problem), re.IGNORECASE):
                self.lost = f"the processes are out of step since an earlier failure ({one_line(problem)}): start again"
                raise
            self.lost = f"rank {self.rank} lost the other processes: {network_reason(problem)}"
            raise MinipopError(self.lost) from None

    def dismiss(self) -> None:
        """At the end of the program."""
        with contextlib.suppress(MinipopError):
            self.tell("stop")
        leave()

    # the others

    def follow(self) -> NoReturn:
        """Do as rank 0 says until it says stop. Then, or when rank 0 is gone, the process ends."""
        model, runners = None, {}
        while True:
            box: list = [None]
            with self.in_step():
                dist.broadcast_object_list(box, src=0, group=self.orders)
            dropped, what, *order = box[0]
            for number in dropped:
                runners.pop(number, None)
            if what == "stop":
                leave()
                raise SystemExit(0)
            elif what == "load":
                try:
                    model = pack(load_parallel(*order))
                except MinipopError:
                    raise SystemExit(2) from None  # rank 0 has the same error, and says it
            elif what == "make":
                number, options = order
                runners[number] = Runner(model, **options)
            else:
                number, plan, method, arguments = order
                runners[number].plan = plan
                try:
                    with self.in_step():
                        getattr(runners[number], method)(*arguments)
                except MinipopError:
                    if self.lost is not None:
                        raise
                    # otherwise a mistake in the call: rank 0 has the same error


def leave() -> None:
    """End the groups' threads: one that still runs when the process ends aborts it."""
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the other side may be gone
        dist.destroy_process_group()


class LeadingRunner(Runner):
    """A runner on rank 0 whose calls the other ranks' runners repeat. What they return is rank 0's."""

    def __init__(self, model: nn.Module, plan: PrefillPlan | None = None, max_seq_len: int = 4096, batch_size: int = 1, *,
                 fused: bool = True, chunk_size: int = 2048, tap: Tap = no_tap):
        if tap is not no_tap:
            raise MinipopError("a tap sees one rank's heads only: run without --tp")
        if plan is not None and plan.kv is not None:
            raise PlanError("calibrated K/V (kv) are for all heads together: run without --tp")
        super().__init__(model, plan, max_seq_len, batch_size, fused=fused, chunk_size=chunk_size)  # the checks come first
        self.team, self.number = model.team, next(model.team.numbers)
        self.team.tell("make", self.number, {"plan": self.plan, "max_seq_len": max_seq_len, "batch_size": batch_size,
                                              "fused": fused, "chunk_size": chunk_size})
        # Not told at once: rank 0 may collect its garbage in the middle of a pass.
        weakref.finalize(self, self.team.dropped.append, self.number)

    def prefill(self, inputs) -> Tensor:
        return self._everywhere("prefill", self._sequences(inputs))

    def extend(self, token_ids) -> Tensor:
        return self._everywhere("extend", as_token_ids(token_ids))

    def rewind(self, n) -> None:
        self._everywhere("rewind", n)

    def reset(self) -> None:
        self._everywhere("reset")

    def _compact(self, kept: list[int]) -> list[int]:
        return self._everywhere("_compact", kept)

    def _everywhere(self, method: str, *arguments: Any) -> Any:
        self.team.tell("run", self.number, self.plan, method, arguments)
        with self.team.in_step():
            return getattr(Runner, method)(self, *arguments)
