"""Wanda (Sun et al. 2023, arXiv 2306.11695): zero the weights that are small and read small inputs.

    score_ij = |W_ij| * ||X_j||_2        X_j: input j of the matrix, over all tokens of a calibration text

In every output row i of every matrix the lowest share of the scores goes. Layers are pruned one after the other: the inputs of a
layer are measured behind layers that are pruned already, those inside it before its own matrices are. Nothing is retrained. Dense kernels
multiply by the zeros as by anything else, so the model is no faster.

Shapes: N tokens of a sequence, D hidden.
"""

import math

import torch
from torch import Tensor, nn

from ..errors import MinipopError
from .streams import Progress, Sequences, Stream, begin, check, check_finite, silent, twin


@torch.no_grad()
def wanda(model: nn.Module, sequences: Sequences, sparsity: float = 0.3, *, progress: Progress = silent) -> nn.Module:
    """A model in which floor(sparsity * inputs) weights of every row of the decoder layers' matrices are zero.

    Embedding, head, norms, biases and a vision tower stay; they are shared with the given model, which is not changed.
    model: plain, not packed. sequences: token ids of any lengths, or ModelInputs with pictures. Memory: one stream [N, D] a sequence.
    Raises MinipopError for a sparsity below 0 or not below 1, PromptError for sequences the model cannot take.
    """
    if not 0 <= sparsity < 1:
        raise MinipopError(f"sparsity must be at least 0 and below 1, not {sparsity}: it is the share of each row's weights to zero")
    check(model, sequences)
    pruned = twin(model)
    streams = list(begin(pruned, sequences))
    for i in progress(range(len(pruned.layers))):
        layer = pruned.layers[i]
        for matrix, norms in input_norms(layer, streams).items():
            check_finite(norms, i)
            matrix.weight = nn.Parameter(zero_lowest(matrix.weight, norms, sparsity), requires_grad=False)
        for stream in streams:
            stream.x = pruned.after_layer(i, layer(stream.x, stream.rope[i], stream.kv), stream.deepstack)
    return pruned


def matrices(layer: nn.Module) -> tuple[nn.Linear, ...]:
    """What is pruned in a layer. q, k, v lie in one matrix and have one input; so have gate and up."""
    return layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down


def input_norms(layer: nn.Module, streams: list[Stream]) -> dict[nn.Linear, Tensor]:
    """||X_j||_2 of each input of each matrix of the layer, over all tokens of the streams that enter it: float64 [inputs]."""
    squares = {matrix: torch.zeros(matrix.in_features, dtype=torch.float64, device=matrix.weight.device) for matrix in matrices(layer)}

    def add(matrix: nn.Linear, inputs: tuple[Tensor]) -> None:
        squares[matrix] += inputs[0].flatten(0, -2).double().square().sum(0)  # [1, N, inputs] -> [inputs]

    hooks = [matrix.register_forward_pre_hook(add) for matrix in squares]
    try:
        for stream in streams:
            layer(stream.x, stream.rope[layer.index], stream.kv)
    finally:
        for hook in hooks:
            hook.remove()
    return {matrix: total.sqrt() for matrix, total in squares.items()}


def zero_lowest(weight: Tensor, norms: Tensor, sparsity: float) -> Tensor:
    """weight [out, in] with the floor(sparsity * in) lowest scores of every row zeroed; among equal scores those of the first inputs."""
    scores = weight.abs().double() * norms
    count = math.floor(sparsity * weight.shape[1] + 1e-9)  # 1e-9: 0.29 * 100 is a little below 29 in binary
    lowest = scores.argsort(dim=1, stable=True)[:, :count]
    return weight.scatter(1, lowest, 0.0)


def sparsity_of(model: nn.Module) -> float:
    """The share of zeros in the matrices of the decoder's layers."""
    found = [matrix.weight for layer in model.layers for matrix in matrices(layer)]
    return sum(int((weight == 0).sum()) for weight in found) / sum(weight.numel() for weight in found)
