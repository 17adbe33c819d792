"""ShortGPT (Men et al. 2024, arXiv 2403.03853): remove the layers that change the residual stream least.

The block influence of layer l is one minus the cosine between the stream that enters it and the stream that leaves it, taken token by
token and averaged over the tokens of a calibration text:

    BI_l = 1 - mean over tokens t of cos(x_l[t], x_{l+1}[t])

It is measured once, in the whole model; then the layers of lowest influence go, all at once, for prompt and answer alike.

Shapes: N tokens of a sequence, D hidden, L layers.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MinipopError
from ..runner import run_layers
from .streams import Progress, Sequences, begin, check, check_finite, silent, twin


@torch.no_grad()
def block_influence(model: nn.Module, sequences: Sequences, *, progress: Progress = silent) -> Tensor:
    """BI of each layer, float64 [L], between 0 (the stream only grows or shrinks) and 2; every token of every sequence counts once.

    model: plain, not packed. sequences: token ids of any lengths, or ModelInputs with pictures. Raises PromptError for sequences the model cannot take.
    """
    check(model, sequences)
    _check_basis(model)
    total, tokens = torch.zeros(model.config.num_layers, dtype=torch.float64), 0
    for stream, _ in zip(begin(model, sequences), progress(range(len(sequences)))):
        before = stream.x[0].double()  # [N, D]

        def compare(layer: int, name: str, tensor: Tensor) -> Tensor:
            nonlocal before
            if name == "resid":
                after = tensor[0].double()
                total[layer] += F.cosine_similarity(before, after, dim=-1).sum().cpu()  # [N] cosines
                before = after
            return tensor

        run_layers(model, stream.x, stream.rope, stream.kv, stream.deepstack, tap=compare)
        tokens += len(before)
    for layer, cosines in enumerate(total):
        check_finite(cosines, layer)
    return 1 - total / tokens


def shortgpt(model: nn.Module, sequences: Sequences, ratio: float = 0.25, *,
             progress: Progress = silent) -> tuple[nn.Module, tuple[int, ...]]:
    """Remove the floor(ratio * L) layers of lowest influence. -> the shorter model, and the numbers that they had in the given one.

    The layers after which Qwen3-VL's DeepStack adds image rows stay. The given model is not changed; both share their weights.
    Raises MinipopError for a ratio below 0, or one that leaves no layer or would need those that stay.
    """
    count = layers_to_remove(model, ratio)
    return remove_layers(model, least_influential(model, block_influence(model, sequences, progress=progress), count))


def least_influential(model: nn.Module, influence: Tensor, count: int) -> tuple[int, ...]:
    """The `count` layers of lowest influence [L] that may go, in order; among equals the deeper one goes first."""
    candidates = sorted(range(model.deepstack_layers, model.config.num_layers), key=lambda layer: (influence[layer].item(), -layer))
    return tuple(sorted(candidates[:count]))


def remove_layers(model: nn.Module, removed: tuple[int, ...]) -> tuple[nn.Module, tuple[int, ...]]:
    """The model without these layers, the others numbered anew: a layer's number is its place in the cache. -> (model, removed)."""
    _check_basis(model)
    kept = [i for i in range(model.config.num_layers) if i not in removed]
    short = twin(model)
    short.layers = nn.ModuleList(short.layers[i] for i in kept)
    for index, layer in enumerate(short.layers):
        layer.index = layer.attn.index = index
    windows = tuple(model.config.layer_windows[i] for i in kept)  # Gemma-3: a layer keeps its sight and its rotary table
    short.config = replace(model.config, num_layers=len(kept), layer_windows=windows)
    return short, removed


def layers_to_remove(model: nn.Module, ratio: float) -> int:
    """floor(ratio * L). Raises MinipopError as `shortgpt` does."""
    layers, fixed = model.config.num_layers, model.deepstack_layers
    if not 0 <= ratio < 1:
        raise MinipopError(f"ratio must be at least 0 and below 1, not {ratio}: it is the share of the layers to remove")
    count = math.floor(ratio * layers + 1e-9)  # 1e-9: a third written as 0.333333333333 is meant as one
    if count > layers - fixed:
        raise MinipopError(f"ratio {ratio} would remove {count} of {layers} layers, but DeepStack adds image rows after the first {fixed}, "
                           f"which stay: at most {layers - fixed} can go")
    return count


def _check_basis(model: nn.Module) -> None:
    if model.config.sliced_width is not None:
        raise MinipopError("this model is sliced (SliceGPT): every layer hands the stream on in another basis, so none can be taken out "
                           "and its input and output cannot be compared")
