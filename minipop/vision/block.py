"""One block of a vision transformer: bidirectional attention within an image, then an MLP, both pre-norm.

    y = x + proj(Attention(qkv(norm1(x))))        x' = y + fc2(act(fc1(norm2(y))))

The patches of all images lie one after another in one matrix [N, D], so every matrix product runs once for all of them.
Only attention must not look from one image into another: it takes the images apart again (`Runs`).

Shapes: N patches of all images, D hidden, H heads, E head_dim.
"""

import torch
from torch import Tensor, nn

from ..attention import attend
from ..config import VisionConfig
from ..layers import Rope, activation, rotate

Runs = list[tuple[int, int]]  # how the N rows divide into images: (images in a row of this size, patches in each)


class VisionBlock(nn.Module):
    """Pre-norm transformer block with biases everywhere and one fused matrix for queries, keys and values [3D, D]."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        width = config.hidden_size
        self.heads, self.head_dim, self.act = config.num_heads, width // config.num_heads, config.hidden_act
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(self, x: Tensor, runs: Runs, rope: Rope | None = None) -> Tensor:
        """x [N, D] -> [N, D]. `rope` (cos, sin, each float32 [1, 1, N, E]) turns queries and keys; None = no rotation."""
        x = x + self._attention(self.norm1(x), runs, rope)
        return x + self.fc2(activation(self.act, self.fc1(self.norm2(x))))

    def _attention(self, x: Tensor, runs: Runs, rope: Rope | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(1, 2, 0, 3)  # [N, 3D] -> [3, H, N, E]
        q, k, v = qkv
        if rope is not None:  # in float32 whatever the weights are, rounded back once
            q, k = rotate(qkv[:2].float(), rope).to(x.dtype)
        sizes = [images * patches for images, patches in runs]
        branches = []
        for (images, patches), *parts in zip(runs, *(tensor.split(sizes, dim=1) for tensor in (q, k, v))):
            q, k, v = (part.unflatten(1, (images, patches)).transpose(0, 1) for part in parts)  # [images, H, patches, E]
            out = attend(q, k, v, mask=None, scale=self.head_dim ** -0.5)
            branches.append(out.transpose(1, 2).flatten(0, 1).flatten(1))  # -> [images * patches, D]
        return self.proj(torch.cat(branches))
