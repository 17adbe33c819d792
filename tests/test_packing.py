import pytest
import torch
import torch.nn.functional as F

from minipop import PrefillPlan, Runner
from minipop.packing import PackedLinear, can_pack, pack

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

needs_packing = pytest.mark.skipif(not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="no packed bfloat16 kernels here")


@needs_packing
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 5), (64, 32), (130, 48)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_packed_product_is_the_plain_one(rows, columns, tokens):
    generator = torch.Generator().manual_seed(rows + tokens)
    weight, bias, x = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, columns), (rows,), (2, tokens, columns)))
    packed = PackedLinear(weight, bias)
    close(packed(x).float(), F.linear(x, weight, bias).float(), 2**-7)  # the sum's order may differ: one bfloat16 rounding
    assert torch.equal(packed.weight, weight)


@needs_packing
@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("skip", [set(), {4, 5}, {1, 3}], ids=str)
def test_a_packed_model_gives_the_same_logits(family, skip):
    logits = []
    for prepare in (lambda model: model, pack):
        model = prepare(tiny_model(family, dtype=torch.bfloat16))
        runner = Runner(model, PrefillPlan(6, skip), max_seq_len=64, batch_size=2)
        logits.append(torch.stack((runner.prefill([random_ids(9), random_ids(5, 1)]), runner.decode([3, 4]))))
    close(logits[1], logits[0], 2**-5)


def test_pack_leaves_other_dtypes_alone():
    model = pack(tiny_model())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
