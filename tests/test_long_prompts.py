"""Long prompts go through the layers in chunks: the working memory follows the chunk, not the prompt. (That the results are those of
one pass is in test_runner.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minipop import PrefillPlan, Runner
from minipop.measuring import peak_memory

from .tiny import random_ids, tiny_model

ROOT = Path(__file__).resolve().parents[1]


def measure(skip: set[int]) -> dict[str, int]:
    """The peak of resident memory above model and cache, bytes, of a short and a long prompt in chunks, and of the long one in one pass."""
    model = tiny_model(num_layers=2, layer_windows=(None, None), intermediate_size=3000, max_position_embeddings=10_000)

    def prefill(tokens: int, chunk: int) -> int:
        runner = Runner(model, PrefillPlan(2, skip), max_seq_len=tokens, chunk_size=chunk)
        runner.cache.keys.zero_(), runner.cache.values.zero_()  # in use from now on
        runner.prefill(random_ids(10))  # what is made once is made
        runner.reset()
        with peak_memory(torch.device("cpu")) as peak:
            runner.prefill(random_ids(tokens))
        return peak.bytes

    return {"short": prefill(1000, 200), "long": prefill(6000, 200), "whole": prefill(6000, 6000)}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell how much memory was used")
@pytest.mark.parametrize("skip", ["", "1"])
def test_working_memory_follows_the_chunk(skip):
    """In a process of its own that gives memory back at once: what other work left in the heap would count."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-m", "tests.test_long_prompts", skip], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    peak = json.loads(done.stdout)
    assert peak["whole"] > 100 * 2**20  # gate and up of all tokens: 6,000 x 6,000 float32 numbers
    assert peak["long"] < peak["short"] + 40 * 2**20 and peak["long"] < peak["whole"] / 2  # more by the scores of one block of queries against all rows


if __name__ == "__main__":
    print(json.dumps(measure(set(map(int, sys.argv[1])))))
