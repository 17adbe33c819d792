"""A part of a checkpoint for one process of several: some of its tensors, or a slice of each.

`load_model(path, part=...)` takes a `Part`, which says what the process needs. The model is then built in that smaller shape and filled
through a `PartialCheckpoint`, in which every tensor looks as if the file held the wanted slice alone. The files are mapped, so what lies
outside the slices is never read, and all the strictness of checkpoint.py stays: a tensor that is missing, of the wrong shape or known to
nobody is an error, whichever part one loads. The two parts are `PrefillPart` and parallel.py's `TensorPart`.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import PlanError
from .models.names import Sources
from .plan import PrefillPlan

Slice = tuple[int, int, int, int]  # dimension, first, end, and the whole tensor's size in that dimension


class Part(Protocol):
    """What one process holds of a model."""

    def config(self, config: ModelConfig) -> ModelConfig:
        """The whole model's config -> the one to build. Raises MinipopError if the model cannot be cut this way."""

    def cut(self, model: nn.Module, checkpoint: Checkpoint, sources: Sources) -> tuple[Checkpoint, Sources]:
        """Take out of `model`, still on the meta device, what is not needed. sources: the whole model's.

        -> the checkpoint as this process sees it, and where the parameters that are left come from.
        """

    def finish(self, model: nn.Module, sources: Sources) -> None:
        """After the weights are in."""


class PartialCheckpoint(Checkpoint):
    """A view of an open checkpoint. slices: of these tensors only that much is there; leave_out: these are not there at all."""

    def __init__(self, whole: Checkpoint, slices: Mapping[str, Slice] = {}, leave_out: Collection[str] = ()):
        self.where, self.metadata, self._maps, self.slices = whole.where, whole.metadata, whole._maps, slices
        self._entries = {name: entry for name, entry in whole._entries.items() if name not in leave_out}

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        dim, first, end, whole = self.slices.get(name, (0, 0, 0, None))
        if shape[dim : dim + 1] != (whole,):  # not sliced, or another size than the config says, which will be found not to fit
            return shape
        return (*shape[:dim], end - first, *shape[dim + 1 :])

    def tensor(self, name: str) -> Tensor:
        """Rows are a view of the mapped file, columns a copy."""
        tensor = super().tensor(name)
        if name not in self.slices:
            return tensor
        dim, first, *_ = self.slices[name]
        return tensor.narrow(dim, first, self.shape(name)[dim]).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that this part reads."""
        return sum(torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize for name in self)


class PrefillPart:
    """What the tokens before the boundary need of a model: the layers that the plan runs, and of the others input norm, W_K, W_V, k-norm.

    `share`: of the checkpoint's bytes, known once it is cut. Raises PlanError for the paper's ablations.
    """

    def __init__(self, plan: PrefillPlan):
        self.plan = plan

    def config(self, config: ModelConfig) -> ModelConfig:
        if not self.plan.project_kv or not self.plan.split_boundary:
            raise PlanError("prefill apart from decode needs the K/V projections and the boundary token: ablations run in one process")
        if self.plan.num_layers != config.num_layers:
            raise PlanError(f"the plan is for {self.plan.num_layers} layers, the model has {config.num_layers}")
        return config

    def cut(self, model: nn.Module, checkpoint: Checkpoint, sources: Sources) -> tuple[Checkpoint, Sources]:
        trim(model, self.plan)
        own = {name for name, _ in model.named_parameters()}
        held = {name: tensors for name, tensors in sources.items() if name in own}
        for i in self.plan.skip:
            for name in (f"layers.{i}.attn.qkv.weight", f"layers.{i}.attn.qkv.bias"):
                if name in held:
                    held[name] = held[name][1:]  # K and V, without Q
        used = {tensor for tensors in held.values() for tensor in tensors}
        known = {tensor for tensors in sources.values() for tensor in tensors}
        part = PartialCheckpoint(checkpoint, leave_out=known - used)
        self.share = part.nbytes / checkpoint.nbytes
        return part, held

    def finish(self, model: nn.Module, sources: Sources) -> None:
        pass


def trim(model: nn.Module, plan: PrefillPlan) -> None:
    """Take from a model on the meta device what a prefill rank has no use for."""
    config = model.config
    for i in plan.skip:
        layer, attn = model.layers[i], model.layers[i].attn
        for name, _ in list(layer.named_children()):
            if name not in ("input_norm", "attn"):
                setattr(layer, name, None)
        attn.qkv = nn.Linear(config.hidden_size, 2 * config.kv_width, bias=config.qkv_bias, device="meta")
        attn.q_norm = attn.o = None
        attn.q_width = 0
    model.norm = model.head = None
