"""What the tests of the vLLM plugin share: tiny checkpoints, an engine's arguments, the Runner's answers to the same prompts."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from minipop import Runner

ROOT = Path(__file__).parents[2]
TORCHVISION = Path(sys.prefix) / "torchvision"  # scripts/setup_vllm.sh
SMOLLM2 = ROOT / "weights" / "smollm2-135m-instruct"
NEEDS_VLLM = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
BLOCK = 32  # tokens in a block of vLLM's cache, here
# vLLM's CPU attention needs heads of 32 numbers or more; its Qwen2 takes hidden_size / heads for their size, its Qwen3 has no output bias.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512}
OVERRIDES = {"qwen2": {"hidden_size": 128, "use_sliding_window": False}, "qwen3": {"attention_bias": False}}


def save_tiny(family: str, folder: Path, **overrides) -> Path:
    """A tiny random checkpoint of a text family."""
    from minipop.compare import random_reference

    random_reference(family, 3, **SIZES | OVERRIDES.get(family, {}) | overrides).save_pretrained(folder)
    return folder


def random_prompts(lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]


def engine(folder: Path, pop: dict | None = None, **changes) -> dict:
    """Arguments of vllm.LLM: small, eager, float32."""
    arguments = {"model": str(folder), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 16,
                 "max_num_batched_tokens": 32, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK, "seed": 0,
                 "disable_log_stats": False} | changes
    return arguments if pop is None else arguments | {"additional_config": {"minipop": pop}}


def answers(result: dict) -> list[list[list[int]]]:
    """Round by round the ids of every answer."""
    assert "error" not in result, result["log"][-4000:]
    return [[answer["ids"] for answer in round] for round in result["rounds"]]


def runner_answer(runner: Runner, ids: list[int], max_tokens: int = 10) -> tuple[list[int], list[float]]:
    """The Runner's greedy answer, with no end but its length, and the log-probability of each of its tokens."""
    runner.reset()
    logits = runner.prefill(ids)
    tokens, logprobs = [], []
    while True:
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[0, tokens[-1]]))
        if len(tokens) == max_tokens:
            return tokens, logprobs
        logits = runner.decode([tokens[-1]])


def check_same(result: dict, runner: Runner, rounds: list, max_tokens: int = 10, tolerance: float = 1e-3) -> None:
    """Every answer is the Runner's, token for token, each about as likely (float32; tolerance: of the log-probabilities)."""
    answers(result)
    for prompts, found in zip(rounds, result["rounds"], strict=True):
        for ids, answer in zip(prompts, found, strict=True):
            expected, logprobs = runner_answer(runner, ids, max_tokens)
            assert answer["ids"] == expected, f"prompt of {len(ids)} tokens"
            if answer["logprobs"] is not None:
                assert torch.allclose(torch.tensor(answer["logprobs"]), torch.tensor(logprobs), atol=tolerance), f"prompt of {len(ids)}"

