"""What the tests of both towers share: a reference with telling weights, and its way into ours through the rename tables."""

import torch

from minipop.checkpoint import Checkpoint, load_parameters
from minipop.saving import save_tensors


def randomise(module, seed=0):
    """Weights with which no norm or bias is neutral: matrices keep the scale of their input, the rest is far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "embed.weight" in name or "position_embedding" in name:
            scale, shift = 1.0, 0.0
        elif "mm_input_projection" in name:
            scale, shift = len(weight) ** -0.5, 0.0
        elif weight.dim() > 1:
            scale, shift = 1.5 * weight[0].numel() ** -0.5, 0.0
        else:
            scale, shift = 0.3, 1.0 if "norm" in name and name.endswith("weight") and "soft_emb" not in name else 0.0
        weight.data = noise * scale + shift
        weight.requires_grad_(False)
    return module.eval()


def fill(build, weights, sources, folder, dtype=torch.float32):
    """Build a tower on the meta device and load `weights` from a file, strictly: each tensor is used exactly once."""
    save_tensors(folder / "tower.safetensors", weights)
    with torch.device("meta"):
        tower = build()
    with Checkpoint.open_file(folder / "tower.safetensors") as checkpoint:
        load_parameters(tower, checkpoint, sources, dtype=dtype, device="cpu")
    return tower.eval()


class Record:
    """A tap that keeps what it sees."""

    def __init__(self):
        self.seen = []

    def __call__(self, layer, name, tensor):
        self.seen.append((name, layer, tensor))
        return tensor

    def __getitem__(self, name):
        return [tensor for seen, _, tensor in self.seen if seen == name]


def gap(ours, theirs):
    """Largest difference, relative to the largest magnitude."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def differing(ours, theirs):
    """The share of elements that are not equal bit by bit."""
    return (ours != theirs).double().mean().item()
