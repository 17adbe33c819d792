"""`python -m minipop.bench`: how long a prompt takes to its first token, and how fast tokens follow.

Machines are noisy, so nothing here is an absolute claim: all contenders take turns within one run (full, POP, full, POP, ...), the
tables show medians with the spread of the repeats, and speed-ups are medians of the ratios within a turn. Beside them stand the
limits: what the speed-up would be if time were proportional to operations, and what share of the machine's matrix-product and reading
rates, measured in the same run, was reached. Memory is what a prefill takes above weights and cache.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from . import costs, measuring
from .checkpoint import resolve_checkpoint
from .cli import Parser, add_parallel_argument, check_device, run
from .compiled import CompiledToken, compile_decoding
from .errors import CheckpointError, MinipopError, PromptError
from .figures import load_pyplot, save_figure
from .files import one_line, read_json, write_text
from .inputs import ModelInputs
from .measuring import Timing, peak_memory, ratio, take_turns
from .models import load_model, pick_dtype
from .packing import has_kernels, pack
from .parallel import join
from .plan import PrefillPlan
from .processing import IMAGE_PROCESSORS, GemmaImageProcessor, QwenImageProcessor
from .projection import KVProjection
from .runner import Runner
from .tokenizer import has_tokenizer, load_token_ids

TEXT_WITH_IMAGE = 32  # tokens of text around an image, half before and half after


# --- what is measured -----------------------------------------------------------------------------------------------------------

@dataclass
class Prompt:
    """What one line of the prefill table is about. `lengths`: tokens of each row; `inputs`: what `Runner.prefill` takes."""

    label: str
    lengths: list[int]
    inputs: object
    image: tuple[int, int] | None = None  # patches and rows

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1


@dataclass
class Row:
    """A line of the prefill table, with its contenders. lengths: tokens of each row; flops: of all rows together."""

    label: str
    lengths: list[int]
    batch: int
    timings: list[Timing]
    flops: dict[str, int]

    def speedup(self, name: str) -> tuple[float, float, float]:
        """Over "full": median, lowest, highest."""
        timings = {t.name: t for t in self.timings}
        return ratio(timings["full"], timings[name])

    def ideal(self, name: str) -> float:
        return self.flops["full"] / self.flops[name]


def random_ids(config, rows: int, tokens: int) -> torch.Tensor:
    ids = torch.randint(0, min(config.num_token_ids, config.vocab_size), (rows, tokens), generator=torch.Generator().manual_seed(0))
    return ids if config.image_token_id is None else ids.masked_fill(ids == config.image_token_id, 0)


def text_prompt(model: nn.Module, tokens: int, batch: int, ragged: bool = False) -> Prompt:
    """Random ids; ragged: rows of 1/B, 2/B, ... of the tokens."""
    ids = random_ids(model.config, batch, tokens)
    if not ragged:
        return Prompt(str(tokens), [tokens] * batch, ids)
    lengths = [max(1, tokens * (row + 1) // batch) for row in range(batch)]
    return Prompt(f"{tokens} ragged", lengths, [row[:n].tolist() for row, n in zip(ids, lengths)])


def image_prompt(model: nn.Module, processor, size: str, batch: int) -> Prompt:
    """A grey picture of `size`, WxH pixels, with text around it. Making pixels of pictures is not timed, the vision tower is."""
    from PIL import Image
    width, height = map(int, size.split("x"))
    pixels, grid = processor([Image.new("RGB", (width, height), "grey")])
    rows, = model.image_counts(pixels, grid)
    vision = model.config.vision
    patches = int(grid.prod()) if grid is not None else (vision.image_size // vision.patch_size) ** 2
    text = random_ids(model.config, 1, TEXT_WITH_IMAGE)[0]
    half = TEXT_WITH_IMAGE // 2
    ids = torch.cat((text[:half], torch.full((rows,), model.config.image_token_id), text[half:]))
    return Prompt(size, [len(ids)] * batch, [ModelInputs(ids, pixels, grid)] * batch, (patches, rows))


def bench_prefill(model: nn.Module, plans: dict[str, PrefillPlan], prompt: Prompt, repeats: int, reference=None, chunk_size: int = 2048,
                  plain_forms: bool = False, warmup: int = 2) -> Row:
    """Time to first token: from ids (and pixels) to the logits of the last one, cache writes included."""
    device = model.embedding.weight.device
    longest, batch = max(prompt.lengths), len(prompt.lengths)
    contenders: dict[str, tuple[Callable, Callable]] = {}

    def add(name: str, plan: PrefillPlan, compiled: CompiledToken | None = None, **options) -> None:
        runner = Runner(model, plan, max_seq_len=longest, chunk_size=chunk_size, **options)
        runner.compiled = compiled
        for store in (runner.cache.keys, runner.cache.values):
            store.zero_()  # the cache's memory is in use from now on: it is not the prefill's
        contenders[name] = (runner.reset, lambda: runner.prefill(prompt.inputs))

    for name, plan in plans.items():
        add(name, plan, batch_size=batch)
        if plain_forms:
            add(f"{name}, plain", plan, batch_size=batch, fused=False)
        if model.compiled is not None and batch == 1 and plan.split_boundary:  # the boundary token is what it is for
            add(f"{name}, compiled", plan, model.compiled, batch_size=batch)
    if prompt.ragged:
        alone = Runner(model, max_seq_len=longest, chunk_size=chunk_size)

        def one_by_one() -> None:
            for row in prompt.inputs:
                alone.reset()
                alone.prefill(row)
        contenders["full, one by one"] = (alone.reset, one_by_one)
    if reference is not None and isinstance(prompt.inputs, torch.Tensor):
        ids = prompt.inputs.to(device)
        contenders["transformers"] = (lambda: None, lambda: reference_prefill(reference, ids))
    timings = take_turns(contenders, repeats, warmup, device)
    full = PrefillPlan.full(model.config.num_layers)
    seen = costs.vision_flops(model.config.vision, *prompt.image) * batch if prompt.image else 0
    flops = {t.name: seen + sum(costs.prefill_flops(model.config, n, plans.get(t.name.removesuffix(", plain").removesuffix(", compiled"), full))
                                for n in prompt.lengths) for t in timings}
    return Row(prompt.label, prompt.lengths, batch, timings, flops)


@torch.no_grad()
def reference_prefill(reference, ids):
    return reference(ids, use_cache=True, logits_to_keep=1)


def bench_decode(model: nn.Module, prompt: Prompt, steps: int, repeats: int, reference=None, plain_forms: bool = False) -> list[Timing]:
    """Seconds of `steps` greedy decode steps after a prompt (the plan does not matter here)."""
    device = model.embedding.weight.device

    def ours(compiled: CompiledToken | None = None, **options) -> tuple[Callable, Callable]:
        runner = Runner(model, max_seq_len=max(prompt.lengths) + steps + 1, batch_size=len(prompt.lengths), **options)
        runner.compiled = compiled
        state: dict = {}

        def prepare():
            runner.reset()
            state["next"] = runner.prefill(prompt.inputs).argmax(-1)

        def work():
            token = state["next"]
            for _ in range(steps):
                token = runner.decode(token).argmax(-1)
        return prepare, work

    contenders = {"minipop": ours()}
    if plain_forms:
        contenders["minipop, plain"] = ours(fused=False)
    if model.compiled is not None and len(prompt.lengths) == 1:
        contenders["minipop, compiled"] = ours(model.compiled)
    if reference is not None and isinstance(prompt.inputs, torch.Tensor):
        state: dict = {}

        def prepare_reference():
            out = reference_prefill(reference, prompt.inputs.to(device))
            state["cache"], state["id"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

        @torch.no_grad()
        def run_reference():
            token, cache = state["id"], state["cache"]
            for _ in range(steps):
                token = reference(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        contenders["transformers"] = (prepare_reference, run_reference)
    return take_turns(contenders, repeats, 1, device)


def bench_loading(load: Callable[[], nn.Module], folder: Path | None) -> tuple[nn.Module, dict]:
    """Load the model once, beside a plain read of its files; both from the disk where the system can be asked to forget them."""
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    forgotten = measuring.forget_files(files) if files else False
    read_seconds = measuring.read_files(files)
    if files:
        measuring.forget_files(files)
    with peak_memory(torch.device("cpu")) as peak:
        begin = time.perf_counter()
        model = load()
        seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    if folder is not None and has_tokenizer(folder):
        load_token_ids(folder)  # again: a model's loading includes it
    tokenizer_seconds = time.perf_counter() - begin
    return model, {"load_seconds": seconds, "tokenizer_seconds": tokenizer_seconds, "read_seconds": read_seconds, "from_disk": forgotten, "load_peak_bytes": peak.bytes,
                   "file_bytes": sum(file.stat().st_size for file in files)}


# --- the command ----------------------------------------------------------------------------------------------------------------

def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m minipop.bench", description=__doc__.split("\n\n")[0].split(": ", 1)[1])
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="checkpoint folder, or org/model")
    source.add_argument("--random", metavar="SHAPE", help="random weights in the shape of llama-3.1-8b, gemma-3-12b or qwen3-vl-8b, or "
                        "of a folder with a config.json: no files are needed")
    p.add_argument("--lengths", default="32,128,512,2048", help="prompt lengths in tokens (default %(default)s)")
    p.add_argument("--image-sizes", metavar="WxH,...", help="for a vision-language model: pictures of these sizes as well, "
                   f"with {TEXT_WITH_IMAGE} tokens of text")
    p.add_argument("--batch", default="1", help="batch sizes (default %(default)s)")
    p.add_argument("--ragged", action="store_true", help="batches of prompts of different lengths as well")
    p.add_argument("--ratios", default="1/3", help="shares of layers to skip, compared with full (default %(default)s)")
    p.add_argument("--plan", help="a plan file to time as well")
    p.add_argument("--kv", metavar="FILE", help="calibrated K/V to time as well, from minipop.calibrate")
    p.add_argument("--chunk-size", type=int, default=2048, help="most prompt tokens that go through the layers at once (default %(default)s)")
    p.add_argument("--against", choices=["transformers"], help="time the same work in transformers, in the same turns")
    p.add_argument("--plain-forms", action="store_true", help="time the plain forms of prefill and decode too (Runner's fused=False)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="time the compiled form of decode steps and of POP's boundary token too, "
                   "on CPUs with a C++ compiler (default: with --against, where there is one)")
    p.add_argument("--decode-tokens", type=int, default=32, help="decode steps to time, 0 for none (default %(default)s)")
    p.add_argument("--decode-prompt", default="128", help="prompt lengths before them (default %(default)s)")
    p.add_argument("--repeats", type=int, default=5, help="turns that count (default %(default)s)")
    p.add_argument("--warmup", type=int, default=2, help="turns before them that do not (default %(default)s)")
    p.add_argument("--dtype", help="float32, bfloat16, ... (default: the checkpoint's)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    p.add_argument("--threads", type=int, help="CPU threads")
    add_parallel_argument(p)
    p.add_argument("--plain", action="store_true", help="leave the weights as they are in the file: no packing for the CPU's kernels")
    p.add_argument("--json", metavar="FILE", help="write every repeat")
    p.add_argument("--figure", metavar="FILE", help="draw speed-ups and time per token (needs matplotlib: the plot extra)")
    return p


def whole_numbers(text: str, name: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise PromptError(f"--{name} takes whole numbers above zero, separated by commas, not {text!r}")
    return numbers


def image_sizes(text: str | None) -> list[str]:
    sizes = [] if text is None else text.split(",")
    for size in sizes:
        width, _, height = size.partition("x")
        if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)) or len(size) > 11:
            raise PromptError(f"--image-sizes takes sizes like 640x480, separated by commas, not {text!r:.80}")
    return sizes


def compile_form(model: nn.Module, args: argparse.Namespace, batches: list[int]) -> float | None:
    """Compile one token's way where it is asked for or, unasked, beside another engine where that is possible. The seconds it took, or None."""
    if args.compile is None and args.against and 1 in batches and model.embedding.weight.device.type == "cpu":
        try:
            return compile_decoding(model)
        except MinipopError as problem:
            print(f"the compiled form is left out: {str(problem).removeprefix('--compile: ')}", file=sys.stderr)
    return compile_decoding(model) if args.compile else None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    lengths, batches = whole_numbers(args.lengths, "lengths"), whole_numbers(args.batch, "batch")
    decode_prompts, sizes = whole_numbers(args.decode_prompt, "decode-prompt"), image_sizes(args.image_sizes)
    if args.repeats < 1 or args.chunk_size < 1 or args.decode_tokens < 0 or args.warmup < 0:
        raise PromptError("--repeats and --chunk-size must be at least 1, --decode-tokens and --warmup at least 0")
    if args.threads is not None:
        if args.threads < 1:
            raise PromptError("--threads must be at least 1")
        torch.set_num_threads(args.threads)
    check_device(args.device)
    model, loading = load(args)
    config, dtype, device = model.config, model.embedding.weight.dtype, model.embedding.weight.device
    size = sum(p.nbytes for p in model.parameters())
    if not args.plain:
        pack(model)
    if max(lengths) > config.max_position_embeddings:
        raise PromptError(f"--lengths asks for {max(lengths)} tokens, the model was made for {config.max_position_embeddings}")
    processor = image_processor(args, config) if sizes else None
    plans = {"full": PrefillPlan.full(config.num_layers)}
    for ratio_text in args.ratios.split(","):
        plan = PrefillPlan.deepest(config.num_layers, ratio_text)
        plans[f"POP {len(plan.skip)}/{plan.num_layers}"] = plan
    if args.plan:
        plans[f"plan {Path(args.plan).stem:.11}"] = PrefillPlan.load(args.plan)
    if args.kv:
        cut, depth = KVProjection.load(args.kv).cut, config.num_layers
        plans[f"calibrated {depth - cut}/{depth}"] = PrefillPlan(depth, range(cut, depth), kv=args.kv)
    reference = load_reference(args.ckpt, dtype, device) if args.against else None
    compile_seconds = compile_form(model, args, batches)
    rates = measuring.machine_rates(dtype if device.type != "cpu" or has_kernels(dtype) else torch.float32, device)

    print(f"{args.ckpt or 'random ' + args.random}  {str(dtype).removeprefix('torch.')}  {device}  {torch.get_num_threads()} threads  "
          f"torch {torch.__version__}  {processor_name(device)}")
    print(describe_loading(loading, size))
    if compile_seconds is not None:
        print(f"one token's way compiled in {compile_seconds:.1f} s; it serves batches of 1 only")
    print(f"this machine now: matrix products {rates['matmul_flops'] / 1e9:.0f} GFLOP/s, memory read at {rates['read_bytes'] / 1e9:.1f} "
          f"and copied at {rates['copy_bytes'] / 1e9:.1f} GB/s\n")

    prompts = []
    for batch in batches:
        prompts += [lambda n=n, b=batch: text_prompt(model, n, b) for n in lengths]
        prompts += [lambda n=n, b=batch: text_prompt(model, n, b, ragged=True) for n in lengths if args.ragged and batch > 1]
        prompts += [lambda s=s, b=batch: image_prompt(model, processor, s, b) for s in sizes]
    rows = []
    print(f"{'tokens':>12} {'batch':>5} {'contender':<20} {'TTFT s':>8} {'min':>8} {'max':>8} {'speed-up':>9} {'ideal':>6} {'of peak':>8} "
          f"{'us/token':>9} {'MiB':>6}")
    for make in prompts:
        row = bench_prefill(model, plans, make(), args.repeats, reference, args.chunk_size, args.plain_forms, args.warmup)
        rows.append(row)
        for t in row.timings:
            memory = "" if t.memory is None else f"{t.memory / 2**20:.0f}"
            print(f"{row.label:>12} {row.batch:>5} {t.name:<20} {t.median:>8.4f} {min(t.seconds):>8.4f} {max(t.seconds):>8.4f} "
                  f"{row.speedup(t.name)[0]:>8.2f}x {row.ideal(t.name):>6.2f} {row.flops[t.name] / t.median / rates['matmul_flops']:>7.0%} "
                  f"{1e6 * t.median / sum(row.lengths):>9.0f} {memory:>6}", flush=True)
        gc.collect()
    decode = []
    if args.decode_tokens:
        print(f"\n{'steps':>6} {'after':>12} {'batch':>5} {'contender':<20} {'tokens/s':>9} {'ms a step':>10} {'of reading rate':>16}")
        for batch in batches:
            for tokens in decode_prompts:
                for ragged in (False, True)[: 1 + (args.ragged and batch > 1)]:
                    prompt = text_prompt(model, tokens, batch, ragged)
                    timings = bench_decode(model, prompt, args.decode_tokens, args.repeats, reference, args.plain_forms)
                    must_read = costs.decode_bytes(config, sum(prompt.lengths) // batch, batch, dtype.itemsize)
                    for t in timings:
                        step = t.median / args.decode_tokens
                        print(f"{args.decode_tokens:>6} {prompt.label:>12} {batch:>5} {t.name:<20} {batch / step:>9.1f} {step * 1e3:>10.2f} "
                              f"{must_read / step / rates['read_bytes']:>15.0%}", flush=True)
                    decode.append({"batch": batch, "prompt": prompt.lengths, "steps": args.decode_tokens, "must_read_bytes": must_read,
                                   "step_flops": sum(costs.step_flops(config, n) for n in prompt.lengths), "timings": [asdict(t) for t in timings]})
    print(f"\npeak memory of the process {measuring.process_peak() / 2**20:.0f} MiB" + (
        f", of the GPU {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB" if device.type == "cuda" else ""))
    result = {"checkpoint": args.ckpt or args.random, "dtype": str(dtype).removeprefix("torch."), "device": str(device),
              "processor": processor_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__, "weight_bytes": size,
              "compile_seconds": compile_seconds,
              "matrix_bytes": costs.decode_bytes(config, 0, 1, dtype.itemsize),
              "peak_bytes": measuring.process_peak(), **loading, **rates, "prefill": [asdict(r) for r in rows], "decode": decode}
    if args.json:
        write_text(Path(args.json), json.dumps(result, indent=1) + "\n")
    if args.figure:
        draw(rows, args.figure)
    return 0


def load(args: argparse.Namespace) -> tuple[nn.Module, dict]:
    """The model that --ckpt or --random names, and what loading it took."""
    team = join(args.tp, args.device)
    if args.random:
        if team is not None or args.against:
            raise MinipopError("--random is for one process, and has no files that transformers could load: leave out --tp and --against")
        config = measuring.shape_config(args.random)
        return bench_loading(lambda: measuring.random_model(config, pick_dtype(args.dtype, config, ()), args.device), None)
    if team is not None:
        return bench_loading(lambda: team.load(args.ckpt, args.dtype, args.device), None)
    return bench_loading(lambda: load_model(args.ckpt, dtype=args.dtype, device=args.device), resolve_checkpoint(args.ckpt))


def describe_loading(loading: dict, size: int) -> str:
    text = f"loaded in {loading['load_seconds']:.2f} s for {size / 2**20:.0f} MiB of weights"
    if loading["tokenizer_seconds"] > 1e-3:
        text += f" (its tokenizer alone: {loading['tokenizer_seconds']:.2f} s)"
    if loading["load_peak_bytes"] is not None:
        text += f", memory {loading['load_peak_bytes'] / 2**20:.0f} MiB at its peak"
    if loading["file_bytes"]:
        text += (f"; a plain read of the {loading['file_bytes'] / 2**20:.0f} MiB file takes {loading['read_seconds']:.2f} s"
                 f"{', both from the disk' if loading['from_disk'] else ''}")
    return text


def image_processor(args: argparse.Namespace, config):
    if config.vision is None:
        raise PromptError("--image-sizes is for vision-language models: this one reads text only")
    if args.ckpt:
        return IMAGE_PROCESSORS[config.family].from_folder(resolve_checkpoint(args.ckpt), config.vision)
    vision = config.vision
    if config.family == "qwen3_vl":
        return QwenImageProcessor(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    return GemmaImageProcessor(vision.image_size, vision.tokens_per_image)


def processor_name(device: torch.device) -> str:
    """The GPU, or the CPU with what its kernels use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def load_reference(path: str, dtype: torch.dtype, device: torch.device):
    try:
        import transformers
    except ImportError:
        raise MinipopError("--against transformers needs transformers: pip install -e '.[test]' in the repository") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = resolve_checkpoint(path)
    vision = "vision_config" in read_json(folder / "config.json")
    loader = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    try:
        return loader.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True).to(device).eval()
    except Exception as problem:  # whatever transformers and the libraries under it raise
        raise CheckpointError(f"{folder}: transformers cannot load this checkpoint: {one_line(problem)}") from None


def draw(rows: list[Row], path: str) -> None:
    """Two panels over the prompt length: speed-up over full, the ideal by operations dashed; and time per prompt token."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    batches = sorted({r.batch for r in rows})
    for batch in batches:
        mine = [r for r in rows if r.batch == batch and r.label.isdecimal()]  # not ragged, no pictures
        x = [r.lengths[0] for r in mine]
        for name in (t.name for t in mine[0].timings):
            medians = [next(t for t in r.timings if t.name == name).median for r in mine]
            line, = right.plot(x, [1e6 * s / sum(r.lengths) for s, r in zip(medians, mine)], marker="o",
                               label=name if len(batches) == 1 else f"{name}, batch {batch}")
            if name == "full":
                continue
            values = [r.speedup(name) for r in mine]
            spread = [[v[0] - v[1] for v in values], [v[2] - v[0] for v in values]]  # to the lowest and the highest of the turns
            left.errorbar(x, [v[0] for v in values], spread, marker="o", capsize=3, elinewidth=0.7, color=line.get_color())
            if mine[0].ideal(name) != 1:
                left.plot(x, [r.ideal(name) for r in mine], linestyle="--", color=line.get_color())
    left.set(xscale="log", xlabel="prompt tokens", ylabel="speed-up over full (dashed: by operations)")
    right.set(xscale="log", xlabel="prompt tokens", ylabel="microseconds per prompt token", ylim=(0, None))
    ticks = sorted({int(r.label) for r in rows if r.label.isdecimal()})
    for axes in (left, right):
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(run(main))
