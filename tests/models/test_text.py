"""Every text family against transformers: streams, K, V, logits and greedy answers of tiny random models in float32."""

import json

import pytest
import torch

from minipop import CheckpointError, ConfigError, PrefillPlan, Runner, load_model
from minipop.config import RopeConfig
from minipop.layers import rope_frequencies
from tests.reference import (TEXT_FAMILIES, check, edit_config, gap, our_answer, random_inputs, random_pair, reference_answer,
                             rewrite, token_ids)

BANDS = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = BANDS | {"rope_type": "llama3", "rope_theta": 5e5}
PLAIN = {"num_hidden_layers": 2, "attention_bias": False, "mlp_bias": False}  # a small Llama without biases


def logits(model, ids):
    return Runner(model, max_seq_len=len(ids)).prefill(ids)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_tensor_and_the_greedy_answer(pair, family):
    model, reference = pair(family)
    inputs = random_inputs(model.config)
    report = check(model, reference, inputs, max_new_tokens=20)
    assert report.answer_tokens == 19 and {d.name for d in report.differences} == {"resid", "k", "v", "logits"}
    assert our_answer(model, inputs) == reference_answer(reference, inputs) == report.our_ids


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_one_token_prompt(pair, family):
    check(*pair(family), [5], max_new_tokens=4)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("shape", [
    {"head_dim": 6, "num_key_value_heads": 1},
    {"head_dim": 10, "num_key_value_heads": 4},  # heads * head_dim = hidden_size
    {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
], ids=["narrow", "square", "wide"])
def test_head_shapes(pair, family, shape):
    check(*pair(family, num_hidden_layers=3, **shape), max_new_tokens=4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("spelling", ["null", "absent"])
def test_without_head_dim_it_is_hidden_size_over_heads(tmp_path, family, spelling):
    model, reference = random_pair(family, 0, tmp_path, head_dim=10, num_hidden_layers=2)
    config = edit_config(tmp_path, drop=["head_dim"], top={"head_dim": None} if spelling == "null" else None)
    assert config.get("head_dim") is None
    check(load_model(tmp_path), reference, max_new_tokens=2)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_without_biases(pair, family):
    off = {} if family in ("mistral", "qwen2") else {"attention_bias": False}
    off |= {"mlp_bias": False} if family == "llama" else {}
    check(*pair(family, num_hidden_layers=2, tie_word_embeddings=family != "qwen2", **off), max_new_tokens=4)


def test_llama_attention_bias_covers_o_proj(pair):
    model, reference = pair("llama", num_hidden_layers=2, mlp_bias=False)
    layer = reference.model.layers[0]
    assert layer.self_attn.o_proj.bias.abs().min() > 0 and layer.mlp.down_proj.bias is None
    check(model, reference, max_new_tokens=4)


def test_qwen2_has_biases_its_config_does_not_mention(pair):
    model, reference = pair("qwen2", num_hidden_layers=2)
    assert "attention_bias" not in json.loads((pair.folder("qwen2", num_hidden_layers=2) / "config.json").read_text())
    attention = reference.model.layers[0].self_attn
    assert attention.k_proj.bias.abs().max() > 0.3 and attention.o_proj.bias is None
    check(model, reference, max_new_tokens=4)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_wrong_epsilon_would_show(pair, family):
    model, reference = pair(family)
    inputs = random_inputs(model.config)
    assert gap(logits(model, inputs.token_ids), reference(inputs.token_ids[None]).logits[:, -1]) < 1e-5
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    assert {norm.eps for norm in norms} == {1e-2}
    try:
        for norm in norms:
            norm.eps = 1e-6
        assert gap(logits(model, inputs.token_ids), reference(inputs.token_ids[None]).logits[:, -1]) > 1e-3
    finally:
        for norm in norms:
            norm.eps = 1e-2


# --- rotary embedding ---------------------------------------------------------------------------------------------------------

def test_llama3_frequencies_fall_into_three_bands():
    plain = rope_frequencies(RopeConfig(5e5), 64)
    scaled = rope_frequencies(RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192), 64)
    ratio = scaled / plain
    torch.testing.assert_close(ratio[:15], torch.ones(15))
    torch.testing.assert_close(ratio[15:18], torch.tensor([0.6056, 0.3037, 0.1034]), atol=5e-5, rtol=0)
    torch.testing.assert_close(ratio[18:], torch.full((14,), 1 / 32))


def test_llama3_rope_past_two_thousand_positions(pair):
    sizes = PLAIN | {"head_dim": 64, "max_position_embeddings": 4096}
    model, reference = pair("llama", rope_parameters=LLAMA3, **sizes)
    ids = token_ids(2100)
    check(model, reference, ids, max_new_tokens=2)
    unscaled, _ = pair("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **sizes)
    assert gap(logits(unscaled, ids), logits(model, ids)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_linear_rope(pair, family):
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model, reference = pair(family, num_hidden_layers=2, rope_parameters=linear)
    check(model, reference, max_new_tokens=4)
    assert model.config.rope == RopeConfig(1e4, "linear", 4.0)


@pytest.mark.parametrize("old", [
    {"rope_theta": 5e5, "rope_scaling": BANDS | {"rope_type": "llama3"}},
    {"rope_theta": 5e5, "rope_scaling": BANDS | {"type": "llama3"}},
    {"rope_scaling": LLAMA3, "rope_theta": 1.0},  # the inner theta wins
    {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},  # the old name wins
    {"rope_parameters": LLAMA3, "rope_scaling": None, "rope_theta": None},
], ids=["old", "older", "theta inside", "both", "nulls"])
def test_old_and_new_spellings_of_rope_are_one_model(pair, tmp_path, old):
    settings = PLAIN | {"head_dim": 64, "rope_parameters": LLAMA3}
    model, reference = pair("llama", **settings)
    rewritten = rewrite(pair.folder("llama", **settings), tmp_path, config={"rope_parameters": None} | old)
    assert rewritten.config.rope == model.config.rope
    ids = token_ids(30)
    assert torch.equal(logits(rewritten, ids), logits(model, ids))
    if "rope_theta" in old and old["rope_theta"]:  # and transformers reads it so, too
        from transformers import AutoConfig
        assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == model.config.rope.theta


@pytest.mark.parametrize("config", [
    {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    {"rope_theta": 1000000.0},
    {"rope_theta": 1000000.0, "rope_scaling": None},
], ids=["new", "old", "old with null"])
def test_theta_from_either_place(pair, tmp_path, config):
    model, _ = pair("qwen3", num_hidden_layers=2)
    folder = pair.folder("qwen3", num_hidden_layers=2)
    rewritten = rewrite(folder, tmp_path, config={"rope_parameters": None} | config)
    assert torch.equal(logits(rewritten, token_ids(20)), logits(model, token_ids(20)))


# --- sliding windows ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, windows", [("mistral", (5,) * 6), ("qwen2", (None,) * 3 + (5,) * 3),
                                             ("gemma3", (5, 5, None) * 2)])
def test_windows_are_where_the_family_has_them(pair, family, windows):
    assert pair(family)[0].config.layer_windows == windows


@pytest.mark.parametrize("window", [1, 2, 22, 23, 24])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_window_next_to_the_prompt_length(pair, family, window):
    check(*pair(family, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=window)
          if family == "gemma3" else pair(family, num_hidden_layers=2, sliding_window=window), max_new_tokens=4)


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 70}], ids=["at once", "in chunks"])
@pytest.mark.parametrize("window", [5, 70])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3"])
def test_prompts_of_several_blocks_of_queries(pair, family, window, settings):
    model, reference = pair(family, num_hidden_layers=4, sliding_window=window)
    assert window in model.config.layer_windows and None in model.config.layer_windows or family == "mistral"
    check(model, reference, token_ids(150), PrefillPlan(4, {1, 3}), max_new_tokens=2, **settings)


def test_mistral_without_a_window(pair):
    model, reference = pair("mistral", num_hidden_layers=2, sliding_window=None)
    assert model.config.layer_windows == (None, None)
    check(model, reference, max_new_tokens=4)


def test_qwen3_with_layer_types(pair):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model, reference = pair("qwen3", num_hidden_layers=3, use_sliding_window=True, sliding_window=4, layer_types=types)
    assert model.config.layer_windows == (4, None, 4)
    check(model, reference)


def test_what_lies_behind_all_windows_cannot_be_seen(pair):
    """Two layers of window 4 reach 2 * 3 tokens back, in prefill and in decode."""
    model, _ = pair("mistral", num_hidden_layers=2, sliding_window=4)
    ids = token_ids(12)
    changed = [ids[0] + 1] + ids[1:]
    for length, same in ((6, False), (7, False), (8, True), (12, True)):
        assert torch.equal(logits(model, ids[:length]), logits(model, changed[:length])) == same
    runners = [Runner(model, max_seq_len=12) for _ in range(2)]
    for runner, prompt in zip(runners, (ids, changed)):
        runner.prefill(prompt[:5])
    for position in range(5, 12):
        ours, theirs = (runner.decode([ids[position]]) for runner in runners)
        assert torch.equal(ours, theirs) == (position >= 7)


# --- the head, and the names of tensors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(pair, family, tied):
    model, reference = pair(family, num_hidden_layers=2, tie_word_embeddings=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    check(model, reference, max_new_tokens=4)


def test_a_head_in_the_file_is_used_whatever_the_flag_says(pair, tmp_path):
    model, reference = pair("llama", **PLAIN)
    rewritten = rewrite(pair.folder("llama", **PLAIN), tmp_path, config={"tie_word_embeddings": True})
    check(rewritten, reference, max_new_tokens=4)


def test_a_redundant_copy_of_the_embedding_is_accepted(pair, tmp_path):
    settings = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    model, reference = pair("qwen2", **settings)
    rewritten = rewrite(pair.folder("qwen2", **settings), tmp_path, extra={"lm_head.weight": model.embedding.weight})
    assert rewritten.head.weight is rewritten.embedding.weight
    check(rewritten, reference, max_new_tokens=4)


def test_no_head_and_no_tie_is_an_error(pair, tmp_path):
    with pytest.raises(CheckpointError, match="lm_head"):
        rewrite(pair.folder("llama", **PLAIN), tmp_path, without=["lm_head.weight"])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_spellings_of_names_are_one_model(pair, tmp_path, family, prefix, head):
    settings = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    model, _ = pair(family, **settings)

    def rename(name):
        return head if name == "lm_head.weight" else prefix + name.removeprefix("model.")

    old = {prefix + f"layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(8) for i in range(2)}
    rewritten = rewrite(pair.folder(family, **settings), tmp_path, rename, extra=old)
    assert torch.equal(logits(rewritten, token_ids(20)), logits(model, token_ids(20)))


@pytest.mark.parametrize("change, message", [
    ({"extra": {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}}, "model.layers.0.self_attn.q_norm.weight"),
    ({"extra": {"model.layers.2.mlp.up_proj.weight": torch.ones(56, 40)}}, "model.layers.2.mlp.up_proj.weight"),
    ({"without": ["model.layers.1.mlp.up_proj.weight"]}, "model.layers.1.mlp.up_proj.weight"),
    ({"without": ["model.norm.weight"]}, "model.norm.weight"),
    ({"without": ["model.embed_tokens.weight"]}, "embed_tokens.weight"),
    ({"extra": {"model.layers.0.mlp.up_proj.weight": torch.ones(57, 40)}}, "model.layers.0.mlp.up_proj.weight"),
], ids=["unknown", "layer too many", "missing", "no norm", "no embedding", "wrong shape"])
def test_tensors_that_do_not_fit_are_named(pair, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        rewrite(pair.folder("llama", **PLAIN), tmp_path, **change)
    assert "\n" not in str(caught.value)


# --- Gemma-3 ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("full", [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
], ids=["1B", "4B"])
def test_gemma_two_layers_two_rotary_tables(pair, full):
    settings = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    model, reference = pair("gemma3", **settings)
    assert (model.config.rope.factor, model.config.rope_local) == (full.get("factor", 1.0), RopeConfig(1e4))
    check(model, reference)


@pytest.mark.parametrize("old", [
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
], ids=["old", "older", "defaults", "null", "half"])
def test_gemma_old_and_new_spellings_are_one_model(pair, tmp_path, old):
    model, _ = pair("gemma3")
    rewritten = rewrite(pair.folder("gemma3"), tmp_path, config={"rope_parameters": None} | old)
    assert torch.equal(logits(rewritten, token_ids(20)), logits(model, token_ids(20)))


@pytest.mark.parametrize("pattern", [{"sliding_window_pattern": 3}, {"_sliding_window_pattern": 3}], ids=lambda p: next(iter(p)))
def test_gemma_pattern_instead_of_layer_types(pair, tmp_path, pattern):
    model, _ = pair("gemma3")
    rewritten = rewrite(pair.folder("gemma3"), tmp_path, config={"layer_types": None} | pattern)
    assert torch.equal(logits(rewritten, token_ids(20)), logits(model, token_ids(20)))


def test_gemma_soft_capping_of_logits(pair):
    model, reference = pair("gemma3", num_hidden_layers=2, final_logit_softcapping=2.0)
    check(model, reference, max_new_tokens=4)
    assert logits(model, token_ids(9)).abs().max() < 2.0


def test_gemma_refuses_float16(pair):
    with pytest.raises(ConfigError, match="float16.*bfloat16"):
        load_model(pair.folder("gemma3"), "float16")
