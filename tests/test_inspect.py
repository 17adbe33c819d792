"""What inspect says of checkpoints whose every parameter is known."""

import json
from pathlib import Path

import pytest
import torch

from minipop import PrefillPlan, Runner, inspect
from minipop.checkpoint import Checkpoint
from minipop.saving import save_checkpoint
from minipop.errors import CheckpointError, ConfigError, PlanError, PromptError
from tests.tiny import CONFIGS, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parent.parent
SMOLLM = ROOT / "weights" / "smollm2-135m-instruct"


def named_weights(model):
    """A model's parameters under the names a published checkpoint gives them: fused matrices are taken apart."""
    config = model.config
    text = "model.language_model." if config.vision else "model."
    sources = model.sources([f"{text}embed_tokens.weight", "model.visual.patch_embed.proj.weight",
                             "model.vision_tower.vision_model.embeddings.patch_embedding.weight",
                             "model.multi_modal_projector.mm_input_projection_weight",
                             *(() if config.tie_word_embeddings else ["lm_head.weight"])])
    parameters = dict(model.named_parameters())
    for ours, theirs in sources.items():
        rows = parameters[ours].shape[0]
        sizes = [rows // len(theirs)] * len(theirs)
        if ours.startswith("layers.") and ".attn.qkv." in ours:
            sizes = [config.queries_width, config.kv_width, config.kv_width]
        yield from zip(theirs, parameters[ours].split(sizes))


def save_tiny(folder, family, weights=None, dtype=torch.float32, extra_files=None, **config):
    """A checkpoint of a tiny random model. config: fields of config.json to change. Returns the model."""
    model = tiny_model(family, dtype=dtype, tie_word_embeddings=family.startswith("gemma"))
    save_checkpoint(folder, dict(named_weights(model)) if weights is None else weights(dict(named_weights(model))),
                    {**CONFIGS[family], "tie_word_embeddings": model.config.tie_word_embeddings, **config},
                    extra_files=extra_files)
    return model


def numel(parameters):
    return sum({id(p): p.numel() for p in parameters}.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_by_part_are_those_of_the_model(tmp_path, family):
    model = save_tiny(tmp_path, family)
    sizes = inspect.inspect_checkpoint(tmp_path)["parameters"]
    norms = [p for n, p in model.named_parameters() if "norm" in n and not n.startswith("vision.")]
    mine = {id(p) for p in norms}
    parts = {"embedding": [model.embedding.weight], "head": [] if model.config.tie_word_embeddings else [model.head.weight],
             "attention": [p for layer in model.layers for p in layer.attn.parameters() if id(p) not in mine],
             "MLP": [p for layer in model.layers for p in layer.mlp.parameters()], "norms": norms}
    if model.config.vision is not None:
        vision = model.vision
        projector = [vision.pool_norm.weight, vision.projection] if family == "gemma3" else \
            [*vision.merger.parameters(), *vision.deepstack_mergers.parameters()]
        tower = [p for p in vision.parameters() if not any(p is q for q in projector)]
        parts |= {"vision tower": tower, "vision projector": projector}
    expected = {part: numel(found) for part, found in parts.items() if found} | {"total": numel(model.parameters())}
    assert {part: size["parameters"] for part, size in sizes.items()} == expected
    assert all(size["bytes"] == size["stored_bytes"] == 4 * size["parameters"] for size in sizes.values())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert sizes["total"]["bytes"] == checkpoint.nbytes


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("skip", [set(), {4, 5}, {0, 3}])
def test_a_node_that_only_prefills_needs_what_prefill_reads(tmp_path, family, skip):
    """By name, independent of how inspect goes about it: everything but ... of the layers that are skipped."""
    plan = PrefillPlan(6, skip)
    model = tiny_model(family)
    weights = dict(named_weights(model))
    save_tiny(tmp_path, family)
    spared = ("q_proj.weight", "q_proj.bias", "o_proj.weight", "q_norm.weight", "gate_proj.weight", "up_proj.weight",
              "down_proj.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight",
              "post_feedforward_layernorm.weight")
    text = "model.language_model." if model.config.vision else "model."
    expected = {n for n in weights if n not in ("lm_head.weight", f"{text}norm.weight")
                and not any(n.startswith(f"{text}layers.{i}.") and n.endswith(spared) for i in skip)}
    with Checkpoint.open(tmp_path) as checkpoint:
        sources = model.sources(checkpoint.names)
    assert {n for ours, theirs in sources.items() for n in inspect.needed_in_prefill(ours, theirs, plan)} == expected


def test_the_share_of_a_prefill_node_by_hand(tmp_path):
    save_tiny(tmp_path, "llama")  # 61 ids, 32 wide, 4 heads of 16 over 2, MLP 40, 6 layers, a head of its own
    node = inspect.inspect_checkpoint(tmp_path, ratios=["1/3"])["prefill_node"]
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 40 + 2 * 32
    needed = 61 * 32 + 4 * layer + 2 * (32 + 2 * 32 * 32)
    total = 2 * 61 * 32 + 6 * layer + 32
    assert node == [{"plan": "1/3", "skipped": 2, "parameters": needed, "bytes": 4 * needed, "share": needed / total}]


def test_a_node_that_only_prefills_makes_the_same_cache(tmp_path):
    """What it does not need may be anything: the cache rows before the boundary stay the same."""
    plan, ids = PrefillPlan.deepest(6), list(range(1, 9))
    model, damaged = tiny_model("qwen3"), tiny_model("qwen3")
    save_tiny(tmp_path, "qwen3")
    with Checkpoint.open(tmp_path) as checkpoint:
        sources = damaged.sources(checkpoint.names)
    for name, parameter in damaged.named_parameters():
        rows = parameter.shape[0]
        needed = inspect.needed_in_prefill(name, sources[name], plan)
        if not needed:
            parameter.fill_(3.0)
        elif len(needed) < len(sources[name]):
            parameter[: rows - 2 * model.config.kv_width] = 3.0
    caches = []
    for one in (model, damaged):
        runner = Runner(one, plan, max_seq_len=8)
        runner.prefill(ids)
        caches.append(torch.stack((runner.cache.keys, runner.cache.values))[..., :7, :])
    assert torch.equal(*caches)


def test_numbers_scale_with_dtype_and_length(tmp_path):
    save_tiny(tmp_path, "llama", dtype=torch.bfloat16)
    half, single = inspect.inspect_checkpoint(tmp_path, [5, 400]), inspect.inspect_checkpoint(tmp_path, [5, 400], dtype="float32")
    assert (half["dtype"], single["dtype"]) == ("bfloat16", "float32")
    row = 6 * 2 * 2 * 16 * 2  # layers, K and V, heads, head_dim, bytes
    assert half["cache"] == {"bytes_per_token": row, "max_position_embeddings": 512, "bytes_at_max": 512 * row}
    for part in half["parameters"]:
        a, b = half["parameters"][part], single["parameters"][part]
        assert a["stored_bytes"] == b["stored_bytes"] == a["bytes"] == b["bytes"] / 2
    assert half["prefill"] == single["prefill"]
    assert [(row["tokens"], row["plan"], row["skipped"]) for row in half["prefill"]] == \
        [(n, plan, skipped) for n in (5, 400) for plan, skipped in (("full", 0), ("1/4", 1), ("1/3", 2), ("1/2", 3))]
    for row in half["prefill"]:
        full = next(r for r in half["prefill"] if r["tokens"] == row["tokens"])
        assert row["ideal_speedup"] == full["flops"] / row["flops"]
    assert [row["tokens"] for row in inspect.inspect_checkpoint(tmp_path)["decode"]] == [128, 512]  # 2048 is too long for it


def test_the_weights_are_not_read(tmp_path, monkeypatch):
    save_tiny(tmp_path, "qwen3_vl")
    monkeypatch.setattr(Checkpoint, "tensor", None)
    assert inspect.inspect_checkpoint(tmp_path)["parameters"]["total"]["parameters"] > 0


def test_a_head_that_repeats_the_embedding_counts_because_it_is_there(tmp_path):
    save_tiny(tmp_path, "gemma3_text", lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    report = inspect.inspect_checkpoint(tmp_path)
    assert report["parameters"]["head"] == report["parameters"]["embedding"]
    assert "weights of its own" in report["architecture"]["vocabulary"]


def test_tensors_that_nothing_uses_are_named(tmp_path):
    extra = {"model.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.adapter": torch.ones(3)}
    save_tiny(tmp_path, "llama", lambda weights: weights | extra)
    report = inspect.inspect_checkpoint(tmp_path)
    assert report["unused"] == ["model.layers.0.adapter"]
    assert "belong to no part" in inspect.to_text(report) and "adapter" in inspect.to_text(report)


def test_words():
    words = inspect.describe(tiny_config("gemma3"), tied=True)
    assert words["attention"] == "layers 0-1,3-4 see the last 5 tokens, layers 2,5 see the whole context"
    assert words["rotary"] == "theta 1,000,000 (sliding layers: theta 10,000)"
    assert "16 x 16 pixels in patches of 4, 4 tokens a picture" in words["vision"] and "is the embedding" in words["vocabulary"]
    assert "1 K/V head;" in inspect.describe(tiny_config("qwen3"), tied=False)["decoder"]
    words = inspect.describe(tiny_config("qwen3_vl"), tied=False)
    assert words["rotary"].endswith("4 frequencies for time, 2 for height, 2 for width")
    assert words["vision"].endswith("patches of 4 pixels, 2 x 2 of them a token; DeepStack after blocks 0, 1")
    assert inspect.describe(tiny_config("mistral"), tied=False)["attention"] == "every layer sees the last 5 tokens"
    assert inspect.describe(tiny_config("qwen2"), tied=False)["decoder"].endswith("biases on q, k, v")
    for kind, text in (("linear", "positions divided by 8"), ("llama3", "llama3 scaling by 8 beyond 8192")):
        rope = inspect.RopeConfig(1e4, kind, factor=8.0)
        assert inspect.describe(tiny_config("llama", rope=rope), tied=False)["rotary"] == f"theta 10,000, {text}"


# --- the command ----------------------------------------------------------------------------------------------------------------


def run_inspect(*arguments):
    return inspect.main([str(argument) for argument in arguments])


def test_the_command(tmp_path, capsys):
    save_tiny(tmp_path / "it", "qwen3_vl")
    file = tmp_path / "numbers.json"
    assert run_inspect("--ckpt", tmp_path / "it", "--lengths", "16, 64", "--ratios", "1/3,0.5", "--json", file) == 0
    out, err = capsys.readouterr()
    report = inspect.inspect_checkpoint(tmp_path / "it", [16, 64], ["1/3", "0.5"])
    assert err == "" and out == inspect.to_text(report) + "\n"
    assert json.loads(file.read_text()) == json.loads(json.dumps(report)) and {*tmp_path.iterdir()} == {tmp_path / "it", file}
    by_plan = {(row["plan"], row["tokens"]): row for row in report["prefill"]}
    line = next(line for line in out.splitlines() if "skip 0.5 (3)" in line)
    assert line.endswith(f"({by_plan['0.5', 64]['ideal_speedup']:.2f}x)") and line.count("x)") == 2


@pytest.mark.parametrize("arguments, message", [
    (["--lengths", "128,zero"], "--lengths"), (["--lengths", "0"], "--lengths"), (["--lengths", ""], "--lengths"),
    (["--lengths", "513"], "513 tokens exceed the 512"), (["--ratios", "2"], "between 0 and 1"), (["--ratios", "1/3,"], "ratio"),
    (["--dtype", "int8"], "--dtype"), (["--json", "missing/x.json"], "missing/x.json"),
    (["--ckpt", "./missing-folder"], "missing-folder"), (["--what"], "--what"),
])
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, arguments, message):
    save_tiny(tmp_path, "llama")
    ckpt = [] if "--ckpt" in arguments else ["--ckpt", tmp_path]
    assert run_inspect(*ckpt, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_checkpoints_that_loading_would_refuse(tmp_path):
    def without(name):
        return lambda weights: {key: value for key, value in weights.items() if key != name}

    save_tiny(tmp_path / "gap", "llama", without("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match="no tensor 'model.layers.3.mlp.up_proj.weight'"):
        inspect.inspect_checkpoint(tmp_path / "gap")
    save_tiny(tmp_path / "other", "llama", intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*\[40, 32\].* are from different models"):
        inspect.inspect_checkpoint(tmp_path / "other")
    save_tiny(tmp_path / "small", "llama", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="gptq"):
        inspect.inspect_checkpoint(tmp_path / "small")
    save_tiny(tmp_path / "strange", "llama", model_type="mamba")
    with pytest.raises(ConfigError, match="mamba"):
        inspect.inspect_checkpoint(tmp_path / "strange")
    save_tiny(tmp_path / "fine", "llama")
    with pytest.raises(PlanError):
        inspect.inspect_checkpoint(tmp_path / "fine", ratios=[1.5])
    with pytest.raises(PromptError):
        inspect.inspect_checkpoint(tmp_path / "fine", lengths=[513])


@pytest.mark.real
@pytest.mark.skipif(not (SMOLLM / "model.safetensors").is_file(), reason="run scripts/fetch_weights.py smollm2-135m-instruct")
def test_smollm():
    report = inspect.inspect_checkpoint(SMOLLM)
    assert report["parameters"]["total"]["parameters"] == 134_515_008  # its model card says 135M
    assert report["cache"]["bytes_per_token"] == 23_040
    third = next(row for row in report["prefill"] if row["plan"] == "1/3" and row["tokens"] == 2048)
    assert third["skipped"] == 10 and third["ideal_speedup"] == pytest.approx(1.465, abs=1e-3)
