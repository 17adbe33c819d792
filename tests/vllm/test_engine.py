"""vLLM with the plugin answers as minipop's Runner does under the same plan: text families, mixed batches, the prefix cache, calibrated K/V."""

import pytest
import torch

from minipop import PrefillPlan, Runner, load_model
from minipop.projection import KVProjection, fingerprint

from .common import BLOCK, NEEDS_VLLM, SMOLLM2, answers, check_same, engine, random_prompts, runner_answer

pytestmark = NEEDS_VLLM
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]
LOGPROBS = {"logprobs": 0}  # of the sampled token alone
LENGTHS = [42, 1, 46, 2, 30, 28, BLOCK, 11, BLOCK + 1, 19, 64, 65, 45, 70, 51, 96]  # 16 requests; chunks of at most 32 tokens in all


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_runners(family, tiny, run_engine):
    """A single prompt, then 16 at a time whose prompts are cut into chunks beside others that decode, then the same from the cache."""
    folder = tiny(family)
    single, many = random_prompts([23], seed=1), random_prompts(LENGTHS, seed=2)
    rounds = [single, many, many]
    result = run_engine(engine(folder, {"ratio": 0.5}), rounds, sampling=LOGPROBS)
    model = load_model(folder)
    runner = Runner(model, PrefillPlan.deepest(6, 0.5), max_seq_len=128)
    check_same(result, runner, rounds)
    # Whole blocks before the boundary token come from the cache, and nothing else.
    assert [a["cached"] for a in result["rounds"][1]] == [0] * 16
    assert [a["cached"] for a in result["rounds"][2]] == [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
    full = Runner(model, max_seq_len=128)
    assert any(runner_answer(full, ids)[0] != runner_answer(runner, ids)[0] for ids in many)  # else the plan would not show


@pytest.mark.parametrize("skip", ["5", "1-5", "0-5"])
def test_other_cuts(skip, tiny, run_engine):
    """Only the last layer, all but the first, every layer."""
    rounds = [random_prompts(LENGTHS, seed=3)]
    result = run_engine(engine(tiny("llama"), {"skip": skip}), rounds, sampling=LOGPROBS)
    layers = range(int(skip[0]), 6)
    check_same(result, Runner(load_model(tiny("llama")), PrefillPlan(6, layers), max_seq_len=128), rounds)


def test_off_is_vllm(tiny, run_engine):
    """Without the switch the plugin changes nothing: the answers are those of a vLLM that does not load it, and the full model's."""
    rounds = [random_prompts(LENGTHS, seed=4)]
    off = run_engine(engine(tiny("llama")), rounds, sampling=LOGPROBS)
    without = run_engine(engine(tiny("llama")), rounds, sampling=LOGPROBS, environment={"VLLM_PLUGINS": ""})
    answers(off), answers(without)
    assert off["rounds"] == without["rounds"]
    assert off["modules"] == without["modules"] == []
    check_same(off, Runner(load_model(tiny("llama")), max_seq_len=128), rounds)


def test_a_conversation(tiny, run_engine):
    """The second turn's prompt holds the first turn's answer. Its K/V are pruned like any prompt's, whatever was decoded before: the
    answer equals that of a fresh prefill of the whole."""
    [first], [more] = random_prompts([2 * BLOCK], seed=5), random_prompts([7], seed=6)
    runner = Runner(load_model(tiny("llama")), PrefillPlan.deepest(6, 0.5), max_seq_len=256)
    reply, _ = runner_answer(runner, first, 40)
    second = first + reply + more  # blocks 0 and 1 hold the first prompt, block 2 the reply
    result = run_engine(engine(tiny("llama"), {"ratio": 0.5}), [[first], [second], [second]], max_tokens=40, sampling=LOGPROBS)
    check_same(result, runner, [[first], [second], [second]], max_tokens=40)
    cached = [round[0]["cached"] for round in result["rounds"]]
    assert cached == [0, BLOCK, (len(second) - 1) // BLOCK * BLOCK]  # the block with the first boundary token was not there to find


def test_preemption(tiny, run_engine):
    """Too few blocks for all: requests lose theirs while they answer and are computed anew, answer and boundary at full depth."""
    rounds = [random_prompts([40, 50, 60, 61, 62, 63], seed=7)]
    result = run_engine(engine(tiny("llama"), {"ratio": 0.5}, num_gpu_blocks_override=14), rounds, max_tokens=60, sampling=LOGPROBS)
    check_same(result, Runner(load_model(tiny("llama")), PrefillPlan.deepest(6, 0.5), max_seq_len=128), rounds, max_tokens=60)
    assert result["preemptions"] > 0


def test_plan_file_and_calibrated_kv(tiny, tmp_path, run_engine):
    """A plan file that names a calibrated K/V file: other K/V than the model's own, the same as the Runner's."""
    folder = tiny("qwen3")
    model = load_model(folder)
    own = KVProjection.of(model, 4)
    generator = torch.Generator().manual_seed(8)
    noisy = own.weight + 0.3 * own.weight.std() * torch.randn(own.weight.shape, generator=generator)
    file = tmp_path / "kv.safetensors"
    KVProjection(noisy, 0.1 * torch.randn(len(noisy), generator=generator), 4, 6, fingerprint(model, 4)).save(file)
    plan = PrefillPlan(6, {4, 5}, kv=str(file))
    plan.save(tmp_path / "plan.json")
    rounds = [random_prompts(LENGTHS, seed=9)]
    result = run_engine(engine(folder, {"plan": str(tmp_path / "plan.json")}), rounds, sampling=LOGPROBS)
    runner = Runner(model, plan, max_seq_len=128)
    check_same(result, runner, rounds)
    plain = Runner(model, PrefillPlan(6, {4, 5}), max_seq_len=128)
    assert any(runner_answer(plain, ids)[1] != runner_answer(runner, ids)[1] for ids in rounds[0])

    result = run_engine(engine(tiny("llama"), {"skip": "4-5", "kv": str(file)}), rounds)
    assert "made for another checkpoint" in result["error"]


def test_two_ranks_equal_one(tiny, run_engine):
    """Tensor parallelism on the CPU: two processes, each with its share of the heads."""
    rounds = [random_prompts(LENGTHS, seed=10)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    for family in ("llama", "qwen3"):  # the tiny Qwen3 has one kv head: both ranks hold a copy of it
        result = run_engine(engine(tiny(family), {"ratio": 0.5}, tensor_parallel_size=2), rounds, sampling=LOGPROBS, environment=environment)
        check_same(result, Runner(load_model(tiny(family)), PrefillPlan.deepest(6, 0.5), max_seq_len=128), rounds)


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="weights/smollm2-135m-instruct is not there")
def test_smollm2(run_engine):
    """Real weights, 10 of 30 layers skipped: one prompt, then 16 together in chunks."""
    rounds = [random_prompts([100], seed=11), random_prompts(LENGTHS, seed=12)]
    result = run_engine(engine(SMOLLM2, {"ratio": "1/3"}, kv_cache_memory_bytes=1 << 28), rounds, max_tokens=16, sampling=LOGPROBS)
    runner = Runner(load_model(SMOLLM2, dtype="float32"), PrefillPlan.deepest(30, "1/3"), max_seq_len=256)
    check_same(result, runner, rounds, max_tokens=16)


def test_prompt_logprobs_are_refused(tiny, run_engine):
    result = run_engine(engine(tiny("llama"), {"ratio": 0.5}), [random_prompts([5])], sampling={"prompt_logprobs": 1})
    assert "prompt tokens do not run the upper layers" in result["error"]

