"""The model registry: which class runs which family, and how a folder becomes a model."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import Checkpoint, detect_quantization, load_parameters, resolve_checkpoint, return_freed_memory
from ..config import DTYPES, ModelConfig, read_config
from ..errors import ConfigError
from ..files import one_line, read_json
from ..tokenizer import has_tokenizer, load_token_ids
from .decoder import Decoder
from .gemma import Gemma, check_dtype
from .qwen_vl import QwenVL

MODELS = {"llama": Decoder, "mistral": Decoder, "qwen2": Decoder, "qwen3": Decoder, "gemma3_text": Gemma, "gemma3": Gemma,
          "qwen3_vl": QwenVL}
IGNORED = ("*rotary_emb.inv_freq",)  # a constant that old checkpoints carry along


def load_model(path: str | Path, dtype: torch.dtype | str | None = None, device: str | torch.device = "cpu", *,
               part=None) -> nn.Module:
    """Load a Hugging Face checkpoint: a folder, or `org/model` through the hub's cache.

    dtype: a torch.dtype or its name; None = what config.json says, else what most weights are. part: what to load of it, for a
    process of several (`shards.Part`); None = all. Returns the model in eval mode without gradients; parameters in the
    checkpoint's dtype may be views of the mapped file.
    Raises ConfigError or CheckpointError with file, field or tensor.
    """
    folder = resolve_checkpoint(path)
    config = complete_config(read_config(folder), folder)
    if part is not None and config.sliced_width is not None:
        raise ConfigError("a sliced model (SliceGPT) runs in one process only: it can be neither divided nor loaded in part")
    with Checkpoint.open(folder) as checkpoint:
        detect_quantization(read_json(folder / "config.json"), checkpoint)
        dtype = pick_dtype(dtype, config, checkpoint)
        if config.family.startswith("gemma"):
            check_dtype(dtype)
        model = build_model(config if part is None else part.config(config))
        sources = model.sources(checkpoint.names)
        held, sources = (checkpoint, sources) if part is None else part.cut(model, checkpoint, sources)
        load_parameters(model, held, sources, dtype=dtype, device=device, ignore=IGNORED)
    if part is None:
        model.tie(sources)
    else:
        part.finish(model, sources)
    return model.eval().requires_grad_(False)


def build_model(config: ModelConfig) -> nn.Module:
    """The module of a family without storage, on the meta device. Raises ConfigError for sizes that no tensor can have."""
    family = model_class(config)
    try:
        with torch.device("meta"):
            return family(config)
    except (RuntimeError, OverflowError, TypeError) as problem:  # a weight's bytes, or one of its sides, exceed 64 bits
        if isinstance(problem, TypeError) and "verflow" not in str(problem):
            raise
        raise ConfigError(f"config.json asks for weights larger than any memory: {one_line(problem)}") from None


def model_class(config: ModelConfig) -> type[nn.Module]:
    if config.sliced_width is not None:
        from ..baselines.slicegpt import SlicedDecoder  # a pruned Llama, Mistral or Qwen; it builds on the runner, which builds on this
        return SlicedDecoder
    return MODELS[config.family]


def complete_config(config: ModelConfig, folder: Path) -> ModelConfig:
    """Add what only the tokenizer knows: how many ids it has, and the token that ends a turn."""
    if not has_tokenizer(folder):
        return config
    known, ends = load_token_ids(folder)
    return_freed_memory()  # what reading took should not stand beside the weights
    eos = dict.fromkeys(config.eos_token_ids + tuple(i for i in ends if i < config.vocab_size))
    return replace(config, eos_token_ids=tuple(eos), num_token_ids=min(config.vocab_size, known))


def pick_dtype(dtype: torch.dtype | str | None, config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype to compute in: asked for, else the config's, else that of most weights."""
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
        dtype = DTYPES[dtype.removeprefix("torch.")]
    if dtype is None:
        dtype = config.dtype
    if dtype is None:
        elements: dict[torch.dtype, int] = {}
        for name in checkpoint.names:
            if checkpoint.dtype(name) in DTYPES.values():
                elements[checkpoint.dtype(name)] = elements.get(checkpoint.dtype(name), 0) + torch.Size(checkpoint.shape(name)).numel()
        dtype = max(elements, key=elements.get, default=torch.float32)
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} is not supported; supported are {', '.join(DTYPES)}")
    return dtype
