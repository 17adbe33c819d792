"""`python -m minipop.bench`: how long a prompt takes to its first token, and how fast tokens follow.

Machines are noisy, so nothing here is an absolute claim: all contenders take turns within one run (full, POP, full, POP, ...), the
table shows medians with the spread of the repeats, and speed-ups are medians of the ratios within a turn. Beside them stand the two
limits: what the speed-up would be if time were proportional to operations, and what share of the machine's matrix-product and copy
rates, measured in the same run, was reached.
"""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import costs
from .cli import Parser, run
from .errors import CheckpointError, MinipopError, PromptError
from .files import one_line, read_json, temporary_beside, write_text
from .models import load_model
from .packing import pack
from .plan import PrefillPlan
from .runner import Runner


@dataclass
class Timing:
    """Seconds of one contender at one setting, a number a repeat."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Row:
    """One line of the prefill table."""

    tokens: int
    batch: int
    timings: list[Timing]
    ideal: dict[str, float]  # by operations, relative to full
    flops: dict[str, int]

    def speedup(self, name: str, over: str) -> tuple[float, float, float]:
        """Median, lowest and highest of over/name within a turn."""
        a, b = (next(t for t in self.timings if t.name == n) for n in (over, name))
        ratios = sorted(x / y for x, y in zip(a.seconds, b.seconds))
        return statistics.median(ratios), ratios[0], ratios[-1]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(contenders: dict, repeats: int, warmup: int, device: torch.device) -> list[Timing]:
    """Run every contender once a turn. contenders: name -> (prepare, work); only `work` is timed."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-warmup, repeats):
        for name, (prepare, work) in contenders.items():
            prepare()
            synchronise(device)
            begin = time.perf_counter()
            work()
            synchronise(device)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return [Timing(name, values) for name, values in seconds.items()]


def machine_rates(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """What this machine reaches now: matrix products (FLOP/s) in `dtype`, and reading memory (bytes/s) by a matrix-vector product."""
    n = 4096 if device.type == "cuda" else 1024
    a, b = torch.randn(n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)
    big = torch.empty(256 * 2**20 // 4, device=device)  # 256 MiB, beyond any cache
    big.fill_(1.0)
    target = torch.empty_like(big)

    def best(work, count=5):
        times = take_turns({"x": (lambda: None, work)}, count, 2, device)[0].seconds
        return min(times)

    product = best(lambda: [a @ b for _ in range(4)])
    copy = best(lambda: target.copy_(big))
    return {"matmul_flops": 4 * 2 * n**3 / product, "copy_bytes": 2 * big.numel() * 4 / copy}


def bench_prefill(model, plans: dict[str, PrefillPlan], tokens: int, batch: int, repeats: int, reference=None) -> Row:
    """Time to first token of random prompts: from ids to the logits of the last one, cache writes included."""
    device = model.embedding.weight.device
    ids = torch.randint(0, min(model.config.num_token_ids, model.config.vocab_size), (batch, tokens),
                        generator=torch.Generator().manual_seed(0))
    contenders = {}
    for name, plan in plans.items():
        runner = Runner(model, plan, max_seq_len=tokens, batch_size=batch)
        contenders[name] = (runner.reset, lambda runner=runner: runner.prefill(ids))
    if reference is not None:
        there = ids.to(device)
        contenders["transformers"] = (lambda: None, lambda: reference_prefill(reference, there))
    timings = take_turns(contenders, repeats, 1 if tokens * batch > 1024 else 2, device)
    full = PrefillPlan.full(model.config.num_layers)
    flops = {name: batch * costs.prefill_flops(model.config, tokens, plan) for name, plan in plans.items()}
    flops["transformers"] = batch * costs.prefill_flops(model.config, tokens, full)
    return Row(tokens, batch, timings, {n: costs.ideal_speedup(model.config, tokens, p) for n, p in plans.items()}, flops)


@torch.no_grad()
def reference_prefill(reference, ids):
    return reference(ids, use_cache=True, logits_to_keep=1)


def bench_decode(model, prompt: int, steps: int, batch: int, repeats: int, reference=None) -> list[Timing]:
    """Seconds of `steps` greedy decode steps after a prompt of `prompt` tokens (the plan does not matter here)."""
    device = model.embedding.weight.device
    ids = torch.randint(0, model.config.num_token_ids, (batch, prompt), generator=torch.Generator().manual_seed(1))
    runner = Runner(model, max_seq_len=prompt + steps + 1, batch_size=batch)
    state: dict = {}

    def prepare():
        runner.reset()
        state["next"] = runner.prefill(ids).argmax(-1)

    def work():
        token = state["next"]
        for _ in range(steps):
            token = runner.decode(token).argmax(-1)

    contenders = {"minipop": (prepare, work)}
    if reference is not None:
        def prepare_reference():
            out = reference_prefill(reference, ids.to(device))
            state["cache"], state["id"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

        @torch.no_grad()
        def run_reference():
            token, cache = state["id"], state["cache"]
            for _ in range(steps):
                token = reference(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        contenders["transformers"] = (prepare_reference, run_reference)
    return take_turns(contenders, repeats, 1, device)


# --- the command -----------------------------------------------------------------------------------------------------------

def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m minipop.bench", description=__doc__.split("\n\n")[0].split(": ", 1)[1])
    p.add_argument("--ckpt", required=True, help="checkpoint folder, or org/model")
    p.add_argument("--lengths", default="32,128,512,2048", help="prompt lengths in tokens (default %(default)s)")
    p.add_argument("--batch", default="1", help="batch sizes (default %(default)s)")
    p.add_argument("--ratios", default="1/3", help="shares of layers to skip, compared with full (default %(default)s)")
    p.add_argument("--plan", help="a plan file to time as well")
    p.add_argument("--against", choices=["transformers"], help="time the same work in transformers, in the same turns")
    p.add_argument("--decode-tokens", type=int, default=32, help="decode steps to time, 0 for none (default %(default)s)")
    p.add_argument("--decode-prompt", type=int, default=128, help="prompt length before them (default %(default)s)")
    p.add_argument("--repeats", type=int, default=5, help="turns that count (default %(default)s)")
    p.add_argument("--dtype", help="float32, bfloat16, ... (default: the checkpoint's)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--plain", action="store_true", help="leave the weights as they are in the file: no packing for the CPU's kernels")
    p.add_argument("--json", metavar="FILE", help="write every repeat")
    p.add_argument("--figure", metavar="FILE", help="draw the speed-ups (needs matplotlib: the plot extra)")
    return p


def whole_numbers(text: str, name: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise PromptError(f"--{name} takes whole numbers above zero, separated by commas, not {text!r}")
    return numbers


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    lengths, batches = whole_numbers(args.lengths, "lengths"), whole_numbers(args.batch, "batch")
    if args.repeats < 1 or args.decode_tokens < 0 or args.decode_prompt < 1:
        raise PromptError("--repeats and --decode-prompt must be at least 1, --decode-tokens at least 0")
    if args.threads is not None:
        if args.threads < 1:
            raise PromptError("--threads must be at least 1")
        torch.set_num_threads(args.threads)
    before = peak_memory()
    begin = time.perf_counter()
    model = load_model(args.ckpt, dtype=args.dtype, device=args.device)
    load_seconds, load_memory = time.perf_counter() - begin, peak_memory() - before
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if not args.plain:
        pack(model)
    dtype, device = model.embedding.weight.dtype, model.embedding.weight.device
    if max(lengths) > model.config.max_position_embeddings:
        raise PromptError(f"--lengths asks for {max(lengths)} tokens, the model was made for {model.config.max_position_embeddings}")
    plans = {"full": PrefillPlan.full(model.config.num_layers)}
    for ratio in args.ratios.split(","):
        plan = PrefillPlan.deepest(model.config.num_layers, ratio)
        plans[f"POP {len(plan.skip)}/{plan.num_layers}"] = plan
    if args.plan:
        plans[Path(args.plan).stem] = PrefillPlan.load(args.plan)
    reference = load_reference(args.ckpt, dtype, device) if args.against else None
    rates = machine_rates(dtype, device)

    print(f"{args.ckpt}  {str(dtype).removeprefix('torch.')}  {device}  {torch.get_num_threads()} threads  "
          f"torch {torch.__version__}  {platform.processor() or platform.machine()}")
    print(f"loaded in {load_seconds:.2f} s, peak memory {load_memory / 2**20:.0f} MiB above the imports for {size / 2**20:.0f} MiB of weights")
    print(f"this machine now: matrix products {rates['matmul_flops'] / 1e9:.0f} GFLOP/s, copies {rates['copy_bytes'] / 1e9:.1f} GB/s\n")
    rows = []
    print(f"{'tokens':>7} {'batch':>5} {'contender':<14} {'TTFT s':>8} {'min':>8} {'max':>8} {'speed-up':>9} {'ideal':>6} {'of peak':>8}")
    for batch in batches:
        for tokens in lengths:
            row = bench_prefill(model, plans, tokens, batch, args.repeats, reference)
            rows.append(row)
            for t in row.timings:
                speedup = row.speedup(t.name, "full")[0]
                ideal = f"{row.ideal[t.name]:.2f}" if t.name in row.ideal else ""
                print(f"{tokens:>7} {batch:>5} {t.name:<14} {t.median:>8.4f} {min(t.seconds):>8.4f} {max(t.seconds):>8.4f} "
                      f"{speedup:>8.2f}x {ideal:>6} {row.flops[t.name] / t.median / rates['matmul_flops']:>7.0%}", flush=True)
            gc.collect()
    decode = []
    if args.decode_tokens:
        print(f"\n{'decode':>7} {'batch':>5} {'contender':<14} {'tokens/s':>9} {'ms a step':>10} {'of copy rate':>13}")
        for batch in batches:
            timings = bench_decode(model, args.decode_prompt, args.decode_tokens, batch, args.repeats, reference)
            must_read = costs.decode_bytes(model.config, args.decode_prompt, batch, dtype.itemsize)
            for t in timings:
                step = t.median / args.decode_tokens
                print(f"{args.decode_tokens:>7} {batch:>5} {t.name:<14} {batch / step:>9.1f} {step * 1e3:>10.2f} "
                      f"{must_read / step / rates['copy_bytes']:>12.0%}", flush=True)
            decode.append({"batch": batch, "prompt": args.decode_prompt, "steps": args.decode_tokens,
                           "timings": [asdict(t) for t in timings]})
    result = {"checkpoint": str(args.ckpt), "dtype": str(dtype).removeprefix("torch."), "device": str(device),
              "threads": torch.get_num_threads(), "torch": torch.__version__, "load_seconds": load_seconds,
              "load_peak_bytes": load_memory, "weight_bytes": size, "peak_bytes": peak_memory(), **rates,
              "prefill": [asdict(r) for r in rows], "decode": decode}
    if args.json:
        write_text(Path(args.json), json.dumps(result, indent=1) + "\n")
    if args.figure:
        draw(rows, Path(args.figure))
    print(f"\npeak memory of the process {peak_memory() / 2**20:.0f} MiB")
    return 0


def load_reference(path: str, dtype: torch.dtype, device: torch.device):
    try:
        import transformers
    except ImportError:
        raise MinipopError("--against transformers needs transformers: pip install -e '.[test]' in the repository") from None
    from .checkpoint import resolve_checkpoint
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = resolve_checkpoint(path)
    vision = "vision_config" in read_json(folder / "config.json")
    loader = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    try:
        return loader.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True).to(device).eval()
    except Exception as problem:  # whatever transformers and the libraries under it raise
        raise CheckpointError(f"{folder}: transformers cannot load this checkpoint: {one_line(problem)}") from None


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def draw(rows: list[Row], path: Path) -> None:
    """Measured speed-up over full against prompt length, the ideal by operations dashed."""
    try:
        import matplotlib
    except ImportError:
        raise MinipopError("--figure needs matplotlib: pip install -e '.[plot]' in the repository") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for batch in sorted({r.batch for r in rows}):
        mine = [r for r in rows if r.batch == batch]
        for name in [n for n in mine[0].ideal if n != "full"]:
            values = [r.speedup(name, "full") for r in mine]
            x = [r.tokens for r in mine]
            line, = axes.plot(x, [v[0] for v in values], marker="o", label=f"{name}, batch {batch}")
            axes.fill_between(x, [v[1] for v in values], [v[2] for v in values], alpha=0.15, color=line.get_color())
            axes.plot(x, [r.ideal[name] for r in mine], linestyle="--", color=line.get_color())
    axes.set(xscale="log", xlabel="prompt tokens", ylabel="time to first token, full / plan")
    axes.set_xticks([r.tokens for r in rows], [str(r.tokens) for r in rows])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    temporary = temporary_beside(path, path.suffix or ".png")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        raise MinipopError(f"cannot write {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(run(main))
