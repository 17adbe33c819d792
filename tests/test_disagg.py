"""Prefill apart from decode: the same answers as one process gives, and no hang whatever becomes of the other side."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import minipop
from minipop import PrefillPlan, Runner, SamplingParams, disagg
from minipop.disagg import DecodeRunner, PrefillRunner
from minipop.errors import CheckpointError, PlanError
from minipop.links import Sender
from minipop.models import build_model
from minipop.projection import KVProjection, fingerprint
from minipop.shards import PrefillPart, trim
from tests.ranks import command, needs_forkserver, run_ranks
from tests.test_generate import tokenizer_files
from tests.test_inspect import save_tiny
from tests.test_parallel import picture_prompt
from tests.tiny import CONFIGS, close, random_ids, tiny_config

ROOT = Path(__file__).resolve().parent.parent
PLANS = {"1/3": PrefillPlan.deepest(6), "2/3": PrefillPlan.deepest(6, 2 / 3), "full": PrefillPlan.full(6), "1,4": PrefillPlan(6, {1, 4})}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)


def ended_ranks(worker, size: int, *arguments) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank, without the line that says whom it waits for."""
    return [one and (*one[:2], re.sub(r"^rank \d waits for .*\n", "", one[2])) for one in run_ranks(worker, size, *arguments)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for family in CONFIGS:
        save_tiny(root / family, family, extra_files=tokenizer_files() if family == "llama" else None)
    return {folder.name: folder for folder in root.iterdir()}


# --- what a prefill rank holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prefill_rank_holds_what_prompts_need(folders, family):
    part = PrefillPart(PLANS["1/3"])
    model, whole = minipop.load_model(folders[family], part=part), minipop.load_model(folders[family])
    for i, (layer, original) in enumerate(zip(model.layers, whole.layers)):
        names = {name for name, _ in layer.named_parameters()}
        if i < 4:
            assert names == {name for name, _ in original.named_parameters()}
            continue
        k_norm = {"attn.k_norm.weight"} if whole.config.qk_norm else set()
        bias = {"attn.qkv.bias"} if whole.config.qkv_bias else set()
        assert names == {"input_norm.weight", "attn.qkv.weight"} | k_norm | bias
        assert torch.equal(layer.attn.qkv.weight, original.attn.qkv.weight[original.attn.q_width :])
    assert not any(name.startswith(("norm.", "head.")) for name, _ in model.named_parameters())
    held, total = (sum(p.nbytes for p in m.parameters()) for m in (model, whole))
    assert part.share == held / total


def test_nothing_else_is_read(tmp_path):
    def spoil(weights):
        for name in ("layers.5.mlp.up_proj.weight", "layers.4.self_attn.q_proj.weight", "layers.4.self_attn.o_proj.weight", "norm.weight"):
            weights["model." + name].fill_(torch.nan)
        return weights

    save_tiny(tmp_path, "llama", spoil)
    minipop.load_model(tmp_path, part=PrefillPart(PLANS["1/3"]))
    with pytest.raises(CheckpointError, match="4.self_attn.q_proj"):
        minipop.load_model(tmp_path, part=PrefillPart(PrefillPlan.deepest(6, 1 / 6)))


def test_about_two_thirds_of_llama_3_1_8b():
    """The share for a third of its layers, from shapes alone: embedding, 22 layers, and W_K and W_V of ten more."""
    config = tiny_config("llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
                         num_kv_heads=8, head_dim=128, layer_windows=(None,) * 32, tie_word_embeddings=False)
    model = build_model(config)
    whole = sum(p.numel() for p in model.parameters())
    assert whole == 8_030_261_248  # the model card's 8.03B
    trim(model, PrefillPlan.deepest(32))
    held = sum(p.numel() for p in model.parameters())
    norms = 22 * 2 * 4096 + 10 * 4096
    assert held == 128256 * 4096 + 22 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 10 * 4096 * 2048 + norms
    assert round(held / whole, 3) == 0.673


@pytest.mark.parametrize("plan", [PrefillPlan(6, {4, 5}, project_kv=False), PrefillPlan(6, {4, 5}, split_boundary=False), PrefillPlan.full(5)])
def test_plans_that_cannot_be_divided(folders, plan):
    with pytest.raises(PlanError):
        minipop.load_model(folders["llama"], part=PrefillPart(plan))


# --- the two runners, in one process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_and_logits_are_those_of_one_runner(folders, family, plan):
    whole, plan = minipop.load_model(folders[family]), PLANS[plan]
    part = minipop.load_model(folders[family], part=PrefillPart(plan))
    prompts = [minipop.ModelInputs(random_ids(n, seed=n)) for n in (13, 1, 2)]
    if family in ("gemma3", "qwen3_vl"):
        image = picture_prompt(family)
        # One that ends with its image: Gemma's boundary is the whole block, Qwen's its last token.
        prompts += [image, minipop.ModelInputs(image.token_ids[:6], image.pixel_values, image.image_grid_thw)]
    alone = Runner(whole, plan, max_seq_len=32, fused=False)
    sender, receiver = PrefillRunner(part, plan, 32, chunk_size=5), DecodeRunner(whole, plan, 32)
    for prompt in prompts:
        pushed = []
        sender.stream(prompt, lambda *message: pushed.append(message))
        for message in pushed:
            receiver.put(*message)
        alone.reset(), receiver.reset()
        close(receiver.prefill(prompt), alone.prefill(prompt))
        n = alone.cache.length
        assert receiver.cache.length == n and receiver.token_ids() == alone.token_ids()
        for ours, theirs in ((receiver.cache.keys, alone.cache.keys), (receiver.cache.values, alone.cache.values)):
            close(ours[..., :n, :], theirs[..., :n, :])
        close(receiver.extend([[3, 4, 5]]), alone.extend([[3, 4, 5]]))  # the positions after an image, too
        pieces = [first for first, _, _ in pushed]
        if n == 13:  # layer by layer, in passes of at most five tokens; a suffix in one piece where one product makes it
            stacked = plan.is_suffix and plan.skip and plan.cut >= whole.deepstack_layers
            assert pieces == 3 * list(range(plan.cut + 1 if stacked else 6))
        elif n == 1:
            assert pieces == []


def test_calibrated_rows(folders, tmp_path):
    """A plan with a K/V file: the prefill rank alone applies it, and drops the matrices that it replaces."""
    whole = minipop.load_model(folders["qwen2"])
    projection = KVProjection.of(whole, 4)
    noise = torch.randn(projection.weight.shape, generator=torch.Generator().manual_seed(0))
    KVProjection(projection.weight + 0.1 * noise, projection.bias, 4, 6, fingerprint(whole, 4)).save(tmp_path / "kv.safetensors")
    plan = PrefillPlan.deepest(6, kv=tmp_path / "kv.safetensors")
    part = minipop.load_model(folders["qwen2"], part=PrefillPart(plan))
    sender, receiver = PrefillRunner(part, plan, 32), DecodeRunner(whole, PLANS["1/3"], 32)
    for layer in part.layers[4:]:
        layer.attn.qkv = None
    sender.stream(minipop.ModelInputs(random_ids(9)), receiver.put)
    alone, plain = Runner(whole, plan, 32), Runner(whole, PLANS["1/3"], 32)
    logits = receiver.prefill(random_ids(9))
    close(logits, alone.prefill(random_ids(9)))
    assert not torch.allclose(logits, plain.prefill(random_ids(9)), rtol=0.01)


# --- processes ------------------------------------------------------------------------------------------------------------------


def worker(rank, arguments, fault=None):
    """disagg's command on each rank; fault: what befalls one of them, and at which message."""
    if fault is not None and rank == fault[1]:
        kind, _, number = fault
        owner, name = (DecodeRunner, "put") if rank == 0 else (Sender, "push")
        usual, count = getattr(owner, name), iter(range(1000))

        def faulty(*arguments):
            if next(count) == number:
                os._exit(9) if kind == "dies" else time.sleep(6)
            usual(*arguments)

        setattr(owner, name, faulty)
    return command(disagg.main, arguments)


def alone(folder, text, plan, params):
    model, tokenizer = minipop.load_model(folder), minipop.load_tokenizer(folder)
    return list(Runner(model, plan, 64).generate(tokenizer.encode(text), params))


def write_prompts(tmp_path, texts):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return ["--input", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers.jsonl"]


TEXTS = ["a long question that goes on.", "abc", "", "What is it?", "the end of"]


@needs_forkserver
@pytest.mark.parametrize("size, options, params", [
    (2, [], GREEDY), (3, ["--temperature", 0.9, "--seed", 5], SamplingParams(temperature=0.9, seed=5, max_new_tokens=8))])
def test_answers_are_those_of_one_process(folders, tmp_path, size, options, params):
    files = write_prompts(tmp_path, TEXTS)
    ended = ended_ranks(worker, size, ["--ckpt", folders["llama"], *files, "--max-new-tokens", 8, *options])
    assert [code for code, *_ in ended] == [0] * size, ended
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(answer["index"], answer["id"]) for answer in answers] == [(i, i) for i in range(len(TEXTS))]
    config = minipop.config.read_config(folders["llama"])
    for answer, text in zip(answers, TEXTS):
        assert answer["token_ids"] == alone(folders["llama"], text, PLANS["1/3"], params)
        report = answer["prefill"]
        sent = 6 * 2 * config.kv_width * 4 * (answer["prompt_tokens"] - 1)  # every layer's K and V of all but the boundary
        assert report["kv_bytes"] == sent and 0 <= report["hidden_s"] <= report["transfer_s"]
    assert {answer["prefill"]["rank"] for answer in answers} <= set(range(1, size))
    log = ended[0][2]
    assert f"{len(TEXTS)} prompts" in log or size > 2
    part = PrefillPart(PLANS["1/3"])
    minipop.load_model(folders["llama"], part=part)
    assert all(f"prefill rank {rank} holds {part.share:.1%} of the weights" in log for rank in range(1, size))
    assert "of K/V sent in" in log and ended[1:] == [(0, "", "")] * (size - 1)


@needs_forkserver
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_stalls_ends_one_request_and_serves_the_next(folders, tmp_path, late):
    files = write_prompts(tmp_path, TEXTS[:2])
    arguments = ["--ckpt", folders["llama"], *files, "--max-new-tokens", 4, "--timeout", 4]
    decode, prefill = ended_ranks(worker, 2, arguments, ("stalls", late, 3))
    failed, answer = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert failed["error"].startswith("prefill rank 1 was silent for 4 s" if late else "prefill rank 1 is gone: ")
    assert answer["token_ids"] == alone(folders["llama"], TEXTS[1], PLANS["1/3"], SamplingParams(temperature=0.0, max_new_tokens=4))
    assert decode[0] == 2 and f"prompts.jsonl line 1: {failed['error']}\n" in decode[2]
    assert prefill[0] == 0 and prefill[2].endswith("; connected again\n") and prefill[2].count("\n") == 1
    assert late or prefill[2].startswith("the decode rank was silent for 4 s")


@needs_forkserver
def test_a_rank_that_dies_leaves_its_work_to_the_others(folders, tmp_path):
    files = write_prompts(tmp_path, TEXTS)
    arguments = ["--ckpt", folders["llama"], *files, "--max-new-tokens", 4, "--timeout", 5]
    decode, dead, other = ended_ranks(worker, 3, arguments, ("dies", 1, 2))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    failed = [answer for answer in answers if "error" in answer]
    assert dead is None and len(failed) == 1 and failed[0]["error"].startswith("prefill rank 1 is gone: ")
    assert all(answer["prefill"]["rank"] == 2 for answer in answers if "error" not in answer)
    assert decode[0] == 2 and decode[2].count("error: ") == 1
    assert other == (0, "", "")


@needs_forkserver
@pytest.mark.parametrize("victim", [0, 1])
def test_no_hang_when_the_only_other_rank_dies(folders, tmp_path, victim):
    files = write_prompts(tmp_path, TEXTS[:3])
    ended = ended_ranks(worker, 2, ["--ckpt", folders["llama"], *files, "--timeout", 3], ("dies", victim, 1))
    code, _, err = ended[1 - victim]
    assert ended[victim] is None and code == 2 and "Traceback" not in err
    if victim:
        errors = [json.loads(line)["error"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        assert errors[0].startswith("prefill rank 1 is gone: ")
        assert all(error.startswith("there is no prefill rank left: ") for error in errors[1:]) and len(errors) == 3
        assert err.count("error: ") == 3
    else:
        assert err.startswith("error: the decode rank is gone: ") and err.count("\n") == 1


@needs_forkserver
def test_pictures(tmp_path):
    """The committed tiny Qwen3-VL, in bfloat16 as in its file: what it sees travels as rows."""
    folder, picture = ROOT / "weights" / "tiny-qwen3-vl", ROOT / "examples" / "shapes.png"
    question = "What is left of the yellow diamond?"
    ended = ended_ranks(worker, 2, ["--ckpt", folder, "--image", picture, "--prompt", question, "--ratio", "1/4"])
    model, processor = minipop.load_model(folder), minipop.load_processor(folder)
    inputs = processor([{"role": "user", "content": [{"type": "image", "image": str(picture)}, {"type": "text", "text": question}]}])
    ids = list(Runner(model, PrefillPlan.deepest(8, 1 / 4), 256).generate(inputs, SamplingParams(temperature=0.0)))
    assert ended[0][:2] == (0, processor.tokenizer.decode(ids) + "\n")


# --- the command ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, text", [
    (["--prompt", "x", "--timeout", 0], "--timeout must be above 0"), ([], "either --prompt or --input"),
    (["--prompt", "x"], "start them with python -m torch.distributed.run"), (["--prompt", "x", "--input", "y"], "either --prompt or --input")])
def test_mistakes(folders, monkeypatch, capsys, arguments, text):
    monkeypatch.delenv("RANK", raising=False)
    assert disagg.main(["--ckpt", str(folders["llama"]), *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and text in err


def test_answers_are_not_overwritten(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2")
    files = write_prompts(tmp_path, ["x"])
    (tmp_path / "answers.jsonl").write_text("mine")
    assert disagg.main(["--ckpt", str(folders["llama"]), *map(str, files)]) == 2
    assert "is there already" in capsys.readouterr().err and (tmp_path / "answers.jsonl").read_text() == "mine"


@needs_forkserver
def test_the_two_sides_must_agree(folders, tmp_path):
    ended = ended_ranks(disagreeing_worker, 2, ["--ckpt", folders["llama"], "--prompt", "abc", "--timeout", 3])
    assert ended[0][0] == 2 and "prefill rank 1 was started with another model, dtype or plan: " in ended[0][2]
    assert ended[1][0] == 2 and ended[1][2].startswith("error: the decode rank ") and ended[1][2].count("\n") == 1


def disagreeing_worker(rank, arguments):
    return worker(rank, [*arguments, *(["--full"] if rank else [])])


@pytest.mark.skipif(sys.platform != "linux", reason="torch.distributed.run")
def test_started_as_a_user_starts_it(folders):
    """The line of the README, with a prompt."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minipop.disagg",
                           "--ckpt", str(folders["llama"]), "--prompt", "abc", "--max-new-tokens", "6"], capture_output=True, text=True,
                          cwd=ROOT, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    model, tokenizer = minipop.load_model(folders["llama"]), minipop.load_tokenizer(folders["llama"])
    ids = list(Runner(model, PLANS["1/3"], 64).generate(tokenizer.apply_chat_template([{"role": "user", "content": "abc"}]),
                                                       SamplingParams(temperature=0.0, max_new_tokens=6)))
    stopped = ids[-1] in model.config.eos_token_ids
    assert done.stdout == tokenizer.decode(ids[:-1] if stopped else ids) + "\n"
    assert "prefill rank 1 holds " in done.stderr and "hidden behind" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_rank_that_waits_for_the_others_can_be_ended(folders):
    """A prefill rank needs no prompts; while nobody answers, SIGTERM ends it."""
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", "import minipop.disagg as d, sys\nrendezvous = d.dist.rendezvous\n"
                                "d.dist.rendezvous = lambda *a, **k: (print('waiting', flush=True), rendezvous(*a, **k))[1]\nsys.exit(d.main(sys.argv[1:]))",
                                "--ckpt", str(folders["qwen2"])], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "waiting\n", process.communicate()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_the_decode_rank_says_that_it_waits(folders):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "minipop.disagg", "--ckpt", folders["qwen2"], "--prompt", "a"], env=environment,
                               stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr.readline().startswith(f"rank 0 waits for ranks 1 to 2, at 127.0.0.1:{port}, 120 s")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)  # inside PyTorch's wait, or just before it


@pytest.mark.parametrize("rank, size, message", [("x", "2", "RANK must be a number"), ("5", "2", "RANK must be a number"), ("-1", "2", "RANK must be"),
                                                 ("0", "two", "RANK must be"), ("0", "1", "two processes or more")])
def test_wrong_ranks(rank, size, message, folders, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert disagg.main(["--ckpt", str(folders["llama"]), "--prompt", "a"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options, message", [(["--prompt", "a", "--wait", "0"], "--wait must be above 0"), (["--input", "p.jsonl", "--image", "x.png"], "--image goes with --prompt"),
                                              (["--prompt", "a", "--max-seq-len", "999999"], "exceeds the"), (["--prompt", "a", "--device", "rocket"], "--device rocket cannot be used")])
def test_mistakes_before_the_others_are_waited_for(options, message, folders, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert disagg.main(["--ckpt", str(folders["llama"]), *options]) == 2
    assert message in capsys.readouterr().err


def test_ranks_know_each_other_by_their_weights_and_calibrated_rows(folders, tmp_path):
    """Another checkpoint of the same sizes, or another K/V file for the same layers, is another model."""
    model, other = minipop.load_model(folders["llama"]), minipop.load_model(folders["llama"])
    other.layers[1].attn.qkv.weight.mul_(-1.5)
    plan = PLANS["1/3"]
    files = []
    for number in range(2):
        weight = KVProjection.of(model, 4).weight + number
        files.append(str(tmp_path / f"{number}.safetensors"))
        KVProjection(weight, torch.zeros(len(weight)), 4, 6, fingerprint(model, 4)).save(files[-1])
    made = [disagg._identity(model, plan), disagg._identity(other, plan), *(disagg._identity(model, PrefillPlan.deepest(6, 1 / 3, kv=file)) for file in files)]
    assert all(made[i] != made[j] for i in range(4) for j in range(i))
    part = PrefillPart(plan)
    assert disagg._identity(minipop.load_model(folders["llama"], part=part), plan) == made[0]
