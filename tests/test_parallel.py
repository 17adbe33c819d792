"""Tensor parallelism: a model over several processes gives what one process gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import minipop
from minipop import ModelInputs, PrefillPlan, Runner, SamplingParams
from minipop.checkpoint import Checkpoint
from minipop.errors import CheckpointError, ConfigError, MinipopError, PlanError, PromptError
from minipop.parallel import TensorPart, join, load_parallel
from minipop.saving import save_checkpoint
from tests.ranks import command, needs_forkserver, run_ranks
from tests.test_generate import tokenizer_files
from tests.test_inspect import named_weights, save_tiny
from tests.tiny import CONFIGS, close, random_ids, tiny_model

ROOT = Path(__file__).resolve().parent.parent
PLANS = [PrefillPlan.deepest(6), PrefillPlan(6, {1, 4}), PrefillPlan.full(6), PrefillPlan(6, {4, 5}, project_kv=False)]
PROMPT, MORE = random_ids(11, seed=1), random_ids(3, seed=2)


def save_biased(folder):
    """A llama with every bias there is: those behind a sum over ranks must be added once."""
    model = tiny_model("llama", qkv_bias=True, o_bias=True, mlp_bias=True)
    config = {**CONFIGS["llama"], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    save_checkpoint(folder, dict(named_weights(model)), config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each family, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in CONFIGS:
        save_tiny(root / family, family, extra_files=tokenizer_files() if family == "llama" else None)
    save_biased(root / "biased")
    return {folder.name: folder for folder in sorted(root.iterdir())}


def picture_prompt(family):
    """Ids and pixels of a prompt with one image of four tokens, as in tests/tiny.py's configs."""
    pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(5)) if family == "qwen3_vl" else \
        torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    grid = torch.tensor([[1, 4, 4]]) if family == "qwen3_vl" else None
    return ModelInputs(torch.tensor([3, 7, 60, 60, 60, 60, 9, 11]), pixels, grid)


def everything(family, model):
    """What both phases give under several plans; with an image, for who takes one; in a batch; sampled."""
    results = []
    for plan in PLANS if family == "llama" else PLANS[:2]:
        runner = Runner(model, plan, max_seq_len=32, chunk_size=6 if family == "llama" else 2048)
        results += [runner.prefill(PROMPT), runner.extend([MORE])[0]]
    if family in ("gemma3", "qwen3_vl"):
        runner.reset()
        results.append(runner.prefill(picture_prompt(family)))
    if family in ("llama", "gemma3_text"):
        ragged = Runner(model, PLANS[0], max_seq_len=32, batch_size=2)
        answer = ragged.generate_batch([MORE], SamplingParams(temperature=0.8, seed=3, max_new_tokens=8))
        results += [torch.tensor(answer), ragged.prefill([PROMPT, MORE]), ragged.decode([3, 4])]
    return results


# --- a rank's share of the weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "biased"])
def test_shares_put_together_are_the_model(folders, family, size):
    whole = minipop.load_model(folders[family])
    shares = [minipop.load_model(folders[family], part=TensorPart(rank, size)) for rank in range(size)]
    heads = whole.config.num_heads // size
    kv_heads = [range(rank * whole.config.num_kv_heads // size, (rank + 1) * whole.config.num_kv_heads // size)
                if whole.config.num_kv_heads >= size else [rank * whole.config.num_kv_heads // size] for rank in range(size)]
    for i, layer in enumerate(whole.layers):
        q, k, v = layer.attn._split(layer.attn.qkv.weight.T[None])  # [1, heads, D, E]: a row of W^T is like a token
        mine = [share.layers[i] for share in shares]
        for rank, other in enumerate(mine):
            own_q, own_k, own_v = other.attn._split(other.attn.qkv.weight.T[None])
            assert torch.equal(own_q, q[:, rank * heads : (rank + 1) * heads])
            assert torch.equal(own_k, k[:, kv_heads[rank]]) and torch.equal(own_v, v[:, kv_heads[rank]])
        gate, up = zip(*(other.mlp.gate_up.weight.chunk(2) for other in mine))
        assert torch.equal(torch.cat((*gate, *up)), layer.mlp.gate_up.weight)
        for ours, theirs in ((layer.attn.o, [other.attn.o.linear for other in mine]), (layer.mlp.down, [other.mlp.down.linear for other in mine])):
            assert torch.equal(torch.cat([linear.weight for linear in theirs], dim=1), ours.weight)
            biases = [linear.bias for linear in theirs]
            assert biases[1:] == [None] * (size - 1) and (ours.bias is None or torch.equal(biases[0], ours.bias))
        assert all(torch.equal(other.input_norm.weight, layer.input_norm.weight) for other in mine)
    assert torch.equal(torch.cat([share.head.linear.weight for share in shares]), whole.head.weight)
    assert all(torch.equal(share.embedding.weight, whole.embedding.weight) for share in shares)


def test_only_the_share_is_read(tmp_path):
    """Columns and rows that belong to rank 1 are not numbers: rank 0 does not notice."""
    def spoil(weights):
        weights["model.layers.2.mlp.down_proj.weight"][:, 20:] = torch.nan
        weights["model.layers.2.self_attn.k_proj.weight"][16:] = torch.nan
        weights["lm_head.weight"][31:] = torch.nan
        return weights

    save_tiny(tmp_path, "llama", spoil)
    minipop.load_model(tmp_path, part=TensorPart(0, 2))
    with pytest.raises(CheckpointError) as problem:
        minipop.load_model(tmp_path, part=TensorPart(1, 2))
    assert all(name in str(problem.value) for name in ("2.mlp.down_proj", "2.self_attn.k_proj", "lm_head"))


def test_a_share_takes_half_of_the_divided_weights(folders):
    model = minipop.load_model(folders["llama"], part=TensorPart(0, 2))
    with Checkpoint.open(folders["llama"]) as checkpoint:
        everywhere = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name or name == "embedding.weight")
        held = sum(p.nbytes for p in model.parameters())
        assert abs(held - (everywhere + (checkpoint.nbytes - everywhere) / 2)) <= 32 * 4  # 61 ids are 31 and 30 rows of the head


@pytest.mark.parametrize("spoil, text", [
    (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "not in the checkpoint"),
    (lambda weights: weights.update(extra=torch.zeros(2)), "not used by the model: 'extra'"),
    (lambda weights: weights.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(80, 32)}), "wrong shape"),  # its half would fit
])
def test_a_part_is_loaded_as_strictly_as_the_whole(tmp_path, spoil, text):
    def change(weights):
        spoil(weights)
        return weights

    save_tiny(tmp_path, "llama", change)
    for part in (None, TensorPart(0, 2), TensorPart(1, 2)):
        with pytest.raises(CheckpointError, match=text):
            minipop.load_model(tmp_path, part=part)


@pytest.mark.parametrize("size, possible", [(3, "1, 2, 4"), (8, "1, 2, 4"), (5, "1, 2, 4")])
def test_what_cannot_be_divided(folders, size, possible):
    with pytest.raises(ConfigError, match=f"over {size} ranks: it has 4 heads, 2 kv heads and 40 rows in its MLP; possible are {possible}$"):
        minipop.load_model(folders["llama"], part=TensorPart(0, size))


# --- all ranks alike ------------------------------------------------------------------------------------------------------------


def spmd_worker(rank, folders):
    dist.init_process_group("gloo")
    answers = {}
    for family, folder in folders.items():
        model = load_parallel(folder)
        answers[family] = everything(family, model)
        heads = Runner(model, max_seq_len=4).cache.keys.shape[2]  # the cache holds this rank's alone
        assert heads == max(1, minipop.config.read_config(folder).num_kv_heads // dist.get_world_size())
    dist.destroy_process_group()
    return answers


@needs_forkserver
@pytest.mark.parametrize("size, families", [(2, [*CONFIGS, "biased"]), (4, ["qwen2", "qwen3"])])
def test_logits_are_those_of_one_process(folders, size, families):
    """Families with images among them; two kv heads over two and four ranks, and one over two and four."""
    ranks = run_ranks(spmd_worker, size, {family: folders[family] for family in families})
    for family in families:
        model = minipop.load_model(folders[family])
        expected = everything(family, model)
        for answers in ranks:
            for ours, theirs, first in zip(answers[family], expected, ranks[0][family], strict=True):
                close(ours.float(), theirs.float())
                assert torch.equal(ours, first)  # on every rank to the last bit: they must not drift apart


# --- command lines: rank 0 leads ------------------------------------------------------------------------------------------------


def session(model):
    """What rank 0 of a chat may do: two runners, mistakes, another plan, taking back."""
    runner, other = Runner(model, PLANS[0], max_seq_len=32), Runner(model, PLANS[2], max_seq_len=16)
    logits = [runner.prefill(PROMPT), other.prefill(MORE), runner.decode([5])]
    for mistake in (lambda: runner.prefill([61]), lambda: runner.prefill(random_ids(30)), lambda: runner.rewind(40),
                    lambda: runner.extend(torch.zeros(2, 1, dtype=torch.long))):
        with pytest.raises(PromptError):
            mistake()
    runner.rewind(6)
    runner.plan = PLANS[1]
    logits += [runner.prefill(MORE), runner.extend([MORE])[0]]
    runner.rewind(0)
    del other
    logits += [runner.prefill(MORE), Runner(model, max_seq_len=8).prefill(MORE)]
    return logits


def led_worker(rank, folder):
    if rank == 0:
        team = join(2)
        model = team.load(folder)
        with pytest.raises(MinipopError, match="--tp"):
            Runner(model, tap=lambda layer, name, tensor: tensor)
        with pytest.raises(PlanError, match="--tp"):
            Runner(model, PrefillPlan.deepest(6, kv="file"))
        result = session(model)
        team.dismiss()
        return result
    return command(lambda _: join(2), [])


@needs_forkserver
def test_rank_0_leads(folders):
    logits, follower = run_ranks(led_worker, 2, folders["llama"])
    for ours, theirs in zip(logits, session(minipop.load_model(folders["llama"])), strict=True):
        close(ours, theirs)
    assert follower == (0, "", "")


def death_worker(rank, folder, victim):
    """The victim's process ends without a word at its second pass."""
    if rank == victim:
        Runner.extend = lambda *arguments: os._exit(9)
    return command(lambda _: minipop.cli.run(lambda: deadly_session(folder)), [])


def deadly_session(folder):
    runner = Runner(join(2).load(folder), max_seq_len=32)
    runner.prefill(PROMPT)
    for _ in range(2):  # the second call finds out that there is nobody left, and says the same
        with pytest.raises(MinipopError, match="rank 0 lost the other processes: "):
            runner.decode([1])
    raise MinipopError("as expected")


@needs_forkserver
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_other_with_one_line(folders, victim):
    ended = run_ranks(death_worker, 2, folders["qwen3"], victim)
    assert ended[victim] is None
    code, out, err = ended[1 - victim]
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: as expected" if victim else "error: rank 1 lost the other processes: ") and "[/" not in err


@pytest.mark.parametrize("tp, environment, text", [
    (2, {}, "--tp 2 takes 2 processes, but there is one: start with python -m torch.distributed.run --nproc-per-node 2 "),
    (2, {"WORLD_SIZE": "3", "RANK": "0"}, "--tp 2 takes 2 processes, but there are 3: start with"),
    (1, {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, "--tp 1 takes 1 process, but there are 2: add --tp 2, or"),
    (2, {"WORLD_SIZE": "2", "RANK": "0"}, "--tp 2: the processes do not find each other: "),  # nobody says where rank 0 is
])
def test_one_line_when_the_processes_are_not_those_asked_for(monkeypatch, tp, environment, text):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert join(1) is None
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MinipopError) as problem:
        join(tp)
    assert str(problem.value).startswith(text) and "\n" not in str(problem.value)
    monkeypatch.setenv("RANK", "1")
    if "find" not in text and environment:
        with pytest.raises(SystemExit):  # rank 0 has said it
            join(tp)


@pytest.mark.skipif(sys.platform != "linux", reason="torch.distributed.run")
def test_the_commands(folders, tmp_path):
    """As a user starts them: a batch of prompts, sampled, with rows that finish early; input and output are rank 0's."""
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "a long question that goes on.", "What is it?"))
    arguments = ["--ckpt", str(folders["llama"]), "--input", "-", "--output", "-", "--temperature", "0.9", "--seed", "3", "--max-new-tokens", "12"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           "-m", "minipop.generate", "--tp", "2", *arguments], input=prompts, capture_output=True, text=True, cwd=ROOT,
                          timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    model, tokenizer = minipop.load_model(folders["llama"]), minipop.load_tokenizer(folders["llama"])
    for answer, text in zip(answers, ("abc", "a long question that goes on.", "What is it?"), strict=True):
        alone = Runner(model, PrefillPlan.deepest(6), 64).generate(tokenizer.encode(text), SamplingParams(temperature=0.9, seed=3, max_new_tokens=12))
        assert answer["token_ids"] == list(alone)


def under_torchrun(module: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, "--tp", "2",
                           *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          check=False, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="torch.distributed.run")
def test_chat_and_bench(folders):
    """To their ends: a process group that nobody ends aborts its process, now and then."""
    for _ in range(2):
        said = under_torchrun("minipop.chat", "--ckpt", folders["llama"], "--prompt", "abc", "--temperature", 0, "--max-new-tokens", 8)
        assert said.returncode == 0, said.stderr
    alone = subprocess.run([sys.executable, "-m", "minipop.chat", "--ckpt", folders["llama"], "--prompt", "abc", "--temperature", "0", "--max-new-tokens", "8"],
                           capture_output=True, text=True, cwd=ROOT, check=True)
    assert said.stdout == alone.stdout
    measured = under_torchrun("minipop.bench", "--ckpt", folders["llama"], "--lengths", "8", "--repeats", 1, "--decode-tokens", 2)
    assert measured.returncode == 0 and "POP 2/6" in measured.stdout and "tokens/s" in measured.stdout, measured.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch.distributed.run")
def test_evaluate(folders, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"goal": f"do the {w}", "choices": [f"go {w}", "a long way home"], "label": i % 2} for i, w in enumerate("abcd")]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--ckpt", folders["llama"], "--tasks", "minipop_piqa", "--data", tmp_path, "--log-samples", "--output"]
    done = under_torchrun("minipop.evaluate", *arguments, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    subprocess.run([sys.executable, "-m", "minipop.evaluate", *map(str, arguments), tmp_path / "one"], capture_output=True, cwd=ROOT, check=True)
    two, one = ([json.loads(line)["resps"] for line in next((tmp_path / name).rglob("samples_*.jsonl")).read_text().splitlines()] for name in ("two", "one"))
    assert len(one) == 4
    for a, b in zip(two, one, strict=True):
        assert [float(choice[0][0]) for choice in a] == pytest.approx([float(choice[0][0]) for choice in b], rel=1e-5)
