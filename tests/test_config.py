"""config.json in all its spellings becomes one ModelConfig; anything else is one clear line that names file and field."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from minipop import ConfigError
from minipop.config import FAMILIES, RopeConfig, read_config

LLAMA = {"model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4}
SIGLIP = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "image_size": 30, "patch_size": 5}
QWEN_VISION = {"hidden_size": 24, "num_heads": 3, "depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def base(family):
    """The least a config of each family must say."""
    text = LLAMA | {"model_type": family}
    if family == "mistral":
        return text | {"num_attention_heads": 8}  # the family's default for K/V heads
    if family == "gemma3":
        return {"model_type": family, "text_config": text, "vision_config": SIGLIP, "mm_tokens_per_image": 4}
    if family == "qwen3_vl":
        return {"model_type": family, "text_config": text | {"head_dim": 128}, "vision_config": QWEN_VISION}
    return text


def read(folder, values, generation=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def refusal(folder, values, generation=None):
    """The one line that reading these values ends with."""
    with pytest.raises(ConfigError) as caught:
        read(folder, values, generation)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and str(folder) in message
    return message


# --- defaults -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_minimal_config_means(tmp_path, family):
    """Sizes, biases, norms, windows and rotary tables, compared with what transformers makes of the same file."""
    values = base(family)
    ours = read(tmp_path, values)
    text = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert ours.family == family and ours.vocab_size == 99 and ours.hidden_size == 64 and ours.num_layers == 4
    assert ours.head_dim == {"mistral": 8, "qwen3": 128, "qwen3_vl": 128, "gemma3": 256, "gemma3_text": 256}.get(family, 16)
    assert (getattr(text, "head_dim", None) or 64 // text.num_attention_heads) == ours.head_dim
    assert ours.norm_eps == text.rms_norm_eps == 1e-6
    assert ours.max_position_embeddings == text.max_position_embeddings
    assert ours.hidden_act == getattr(text, "hidden_act", None) or text.hidden_activation
    assert ours.qkv_bias == (family == "qwen2") and not ours.o_bias and not ours.mlp_bias
    assert ours.qk_norm == (family in ("qwen3", "qwen3_vl", "gemma3", "gemma3_text"))
    assert ours.tie_word_embeddings == family.startswith("gemma") == (ours.embedding_scale == 8.0)
    types = getattr(text, "layer_types", None) or ["full_attention"] * 4
    windows = [4096 if family == "mistral" or kind == "sliding_attention" else None for kind in types]
    assert list(ours.layer_windows) == windows
    rope = text.rope_parameters
    if family.startswith("gemma"):
        assert (ours.rope, ours.rope_local) == (RopeConfig(1e6), RopeConfig(1e4))
        assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (1e6, 1e4)
    else:
        assert (ours.rope, ours.rope_local) == (RopeConfig(5e5 if family == "qwen3_vl" else 1e4), None)
        assert rope["rope_theta"] == ours.rope.theta
    assert ours.bos_token_id == {"llama": None, "mistral": None, "gemma3": 2, "gemma3_text": 2}.get(family)
    assert ours.eos_token_ids == () and ours.dtype is None and ours.num_token_ids == 99


def test_sizes_that_do_not_follow_from_each_other(tmp_path):
    config = read(tmp_path, LLAMA | {"head_dim": 32, "num_key_value_heads": 2})
    assert (config.queries_width, config.kv_width, config.attention_scale) == (128, 64, 32 ** -0.5)
    assert read(tmp_path, LLAMA | {"head_dim": None}).head_dim == 16
    assert read(tmp_path, LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4
    assert read(tmp_path, base("mistral")).num_kv_heads == read(tmp_path, base("mistral")).num_heads == 8


def test_biases(tmp_path):
    config = read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert config.qkv_bias and config.o_bias and config.mlp_bias
    for said in ({}, {"attention_bias": True}, {"attention_bias": False}):  # not a setting of this family
        config = read(tmp_path, base("qwen2") | said)
        assert config.qkv_bias and not config.o_bias
    config = read(tmp_path, base("qwen3") | {"attention_bias": True})
    assert config.qkv_bias and config.o_bias and not config.mlp_bias


def test_vision_settings(tmp_path):
    gemma = read(tmp_path, base("gemma3"))
    assert (gemma.vision.kind, gemma.vision.depth, gemma.vision.tokens_per_image) == ("siglip", 2, 4)
    assert gemma.vision.out_hidden_size == 64 and gemma.image_token_id == 262144 and gemma.mrope_section is None
    assert read(tmp_path, base("gemma3") | {"image_token_index": 7}).image_token_id == 7
    qwen = read(tmp_path, base("qwen3_vl"))
    assert (qwen.vision.depth, qwen.vision.deepstack_indexes, qwen.mrope_section) == (3, (0, 2), (24, 20, 20))
    assert (qwen.vision.temporal_patch_size, qwen.vision.spatial_merge_size, qwen.vision.patch_size) == (2, 2, 16)
    assert (qwen.image_token_id, qwen.vision_start_token_id) == (151655, 151652)


def test_gemma3_without_a_tower_reads_text_only(tmp_path):
    values = base("gemma3")
    assert read(tmp_path, values | {"vision_config": None}).vision is None


def test_the_config_is_frozen(tmp_path):
    with pytest.raises(AttributeError):
        read(tmp_path, LLAMA).hidden_size = 1
    assert replace(read(tmp_path, LLAMA), hidden_size=1).hidden_size == 1


# --- spellings ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, fields, rope", [
    ("llama", {"rope_theta": 7.0}, RopeConfig(7.0)),
    ("llama", {"rope_theta": 7}, RopeConfig(7.0)),
    ("llama", {"rope_parameters": {"rope_theta": 7.0}}, RopeConfig(7.0)),
    ("llama", {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": 8.0}, RopeConfig(7.0)),
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 8.0}, RopeConfig(8.0)),
    ("llama", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 8.0}, RopeConfig(8.0)),
    ("llama", {"rope_parameters": LLAMA3}, RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 7.0}}, RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}, "max_position_embeddings": 77},
     RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 77)),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
    ("qwen3", {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}}, RopeConfig(1e4, "linear", 2.0)),
    ("llama", {"rope_scaling": None, "rope_parameters": None, "rope_theta": None}, RopeConfig(1e4)),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, RopeConfig(1e6, "linear", 8.0)),
    ("gemma3_text", {"rope_parameters": {"full_attention": None, "sliding_attention": None}}, RopeConfig(1e6)),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}}, RopeConfig(1e6)),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 3.0}},
                     "rope_scaling": {"type": "linear", "factor": 8.0}}, RopeConfig(3.0, "linear", 8.0)),
], ids=str)
def test_rope_spellings(tmp_path, family, fields, rope):
    assert read(tmp_path, base(family) | fields).rope == rope
    text = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    text = text.get("full_attention", text)
    assert text["rope_theta"] in (rope.theta, None)  # transformers does not replace a null theta, we do
    assert text.get("rope_type", text.get("type")) == rope.kind


@pytest.mark.parametrize("fields, theta", [
    ({}, 1e4), ({"rope_local_base_freq": 3.0}, 3.0), ({"rope_parameters": {"sliding_attention": {"rope_theta": 4.0}}}, 4.0),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}, "rope_local_base_freq": 3.0}, 3.0),
    ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 8.0}}, 1e4),  # neither reaches the sliding layers
], ids=str)
def test_gemmas_local_rope_is_never_scaled(tmp_path, fields, theta):
    assert read(tmp_path, base("gemma3_text") | fields).rope_local == RopeConfig(theta)


@pytest.mark.parametrize("config, dtype", [
    ({"dtype": "bfloat16"}, torch.bfloat16), ({"torch_dtype": "bfloat16"}, torch.bfloat16),
    ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32), ({"torch_dtype": "torch.float16"}, torch.float16),
    ({"dtype": "auto"}, None), ({"dtype": None}, None), ({"dtype": "auto", "torch_dtype": "float16"}, torch.float16),
], ids=str)
def test_dtype_spellings(tmp_path, config, dtype):
    assert read(tmp_path, LLAMA | config).dtype == dtype
    nested = base("qwen3_vl")
    nested["text_config"] |= config
    assert read(tmp_path, nested).dtype == dtype
    assert read(tmp_path, nested | {"dtype": "float64"}).dtype == torch.float64  # the outer one comes first


@pytest.mark.parametrize("text, top, tied", [
    ({}, {}, True), ({"tie_word_embeddings": False}, {}, False), ({}, {"tie_word_embeddings": False}, False),
    ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}, False),
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
], ids=str)
def test_tying_may_be_said_in_two_places(tmp_path, text, top, tied):
    values = base("gemma3")
    assert read(tmp_path, values | top | {"text_config": values["text_config"] | text}).tie_word_embeddings == tied


# --- windows ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, fields, windows", [
    ("mistral", {}, (4096,) * 4), ("mistral", {"sliding_window": 8}, (8,) * 4),
    ("mistral", {"sliding_window": None}, (None,) * 4),
    ("llama", {"sliding_window": 8}, (None,) * 4),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, (None,) * 4),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, (None,) * 4),  # only layers from 28 on
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8,) * 4),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
     (None, 8, None, 8)),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None)),
    ("gemma3_text", {"sliding_window": 8, "_sliding_window_pattern": 2}, (8, None, 8, None)),
    ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}, (8, 8, 8, 8, 8, None, 8)),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2,
                     "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 8)),
], ids=str)
def test_windows(tmp_path, family, fields, windows):
    assert read(tmp_path, base(family) | fields).layer_windows == windows


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_null_window_switches_sliding_off(tmp_path, family):
    fields = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}
    assert read(tmp_path, base(family) | fields).layer_windows == (None,) * 4


# --- tokens -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("generation, top, text, ids", [
    (None, {}, {}, ()),
    (None, {"eos_token_id": 7}, {}, (7,)),
    (None, {"eos_token_id": [7, 8]}, {}, (7, 8)),
    (None, {"eos_token_id": 0}, {}, (0,)),
    (None, {"eos_token_id": [7, 7]}, {}, (7,)),
    (None, {}, {"eos_token_id": 9}, (9,)),
    (None, {"eos_token_id": None}, {"eos_token_id": [9, 1]}, (9, 1)),
    (None, {"eos_token_id": 7}, {"eos_token_id": 9}, (7,)),
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {}, (5, 6)),
    ({"eos_token_id": 5}, {"eos_token_id": 7}, {"eos_token_id": 9}, (5,)),
    ({"eos_token_id": None}, {"eos_token_id": 7}, {}, (7,)),
    ({"eos_token_id": []}, {"eos_token_id": 7}, {}, (7,)),
    ({}, {}, {"eos_token_id": 9}, (9,)),
], ids=str)
def test_the_first_source_that_names_an_eos_wins(tmp_path, generation, top, text, ids):
    values = base("qwen3_vl")
    values["text_config"] |= text
    assert read(tmp_path, values | top, generation).eos_token_ids == ids


@pytest.mark.parametrize("family, fields, bos", [
    ("llama", {"bos_token_id": 1}, 1), ("llama", {"bos_token_id": None}, None), ("llama", {"bos_token_id": [5, 6]}, 5),
    ("qwen2", {"bos_token_id": 1}, None),  # named, but no prompt of the family begins with it
    ("gemma3_text", {"bos_token_id": 3}, 3),
], ids=str)
def test_bos(tmp_path, family, fields, bos):
    assert read(tmp_path, base(family) | fields).bos_token_id == bos


# --- mistakes -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "model_type"])
@pytest.mark.parametrize("gone", ["absent", "null"])
def test_required_fields(tmp_path, field, gone):
    values = LLAMA | {field: None}
    if gone == "absent":
        del values[field]
    message = refusal(tmp_path, values)
    assert "config.json" in message and field in message and "missing" in message


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "max_position_embeddings")


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [-1, 0, 2**31 + 1, 10**30, 1.5, 4.0, "4", True, [4], {"a": 4}], ids=str)
def test_sizes_must_be_positive_whole_numbers(tmp_path, field, value):
    message = refusal(tmp_path, LLAMA | {field: value})
    assert field in message and "positive whole number" in message


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [-1, -1e-6, 0, 1e31, "1e-6", True, [1e-6], {}], ids=str)
def test_numbers_must_be_positive_and_finite(tmp_path, field, value):
    message = refusal(tmp_path, LLAMA | {field: value})
    assert field in message and "positive finite number" in message


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_whole_numbers_beyond_any_float(tmp_path, field):
    assert field in refusal(tmp_path, LLAMA | {field: 10**400})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["rms_norm_eps", "hidden_size", "rope_theta"])
def test_numbers_that_are_none(tmp_path, field, number):
    text = json.dumps(LLAMA | {field: "HERE"}).replace('"HERE"', number)
    assert "config.json" in refusal(tmp_path, text)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [0, 1, "true", [], 1.0], ids=str)
def test_flags_must_be_true_or_false(tmp_path, field, value):
    message = refusal(tmp_path, LLAMA | {field: value})
    assert field in message and "true or false" in message


@pytest.mark.parametrize("family, fields, words", [
    ("gpt2", {}, ["model_type", "gpt2", "llama", "qwen3_vl"]),
    ("llama", {"model_type": 3}, ["model_type", "string"]),
    ("llama", {"model_type": ["llama"]}, ["model_type", "string"]),
    ("llama", {"hidden_act": "relu"}, ["activation", "relu", "silu"]),
    ("llama", {"hidden_act": 1}, ["hidden_act", "string"]),
    ("gemma3_text", {"hidden_activation": "swish!"}, ["activation", "swish!"]),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 2}, ["num_attention_heads 3", "num_key_value_heads 2"]),
    ("llama", {"num_attention_heads": 5}, ["head_dim", "hidden_size 64"]),
    ("llama", {"head_dim": 15}, ["head_dim 15", "odd"]),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["dynamic"]),
    ("llama", {"rope_scaling": {"rope_type": 7}}, ["rope_type", "string"]),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "positive"]),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "8"}}, ["factor", "number"]),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, ["low_freq_factor", "missing"]),
    ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
    ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": -1}}, ["original_max_position_embeddings"]),
    ("llama", {"rope_scaling": "linear"}, ["rope_scaling", "object"]),
    ("llama", {"rope_parameters": [1]}, ["rope_parameters", "object"]),
    ("llama", {"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "Gemma-3"]),
    ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 7.0}}, ["partial_rotary_factor"]),
    ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, ["rope_parameters.full_attention", "object"]),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["yarn"]),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, ["factor", "missing"]),
    ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "causal"]),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    ("gemma3_text", {"final_logit_softcapping": -30.0}, ["final_logit_softcapping"]),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
    ("gemma3_text", {"sliding_window": 0}, ["sliding_window"]),
    ("gemma3_text", {"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
    ("gemma3_text", {"layer_types": ["full_attention"]}, ["layer_types", "4 times"]),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, ["layer_types"]),
    ("gemma3_text", {"layer_types": "full_attention"}, ["layer_types"]),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
    ("qwen2", {"max_window_layers": -1, "use_sliding_window": True}, ["max_window_layers"]),
    ("mistral", {"sliding_window": "4096"}, ["sliding_window"]),
    ("llama", {"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
    ("llama", {"torch_dtype": 16}, ["torch_dtype", "16"]),
    ("llama", {"eos_token_id": -1}, ["eos_token_id", "-1"]),
    ("llama", {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ("llama", {"eos_token_id": [1, None]}, ["eos_token_id"]),
    ("llama", {"eos_token_id": True}, ["eos_token_id"]),
    ("llama", {"eos_token_id": 1.0}, ["eos_token_id"]),
    ("llama", {"bos_token_id": "<s>"}, ["bos_token_id"]),
    ("llama", {"bos_token_id": []}, ["bos_token_id"]),
    ("llama", {"bos_token_id": -5}, ["bos_token_id"]),
], ids=str)
def test_mistakes_of_text_configs(tmp_path, family, fields, words):
    message = refusal(tmp_path, (base(family) if family in FAMILIES else LLAMA | {"model_type": family}) | fields)
    assert "config.json" in message and all(word in message for word in words), message


@pytest.mark.parametrize("entry", [["full_attention"], {}], ids=str)
def test_layer_types_of_something_else(tmp_path, entry):
    assert "layer_types" in refusal(tmp_path, base("gemma3_text") | {"layer_types": [entry] * 4})


@pytest.mark.parametrize("family, part, fields, words", [
    ("gemma3", None, {"text_config": None}, ["text_config", "missing"]),
    ("gemma3", None, {"text_config": []}, ["text_config", "object"]),
    ("gemma3", None, {"vision_config": 3}, ["vision_config", "object"]),
    ("gemma3", None, {"mm_tokens_per_image": 5}, ["mm_tokens_per_image 5", "square"]),
    ("gemma3", None, {"mm_tokens_per_image": 16}, ["mm_tokens_per_image 16", "divides 6"]),
    ("gemma3", None, {"mm_tokens_per_image": 144}, ["mm_tokens_per_image 144"]),
    ("gemma3", None, {"image_token_index": "<image>"}, ["image_token_index"]),
    ("gemma3", "text_config", {"hidden_size": -3}, ["text_config", "hidden_size"]),
    ("gemma3", "vision_config", {"num_attention_heads": 5}, ["vision_config", "hidden_size 24", "5 heads"]),
    ("gemma3", "vision_config", {"hidden_act": "relu"}, ["vision_config", "relu"]),
    ("gemma3", "vision_config", {"patch_size": 0}, ["vision_config", "patch_size"]),
    ("gemma3", "vision_config", {"patch_size": 31}, ["mm_tokens_per_image"]),
    ("gemma3", "vision_config", {"layer_norm_eps": "small"}, ["vision_config", "layer_norm_eps"]),
    ("qwen3_vl", None, {"text_config": "x"}, ["text_config", "object"]),
    ("qwen3_vl", None, {"vision_config": None}, ["vision_config"]),
    ("qwen3_vl", None, {"image_token_id": -2}, ["image_token_id"]),
    ("qwen3_vl", "vision_config", {"out_hidden_size": 32}, ["out_hidden_size 32", "64"]),
    ("qwen3_vl", "vision_config", {"num_position_embeddings": 15}, ["num_position_embeddings 15", "square"]),
    ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0, 3]}, ["deepstack_visual_indexes", "depth 3"]),
    ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": "8"}, ["deepstack_visual_indexes"]),
    ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [-1]}, ["deepstack_visual_indexes"]),
    ("qwen3_vl", "vision_config", {"spatial_merge_size": 0}, ["spatial_merge_size"]),
    ("qwen3_vl", "vision_config", {"temporal_patch_size": None, "depth": "27"}, ["depth"]),
    ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_section": [24, 20]}}, ["mrope_section", "three"]),
    ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_section": [24, 20, 21]}}, ["mrope_section", "64"]),
    ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_section": [88, -4, -20]}}, ["mrope_section"]),
    ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_section": [4, 30, 30]}}, ["mrope_section", "interleaved"]),
    ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_section": "24,20,20"}}, ["mrope_section"]),
    ("qwen3_vl", "text_config", {"num_attention_heads": None}, ["text_config", "num_attention_heads", "missing"]),
], ids=str)
def test_mistakes_of_vision_language_configs(tmp_path, family, part, fields, words):
    values = base(family)
    message = refusal(tmp_path, values | fields if part is None else values | {part: values[part] | fields})
    assert "config.json" in message and all(word in message for word in words), message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"model_type": "llama", "model_type": "qwen2"}', "\ufeff{}"],
                         ids=repr)
def test_files_that_hold_no_object(tmp_path, text):
    assert "config.json" in refusal(tmp_path, text)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("generation", [{"eos_token_id": "x"}, {"eos_token_id": [-1]}], ids=str)
def test_a_bad_generation_config_is_named(tmp_path, generation):
    assert "generation_config.json" in refusal(tmp_path, LLAMA, generation)
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(tmp_path, LLAMA)


def test_a_long_value_is_shortened(tmp_path):
    assert len(refusal(tmp_path, LLAMA | {"hidden_size": "x" * 10_000})) < 300
