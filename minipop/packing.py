"""Weights in the layout that the CPU's kernels want, rearranged once instead of at every product.

PyTorch's `F.linear` keeps a weight as rows. oneDNN, which multiplies bfloat16 matrices on CPUs with instructions for it, wants blocks, and
rearranges the weight anew in each call: for one token that costs as much as reading it does (docs/PERFORMANCE.md). On CPUs without such
instructions bfloat16 and float16 products run some ten times slower than float32 ones; there FBGEMM keeps the weight in float16 blocks and
multiplies in float32, at half of float32's memory. `pack` does either once, layer by layer, and drops the rows, so memory stays what it
was (a tied head becomes a packed copy beside the embedding).

The results are the plain ones up to the order of the sum, or better: FBGEMM rounds nothing on the way. float16 holds bfloat16's bits
exactly between 2^-17 and 65504; smaller weights lose some of theirs, at most 2^-25 each; a matrix with larger ones is left as it is.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

MOST_AT_ONCE = 2**25  # elements that are packed from one float32 copy: 128 MiB


@lru_cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this dtype at speed."""
    if dtype in (torch.float32, torch.float64):
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    supported = getattr(torch.ops.mkldnn, name, None)
    return torch.backends.mkldnn.is_available() and supported is not None and supported()


@lru_cache
def has_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether this CPU has tiles for products of this dtype (AMX), which PyTorch's attention kernel then uses."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return dtype == torch.bfloat16 and supported is not None and supported()


@lru_cache
def kernel(dtype: torch.dtype) -> str | None:
    """Which packed form serves a dtype here: "onednn", "fbgemm", or None."""
    if dtype == torch.bfloat16 and has_kernels(dtype) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "onednn"
    if dtype in (torch.bfloat16, torch.float16) and not has_kernels(dtype) and "fbgemm" in torch.backends.quantized.supported_engines:
        return "fbgemm"
    return None


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has a packed form of the matrix, and gains from it."""
    if weight.device.type != "cpu" or weight.dim() != 2 or kernel(weight.dtype) is None:
        return False
    return kernel(weight.dtype) == "onednn" or bool(weight.abs().max() <= torch.finfo(torch.float16).max)


class PackedLinear(nn.Module):
    """x W^T + b with W [out, in] packed. Stands in for nn.Linear; `weight` unpacks a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, weight.dtype
        self.onednn = kernel(weight.dtype) == "onednn"
        if self.onednn:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        else:  # FBGEMM packs from float32: some rows at a time, so that a large head needs no large copy
            rows = max(1, MOST_AT_ONCE // self.in_features)
            biases = [None] * len(weight.split(rows)) if bias is None else [part.float() for part in bias.detach().split(rows)]
            self.packed = [torch.ops.quantized.linear_prepack_fp16(part.float(), b) for part, b in zip(weight.detach().split(rows), biases)]

    def forward(self, x: Tensor) -> Tensor:
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        wide = x.float()
        parts = [torch.ops.quantized.linear_dynamic_fp16(wide, part) for part in self.packed]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """The plain matrix [out, in], made anew."""
        if self.onednn:
            return self.packed.to_dense()
        return torch.cat([torch.ops.quantized.linear_unpack_fp16(part)[0].to(self.dtype) for part in self.packed])


def pack(model: nn.Module) -> nn.Module:
    """Pack every matrix of the decoder's layers, the head and the vision tower, in place. Where packing is not possible, nothing happens.

    For inference only: a packed model has no parameters for these matrices, so it can be neither trained nor saved.
    """
    vision = getattr(model, "vision", None)
    for parent in [*model.layers.modules(), *([] if vision is None else vision.modules()), model]:
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
    return isinstance(model.layers[0].attn.qkv, PackedLinear)  # not the head: a rank of several may have none (shards.py)
