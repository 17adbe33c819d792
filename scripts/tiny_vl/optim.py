"""Muon for the weight matrices and AdamW for everything else, in one optimizer with a plain state."""
from __future__ import annotations

import torch


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly, by Newton-Schulz steps. g [batch, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if flip else x).float()


class MuonAdamW:
    """Embeddings, read-outs, norms, biases and the patch convolution go to AdamW.

    Matrices of equal shape are stacked, so that one batched product serves all of them; processes share that work.
    """

    def __init__(self, named_parameters, muon_lr=0.02, adam_lr=2e-3, momentum=0.95, weight_decay=0.01, rank=0, ranks=1):
        self.rank, self.ranks = rank, ranks
        self.muon_lr, self.adam_lr, self.momentum, self.weight_decay = muon_lr, adam_lr, momentum, weight_decay
        self.groups, self.others = {}, []
        for name, p in named_parameters:
            if p.ndim == 2 and "embed" not in name and not name.startswith("heads."):
                self.groups.setdefault(tuple(p.shape), []).append(p)
            else:
                self.others.append(p)
        self.buffers = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}
        self.adam = torch.optim.AdamW(self.others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates times `scale`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        lr, updates = self.muon_lr * scale, []
        for shape, ps in self.groups.items():
            g, m = torch.stack([p.grad for p in ps]), self.buffers[shape]
            m.lerp_(g, 1 - self.momentum)
            update = g.lerp_(m, self.momentum)
            mine = orthogonalise(update[self.rank::self.ranks]) * max(1.0, shape[0] / shape[1]) ** 0.5
            update.zero_()[self.rank::self.ranks] = mine
            updates.append(update.flatten())
        flat = torch.cat(updates)
        if self.ranks > 1:
            torch.distributed.all_reduce(flat)          # the other processes' matrices are zeros here
        flat = iter(flat.split([p.numel() for ps in self.groups.values() for p in ps]))
        for ps in self.groups.values():
            for p in ps:
                p.mul_(1 - lr * self.weight_decay).add_(next(flat).view_as(p), alpha=-lr)
                p.grad = None

    def state_tensors(self) -> dict:
        """Everything a resumed run needs, as named tensors."""
        state = {f"muon.{i}": m for i, m in enumerate(self.buffers.values())}
        for i, p in enumerate(self.others):
            for key, value in self.adam.state[p].items():
                state[f"adam.{i}.{key}"] = value
        return state

    def load_state_tensors(self, state: dict) -> None:
        for i, m in enumerate(self.buffers.values()):
            m.copy_(state[f"muon.{i}"])
        for i, p in enumerate(self.others):
            prefix = f"adam.{i}."
            self.adam.state[p] = {k[len(prefix):]: v.clone() for k, v in state.items() if k.startswith(prefix)}
