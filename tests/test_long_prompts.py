"""Long prompts go through the layers in chunks: the working memory follows the chunk, not the prompt. (That the results are those of
one pass is in test_runner.py.)"""

import os

import pytest
import torch

from minipop import PrefillPlan, Runner
from minipop.measuring import peak_memory

from .tiny import close, random_ids, tiny_model


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell how much memory was used")
@pytest.mark.parametrize("skip", [set(), {1}], ids=str)
def test_working_memory_follows_the_chunk(skip):
    model = tiny_model(num_layers=2, layer_windows=(None, None), intermediate_size=3000, max_position_embeddings=10_000)

    def prefill(tokens: int, chunk: int) -> tuple[int, torch.Tensor]:
        runner = Runner(model, PrefillPlan(2, skip), max_seq_len=tokens, chunk_size=chunk)
        runner.cache.keys.zero_(), runner.cache.values.zero_()  # in use from now on
        runner.prefill(random_ids(10))  # what is made once is made
        runner.reset()
        with peak_memory(torch.device("cpu")) as peak:
            logits = runner.prefill(random_ids(tokens))
        return peak.bytes, logits

    (short, _), (long, pieces), (whole, one) = prefill(1000, 200), prefill(6000, 200), prefill(6000, 6000)
    assert whole > 100 * 2**20  # gate and up of all tokens: 6,000 x 6,000 float32 numbers
    assert long < short + 40 * 2**20 and long < whole / 2  # more by the scores of one block of queries against all rows
    close(pieces, one)
