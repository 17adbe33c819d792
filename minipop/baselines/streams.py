"""What the baselines share: calibration sequences on their way through a model, and copies that leave the given model as it is.

Shapes: N tokens of a sequence, D hidden, L layers.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cache import FunctionalKV, Span
from ..errors import MinipopError, PromptError
from ..inputs import Batch, ModelInputs
from ..layers import Rope
from ..packing import PackedLinear

Sequences = Sequence[list[int] | ModelInputs]  # text, or with pictures
Progress = Callable[[Iterable[int]], Iterable[int]]  # wraps the loop over layers or sequences: tqdm, say


def silent(steps: Iterable[int]) -> Iterable[int]:
    return steps


@dataclass
class Stream:
    """One sequence between two layers: its residual stream x [1, N, D], a rotary table for each layer, what attention sees, and the image
    rows that Qwen3-VL adds after its first layers.

    Sequences go through the layers one at a time, so there is no padding that could count.
    """

    x: Tensor
    rope: list[Rope]
    kv: FunctionalKV
    deepstack: tuple[Tensor, ...] = ()


def begin(model: nn.Module, sequences: Sequences) -> Iterator[Stream]:
    """The stream of each sequence before the first layer. Check the sequences first (`check`)."""
    ropes: dict[int, list[Rope]] = {}  # texts of the same length share their tables
    for inputs in map(as_one, sequences):
        batch, count = Batch.of([inputs], model), len(inputs)
        start = torch.zeros(1, dtype=torch.long)
        rope = ropes.get(count) if inputs.pixel_values is None else None
        if rope is None:
            rope = model.rope(model.positions(batch, start)[0])
            if inputs.pixel_values is None:
                ropes[count] = rope
        embedded = model.embed(batch)
        span = Span(start, batch.counts, count, model.image_blocks(batch.token_ids))
        yield Stream(embedded.x, rope, FunctionalKV(span, embedded.x.device), embedded.deepstack)


def as_one(sequence: list[int] | ModelInputs) -> ModelInputs:
    return sequence if isinstance(sequence, ModelInputs) else ModelInputs(sequence)


def check(model: nn.Module, sequences: Sequences) -> None:
    """Raises MinipopError for a packed model; PromptError when there are no sequences, or one that the model cannot take."""
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise MinipopError("packed weights cannot be pruned: load the model without packing.pack, and pack what comes out")
    if not sequences:
        raise PromptError("no calibration sequences: pruning needs some text to look at")
    longest = model.config.max_position_embeddings
    for number, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= longest:
            raise PromptError(f"calibration sequence {number} has {len(sequence)} tokens; the model takes 1 to {longest}")
        Batch.of([as_one(sequence)], model)  # whole numbers, inside the vocabulary, image placeholders only with their images


def check_finite(measured: Tensor, layer: int) -> None:
    if not measured.isfinite().all():
        raise MinipopError(f"the activations in layer {layer} are not finite: calibrate in float32; if that is so already, check the weights")


def twin(model: nn.Module) -> nn.Module:
    """The same model in modules and parameters of its own, which can be replaced at will; the numbers behind them are shared."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()})
