"""Tiny models with random weights, made without any other library: fast enough to build anew in every test."""

import dataclasses
import json
import tempfile
from pathlib import Path

import torch

from minipop.config import ModelConfig, read_config
from minipop.models import build_model

BASE = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-3, eos_token_id=None)
CONFIGS = {
    "llama": dict(BASE, model_type="llama", bos_token_id=1),
    "mistral": dict(BASE, model_type="mistral", sliding_window=5, bos_token_id=1),
    "qwen2": dict(BASE, model_type="qwen2"),
    "qwen3": dict(BASE, model_type="qwen3", num_key_value_heads=1),
    "gemma3_text": dict(BASE, model_type="gemma3_text", sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=24,
                        bos_token_id=2),
    "gemma3": dict(model_type="gemma3", image_token_index=60, mm_tokens_per_image=4,
                   text_config=dict(BASE, sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=24),
                   vision_config=dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
                                      image_size=16, patch_size=4)),
    "qwen3_vl": dict(model_type="qwen3_vl", image_token_id=60, vision_start_token_id=59,
                     text_config=dict(BASE, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])),
                     vision_config=dict(depth=3, hidden_size=24, intermediate_size=32, num_heads=3, patch_size=4,
                                        temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=32,
                                        num_position_embeddings=16, deepstack_visual_indexes=[0, 1])),
}
TEXT_FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


def tiny_config(family: str, **overrides) -> ModelConfig:
    """A family's small config; overrides are fields of ModelConfig."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[family]))
        return dataclasses.replace(read_config(folder), **overrides)


def tiny_model(family: str = "llama", seed: int = 0, dtype=torch.float32, **overrides):
    """A model of `family` with random weights: norms around one, biases and matrices large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(tiny_config(family, **overrides)).to_empty(device="cpu").to(dtype)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name and parameter.dim() == 1 and name.endswith("weight")
        parameter.data.copy_(1 + 0.3 * noise if is_norm else 0.25 * noise)
    return model.eval().requires_grad_(False)


def random_ids(n: int, seed: int = 0, vocab: int = 59) -> list[int]:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Largest difference relative to the tensor's largest magnitude."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative difference {error:.2e} exceeds {tolerance:.0e}"
