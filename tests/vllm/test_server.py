"""The OpenAI-compatible server under POP, with several clients at once."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

import minipop
from minipop import PrefillPlan, Runner

from .common import ENVIRONMENT, NEEDS_VLLM, SMOLLM2, random_prompts, runner_answer

pytestmark = [*NEEDS_VLLM, pytest.mark.skipif(not SMOLLM2.is_dir(), reason="weights/smollm2-135m-instruct is not there")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of SmolLM2 in float32, the deepest third skipped."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(SMOLLM2), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
               "--served-model-name", "smollm2", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "64",
               "--block-size", "32", "--kv-cache-memory-bytes", str(1 << 28), "--additional-config", '{"minipop": {"ratio": 0.334}}']
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(address + "/health", timeout=5).read()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)  # no event tells when a server is up
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def runner():
    return Runner(minipop.load_model(SMOLLM2, dtype="float32"), PrefillPlan.deepest(30, 1 / 3), max_seq_len=512)


def post(address: str, path: str, body: dict):
    request = urllib.request.Request(address + path, json.dumps({"model": "smollm2", "temperature": 0} | body).encode(),
                                     {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def test_clients_at_once(server, runner):
    """Twelve clients, each with a prompt of another length; every answer is the Runner's."""
    prompts = random_prompts(range(5, 125, 10), seed=1)

    def ask(ids):
        with post(server, "/v1/completions", {"prompt": ids, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}) as reply:
            return json.load(reply)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(ask, prompts))
    assert found == [runner_answer(runner, ids, 12)[0] for ids in prompts]


def test_a_streamed_chat(server, runner):
    """A chat reply arrives in pieces, and is what minipop's own chat would say."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 24, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.read().decode().splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    tokenizer = minipop.load_tokenizer(SMOLLM2)
    prompt = tokenizer.apply_chat_template(messages)
    runner.reset()
    expected = list(runner.generate(prompt, minipop.SamplingParams(temperature=0.0, max_new_tokens=24)))
    assert "".join(filter(None, pieces)) == tokenizer.decode(expected)
    assert sum(bool(piece) for piece in pieces) > 1


def test_a_refused_request_leaves_the_server_up(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 1})
    assert caught.value.code == 400 and "upper layers" in caught.value.read().decode()
    with post(server, "/v1/completions", {"prompt": [5, 6], "max_tokens": 2}) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 2
