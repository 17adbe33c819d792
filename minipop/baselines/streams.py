"""What the baselines share: calibration sequences on their way through a model, and copies that leave the given model as it is.

Shapes: N tokens of a sequence, D hidden, L layers.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cache import FunctionalKV, Span
from ..errors import MinipopError, PromptError
from ..inputs import Batch, ModelInputs
from ..layers import Rope
from ..packing import PackedLinear

Progress = Callable[[Iterable[int]], Iterable[int]]  # wraps the loop over layers or sequences: tqdm, say


def silent(steps: Iterable[int]) -> Iterable[int]:
    return steps


@dataclass
class Stream:
    """One sequence between two layers: its residual stream x [1, N, D], a rotary table for each layer, and what attention sees.

    Sequences go through the layers one at a time, so there is no padding that could count.
    """

    x: Tensor
    rope: list[Rope]
    kv: FunctionalKV


def begin(model: nn.Module, sequences: list[list[int]]) -> Iterator[Stream]:
    """The stream of each sequence before the first layer. Check the sequences first (`check`)."""
    ropes: dict[int, list[Rope]] = {}  # sequences of the same length share their tables
    for ids in sequences:
        batch = Batch.of([ModelInputs(ids)], model)
        start = torch.zeros(1, dtype=torch.long)
        if len(ids) not in ropes:
            ropes[len(ids)] = model.rope(model.positions(batch, start)[0])
        x = model.embed(batch).x
        yield Stream(x, ropes[len(ids)], FunctionalKV(Span(start, batch.counts, len(ids)), x.device))


def check(model: nn.Module, sequences: list[list[int]]) -> None:
    """Raises MinipopError for a packed model; PromptError when there are no sequences, or one that the model cannot take."""
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise MinipopError("packed weights cannot be pruned: load the model without packing.pack, and pack what comes out")
    if not sequences:
        raise PromptError("no calibration sequences: pruning needs some text to look at")
    longest = model.config.max_position_embeddings
    for number, ids in enumerate(sequences):
        if not 0 < len(ids) <= longest:
            raise PromptError(f"calibration sequence {number} has {len(ids)} tokens; the model takes 1 to {longest}")
        Batch.of([ModelInputs(ids)], model)  # whole numbers, inside the vocabulary, no image placeholders


def check_finite(measured: Tensor, layer: int) -> None:
    if not measured.isfinite().all():
        raise MinipopError(f"the activations in layer {layer} are not finite: calibrate in float32; if that is so already, check the weights")


def twin(model: nn.Module) -> nn.Module:
    """The same model in modules and parameters of its own, which can be replaced at will; the numbers behind them are shared."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()})
