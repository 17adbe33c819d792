"""What a checkpoint is, and what Prefill-Only Pruning (arXiv 2602.03295) saves on it, on paper.

    python -m minipop.inspect --ckpt path/to/checkpoint --lengths 128,2048 --ratios 1/4,1/3

Only config.json and the headers of the safetensors files are read, no weights. Sizes are exact; operations are those of costs.py:
matrix products and attention of the text decoder. A vision tower is counted in the weights, but not in the operations.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path


from . import costs
from .checkpoint import Checkpoint, detect_quantization, resolve_checkpoint
from .cli import Parser, run, show_bytes
from .config import DTYPES, ModelConfig, RopeConfig, VisionConfig, read_config
from .errors import CheckpointError, PromptError
from .files import listing, quote, read_json, write_text
from .models import IGNORED, build_model, pick_dtype
from .models.names import Sources
from .plan import PrefillPlan, format_layers

LENGTHS, RATIOS = (128, 512, 2048), ("1/4", "1/3", "1/2")
PARTS = ("embedding", "attention", "MLP", "shortcuts", "norms", "head", "vision tower", "vision projector")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _inspect(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.inspect", description=first, epilog=rest)
    parser.add_argument("--ckpt", metavar="PATH", required=True, help="a Hugging Face checkpoint folder, or org/model")
    parser.add_argument("--lengths", metavar="LIST", help="prompt lengths in tokens (default: those of 128,512,2048 that fit)")
    parser.add_argument("--ratios", metavar="LIST", default=",".join(RATIOS),
                        help="shares of layers to skip (default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and cache (default: the checkpoint's)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to a file too")
    return parser


def _inspect(args: argparse.Namespace) -> int:
    lengths = None if args.lengths is None else _whole_numbers(args.lengths)
    report = inspect_checkpoint(args.ckpt, lengths, [ratio.strip() for ratio in args.ratios.split(",")], args.dtype)
    print(to_text(report))
    if args.json is not None:
        write_text(args.json, json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 0


def _whole_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < len(part) < 12 and int(part) for part in parts):
        raise PromptError(f"--lengths takes whole numbers above 0, separated by commas, not {text!r}")
    return [int(part) for part in parts]


# --- the numbers ----------------------------------------------------------------------------------------------------------------


def inspect_checkpoint(path: str | Path, lengths: Sequence[int] | None = None, ratios: Sequence[str | float] = RATIOS,
                       dtype: str | None = None) -> dict:
    """All there is to say about a checkpoint folder (or org/model), as JSON values; `to_text` lays it out.

    lengths: prompt lengths in tokens; None = those of LENGTHS that the model takes. ratios: shares of layers to skip.
    Raises ConfigError, CheckpointError or PlanError as loading would, PromptError for a length that the model does not take.
    """
    folder = resolve_checkpoint(path)
    config = read_config(folder)
    longest = config.max_position_embeddings
    lengths = [n for n in LENGTHS if n <= longest] or [longest] if lengths is None else lengths
    if too_long := [n for n in lengths if n > longest]:
        raise PromptError(f"{too_long[0]} tokens exceed the {longest} positions the model was made for")
    plans = {str(ratio): PrefillPlan.deepest(config.num_layers, ratio) for ratio in ratios}
    if config.sliced_width is not None:  # its layers cannot be skipped
        plans = {}
    with Checkpoint.open(folder) as checkpoint:
        detect_quantization(read_json(folder / "config.json"), checkpoint)
        torch_dtype = pick_dtype(dtype, config, checkpoint)
        model = build_model(config)  # without storage
        sources = model.sources(checkpoint.names)
        _check_sizes(model, sources, checkpoint)
        counts = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
        stored = {name: counts[name] * checkpoint.dtype(name).itemsize for name in checkpoint.names}
    used = {name for names in sources.values() for name in names}
    itemsize, total = torch_dtype.itemsize, sum(counts[name] for name in used)
    per_token = costs.cache_bytes_per_token(config, itemsize)
    full = PrefillPlan.full(config.num_layers)

    report = {
        "checkpoint": str(path), "family": config.family, "dtype": str(torch_dtype).removeprefix("torch."),
        "architecture": describe(config, "head.weight" not in sources),
        "config": {**asdict(config), "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch.")},
        "parameters": {}, "unused": [name for name in counts if name not in used and not _ignored(name)],
        "cache": {"bytes_per_token": per_token, "max_position_embeddings": longest, "bytes_at_max": per_token * longest},
        "prefill": [], "decode": [], "prefill_node": [],
    }
    for part in PARTS:
        names = [name for ours, theirs in sources.items() if part_of(ours) == part for name in theirs]
        if names:
            report["parameters"][part] = _size(names, counts, stored, itemsize)
    report["parameters"]["total"] = _size(used, counts, stored, itemsize)
    for n in lengths:
        for ratio, plan in {"full": full, **plans}.items():
            report["prefill"].append({"tokens": n, "plan": ratio, "skipped": len(plan.skip),
                                      "flops": costs.prefill_flops(config, n, plan),
                                      "ideal_speedup": costs.ideal_speedup(config, n, plan)})
        report["decode"].append({"tokens": n, "bytes": costs.decode_bytes(config, n, 1, itemsize)})
    for ratio, plan in plans.items():
        needed = sum(counts[name] for ours, theirs in sources.items() for name in needed_in_prefill(ours, theirs, plan))
        report["prefill_node"].append({"plan": ratio, "skipped": len(plan.skip), "parameters": needed, "bytes": needed * itemsize,
                                       "share": needed / total})
    return report


def part_of(name: str) -> str:
    """The part of PARTS that a parameter of ours belongs to."""
    if name.startswith("vision."):
        projector = name.split(".")[1] in ("merger", "deepstack_mergers", "pool_norm", "projection")
        return "vision projector" if projector else "vision tower"
    if "norm" in name.split(".")[-2]:
        return "norms"
    if "shortcut" in name:
        return "shortcuts"
    return {"embedding": "embedding", "head": "head"}.get(name.split(".")[0]) or ("MLP" if ".mlp." in name else "attention")


def needed_in_prefill(name: str, tensors: tuple[str, ...], plan: PrefillPlan) -> tuple[str, ...]:
    """Which of the checkpoint's tensors behind a parameter of ours a node needs that only prefills (arXiv 2602.03295).

    It hands the cache over before the boundary token, which is the first to run through all layers and to have logits: so
    it needs no head and no final norm, and of a skipped layer only what makes K and V.
    """
    layer = re.match(r"layers\.(\d+)\.(.+)", name)
    if layer is None:
        return () if name in ("head.weight", "norm.weight") else tensors
    if int(layer[1]) not in plan.skip:
        return tensors
    if layer[2].startswith("attn.qkv."):
        return tensors[1:]  # q, k, v: all but the first
    return tensors if layer[2] in ("input_norm.weight", "attn.k_norm.weight") else ()


def _size(names, counts: dict[str, int], stored: dict[str, int], itemsize: int) -> dict[str, int]:
    parameters = sum(counts[name] for name in names)
    return {"parameters": parameters, "bytes": parameters * itemsize, "stored_bytes": sum(stored[name] for name in names)}


def _check_sizes(model, sources: Sources, checkpoint: Checkpoint) -> None:
    """Headers and config.json must agree, or the numbers would describe neither."""
    for ours, parameter in model.named_parameters():
        theirs = sources.get(ours, ())
        found = [prod(checkpoint.shape(name)) for name in theirs]
        if theirs and sum(found) != parameter.numel():
            shapes = ", ".join(f"{name} {list(checkpoint.shape(name))}" for name in theirs)
            raise CheckpointError(f"{checkpoint.file(theirs[0])}: {shapes}: {sum(found)} values where config.json asks for "
                                  f"{parameter.numel()}; the files are from different models")


def _ignored(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in IGNORED)


# --- in words -------------------------------------------------------------------------------------------------------------------


def describe(config: ModelConfig, tied: bool) -> dict[str, str]:
    """The architecture in words. tied: whether the head is the embedding."""
    biases = ", ".join(text for text, on in (("q, k, v", config.qkv_bias), ("o", config.o_bias), ("MLP", config.mlp_bias)) if on)
    sliced = "" if config.sliced_width is None else f" (sliced to {config.sliced_width} between the layers)"
    words = {
        "decoder": f"{config.num_layers} layers, {config.hidden_size} wide{sliced}; {config.num_heads} heads of {config.head_dim} over "
                   f"{config.num_kv_heads} K/V head{'s' * (config.num_kv_heads > 1)}; gated MLP {config.intermediate_size} wide "
                   f"({config.hidden_act})" + "; norms on q and k" * config.qk_norm + f"; biases on {biases}" * bool(biases),
        "attention": _windows_in_words(config.layer_windows),
        "rotary": _rope_in_words(config.rope),
        "vocabulary": f"{config.vocab_size} ids, the head " + ("is the embedding" if tied else "has weights of its own"),
        "positions": str(config.max_position_embeddings),
    }
    if config.rope_local is not None:
        words["rotary"] += f" (sliding layers: {_rope_in_words(config.rope_local)})"
    if config.mrope_section is not None:
        words["rotary"] += "; {} frequencies for time, {} for height, {} for width".format(*config.mrope_section)
    if config.vision is not None:
        words["vision"] = _vision_in_words(config.vision)
    return words


def _windows_in_words(windows: tuple[int | None, ...]) -> str:
    seeing: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        seeing.setdefault(window, []).append(layer)

    def sight(window: int | None) -> str:
        return "the whole context" if window is None else f"the last {window} tokens"

    if len(seeing) == 1:
        return f"every layer sees {sight(windows[0])}"
    return ", ".join(f"layers {format_layers(layers)} see {sight(window)}" for window, layers in seeing.items())


def _rope_in_words(rope: RopeConfig) -> str:
    scaling = {"linear": f", positions divided by {rope.factor:g}",
               "llama3": f", llama3 scaling by {rope.factor:g} beyond {rope.original_max_position}"}
    return f"theta {rope.theta:,.0f}" + scaling.get(rope.kind, "")


def _vision_in_words(vision: VisionConfig) -> str:
    tower = f"{vision.depth} blocks, {vision.hidden_size} wide; {vision.num_heads} heads; MLP {vision.intermediate_size} wide; "
    if vision.kind == "siglip":
        return f"SigLIP: {tower}{vision.image_size} x {vision.image_size} pixels in patches of {vision.patch_size}, " \
               f"{vision.tokens_per_image} tokens a picture"
    merge = vision.spatial_merge_size
    taps = f"; DeepStack after blocks {', '.join(map(str, vision.deepstack_indexes))}" if vision.deepstack_indexes else ""
    return f"Qwen3-VL: {tower}patches of {vision.patch_size} pixels, {merge} x {merge} of them a token{taps}"


def to_text(report: dict) -> str:
    """The report for people."""
    lines = [f"{report['checkpoint']}: {report['family']}, {report['dtype']}"]
    lines += [f"  {name:<12}{text}" for name, text in report["architecture"].items()]
    total = report["parameters"]["total"]["parameters"]
    lines += ["", f"{'parameters':<18}{'count':>16}{'bytes':>12}{'share':>8}"]
    lines += [f"  {part:<16}{size['parameters']:>16,}{show_bytes(size['bytes']):>12}{size['parameters'] / total:>8.1%}"
              for part, size in report["parameters"].items()]
    if report["unused"]:
        shown = listing(map(quote, report["unused"]), 5)
        lines += [f"  tensors in the file that belong to no part, for which loading refuses it: {shown}"]
    cache = report["cache"]
    lines += ["", f"cache: {show_bytes(cache['bytes_per_token'])} a token, {show_bytes(cache['bytes_at_max'])} at "
              f"{cache['max_position_embeddings']} tokens, whatever the plan"]

    lengths = list(dict.fromkeys(row["tokens"] for row in report["prefill"]))
    lines += ["", "prefill: operations of the decoder, and the speed-up if time were proportional to them",
              f"  {'tokens':<14}" + "".join(f"{n:>20}" for n in lengths)]
    for plan in dict.fromkeys(row["plan"] for row in report["prefill"]):
        rows = [row for row in report["prefill"] if row["plan"] == plan]
        cells = [_operations(row["flops"]) + ("" if plan == "full" else f" ({row['ideal_speedup']:.2f}x)") for row in rows]
        name = plan if plan == "full" else f"skip {plan} ({rows[0]['skipped']})"
        lines.append(f"  {name:<14}" + "".join(f"{cell:>20}" for cell in cells))
    lines += ["", "decode: bytes of weights and cache that one step reads",
              f"  {'cached tokens':<14}" + "".join(f"{row['tokens']:>20}" for row in report["decode"]),
              f"  {'':<14}" + "".join(f"{show_bytes(row['bytes']):>20}" for row in report["decode"])]
    if report["prefill_node"]:
        lines += ["", "weights a node needs that only prefills: embedding, layers that run, the others' input norm, W_K, W_V, k-norm"]
    lines += [f"  skip {row['plan'] + ' (' + str(row['skipped']) + ')':<12}{row['parameters']:>13,}{show_bytes(row['bytes']):>12}"
              f"{row['share']:>8.1%}" for row in report["prefill_node"]]
    return "\n".join(lines)


def _operations(flops: int) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops / 1e6:.4g} MFLOP"


if __name__ == "__main__":
    sys.exit(main())
