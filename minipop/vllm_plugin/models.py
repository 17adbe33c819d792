"""The model classes: vLLM's own, whose stack of decoder layers is cut in two.

In a step whose batch holds prompt tokens, every row runs the lower layers. At the cut the prompt's rows leave their K/V in all upper
layers at once and are done; the others, boundary and decoded tokens, go on through the upper layers as a smaller batch of their own:

    rows of the batch   p p p D p D D     p prompt, D boundary or decoded
    lower layers        p p p D p D D
    at the cut          p p p   p         one norm, one product, RoPE, into the cache
    upper layers              D   D D

A step without prompt tokens is vLLM's, untouched.

Shapes: N rows of the batch, P those that are pruned, F the others, L' skipped layers, D hidden, K kv heads of this rank, E head_dim.
"""

import math
from dataclasses import replace
from types import SimpleNamespace as Names

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from ..plan import PrefillPlan
from ..projection import KVProjection
from .switch import plan_of
from .worker import STEP, Step


class CutStack:
    """Mixed into vLLM's stack of decoder layers (LlamaModel, Gemma3Model, ...): the two ways through the layers."""

    def cut_at(self, plan: PrefillPlan) -> None:
        """Prepare the projection that makes the K and V of all skipped layers in one product (`minipop.stacked` explains it).

        Every rank of a tensor-parallel group holds that of its own kv heads, so nothing is exchanged. It is one of vLLM's linear layers,
        and packed for the CPU as they are.
        """
        self.plan, self.cut = plan, plan.cut
        attention = self.layers[self.cut].self_attn
        self.kv_shape = (len(self.layers) - self.cut, 2, attention.num_kv_heads, attention.head_dim)
        self.skipped_kv = ReplicatedLinear(attention.qkv_proj.input_size, math.prod(self.kv_shape), return_bias=False,
                                           bias=plan.kv is not None or attention.qkv_proj.bias is not None)

    def skipped(self) -> list:
        return list(self.layers[self.cut :])

    def load_weights(self, weights) -> set[str]:
        """vLLM's loading, then the merged projection: the layers' own W_K and W_V, or the plan's calibrated file."""
        loaded = super().load_weights(weights)
        weight, bias = own_projection(self.skipped()) if self.plan.kv is None else calibrated_projection(self.skipped(), self.plan)
        self.skipped_kv.weight.data.copy_(weight)
        if bias is not None:
            self.skipped_kv.bias.data.copy_(bias)
        return loaded | {f"skipped_kv.{name}" for name, _ in self.skipped_kv.named_parameters()}

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        metadata = get_forward_context().attn_metadata
        step = metadata.get(STEP) if isinstance(metadata, dict) else None
        if step is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        return self.forward_cut(input_ids, positions, inputs_embeds, step, kwargs.get("deepstack_input_embeds") or {})

    def forward_cut(self, input_ids, positions: Tensor, inputs_embeds: Tensor | None, step: Step, deepstack) -> Tensor:
        """A batch with prompt tokens: positions [N] or, for M-RoPE, [3, N] -> [N, D], normed; 0 in the rows of prompt tokens.

        vLLM's layers carry the stream as two tensors, x and residual, whose sum it is.
        """
        x, residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, None
        for i in range(self.cut):
            x, residual = self.layers[i](positions, x, residual)
            if i < len(deepstack):
                x = x + deepstack[f"deepstack_input_embeds_{i}"]
        stream = x if residual is None else x + residual  # [N, D]
        self.project_kv(stream[step.pruned], positions[..., step.pruned], step)
        out = torch.zeros_like(stream)
        if len(step.full):
            x, residual = stream[step.full], None  # [F, D]
            context = replace(get_forward_context(), attn_metadata=step.full_metadata, slot_mapping=step.full_slots)
            with override_forward_context(context):
                for layer in self.skipped():
                    x, residual = layer(positions[..., step.full], x, residual)
            out[step.full] = self.norm(x, residual)[0]
        return out

    def project_kv(self, stream: Tensor, positions: Tensor, step: Step) -> None:
        """Write the K/V of the pruned rows, stream [P, D], into all skipped layers."""
        layers, count = self.skipped(), len(stream)
        normed = normalise(stream, layers[0].input_layernorm).to(stream.dtype)
        k, v = self.skipped_kv(normed).view(count, *self.kv_shape).unbind(2)  # each [P, L', K, E]
        norms = [getattr(layer.self_attn, "k_norm", None) for layer in layers]
        if norms[0] is not None:
            scale = torch.stack([norm_scale(norm) for norm in norms])[:, None]  # [L', 1, E]
            k = (normalise(k, norms[0]) * scale).to(v.dtype)
        for i, layer in enumerate(layers):
            key = k[:, i].reshape(count, -1)  # [P, K * E]
            # vLLM turns queries and keys together; the query is one head of nothing.
            _, key = layer.self_attn.rotary_emb(positions, key.new_zeros(count, self.kv_shape[-1]), key)
            attention = layer.self_attn.attn
            attention.impl.do_kv_cache_update(attention, key.view(count, *self.kv_shape[2:]), v[:, i].contiguous(),
                                              attention.kv_cache, step.pruned_slots[attention.layer_name])


def own_projection(layers: list) -> tuple[Tensor, Tensor | None]:
    """This rank's W_K and W_V of the skipped layers, the weights of the input norms folded in: [L' * 2K * E, D], and the biases."""
    weights, biases = [], []
    for layer in layers:
        qkv, width = layer.self_attn.qkv_proj, layer.self_attn.q_size
        weights.append(qkv.weight[width:].float() * norm_scale(layer.input_layernorm))
        biases.append(None if qkv.bias is None else qkv.bias[width:])
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


def calibrated_projection(layers: list, plan: PrefillPlan) -> tuple[Tensor, Tensor]:
    """This rank's kv heads of a calibrated K/V file. Raises PlanError when it was made for another checkpoint or plan."""
    made = KVProjection.load(plan.kv)
    as_ours = []  # what the check looks at, under minipop's names and with the heads of all ranks
    for layer in layers:
        attention = layer.self_attn
        weight, bias = (None if part is None else all_heads(part[attention.q_size :], attention)
                        for part in (attention.qkv_proj.weight, attention.qkv_proj.bias))
        as_ours.append(Names(input_norm=layer.input_layernorm, attn=Names(qkv=Names(weight=weight, bias=bias), q_width=0)))
    config = Names(num_layers=plan.num_layers, kv_width=attention.total_num_kv_heads * attention.head_dim,
                   hidden_size=attention.qkv_proj.input_size)
    made.check(Names(layers=[None] * plan.cut + as_ours, config=config), plan, plan.kv)
    first = get_tensor_model_parallel_rank() * attention.total_num_kv_heads // get_tensor_model_parallel_world_size()
    mine = slice(first, first + attention.num_kv_heads)
    rows = (len(layers), 2, attention.total_num_kv_heads, attention.head_dim)
    return made.weight.unflatten(0, rows)[:, :, mine].flatten(0, 3), made.bias.unflatten(0, rows)[:, :, mine].flatten()


def all_heads(kv: Tensor, attention) -> Tensor:
    """K and V rows of this rank's kv heads, [2K * E, ...] -> those of all ranks."""
    ranks = get_tensor_model_parallel_world_size()
    copies = max(ranks // attention.total_num_kv_heads, 1)  # with more ranks than kv heads, neighbours hold the same ones
    parts = tensor_model_parallel_all_gather(kv.contiguous(), dim=0).unflatten(0, (ranks, 2, attention.kv_size))[::copies]
    return parts.transpose(0, 1).flatten(0, 2)


def normalise(x: Tensor, norm) -> Tensor:
    """x / rms(x) over the last dimension, float32: the part of the norm that all layers share."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def norm_scale(norm) -> Tensor:
    """What a norm multiplies the normalised x by, float32; Gemma stores it minus one."""
    return norm.weight.float() + 1 if isinstance(norm, GemmaRMSNorm) else norm.weight.float()


class PrunedModel:
    """Mixed into vLLM's model classes: once built, the layers are cut where the plan says."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        stack = getattr(self, "language_model", self).model
        # vLLM's class builds the stack itself and takes no other: it becomes one of ours here.
        stack.__class__ = type(f"Cut{type(stack).__name__}", (CutStack, type(stack)), {})
        stack.cut_at(plan_of(vllm_config))


def pruned(model_class: type) -> type:
    """vLLM's model class of a family -> ours."""
    return type(f"Pruned{model_class.__name__}", (PrunedModel, model_class), {})
