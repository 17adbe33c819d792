"""The K/V projection of a skipped suffix: one matrix for all its layers, the model's own or a calibrated one from a file.

Every layer of a skipped suffix sees the same residual stream x, the one at the cut. With n = x / rms(x), K before k-norm and RoPE, and V,

    K_l, V_l = W_l n + b_l     for each skipped layer l.

POP (arXiv 2602.03295) takes the model's own W_l: input norm, W_K and W_V, which were trained for another stream, the one that reaches layer l
in the full model. `minipop.calibrate` refits W_l and b_l to the stream at the cut; applying them costs the same. `stacked.py` applies both.

Shapes: L' skipped layers, D hidden, K kv heads, E head_dim. A row of `weight` is one number of K or V: layer by layer, keys before
values, head by head.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import PlanError
from .files import one_line, quote
from .saving import save_tensors

FORMAT = "minipop calibrated K/V, version 1"


@dataclass
class KVProjection:
    """weight [L' * 2K * E, D]; bias [L' * 2K * E] or None; cut: the first skipped layer, of num_layers.

    fingerprint: of the weights it was fitted to (see `fingerprint`). notes: what else the file says about its making.
    """

    weight: Tensor
    bias: Tensor | None
    cut: int
    num_layers: int
    fingerprint: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, cut: int, dtype: torch.dtype | None = None) -> "KVProjection":
        """The model's own, the weights of the input norms folded in: W_l (w_l * n) = (W_l diag(w_l)) n."""
        weights, biases = [], []
        for layer in model.layers[cut:]:
            qkv, width = layer.attn.qkv, layer.attn.q_width
            weights.append((qkv.weight[width:].float() * layer.input_norm.scale().float()).to(dtype or qkv.weight.dtype))
            biases.append(None if qkv.bias is None else qkv.bias[width:])
        bias = None if biases[0] is None else torch.cat(biases).to(weights[0].dtype)
        return cls(torch.cat(weights), bias, cut, model.config.num_layers)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, complete or not at all. Raises CheckpointError when it cannot be written."""
        about = {"minipop": FORMAT, "cut": str(self.cut), "num_layers": str(self.num_layers), "fingerprint": self.fingerprint,
                 "notes": json.dumps(self.notes)}
        save_tensors(path, {"weight": self.weight, "bias": self.bias}, about)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "KVProjection":
        """Read a file that `save` wrote. Raises PlanError when it is not one."""
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"{path}: {'not a file' if path.exists() else 'no such file'}; calibrated K/V files are made by `python -m minipop.calibrate`")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("minipop") != FORMAT or set(file.keys()) != {"weight", "bias"}:
                    raise PlanError(f"{path}: not a calibrated K/V file of this version; make one with `python -m minipop.calibrate`")
                weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            notes = json.loads(about["notes"])
            if not isinstance(notes, dict) or not 0 <= int(about["cut"]) < int(about["num_layers"]):
                raise ValueError("its notes or its cut make no sense")
            made = cls(weight, bias, int(about["cut"]), int(about["num_layers"]), about["fingerprint"], notes)
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as problem:
            if isinstance(problem, PlanError):
                raise
            raise PlanError(f"{path}: not a calibrated K/V file: {one_line(problem)}") from None
        floats = weight.is_floating_point() and bias.is_floating_point()
        if not floats or weight.dim() != 2 or bias.shape != weight.shape[:1] or not (weight.isfinite().all() and bias.isfinite().all()):
            raise PlanError(f"{path}: damaged: its matrix and bias do not fit together, or are not all finite numbers")
        return made

    def check(self, model: nn.Module, plan, where: str) -> None:
        """Raises PlanError unless this projection was fitted to this model at this plan's cut."""
        config = model.config
        if not plan.is_suffix or plan.cut != self.cut or plan.num_layers != self.num_layers:
            raise PlanError(f"{where}: made for layers {self.cut}-{self.num_layers - 1} of {self.num_layers} skipped, the plan has "
                            f"{plan.describe()}")
        rows = (config.num_layers - self.cut) * 2 * config.kv_width
        if self.weight.shape != (rows, config.hidden_size) or self.fingerprint != fingerprint(model, self.cut):
            raise PlanError(f"{where}: made for another checkpoint ({quote(self.notes.get('checkpoint', '?'))}): calibrate this one")


def fingerprint(model: nn.Module, cut: int) -> str:
    """A digest of what a calibration depends on most: W_K, W_V and the input norm of the skipped layers.

    The same in every dtype that holds the checkpoint's numbers: they are rounded to bfloat16 first, and then to float16's range.
    """
    digest = hashlib.sha256()
    for layer in model.layers[cut:]:
        qkv, width = layer.attn.qkv, layer.attn.q_width
        for tensor in (layer.input_norm.weight, qkv.weight[width:], None if qkv.bias is None else qkv.bias[width:]):
            if tensor is not None:
                digest.update(tensor.detach().bfloat16().half().cpu().contiguous().numpy())
    return digest.hexdigest()[:32]
