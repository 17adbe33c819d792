"""Pruned models on disk. What ShortGPT and Wanda leave is an ordinary Hugging Face checkpoint; a sliced model carries a mark in its config.json.

    "minipop_sliced": {"width": 432}      the stream has 432 columns between the layers; shortcuts lie beside the other weights
"""

import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from ..checkpoint import Checkpoint, resolve_checkpoint
from ..config import DTYPES, FAMILIES, SLICED
from ..errors import CheckpointError
from ..files import check_writable, read_json
from ..models.decoder import HEADS
from ..saving import save_checkpoint

COPIED = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation and picture settings
LICENCES = ("LICENSE", "LICENCE", "NOTICE")


def save_pruned(model: nn.Module, source_folder: str | os.PathLike, out_folder: str | os.PathLike) -> None:
    """Write a checkpoint that `load_model` and every command load again, equal to the last bit.

    model: what a baseline made of the checkpoint in `source_folder` (or org/model), which gives the names of its tensors, its config
    and the files of its tokenizer. The weights are written in the dtype they have.
    Raises CheckpointError when `out_folder` is not empty, or cannot be written.
    """
    source, out = resolve_checkpoint(source_folder), check_free(out_folder)
    values = pruned_config(read_json(source / "config.json"), model)
    with Checkpoint.open(source) as checkpoint:
        save_checkpoint(out, named_tensors(model, checkpoint), values, extra_files=other_files(source))


def check_free(folder: str | os.PathLike) -> Path:
    """Raises CheckpointError unless the folder is empty or does not exist, and can be written to."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already: choose a new folder, or empty this one")
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    try:
        check_writable(above)
    except OSError as problem:
        raise CheckpointError(f"{folder} cannot be made in {above}: {problem.strerror}") from None
    return folder


def named_tensors(model: nn.Module, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under the names that its checkpoint uses; stacked ones are taken apart again."""
    names = set(checkpoint.names)
    if model.head.weight is not model.embedding.weight and not names & set(HEADS):
        names.add(HEADS[0])  # a head that was the embedding, before that was sliced
    sources = model.sources(names)
    for ours, parameter in model.named_parameters():
        theirs = sources[ours]
        rows = [checkpoint.shape(name)[0] for name in theirs] if len(theirs) > 1 else [len(parameter)]
        yield from zip(theirs, parameter.split(rows))


def pruned_config(values: dict, model: nn.Module) -> dict:
    """config.json of the given checkpoint -> that of the pruned model."""
    config, key = model.config, FAMILIES[model.config.family].text_key
    text = dict(values[key] if key else values)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == model.embedding.weight.dtype)
    if FAMILIES[config.family].windows in ("late", "pattern"):  # who slides no longer follows from a layer's place
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            text.pop(name, None)
        text["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in config.layer_windows]
    text["num_hidden_layers"] = config.num_layers
    if config.sliced_width is not None:
        text |= {SLICED: {"width": config.sliced_width}, "tie_word_embeddings": False, "architectures": ["SlicedDecoder"]}
    values = {**values, key: text} if key else text
    for part in (values, *(part for part in values.values() if isinstance(part, dict))):
        if "torch_dtype" in part or "dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    return {**values, "dtype": dtype}


def other_files(source: Path) -> dict[str, bytes]:
    """The files beside config and weights that a checkpoint needs: name -> contents."""
    def wanted(name: str) -> bool:
        weights = name == "config.json" or name.endswith((".index.json", ".safetensors"))
        return not weights and (name.endswith(COPIED) or name.upper().startswith(LICENCES))

    try:
        return {path.name: path.read_bytes() for path in sorted(source.iterdir()) if path.is_file() and wanted(path.name)}
    except OSError as problem:
        raise CheckpointError(f"{problem.filename}: cannot be read: {problem.strerror}") from None
