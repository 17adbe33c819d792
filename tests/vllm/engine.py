"""vLLM engines for the tests. Importing vLLM takes longer than a tiny engine runs, so this process imports it once and then reads jobs, one
JSON line each, from stdin; every job runs in a forked child of its own, and its result is written to the file that the job names.

A job: {"engine": arguments of vllm.LLM, "rounds": [[prompt, ...], ...], "max_tokens": n, "sampling": more of SamplingParams, "environment":
{name: value}, "result": file, "log": file}. A prompt is a list of token ids, or {"ids": list, "image": file};
the prompts of a round run at the same time. The result: {"rounds": [[answer, ...], ...], "preemptions": n, "modules": [...]} (see
`describe`) or {"error": text}. A line on stdout tells that a job has ended. An argument names a folder with torchvision.
"""

import json
import os
import sys
import traceback


def main() -> None:
    if len(sys.argv) > 1:
        import_torchvision(sys.argv[1])  # before anybody asks whether there is one
    import vllm.engine.arg_utils
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)


def run(job: dict) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(job["environment"])
    try:
        result = answer(job)
    except Exception as problem:  # noqa: BLE001  the test says whether it should have happened
        traceback.print_exc()
        result = {"error": str(problem)}
    with open(job["result"], "w") as file:
        json.dump(result, file)


def answer(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False, **job["sampling"])
    rounds = [[describe(found) for found in llm.generate([as_input(prompt) for prompt in prompts], params, use_tqdm=False)]
              for prompts in job["rounds"]]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {"rounds": rounds, "preemptions": counters.get("vllm:num_preemptions"),
            "modules": sorted(name for name in sys.modules if name.startswith("minipop.vllm_plugin."))}


def import_torchvision(folder: str) -> None:
    """Import a torchvision whose compiled part does not load beside this torch, for its Python part. It names two operators in passing."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(folder)
    import torchvision  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # vLLM looks at a model class in another process, which has none of this


def as_input(prompt) -> dict:
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    from PIL import Image

    return {"prompt_token_ids": prompt["ids"], "multi_modal_data": {"image": Image.open(prompt["image"]).convert("RGB")}}


def describe(found) -> dict:
    """Of one request: the ids, the log-probability of each, and how many prompt tokens came from the prefix cache."""
    out = found.outputs[0]
    ids = list(out.token_ids)
    logprobs = None if out.logprobs is None else [step[i].logprob for step, i in zip(out.logprobs, ids)]
    return {"ids": ids, "logprobs": logprobs, "cached": found.num_cached_tokens}


if __name__ == "__main__":
    main()
