"""What the switch may say, and what is refused when the engine starts: configurations only, no weights are loaded."""

import importlib.util
import json

import pytest

from minipop import PrefillPlan

from .common import NEEDS_VLLM, engine, save_tiny

pytestmark = NEEDS_VLLM

if importlib.util.find_spec("vllm"):
    import numpy as np

    from minipop.vllm_plugin import switch
    from minipop.vllm_plugin.worker import full_counts


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def configure(folder, pop=None, **changes):
    """The configuration that an engine would start with, and in it what the plugin put there."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine(folder, pop, **changes)).create_engine_config()


def refusal(folder, pop=None, **changes) -> str:
    with pytest.raises(ValueError) as caught:
        configure(folder, {"ratio": 0.5} if pop is None else pop, **changes)
    return str(caught.value)


@pytest.mark.parametrize("num_computed, num_scheduled, num_prompt, expected", [
    (0, 6, 6, 1),  # a whole prompt: its last token
    (0, 4, 6, 0),  # its first chunk
    (4, 2, 6, 1),  # its last one
    (5, 1, 6, 1),  # the boundary token alone
    (6, 1, 6, 1),  # decoding
    (9, 1, 6, 1),
    (0, 1, 1, 1),  # a prompt of one token
    (0, 9, 6, 4),  # computed anew after preemption: boundary and three decoded tokens
    (3, 3, 0, 3),  # a dry run of vLLM's, without requests
])
def test_which_rows_need_every_layer(num_computed, num_scheduled, num_prompt, expected):
    arrays = (np.array([n, n]) for n in (num_computed, num_scheduled, num_prompt))
    assert full_counts(*arrays).tolist() == [expected, expected]


def test_what_the_switch_changes(llama):
    off, on = configure(llama, enforce_eager=False), configure(llama, {"ratio": 0.5}, enforce_eager=False)
    assert on.parallel_config.worker_cls == switch.WORKER and on.scheduler_config.scheduler_cls == switch.SCHEDULER
    assert on.model_config.enforce_eager and not off.model_config.enforce_eager
    assert off.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker" and off.scheduler_config.scheduler_cls is None
    assert off.model_config.logits_processors is None
    assert switch.plan_of(on) == PrefillPlan.deepest(6, 0.5)


@pytest.mark.parametrize("values, skip", [({"ratio": 0.334}, {4, 5}), ({"ratio": "1/3"}, {4, 5}), ({"skip": "3-5"}, {3, 4, 5}),
                                          ({"skip": [5]}, {5})])
def test_plans(values, skip):
    assert switch.read_plan(values, 6) == PrefillPlan(6, skip)


@pytest.mark.parametrize("values, words", [
    (True, "must be an object"), ({}, "none of them given"), ({"ratio": 0.5, "skip": "5"}, "ratio and skip given"),
    ({"ratoi": 0.5}, "unknown key 'ratoi'"), ({"ratio": 2}, "between 0 and 1"), ({"ratio": 0.01}, "skips no layer"),
    ({"skip": "3"}, "deepest layers only"), ({"skip": "3-9"}, "layers 0 to 5"), ({"plan": 3}, "must be a file name"),
    ({"ratio": 0.5, "kv": 3}, "kv must be a file name"), ({"plan": "nowhere.json"}, "nowhere.json"),
])
def test_bad_switches(values, words):
    with pytest.raises(ValueError, match=words):
        switch.read_plan(values, 6)


@pytest.mark.parametrize("plan, words", [
    (PrefillPlan(8, {6, 7}), "for 8 layers, the model has 6"), (PrefillPlan(6, {4, 5}, project_kv=False), "no ablations"),
    (PrefillPlan(6, {4, 5}, split_boundary=False), "no ablations"),
])
def test_bad_plan_files(plan, words, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=words):
        switch.read_plan({"plan": str(tmp_path / "plan.json")}, 6)


@pytest.mark.parametrize("changes, words", [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, "speculative decoding"),
    ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ({"data_parallel_size": 2}, "data parallelism"),
    ({"enable_lora": True}, "LoRA"),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                             "kv_connector_extra_config": {"shared_storage_path": "/nowhere"}}}, "KV connector"),
    ({"kv_cache_dtype": "fp8"}, "fp8 cache"),
    ({"runner": "pooling"}, "pooling runner"),
    ({"enable_prompt_embeds": True}, "prompt embeddings"),
    ({"worker_cls": "other.Worker"}, "worker class other.Worker"),
    ({"scheduler_cls": "other.Scheduler"}, "scheduler class other.Scheduler"),
])
def test_refused_at_start(changes, words, llama):
    assert words in refusal(llama, **changes)


def test_another_architecture_is_refused(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}))
    assert "cannot be used with GPTNeoXForCausalLM; it knows LlamaForCausalLM" in refusal(tmp_path)


def test_another_version_is_refused(llama, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.1+cpu")
    assert "made for vLLM 0.32.0, not 0.99.1" in refusal(llama)
    configure(llama)  # without the switch nobody asks


def test_model_runner_v2_is_refused(llama, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    said = refusal(llama)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in said or "Model Runner V2 requires Triton" in said  # vLLM's own, where there is no Triton
