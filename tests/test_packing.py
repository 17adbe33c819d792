import pytest
import torch
import torch.nn.functional as F

from minipop import PrefillPlan, Runner, packing
from minipop.packing import PackedLinear, can_pack, pack

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

HALVES = [pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(torch.zeros(2, 2, dtype=dtype)), reason="no packed form here"))
          for dtype in (torch.bfloat16, torch.float16)]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def random(*shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 5), (64, 32), (130, 48)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [True, False])
def test_packed_product_is_the_plain_one(dtype, rows, columns, tokens, with_bias):
    weight, bias, x = random((rows, columns), (rows,), (2, tokens, columns), dtype=dtype, seed=rows + tokens)
    bias = bias if with_bias else None
    packed = PackedLinear(weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(packed(x).double(), exact, 2 * ROUNDING[dtype])  # of the result, and nothing on the way
    assert packed(x).dtype == dtype
    close(packed.weight.float(), weight.float(), 2**-25)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_large_matrix_is_packed_in_parts(dtype, monkeypatch):
    weight, bias, x = random((130, 48), (130,), (2, 48), dtype=dtype)
    whole = PackedLinear(weight, bias)
    monkeypatch.setattr(packing, "MOST_AT_ONCE", 7 * 48)
    parts = PackedLinear(weight, bias)
    assert parts.onednn or len(parts.packed) == 19
    close(parts(x).float(), whole(x).float(), 2 * ROUNDING[dtype])
    assert torch.equal(parts.weight, whole.weight)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "qwen3_vl"])
@pytest.mark.parametrize("skip", [set(), {4, 5}, {1, 3}], ids=str)
def test_a_packed_model_gives_the_same_logits(dtype, family, skip):
    if family.startswith("gemma") and dtype == torch.float16:
        pytest.skip("float16 is refused for Gemma-3")
    logits = []
    for prepare in (lambda model: model, pack):
        model = prepare(tiny_model(family, dtype=dtype))
        runner = Runner(model, PrefillPlan(6, skip), max_seq_len=64, batch_size=2)
        logits.append(torch.stack((runner.prefill([random_ids(9), random_ids(5, 1)]), runner.decode([3, 4]))))
    close(logits[1], logits[0], 16 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_the_vision_tower_is_packed_too(dtype):
    model = pack(tiny_model("qwen3_vl", dtype=dtype))
    assert isinstance(model.vision.blocks[0].fc1, PackedLinear) and isinstance(model.vision.merger.fc2, PackedLinear)


def test_weights_beyond_float16_stay_as_they_are():
    if packing.kernel(torch.bfloat16) != "fbgemm":
        pytest.skip("bfloat16 is not kept as float16 here")
    assert not can_pack(torch.full((2, 2), 70000.0, dtype=torch.bfloat16)) and can_pack(torch.full((2, 2), 65000.0, dtype=torch.bfloat16))


def test_pack_leaves_other_dtypes_alone():
    model = pack(tiny_model())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
