"""Weights in the layout that the CPU's bfloat16 kernels want, rearranged once instead of at every product.

PyTorch's `F.linear` keeps a weight as rows; oneDNN, which multiplies it, wants blocks, and rearranges it anew in each call. For one
token that costs as much as reading the weight does (docs/PERFORMANCE.md). `pack` does it once, layer by layer, and drops the rows, so
memory stays what it was (a tied head becomes a packed copy beside the embedding). The results are the same to the last bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has the packed form of the matrix, and gains from it: bfloat16 on a CPU."""
    return (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.dim() == 2
            and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
            and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """x W^T + b with W [out, in] packed. Stands in for nn.Linear; `weight` unpacks a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """The plain matrix [out, in], made anew."""
        return self.packed.to_dense()


def pack(model: nn.Module) -> nn.Module:
    """Pack every matrix of the decoder's layers and the head, in place. Where packing is not possible, nothing happens.

    For inference only: a packed model has no parameters for these matrices, so it can be neither trained nor saved.
    """
    for parent in [*(part for layer in model.layers for part in layer.modules()), model]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return model


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all parameters, packed or not, in the order of their names."""
    names = {name: None for name, _ in model.named_parameters()}
    packed = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name in sorted([*names, *packed]):
        yield name, packed[name].weight if name in packed else model.get_parameter(name)


def is_packed(model: nn.Module) -> bool:
    return isinstance(model.head, PackedLinear)
