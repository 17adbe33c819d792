"""SliceGPT (Ashkboos et al. 2024, arXiv 2401.15024): a narrower residual stream.

The stream between two blocks can be turned by any orthogonal matrix Q, if the matrices that write it are turned too and those that read it
turned back: an RMSNorm sees lengths only, and those stay. So the stream is turned to its principal axes, and the last of them, along
which it hardly varies, are deleted: columns of every matrix that reads the stream, rows of every matrix that writes it.

    y = x + Attn(norm(x))      becomes      y' = x' (Q1^T Q2) + Attn'(norm'(x'))        x' = x Q1, y' = y Q2
    z = y + MLP(norm(y))                    z' = y' (Q2^T Q3) + MLP'(norm'(y'))

Every block has axes of its own, so the residual connection needs a shortcut matrix between two sets of them: real work that the
original model does not have. Norm weights are folded into the matrices that follow (a rotation does not commute with them). Q_l are the
eigenvectors of the Gram matrix of the calibration streams at that place, in a model that is sliced below already.

Three choices follow the authors' own implementation (github.com/microsoft/TransformerCompression): the axes are those of the raw stream, not of
the normed one; a norm divides by the width the stream had, as if the deleted columns were zeros (their issue 131); and the last MLP
writes the whole stream, in its original basis, so that final norm and head stay as they are.

Gemma-3 cannot be turned: a norm with weights lies between each block and the stream. Nor is Qwen3-VL: DeepStack adds image rows, which are
made in the original basis, after several layers.

Shapes: N tokens of a sequence, D hidden, W kept width of the stream, L layers.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import ConfigError, MinipopError, PlanError
from ..layers import KV, DecoderLayer, Rope, Tap, no_tap
from ..models import build_model
from ..models.decoder import WEIGHTS, Decoder
from ..plan import PrefillPlan
from ..runner import Runner
from .streams import Progress, Stream, begin, check, check_finite, silent

WIDTH_STEP = 8  # kernels like widths that are multiples of it
DAMPING = 0.01  # of the Gram matrix's mean diagonal, added to its diagonal


# --- the sliced model -----------------------------------------------------------------------------------------------------------


class SlicedNorm(nn.Module):
    """The RMSNorm of a whole stream, D wide, of which x [.., W] is what was kept. Its weight lies in the matrices that follow.

    sqrt(sum(x^2) / D + eps) = sqrt(W / D) * sqrt(sum(x^2) / W + eps * D / W): the factor in front is folded as well.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps * config.hidden_size / config.sliced_width

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)


class SlicedLayer(DecoderLayer):
    """A layer on W columns, with a shortcut matrix in each residual connection. The last layer's MLP gives back all D."""

    def __init__(self, config: ModelConfig, index: int):
        width, whole = config.sliced_width, config.hidden_size
        super().__init__(replace(config, hidden_size=width), index)
        self.input_norm, self.mlp_norm = SlicedNorm(config), SlicedNorm(config)
        written = whole if index == config.num_layers - 1 else width
        self.mlp.down = nn.Linear(config.intermediate_size, written, bias=config.mlp_bias)
        self.attn_shortcut = nn.Linear(width, width, bias=False)
        self.mlp_shortcut = nn.Linear(width, written, bias=False)

    def forward(self, x: Tensor, rope: Rope, kv: KV, tap: Tap = no_tap) -> Tensor:
        """x [B, N, W] -> [B, N, W], after the last layer [B, N, D]; writes N rows of K/V."""
        h = tap(self.index, "attn_in", self.input_norm(x))
        x = self.attn_shortcut(x) + tap(self.index, "attn_out", self.attn(h, rope, kv, tap))
        return self.mlp_shortcut(x) + tap(self.index, "mlp_out", self.mlp(self.mlp_norm(x)))


class SlicedRunner(Runner):
    """A Runner that refuses to skip layers: each hands the stream on in another basis, so it cannot pass one by unchanged."""

    @property
    def plan(self) -> PrefillPlan:
        return self._plan

    @plan.setter
    def plan(self, plan: PrefillPlan) -> None:
        if plan.skip:
            raise PlanError("a sliced model (SliceGPT) cannot skip layers in prefill: each layer hands the stream on in another basis; "
                            "run all of them (--full)")
        self._plan = plan


class SlicedDecoder(Decoder):
    """A Llama, Mistral, Qwen2 or Qwen3 decoder whose stream has config.sliced_width columns between the layers."""

    layer_class = SlicedLayer
    runner_class = SlicedRunner
    weights = {**WEIGHTS, "layers.{i}.attn_shortcut.weight": "layers.{i}.attn_shortcut.weight",
               "layers.{i}.mlp_shortcut.weight": "layers.{i}.mlp_shortcut.weight"}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.sliced_width), freeze=False)


# --- slicing --------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def slicegpt(model: nn.Module, sequences: list[list[int]], ratio: float = 0.25, *, progress: Progress = silent) -> nn.Module:
    """A `SlicedDecoder` whose stream is (1 - ratio) * D wide, rounded down to a multiple of 8; ratio 0 turns without slicing.

    model: plain, not packed; it is not changed. sequences: token ids, of any lengths; together they should have more tokens than D.
    Memory: one stream [N, D] a sequence, and Gram matrices [D, D] in float64. Raises ConfigError for a family that cannot be sliced,
    MinipopError for a ratio that leaves fewer than 8 columns, PromptError for sequences the model cannot take.
    """
    check_sliceable(model.config)
    config = replace(model.config, sliced_width=sliced_width(model.config.hidden_size, ratio), tie_word_embeddings=False)
    check(model, sequences)
    sliced = build_model(config)
    streams, dtype = list(begin(model, sequences)), model.embedding.weight.dtype

    axes = principal_axes(streams, 0)[:, : config.sliced_width]  # [D, W], float64
    _set(sliced.embedding, model.embedding.weight.double() @ axes, dtype)
    _project(streams, axes)
    for i in progress(range(config.num_layers)):
        old, new, last = model.layers[i], sliced.layers[i], i == config.num_layers - 1
        for name in ("q_norm", "k_norm"):
            if getattr(old.attn, name) is not None:
                _set(getattr(new.attn, name), getattr(old.attn, name).weight)

        # Attention reads the stream along `axes`; what it writes has the original basis until the axes behind it are known.
        _set_reader(new.attn.qkv, old.attn.qkv, old.input_norm.scale(), axes)
        _set(new.attn.o, old.attn.o.weight, bias=old.attn.o.bias)
        back = axes.T.to(dtype)
        for stream in streams:  # [1, N, W] -> [1, N, D]
            stream.x = stream.x @ back + new.attn(new.input_norm(stream.x), stream.rope[i], stream.kv, no_tap)
        behind = principal_axes(streams, i)[:, : config.sliced_width]
        _set_writer(new.attn.o, old.attn.o, behind)
        _set(new.attn_shortcut, behind.T @ axes, dtype)  # x Q1^T Q2, as a matrix that F.linear transposes
        _project(streams, behind)
        axes = behind

        # The MLP, in the same way. The last one keeps the original basis, whole.
        _set_reader(new.mlp.gate_up, old.mlp.gate_up, old.mlp_norm.scale(), axes)
        _set(new.mlp.down, old.mlp.down.weight, bias=old.mlp.down.bias)
        back = axes.T.to(dtype)
        for stream in streams:
            stream.x = stream.x @ back + new.mlp(new.mlp_norm(stream.x))
        behind = torch.eye(len(axes)).to(axes) if last else principal_axes(streams, i)[:, : config.sliced_width]
        _set_writer(new.mlp.down, old.mlp.down, behind)
        _set(new.mlp_shortcut, behind.T @ axes, dtype)
        _project(streams, behind)
        axes = behind
    _set(sliced.norm, model.norm.weight)
    _set(sliced.head, model.head.weight)
    return sliced.eval()


def check_sliceable(config: ModelConfig) -> None:
    """Raises ConfigError, with the reason, for a model that cannot be sliced."""
    if config.sliced_width is not None:
        raise ConfigError("this model is sliced already")
    if config.family.startswith("gemma"):
        raise ConfigError("SliceGPT cannot slice Gemma-3: a norm with weights of its own lies between every block and the residual stream, "
                          "and a rotation of the stream cannot be moved through it")
    if config.vision is not None:
        raise ConfigError("SliceGPT slices text models here: a vision tower hands over image rows in the original basis, at several layers")


def sliced_width(hidden: int, ratio: float) -> int:
    """Columns that are left of D. Raises MinipopError for a ratio below 0, or one that leaves too few."""
    if not 0 <= ratio < 1:
        raise MinipopError(f"ratio must be at least 0 and below 1, not {ratio}: it is the share of the stream's columns to delete")
    width = math.floor((1 - ratio) * hidden + 1e-9) // WIDTH_STEP * WIDTH_STEP if ratio else hidden
    if not width:
        raise MinipopError(f"ratio {ratio} leaves fewer than {WIDTH_STEP} of {hidden} columns: choose a smaller one")
    return width


def principal_axes(streams: list[Stream], layer: int) -> Tensor:
    """The eigenvectors of sum x^T x over all tokens, as columns, largest eigenvalue first: float64 [D, D]."""
    gram = sum(x.T @ x for x in (stream.x[0].double() for stream in streams))  # [N, D] -> [D, D]
    check_finite(gram, layer)
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    return torch.linalg.eigh(gram).eigenvectors.flip(1)


def _project(streams: list[Stream], axes: Tensor) -> None:
    """x [1, N, D] -> its coordinates along the axes [D, W], [1, N, W]."""
    for stream in streams:
        stream.x = stream.x @ axes.to(stream.x.dtype)


def _set_reader(new: nn.Linear, old: nn.Linear, norm: Tensor, axes: Tensor) -> None:
    """W (norm * n) for the whole normed stream n becomes W' n', with n' along the axes [D, W] as a SlicedNorm gives it."""
    whole, kept = axes.shape
    _set(new, old.weight.double() * norm.double() @ axes * math.sqrt(whole / kept), old.weight.dtype, old.bias)


def _set_writer(new: nn.Linear, old: nn.Linear, axes: Tensor) -> None:
    """W u + b, a summand of the stream, becomes its coordinates along the axes [D, W]."""
    bias = None if old.bias is None else (axes.T @ old.bias.double()).to(old.bias.dtype)
    _set(new, axes.T @ old.weight.double(), old.weight.dtype, bias)


def _set(module: nn.Module, weight: Tensor, dtype: torch.dtype | None = None, bias: Tensor | None = None) -> None:
    module.weight = nn.Parameter(weight.to(dtype or weight.dtype).contiguous(), requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
