"""One token of one sequence as compiled loops (`torch.compile`): an option for decoding on a CPU, `--compile`.

A decode step reads every weight once and does little else, so on a CPU it should take about as long as memory needs. Calls of products, norms and
sums (decoding.py) take twice that. Here a layer is written out as the arithmetic it is, with a matrix times a vector as sums of
products, and the compiler makes two loops over the cores of it, one before attention and one after.

It costs a C++ compiler, some seconds before the first token, and memory: the loops read plain weights, so a packed model (packing.py) holds
its layers twice. Prompts and batches go the ways they always go; a single token takes this one: every step of `generate`, and the
boundary token of POP's prefill.

In between nothing is rounded to the weights' dtype but what attention reads: in float32 the results are the plain form's up to the order of
sums, in bfloat16 they are nearer to float32's than the plain form's are. tests/test_compiled.py holds one against the other.

Shapes: T cache rows seen, D hidden, H heads, K kv heads, E head_dim, I intermediate.
"""

import time
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KVCache, Span, visibility
from .decoding import fits
from .errors import MinipopError
from .files import one_line
from .layers import Rope, activation, rotate
from .models.gemma import GemmaLayer
from .packing import PackedLinear


def compile_decoding(model: nn.Module) -> float:
    """Compile the model's way of one token; its Runners use it from then on. Returns the seconds it took.

    model: from `load_model`, packed or not, on a CPU. Raises MinipopError for models of other kinds (sliced, divided over processes), on
    other devices, and where PyTorch finds no C++ compiler.
    """
    begin = time.perf_counter()
    if model.embedding.weight.device.type != "cpu":
        raise MinipopError("--compile is for CPUs: on a GPU decode steps are recorded as CUDA graphs anyway")
    if hasattr(model, "runner_class") or not fits(model):
        raise MinipopError("--compile knows whole models with the layers of Llama, Qwen and Gemma only: not those that SliceGPT made, or "
                           "that are divided over processes")
    model.compiled = CompiledToken(model)
    return time.perf_counter() - begin


class CompiledToken:
    """The layers and the head of a model for one token of one sequence."""

    def __init__(self, model: nn.Module):
        config = self.config = model.config
        self.windows = config.layer_windows
        self.constants = model.norm.eps, config.attention_scale, config.hidden_act
        self.weights = [LayerWeights.of(layer) for layer in model.layers]
        tied = config.tie_word_embeddings and isinstance(model.head, PackedLinear)  # then the plain matrix is still there, as the embedding
        self.head = model.norm.scale(), model.embedding.weight if tied else model.head.weight, model.norm.eps
        self.cap = config.final_logit_softcapping
        try:
            self._layer, self._head = compiled(layer_step), compiled(head_step)
            self._warm_up(model)
        except MinipopError as problem:
            raise MinipopError(f"--compile: {problem}") from None
        except Exception as problem:  # whatever the compiler's many parts raise
            raise MinipopError("--compile: PyTorch could not compile a decode step; it needs a C++ compiler, such as g++ (the environment variable "
                               f"CXX names another), Python's headers, and a folder for what it makes (TORCHINDUCTOR_CACHE_DIR): {one_line(problem)}") from None

    @torch.no_grad()
    def _warm_up(self, model: nn.Module) -> None:
        """Compile with rows of which the compiler is told that their number changes: so one form serves all lengths, and caches of all sizes.

        Each tensor is one of its own, as they are later: what is one tensor here would be taken for one tensor for ever.
        """
        config, dtype = self.config, model.embedding.weight.dtype
        x, cos, sin = torch.zeros(config.hidden_size, dtype=dtype), torch.ones(config.head_dim, dtype=dtype), torch.zeros(config.head_dim, dtype=dtype)
        keys, values = (torch.zeros(config.num_kv_heads, 12, config.head_dim, dtype=dtype)[:, :8] for _ in range(2))
        for rows in (keys, values):
            torch._dynamo.mark_dynamic(rows, 1)
        self._layer(x, self.weights[0], keys, values, cos, sin, *self.constants)
        self._head(x, *self.head)
        for rows in (3, 11):
            self._check(rows, model)

    def _check(self, rows: int, model: nn.Module) -> None:
        """Nothing is checked later, so here: the compiled layer and head against the written ones, with other numbers and another number of rows."""
        config, dtype = self.config, model.embedding.weight.dtype
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        x, cos, sin = random(config.hidden_size), random(config.head_dim), random(config.head_dim)
        stores = [random(config.num_kv_heads, 16, config.head_dim) for _ in range(2)]
        results = []
        for layer, head in ((self._layer, self._head), (layer_step, head_step)):
            keys, values = (store.clone()[:, :rows] for store in stores)
            out = layer(x, self.weights[-1], keys, values, cos, sin, *self.constants)
            results.append((out, keys, values, head(x, *self.head)))
        for made, written in zip(*results):
            if not torch.allclose(made.float(), written.float(), rtol=0.05, atol=0.05 * float(written.abs().max())):
                raise MinipopError("what the compiler made of a layer or the head computes something else: is its cache damaged?")

    def __call__(self, x: Tensor, rope: list[Rope], cache: KVCache, start: int, layers: range) -> Tensor:
        """The stream x [1, 1, D] of the token at column `start` >= 1 of row 0 after `layers`, [1, 1, D]; writes its K/V. rope: see OneToken."""
        span = Span(torch.tensor([start]), torch.ones(1, dtype=torch.long), 1)
        seen = {window: tuple(store[:, 0, :, visibility(span, window, None, None).first : start + 1].unbind() for store in (cache.keys, cache.values))
                for window in set(self.windows)}  # window -> L x [K, T, E], twice
        turns = {id(table): (table[0].flatten(), table[1].flatten()) for table in rope}  # each [E]; layers share tables
        x = x.flatten()
        for i in layers:
            keys, values = seen[self.windows[i]]
            x = self._layer(x, self.weights[i], keys[i], values[i], *turns[id(rope[i])], *self.constants)
        return x.view(1, 1, -1)

    def logits(self, x: Tensor) -> Tensor:
        """As `Decoder.logits`: x [1, 1, D] -> float32 [1, 1, vocab]."""
        logits = self._head(x.flatten(), *self.head)
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits.view(1, 1, -1)


def compiled(function: Callable) -> Callable:
    """The function compiled, without the checks at every call that what it was compiled for is still so: for 30 layers they take 1 to 2 ms.

    That is safe for one model, whose layers differ in nothing but the numbers. The compiler keeps what it makes by code object: a
    copy of the code keeps models apart.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    unchecked = getattr(torch.compiler, "skip_all_guards_unsafe", None)  # not in the oldest versions, which check
    return torch.compile(own, fullgraph=True, options=None if unchecked is None else {"guard_filter_fn": unchecked})


class LayerWeights(NamedTuple):
    """What one layer multiplies with; None where the family has no such thing."""

    input_norm: Tensor  # [D]; all norms as what the normalised stream is multiplied by
    qkv: Tensor  # [(H + 2K) * E, D]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [E]
    k_norm: Tensor | None
    o: Tensor  # [D, H * E]
    o_bias: Tensor | None
    attn_post_norm: Tensor | None  # [D]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 * I, D]
    gate_up_bias: Tensor | None
    down: Tensor  # [D, I]
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None  # [D]

    @classmethod
    def of(cls, layer: nn.Module) -> "LayerWeights":
        attn, mlp = layer.attn, layer.mlp
        post = (layer.attn_post_norm, layer.mlp_post_norm) if isinstance(layer, GemmaLayer) else (None, None)
        input_norm, q_norm, k_norm, attn_post, mlp_norm, mlp_post = (
            None if norm is None else norm.scale() for norm in (layer.input_norm, attn.q_norm, attn.k_norm, post[0], layer.mlp_norm, post[1]))
        return cls(input_norm, attn.qkv.weight, attn.qkv.bias, q_norm, k_norm, attn.o.weight, attn.o.bias, attn_post, mlp_norm,
                   mlp.gate_up.weight, mlp.gate_up.bias, mlp.down.weight, mlp.down.bias, mlp_post)


# --- the arithmetic of a layer, for one token --------------------------------------------------------------------------------------


def layer_step(x: Tensor, w: LayerWeights, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float, act: str) -> Tensor:
    """The stream x [D] after a layer. keys, values [K, T, E]: rows of the cache, the last of which becomes this token's. cos, sin [E]."""
    groups, _, width = keys.shape
    rows = matvec(w.qkv, norm(x, w.input_norm, eps), w.qkv_bias).view(-1, width)  # [H + 2K, E]
    q, k, v = rows.split([len(rows) - 2 * groups, groups, groups])
    q = rotate(q if w.q_norm is None else norm(q, w.q_norm, eps), (cos, sin))  # [H, E]
    k = rotate(k if w.k_norm is None else norm(k, w.k_norm, eps), (cos, sin))  # [K, E]
    keys[:, -1], values[:, -1] = k, v
    # The heads that share a kv head are the query rows of one product.
    out = F.scaled_dot_product_attention(q.to(x.dtype).view(1, groups, -1, width), keys[None], values[None], scale=scale)
    x = x + branch(matvec(w.o, out.reshape(-1), w.o_bias), w.attn_post_norm, eps)
    gate, up = matvec(w.gate_up, norm(x, w.mlp_norm, eps), w.gate_up_bias).chunk(2)  # each [I]
    return (x + branch(matvec(w.down, activation(act, gate) * up, w.down_bias), w.mlp_post_norm, eps)).to(w.qkv.dtype)


def head_step(x: Tensor, scale: Tensor, head: Tensor, eps: float) -> Tensor:
    """Final norm and head: x [D] -> float32 [vocab]."""
    return matvec(head, norm(x, scale, eps), None)


def matvec(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """weight [out, in], x [in] -> float32 [out], as one loop over the rows.

    A view by strides is the one thing the compiler does not look through: without it, it would make x anew (a norm, an activation) for each row.
    """
    x = x.float().as_strided(x.shape, (1,))
    out = (weight.float() * x).sum(-1)
    return out if bias is None else out + bias.float()


def norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., n] -> float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale.float()


def branch(x: Tensor, post_norm: Tensor | None, eps: float) -> Tensor:
    return x if post_norm is None else norm(x, post_norm, eps)
