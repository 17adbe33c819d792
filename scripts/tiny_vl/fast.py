"""The forward pass of Qwen3-VL written for training on a CPU: the same function as the reference's, on batches of equal shape.

It reads the parameters of a `Qwen3VLForConditionalGeneration` where they are, does its matrix products in bfloat16, and takes
every picture of a batch through the vision tower at once (the reference walks through them one by one). The prompt starts with
one picture, so the image rows of all sequences lie at the same place. `tests/test_tiny_vl.py` compares it with the reference.

B sequences, N tokens, P patches a picture, D hidden, H heads, K kv heads, E head_dim.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

FIRST_IMAGE_ROW = 4          # <|im_start|> user \\n <|vision_start|>, then the image rows
MATMUL_DTYPE = torch.bfloat16


def linear(x, weight, bias=None):
    return F.linear(x.to(MATMUL_DTYPE), weight.to(MATMUL_DTYPE), None if bias is None else bias.to(MATMUL_DTYPE))


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * w over the last axis, with a backward in few passes over memory (what autograd derives takes more)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_() / x.shape[-1] + eps).rsqrt_()
        normed = x * scale.to(x.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved_tensors
        product, w = grad * normed, weight.to(grad.dtype)
        inner = (product @ w).unsqueeze(-1) / -w.shape[0]
        return torch.addcmul(grad * w, normed, inner).mul_(scale.to(grad.dtype)), product.flatten(0, -2).float().sum(0), None


def rms_norm(x, weight):
    return _RMSNorm.apply(x, weight, 1e-6)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attention(q, k, v, mask=None):
    """Plain products and softmax: at these lengths several times faster backwards than the fused CPU kernel.

    q [B, H, N, E] already scaled, k and v [B, K, N, E], mask [B, 1, H/K * N, N] or None -> [B, N, H * E]
    """
    B, H, N, E = q.shape
    K = k.shape[1]
    scores = q.reshape(B, K, H // K * N, E) @ k.mT                     # the query heads of one kv head lie below each other
    weights = torch.softmax(scores if mask is None else scores + mask, -1)                     # [B, K, H/K * N, N]
    return (weights @ v).view(B, H, N, E).transpose(1, 2).reshape(B, N, H * E)


def text_layer(layer, x, cos, sin, mask):
    """x [B, N, D] float32, cos and sin [B, N, 1, E], mask [B, 1, H/K * N, N] (0 or -inf) -> [B, N, D]."""
    a, m, (B, N, _), E = layer.self_attn, layer.mlp, x.shape, cos.shape[-1]
    h = rms_norm(x, layer.input_layernorm.weight)
    q = rms_norm(linear(h, a.q_proj.weight).view(B, N, -1, E), a.q_norm.weight * E ** -0.5)              # [B, N, H, E]
    k = rms_norm(linear(h, a.k_proj.weight).view(B, N, -1, E), a.k_norm.weight)                          # [B, N, K, E]
    v = linear(h, a.v_proj.weight).view(B, N, -1, E).transpose(1, 2)
    q, k = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
    x = x + linear(attention(q, k, v, mask), a.o_proj.weight)
    h = rms_norm(x, layer.post_attention_layernorm.weight).to(MATMUL_DTYPE)
    return x + linear(F.silu(linear(h, m.gate_proj.weight)) * linear(h, m.up_proj.weight), m.down_proj.weight)


def vision_block(block, x, cos, sin, heads: int):
    """x [B, P, D] float32, cos and sin [P, E] -> [B, P, D]."""
    a, m, (B, P, D) = block.attn, block.mlp, x.shape
    h = F.layer_norm(x, (D,), block.norm1.weight, block.norm1.bias, 1e-6)
    q, k, v = linear(h, a.qkv.weight, a.qkv.bias).view(B, P, 3, heads, -1).permute(2, 0, 3, 1, 4)         # each [B, H, P, E]
    q, k = rotate(q * (q.shape[-1] ** -0.5), cos, sin), rotate(k, cos, sin)
    x = x + linear(attention(q, k, v), a.proj.weight, a.proj.bias)
    h = F.layer_norm(x, (D,), block.norm2.weight, block.norm2.bias, 1e-6)
    h = F.gelu(linear(h, m.linear_fc1.weight, m.linear_fc1.bias), approximate="tanh")
    return x + linear(h, m.linear_fc2.weight, m.linear_fc2.bias)


def merge(x, group_first: bool, m):
    """x [B, P, D] -> [B, P/4, out] by the merger m. DeepStack's mergers norm groups of four patches, the main one each patch."""
    B, P, D = x.shape
    if group_first:
        x = F.layer_norm(x.reshape(B, P // 4, 4 * D), (4 * D,), m.norm.weight, m.norm.bias, 1e-6)
    else:
        x = F.layer_norm(x, (D,), m.norm.weight, m.norm.bias, 1e-6).reshape(B, P // 4, 4 * D)
    h = F.gelu(linear(x, m.linear_fc1.weight, m.linear_fc1.bias))
    return linear(h, m.linear_fc2.weight, m.linear_fc2.bias)


def patches(images, patch: int):
    """uint8 [B, height, width, 3] -> float [B, P, 3 * patch * patch] in -1..1, in the order of the 2x2 merge blocks."""
    B, height, width, _ = images.shape
    x = images.float().div(127.5).sub(1).permute(0, 3, 1, 2)
    x = x.reshape(B, 3, height // patch // 2, 2, patch, width // patch // 2, 2, patch)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(B, -1, 3 * patch * patch)


class FastForward:
    """Calls the pieces above with the parameters of a reference model."""

    def __init__(self, model):
        self.model, c = model, model.config.vision_config
        self.patch, self.taps, self.heads = c.patch_size, list(c.deepstack_visual_indexes), c.num_heads

    def vision_positions(self, height: int, width: int):
        """For a grid of height x width patches: rows of learned positions [P, D] and the rotary cos, sin [P, E]."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids
        v, grid = self.model.model.visual, torch.tensor([[1, height, width]])
        index, weight = get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=v.num_grid_per_side, mode=v.interpolation_mode, align_corners=v.interpolation_align_corners,
            spatial_merge_size=2, kwargs={})
        cos, sin = v.rotary_pos_emb(weight, get_vision_position_ids(grid, 2, kwargs={}))
        return (v.pos_embed(index) * weight[:, :, None]).sum(1), cos.squeeze(0).to(MATMUL_DTYPE), sin.squeeze(0).to(MATMUL_DTYPE)

    def vision(self, images):
        """uint8 [B, height, width, 3] -> image rows [B, P/4, D], a list of DeepStack rows, the last patch rows [B, P, D]."""
        v = self.model.model.visual
        learned, cos, sin = self.vision_positions(images.shape[1] // self.patch, images.shape[2] // self.patch)
        weight = v.patch_embed.proj.weight.sum(2).flatten(1)            # a still picture: its one frame is seen twice
        x = linear(patches(images, self.patch), weight, v.patch_embed.proj.bias).float() + learned
        deep = []
        for i, block in enumerate(v.blocks):
            x = vision_block(block, x, cos, sin, self.heads)
            if i in self.taps:
                deep.append(merge(x, True, v.deepstack_merger_list[self.taps.index(i)]))
        return merge(x, False, v.merger), deep, x

    def hidden(self, images, token_ids, positions, mask):
        """images uint8 [B, height, width, 3], token_ids [B, N], positions [3, B, N], mask [B, 1, N, N] -> the last hidden rows
        [B, N, D], those after half of the text layers [B, N, D], and the vision tower's last patch rows [B, P, D]."""
        rows, deep, seen = self.vision(images)
        text = self.model.model.language_model
        x = text.embed_tokens(token_ids)
        first, end = FIRST_IMAGE_ROW, FIRST_IMAGE_ROW + rows.shape[1]
        x = torch.cat((x[:, :first], rows.float(), x[:, end:]), 1)
        cos, sin = (t.unsqueeze(2).to(MATMUL_DTYPE) for t in text.rotary_emb(x, positions))
        mask = mask.to(MATMUL_DTYPE).repeat(1, 1, text.layers[0].self_attn.num_key_value_groups, 1)
        halfway = x
        for i, layer in enumerate(text.layers):
            x = text_layer(layer, x, cos, sin, mask)
            halfway = x if i == len(text.layers) // 2 - 1 else halfway
            if i < len(deep):
                x = torch.cat((x[:, :first], x[:, first:end] + deep[i], x[:, end:]), 1)
        return rms_norm(x, text.norm.weight), halfway, seen

    def logits(self, hidden):
        return linear(hidden, self.model.model.language_model.embed_tokens.weight).float()
