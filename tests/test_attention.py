import pytest
import torch

from minipop import attention
from minipop.attention import Causal, attend, attend_by_kernel, attend_in_blocks

from .tiny import close


def reference(q, keys, values, mask, scale):
    """Softmax attention from its definition, in float64."""
    q, keys, values = (t.double() for t in (q, keys, values))
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (keys, values))
    scores = q @ keys.transpose(-1, -2) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values


def tensors(heads, kv_heads, tokens, rows, dtype=torch.float32, batch=2, width=16):
    generator = torch.Generator().manual_seed(tokens + rows)
    return [torch.randn(batch, h, n, width, generator=generator).to(dtype)
            for h, n in ((heads, tokens), (kv_heads, rows), (kv_heads, rows))]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("past, tokens", [(0, 5), (0, 64), (0, 150), (7, 260), (100, 65), (100, 3)])
@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65, 100, 1000])
def test_causal_attention(heads, kv_heads, past, tokens, window):
    """Every causal case, through whichever form `attend` picks and through the blocks."""
    q, keys, values = tensors(heads, kv_heads, tokens, past + tokens)
    query, key = past + torch.arange(tokens)[:, None], torch.arange(past + tokens)
    seen = (key <= query) & (query - key < (window or 10**9))
    expected = reference(q, keys, values, seen, 0.3)
    close(attend(q, keys, values, Causal(past, window), 0.3).double(), expected, 3e-6)
    for block in (1, 16, 64):
        for walk in (attend_in_blocks, attend_by_kernel):
            close(walk(q, keys, values, Causal(past, window), 0.3, block).double(), expected, 3e-6)
    assert torch.equal(Causal(past, window).mask(tokens, "cpu"), seen)


def test_bfloat16_blocks_are_as_close_as_the_kernel():
    q, keys, values = tensors(6, 2, 300, 300, torch.bfloat16)
    expected = reference(q, keys, values, torch.ones(300, 300, dtype=torch.bool).tril(), 0.25)
    kernel = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=0.25, enable_gqa=True)
    blocks = attend_in_blocks(q, keys, values, Causal(0), 0.25)
    error, kernels = ((t.double() - expected).square().mean().sqrt() for t in (blocks, kernel))
    assert error < 2.5 * kernels and error < 2**-8 * expected.square().mean().sqrt()


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_one_token(heads, kv_heads):
    q, keys, values = tensors(heads, kv_heads, 1, 9)
    everything = torch.ones(1, 9, dtype=torch.bool)
    close(attend(q, keys, values, None, 0.3).double(), reference(q, keys, values, everything, 0.3), 3e-6)
    mask = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 0] = True
    close(attend(q, keys, values, mask, 0.3).double(), reference(q, keys, values, mask, 0.3), 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("past, window", [(0, None), (0, 70), (30, None), (30, 70)])
@pytest.mark.parametrize("kernels, unit", [(True, True), (True, False), (False, False)])
def test_narrow_dtypes_with_and_without_kernels_for_them(dtype, past, window, kernels, unit, monkeypatch):
    """A CPU without fast products in the dtype, or without a unit for them, takes other ways, to the same result."""
    monkeypatch.setattr(attention, "has_kernels", lambda dtype: kernels)
    monkeypatch.setattr(attention, "has_matrix_unit", lambda dtype: unit)
    q, keys, values = tensors(6, 2, 140, past + 140, dtype)
    expected = reference(q, keys, values, Causal(past, window).mask(140, "cpu"), 0.25)
    out = attend(q, keys, values, Causal(past, window), 0.25)
    assert out.dtype == dtype
    close(out.double(), expected, 4 * 2.0 ** (-8 if dtype == torch.bfloat16 else -11))
