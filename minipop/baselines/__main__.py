"""Prune a checkpoint by one of the methods that Prefill-Only Pruning is compared with, and save what is left as a checkpoint.

    python -m minipop.baselines shortgpt --ckpt path/to/checkpoint --out pruned --ratio 0.25
    python -m minipop.baselines slicegpt --ckpt path/to/checkpoint --out pruned --ratio 0.25
    python -m minipop.baselines wanda --ckpt path/to/checkpoint --out pruned --sparsity 0.3

What is pruned is decided by a calibration text: files of your own, or the source of some modules of Python's standard library, which are
wherever Python is. The arithmetic is float32; the weights are written in the checkpoint's dtype. ShortGPT and Wanda write ordinary
Hugging Face checkpoints; a sliced one runs in minipop only.
"""

import argparse
import sys
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from ..checkpoint import Checkpoint, resolve_checkpoint
from ..cli import Parser, check_device, positive, run
from ..config import DTYPES, read_config
from ..errors import PlanError, PromptError
from ..models import load_model, pick_dtype
from ..plan import parse_ratio
from ..texts import default_text, read_text, text_sequences
from ..tokenizer import load_tokenizer
from .checkpoints import check_free, save_pruned
from .shortgpt import block_influence, layers_to_remove, least_influential, remove_layers
from .slicegpt import check_sliceable, slicegpt
from .wanda import sparsity_of, wanda

SAMPLES, LENGTH = 128, 2048  # what SliceGPT and Wanda calibrate with


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code (see cli.py)."""
    return run(lambda: _prune(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="python -m minipop.baselines", description=first, epilog=rest)
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    for method, text in (("shortgpt", "remove the layers that change the stream least"),
                         ("slicegpt", "rotate the stream and delete its least important columns"),
                         ("wanda", "zero weights that are small and read small inputs")):
        part = methods.add_parser(method, help=text, description=text[0].upper() + text[1:] + ".")
        part.add_argument("--ckpt", metavar="PATH", required=True, help="a Hugging Face checkpoint folder, or org/model")
        part.add_argument("--out", metavar="FOLDER", required=True, help="where the pruned checkpoint goes: a new or empty folder")
        if method == "wanda":
            part.add_argument("--sparsity", type=share, default=0.3, metavar="S",
                              help="share of the weights to zero in every row (default: %(default)s)")
        else:
            what = "layers to remove" if method == "shortgpt" else "stream's columns to delete"
            part.add_argument("--ratio", type=share, default=0.25, metavar="R", help=f"share of the {what}: 0.25 or 1/3 (default: %(default)s)")
        part.add_argument("--text", nargs="+", metavar="FILE", help="calibration text (default: modules of Python's standard library)")
        part.add_argument("--samples", type=positive, default=SAMPLES, metavar="N",
                          help="calibration sequences at most, drawn from the text (default: %(default)s)")
        part.add_argument("--length", type=positive, metavar="N", help=f"tokens of each (default: {LENGTH}, or what the model allows)")
        part.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default: %(default)s)")
        part.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights that are written (default: the checkpoint's)")
        part.add_argument("--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1, ...")
        part.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    return parser


def share(text: str) -> float:
    """An argument's type: a number or fraction, at least 0 and below 1."""
    try:
        value = parse_ratio(text)
    except PlanError:
        value = 1.0
    if value == 1:
        raise argparse.ArgumentTypeError(f"must be a number or a fraction like 1/4, at least 0 and below 1, not {text!r:.60}")
    return value


def _prune(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    check_device(args.device)
    folder = resolve_checkpoint(args.ckpt)
    check_free(args.out)  # before the work, not after it
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    length = args.length or min(LENGTH, config.max_position_embeddings)
    if length > config.max_position_embeddings:
        raise PromptError(f"--length {length} exceeds the {config.max_position_embeddings} positions the model was made for")
    if args.method == "slicegpt":
        check_sliceable(config)
    texts = [read_text(path) for path in args.text] if args.text else default_text()
    sequences = text_sequences(tokenizer, texts, args.samples, length, args.seed)
    with Checkpoint.open(folder) as checkpoint:
        dtype = pick_dtype(args.dtype, config, checkpoint)
    model = load_model(folder, torch.float32, args.device)
    print(f"{args.method}: {args.ckpt}, calibrated with {len(sequences)} sequences of {length} tokens")
    pruned = METHODS[args.method](model, sequences, args).to(dtype)
    save_pruned(pruned, folder, args.out)
    before, after = parameters(model), parameters(pruned)
    print(f"parameters: {before:,} -> {after:,} ({after / before:.1%})")
    print(f"written to {args.out} in {str(dtype).removeprefix('torch.')}; run it with\n\n"
          f"    python -m minipop.chat --ckpt {args.out} --full")
    return 0


def _shortgpt(model: nn.Module, sequences: list[list[int]], args: argparse.Namespace) -> nn.Module:
    count = layers_to_remove(model, args.ratio)
    influence = block_influence(model, sequences, progress=partial(tqdm, unit="sequence", disable=None))
    short, removed = remove_layers(model, least_influential(model, influence, count))
    print("block influence of each layer")
    for layer, value in enumerate(influence.tolist()):
        print(f"  {layer:>4}  {value:.4f}" + "  removed" * (layer in removed))
    print(f"removed layers: {', '.join(map(str, removed)) or 'none'} ({len(removed)} of {model.config.num_layers})")
    return short


def _slicegpt(model: nn.Module, sequences: list[list[int]], args: argparse.Namespace) -> nn.Module:
    sliced = slicegpt(model, sequences, args.ratio, progress=partial(tqdm, unit="layer", disable=None))
    print(f"width of the stream: {model.config.hidden_size} -> {sliced.config.sliced_width}")
    return sliced


def _wanda(model: nn.Module, sequences: list[list[int]], args: argparse.Namespace) -> nn.Module:
    pruned = wanda(model, sequences, args.sparsity, progress=partial(tqdm, unit="layer", disable=None))
    print(f"zeros in the matrices of the layers: {sparsity_of(model):.2%} -> {sparsity_of(pruned):.2%}")
    return pruned


METHODS = {"shortgpt": _shortgpt, "slicegpt": _slicegpt, "wanda": _wanda}


def parameters(model: nn.Module) -> int:
    """Numbers in the model's weights, zeros included; a head that is the embedding counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
