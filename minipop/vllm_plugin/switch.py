"""The switch `--additional-config '{"minipop": {...}}'`: what it may say, what is refused at start, what it changes.

One of these says which layers the prompt skips (always the deepest ones); `kv` may be added:

    {"ratio": 0.333}        the deepest third          {"skip": "20-29"}        these layers
    {"plan": "plan.json"}   a plan file                {..., "kv": "kv.safetensors"}   calibrated K/V projections for them

Everything is checked before a weight is loaded. Errors are MinipopErrors, one line each.
"""

import vllm
from vllm.logger import init_logger

from ..errors import MinipopError, PlanError
from ..plan import PrefillPlan, parse_layers

MADE_FOR = "0.32.0"
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM",
          "Qwen3VLForConditionalGeneration")  # vLLM's names of the architectures that models.py was made for
WORKER = "minipop.vllm_plugin.worker.PopWorker"
SCHEDULER = "minipop.vllm_plugin.scheduler.PopScheduler"
REQUEST_CHECK = "minipop.vllm_plugin.requests:CheckRequest"


logger = init_logger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class Refused(MinipopError):
    """Something the plugin cannot do, asked of it when the engine starts."""


def read_plan(values: object, num_layers: int) -> PrefillPlan:
    """The plan that the switch asks for. Raises PlanError for a switch that says nothing, too much, or what POP in vLLM cannot do."""
    if not isinstance(values, dict):
        raise PlanError(f'minipop in --additional-config must be an object like {{"ratio": 0.333}}, not {values!r:.60}')
    choices = [key for key in ("ratio", "skip", "plan") if values.get(key) is not None]
    unknown = sorted(values.keys() - {"ratio", "skip", "plan", "kv"})
    if unknown or len(choices) != 1:
        found = f"unknown key {unknown[0]!r:.60}" if unknown else f"{' and '.join(choices) or 'none of them'} given"
        raise PlanError(f"minipop in --additional-config takes one of ratio, skip and plan, and kv beside it: {found}")
    choice = values[choices[0]]
    if choices[0] == "plan":
        if not isinstance(choice, str):
            raise PlanError(f"minipop in --additional-config: plan must be a file name, not {choice!r:.60}")
        plan = PrefillPlan.load(choice)
    elif choices[0] == "skip":
        plan = PrefillPlan(num_layers, parse_layers(choice) if isinstance(choice, str) else choice)
    else:
        plan = PrefillPlan.deepest(num_layers, choice)
    kv = values.get("kv", plan.kv)
    if kv is not None and not isinstance(kv, str):
        raise PlanError(f"minipop in --additional-config: kv must be a file name, not {kv!r:.60}")
    plan = PrefillPlan(plan.num_layers, plan.skip, plan.project_kv, plan.split_boundary, kv)
    if plan.num_layers != num_layers:
        raise PlanError(f"the plan is for {plan.num_layers} layers, the model has {num_layers}")
    if not plan.skip:
        raise PlanError("the plan skips no layer: leave minipop out of --additional-config to run vLLM unchanged")
    if not plan.is_suffix:
        raise PlanError("POP in vLLM skips the deepest layers only: the plan's skip must reach from one layer to the last without a gap")
    if not (plan.project_kv and plan.split_boundary):
        raise PlanError("POP in vLLM has no ablations: project_kv and split_boundary must be true in the plan")
    return plan


def plan_of(vllm_config) -> PrefillPlan:
    """The plan of a configuration that `turn_on` has been through."""
    return read_plan(vllm_config.additional_config["minipop"], vllm_config.model_config.hf_text_config.num_hidden_layers)


def turn_on(vllm_config) -> None:
    """Check what is known before vLLM completes the configuration, and put our worker and scheduler into it.

    Raises Refused or PlanError. Calling it again changes nothing.
    """
    version = vllm.__version__.split("+")[0]
    if version != MADE_FOR:
        raise Refused(f"this minipop was made for vLLM {MADE_FOR}, not {version}: install that version or leave minipop out of "
                      "--additional-config")
    model = vllm_config.model_config
    if model is None or model.is_submodel_config:
        return
    for wrong, reason in _cannot(vllm_config):
        if wrong:
            raise Refused(f"POP in vLLM cannot be used {reason}")
    plan = plan_of(vllm_config)
    _check_deepstack(model, plan)
    model.enforce_eager = True  # how many rows go through the upper layers changes from step to step
    model.logits_processors = [*(p for p in model.logits_processors or () if p != REQUEST_CHECK), REQUEST_CHECK]
    vllm_config.parallel_config.worker_cls = WORKER
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    logger.info_once("minipop: %s", plan.describe())


def _cannot(config):
    """(whether it is asked for, the reason against it) of everything known before the configuration is complete."""
    from vllm.platforms import current_platform

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    yield not current_platform.is_cpu(), f"on {current_platform.device_type}: it was made for, and tested on, vLLM's CPU backend"
    yield model.runner_type != "generate", f"with the {model.runner_type} runner: only text generation has a decode stage"
    yield model.architecture not in MODELS, f"with {model.architecture}; it knows {', '.join(MODELS)}"
    yield config.speculative_config is not None, "with speculative decoding: draft tokens would need rules of their own"
    yield parallel.pipeline_parallel_size > 1, "with pipeline parallelism: the rows are chosen anew at one layer, in one process"
    yield parallel.data_parallel_size > 1, "with data parallelism: start one server for each replica"
    yield parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1, "with context parallelism"
    yield config.kv_transfer_config is not None, "with a KV connector: other engines would take pruned K/V for full ones"
    yield config.lora_config is not None, "with LoRA adapters: the skipped layers' K/V come from one merged projection"
    yield model.quantization is not None or config.quant_config is not None, "with quantised weights"
    yield cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16"), f"with a {cache.cache_dtype} cache"
    yield cache.kv_sharing_fast_prefill, "with --kv-sharing-fast-prefill, which drops rows from a batch itself"
    yield getattr(model.hf_text_config, "dual_chunk_attention_config", None) is not None, "with dual chunk attention"
    yield model.enable_prompt_embeds, "with prompt embeddings"
    yield config.weight_transfer_config is not None, "with weight transfer: the skipped layers' merged K/V projection would be stale"
    yield config.load_config.load_format in ("sharded_state", "tensorizer", "bitsandbytes"), f"with load format {config.load_config.load_format}"
    yield parallel.worker_cls not in ("auto", WORKER), f"with the worker class {parallel.worker_cls}: it brings its own"
    scheduler = config.scheduler_config.scheduler_cls
    yield scheduler not in (None, SCHEDULER), f"with the scheduler class {scheduler}: it brings its own"


def check_made(vllm_config) -> None:
    """Check what only the complete configuration tells."""
    model = vllm_config.model_config
    if model is None or model.is_submodel_config:
        return
    if vllm_config.use_v2_model_runner:
        raise Refused("POP in vLLM cannot be used with model runner V2: set VLLM_USE_V2_MODEL_RUNNER=0")
    if vllm_config.scheduler_config.async_scheduling:
        raise Refused("POP in vLLM cannot be used with asynchronous scheduling")
    if vllm_config.quant_config is not None:
        raise Refused("POP in vLLM cannot be used with quantised weights")


def _check_deepstack(model, plan: PrefillPlan) -> None:
    """Qwen3-VL adds image rows to the stream after its first layers: those must run, so that all skipped layers see one stream."""
    vision = getattr(model.hf_config, "vision_config", None)
    levels = len(getattr(vision, "deepstack_visual_indexes", ()))
    if plan.cut < levels:
        raise Refused(f"POP in vLLM cannot skip layers below {levels} of this model: image features enter after each of them; skip "
                      f"{levels}-{plan.num_layers - 1} at most")
