"""How `bench` measures: contenders in turns, peak memory, the machine's own rates, random weights of a shape.

A figure of seconds says little on a machine that others use too; what is compared takes turns within one run.
"""

import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .checkpoint import return_freed_memory
from .config import ModelConfig, read_config
from .errors import ConfigError
from .layers import GemmaRMSNorm
from .models import build_model

SHAPES = Path(__file__).parent / "shapes"  # config.json files of published models, for random weights


# --- time -----------------------------------------------------------------------------------------------------------------------

@dataclass
class Timing:
    """One contender at one setting: seconds, a number a repeat, and the most memory it took above what was in use, bytes."""

    name: str
    seconds: list[float]
    memory: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ratio(over: Timing, timing: Timing) -> tuple[float, float, float]:
    """How many times faster than `over`: median, lowest and highest of the ratios within a turn."""
    ratios = sorted(a / b for a, b in zip(over.seconds, timing.seconds))
    return statistics.median(ratios), ratios[0], ratios[-1]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(contenders: dict[str, tuple[Callable, Callable]], repeats: int, warmup: int, device: torch.device) -> list[Timing]:
    """Run every contender once a turn. contenders: name -> (prepare, work); only `work` is timed. Memory is
    that of the last turn, when whatever is made once has been made."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, int | None] = {name: None for name in contenders}
    for turn in range(-warmup, repeats):
        for name, (prepare, work) in contenders.items():
            prepare()
            with peak_memory(device) if turn == repeats - 1 else contextlib.nullcontext() as peak:
                synchronise(device)
                begin = time.perf_counter()
                work()
                synchronise(device)
                end = time.perf_counter()
            if turn >= 0:
                seconds[name].append(end - begin)
            if peak is not None:
                memory[name] = peak.bytes
    return [Timing(name, values, memory[name]) for name, values in seconds.items()]


# --- memory ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Peak:
    bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The most memory in use within the block, above what was in use at its start. None where the system does not tell."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:  # Linux keeps the largest resident size, and sets it back on request
        return_freed_memory()  # what earlier work freed must not count as in use
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    except (OSError, StopIteration):
        before = None
    yield peak
    if before is not None:
        peak.bytes = max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def process_peak() -> int:
    """Largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- the machine ----------------------------------------------------------------------------------------------------------------

def machine_rates(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """What this machine reaches now: matrix products in `dtype` (FLOP/s), copying memory (bytes/s, read and written together) and
    reading it (bytes/s)."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)
    big = torch.ones(2**26, device=device)  # 256 MiB, beyond any cache
    target = torch.empty_like(big)

    def best(work: Callable) -> float:
        begin = time.perf_counter()
        work()
        synchronise(device)
        spent = time.perf_counter() - begin
        repeats = 20 if spent < 0.1 else 5 if spent < 5 else 1  # some CPUs take minutes for a product in bfloat16
        return min(take_turns({"": (lambda: None, work)}, repeats, 0, device)[0].seconds)

    return {"matmul_flops": 2 * n**3 / best(lambda: a @ b), "copy_bytes": 2 * big.nbytes / best(lambda: target.copy_(big)),
            "read_bytes": big.nbytes / best(lambda: big.sum())}


def read_files(paths: list[Path]) -> float:
    """Seconds to read files plainly, from first byte to last."""
    buffer = bytearray(16 * 2**20)
    begin = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def forget_files(paths: list[Path]) -> bool:
    """Ask the system to drop its copies of files, so that they are read from the disk next; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


# --- models without a checkpoint ------------------------------------------------------------------------------------------------

def shape_config(name: str) -> ModelConfig:
    """The config of a published model by its name here, or of a folder with a config.json, or of such a file."""
    path = Path(name)
    known = sorted(p.name for p in SHAPES.iterdir() if p.is_dir())
    folder = SHAPES / name if name in known else path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no shape {name!r}: choose one of {', '.join(known)}, or a folder with a config.json")
    return read_config(folder)


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> nn.Module:
    """A model with random weights, made on the device: matrices around 0, norms at their neutral value."""
    model = build_model(config).to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    torch.manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02)
            else:  # a norm's weight or a bias
                parameter.data.fill_(1.0 if name == "weight" and not isinstance(module, GemmaRMSNorm) else 0.0)
    return model.eval().requires_grad_(False)
