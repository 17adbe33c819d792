"""What a model is, read from a Hugging Face folder.

`read_config(folder)` is the one function that knows the many spellings of config.json: old and new names of the
rotary settings, values nested under `text_config`, family defaults for absent keys. Everything behind it sees one
frozen `ModelConfig` and asks no more questions. The only list of family names lies here (`FAMILIES`) and in the
model registry.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import ConfigError
from .files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MAX_LAYERS = 1000  # modules are built layer by layer before the weights are looked at
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
SLICED = "minipop_sliced"  # the mark of a model with a narrower stream (baselines/slicegpt.py)


@dataclass(frozen=True)
class RopeConfig:
    """One rotary table. `kind` is "default", "linear" (positions / factor) or "llama3" (three frequency bands)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower. Fields that only one of the two towers has are zero or empty for the other."""

    kind: str  # "qwen3_vl" or "siglip"
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    out_hidden_size: int  # width of the rows handed to the decoder
    hidden_act: str = "gelu_pytorch_tanh"
    in_channels: int = 3
    layer_norm_eps: float = 1e-6
    # Qwen3-VL
    temporal_patch_size: int = 1
    spatial_merge_size: int = 1
    num_position_embeddings: int = 0  # a square grid: 2304 = 48 x 48
    deepstack_indexes: tuple[int, ...] = ()
    # Gemma-3 (SigLIP)
    image_size: int = 0  # pixels, square
    tokens_per_image: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """All a decoder needs to know. `layer_windows[i]` is None for full attention, else the sliding window in tokens."""

    family: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    attention_scale: float
    rope: RopeConfig
    rope_local: RopeConfig | None  # the table of sliding layers where it differs (Gemma-3)
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: torch.dtype | None  # what config.json says; None = ask the weights
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_token_ids: int  # ids the tokenizer knows; ids from here on are padding of the vocabulary and never sampled
    embedding_scale: float | None = None  # Gemma: sqrt(hidden_size)
    final_logit_softcapping: float | None = None
    mrope_section: tuple[int, ...] | None = None  # Qwen3-VL: head_dim/2 split over time, height, width
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision: VisionConfig | None = None
    sliced_width: int | None = None  # columns of the stream between the layers, where SliceGPT has cut them down from hidden_size

    @property
    def stream_width(self) -> int:
        """Columns of the residual stream between the layers."""
        return self.hidden_size if self.sliced_width is None else self.sliced_width

    @property
    def queries_width(self) -> int:
        """Rows of W_Q: num_heads * head_dim, which need not equal hidden_size."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of W_K and of W_V."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Family:
    """What a family takes for granted when config.json does not say."""

    text_key: str | None = None  # where the decoder's settings are nested
    rope_theta: float = 10000.0
    head_dim: int | None = None  # None = hidden_size / num_heads
    num_kv_heads: int | None = None  # None = num_heads
    max_positions: int = 32768
    tied: bool = False
    qk_norm: bool = False
    act_key: str = "hidden_act"
    act: str = "silu"
    windows: str = "none"  # who slides: "none", "all" (Mistral), "late" (Qwen), "pattern" (Gemma-3)
    bos: bool = False  # whether prompts begin with a BOS
    gemma: bool = False
    vision: str | None = None


FAMILIES = {
    "llama": Family(bos=True, max_positions=2048),
    "mistral": Family(bos=True, num_kv_heads=8, windows="all", max_positions=131072),
    "qwen2": Family(windows="late"),
    "qwen3": Family(head_dim=128, qk_norm=True, windows="late"),
    "gemma3_text": Family(rope_theta=1e6, head_dim=256, num_kv_heads=4, tied=True, qk_norm=True, act_key="hidden_activation",
                          act="gelu_pytorch_tanh", windows="pattern", bos=True, gemma=True, max_positions=131072),
    "gemma3": Family(text_key="text_config", rope_theta=1e6, head_dim=256, num_kv_heads=4, tied=True, qk_norm=True,
                     act_key="hidden_activation", act="gelu_pytorch_tanh", windows="pattern", bos=True, gemma=True,
                     max_positions=131072, vision="siglip"),
    "qwen3_vl": Family(text_key="text_config", rope_theta=5e5, head_dim=128, qk_norm=True, max_positions=128000,
                       vision="qwen3_vl"),
}


def read_config(folder: str | Path) -> ModelConfig:
    """Read config.json (and generation_config.json, if there is one) of a checkpoint folder.

    Raises ConfigError with file and field when something is missing, of the wrong type, or not supported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    top = _Fields(read_json(path, ConfigError), str(path))
    family_name = top.text("model_type")
    if family_name not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family_name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[family_name]
    text = top.nested(family.text_key) if family.text_key else top

    hidden_size = text.count("hidden_size", 2304 if family_name == "gemma3" else None)
    num_heads = text.count("num_attention_heads", 8 if family_name == "gemma3" else None)
    num_layers = text.count("num_hidden_layers", 26 if family_name == "gemma3" else None, most=MAX_LAYERS)
    num_kv_heads = text.count("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{path}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if family.head_dim is None and text.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(f"{path}: head_dim is absent and hidden_size {hidden_size} is not a multiple of "
                          f"num_attention_heads {num_heads}")
    head_dim = text.count("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim {head_dim} is odd, rotary embeddings need pairs")
    vocab_size = text.count("vocab_size", 262208 if family.gemma else None)
    act = text.text(family.act_key, text.text("hidden_act", family.act))
    if act not in ACTIVATIONS:
        raise ConfigError(f"{path}: activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if text.flag("use_bidirectional_attention", False):
        raise ConfigError(f"{path}: use_bidirectional_attention is an encoder's setting; minipop runs causal decoders only")
    if text.get("attn_logit_softcapping") is not None:
        raise ConfigError(f"{path}: attn_logit_softcapping (Gemma-2) is not supported")

    windows = _layer_windows(text, family, num_layers)
    rope, rope_local = _ropes(text, family)
    attention_bias = text.flag("attention_bias", False)
    scale = text.number("query_pre_attn_scalar", 256.0) if family.gemma else float(head_dim)
    eos = _eos_token_ids(folder, top, text)
    bos = text.optional_id("bos_token_id") if text.get("bos_token_id") is not None else top.optional_id("bos_token_id")
    if bos is None and family.gemma:
        bos = 2

    return ModelConfig(
        family=family_name, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
        intermediate_size=text.count("intermediate_size", 9216 if family_name == "gemma3" else None),
        num_kv_heads=num_kv_heads, head_dim=head_dim,
        max_position_embeddings=text.count("max_position_embeddings", family.max_positions),
        norm_eps=text.number("rms_norm_eps", 1e-6), hidden_act=act, attention_scale=scale ** -0.5,
        rope=rope, rope_local=rope_local, layer_windows=windows,
        qkv_bias=True if family_name == "qwen2" else attention_bias,
        o_bias=False if family_name == "qwen2" else attention_bias,
        mlp_bias=text.flag("mlp_bias", False) if family_name == "llama" else False,
        qk_norm=family.qk_norm,
        tie_word_embeddings=text.flag("tie_word_embeddings", top.flag("tie_word_embeddings", family.tied)),
        dtype=_dtype(top, text), eos_token_ids=eos, bos_token_id=bos if family.bos else None, num_token_ids=vocab_size,
        embedding_scale=math.sqrt(hidden_size) if family.gemma else None,
        final_logit_softcapping=text.number("final_logit_softcapping", None) if family.gemma else None,
        mrope_section=_mrope_section(text, head_dim) if family_name == "qwen3_vl" else None,
        image_token_id=_image_token_id(top, family_name),
        vision_start_token_id=top.optional_id("vision_start_token_id", 151652) if family_name == "qwen3_vl" else None,
        vision=_vision(top, family, hidden_size), sliced_width=_sliced_width(text, family, hidden_size),
    )


# --- the parts of a config -------------------------------------------------------------------------------------------

def _layer_windows(text: "_Fields", family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, None where a layer attends to everything."""
    if family.windows == "none":
        return (None,) * num_layers
    # An absent key means 4096; a null one switches sliding off (Mistral, Qwen).
    switched_off = "sliding_window" in text.values and text.get("sliding_window") is None and not family.gemma
    window = None if switched_off else text.count("sliding_window", 4096)
    if family.windows == "all":
        return (window,) * num_layers
    types = text.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or any(
                kind not in ("full_attention", "sliding_attention") for kind in types):
            raise ConfigError(f"{text.where}: layer_types must list {num_layers} times full_attention or sliding_attention")
        slides = [kind == "sliding_attention" for kind in types]
    elif family.windows == "late":
        first = text.integer("max_window_layers", 28)
        slides = [text.flag("use_sliding_window", False) and i >= first for i in range(num_layers)]
    else:  # Gemma-3: five sliding layers, then a full one
        period = text.count("sliding_window_pattern", text.count("_sliding_window_pattern", 6))
        slides = [bool((i + 1) % period) for i in range(num_layers)]
    if not any(slides):
        return (None,) * num_layers
    if family.windows == "late" and not text.flag("use_sliding_window", False):
        raise ConfigError(f"{text.where}: layer_types has sliding layers but use_sliding_window is false")
    return tuple(window if s else None for s in slides)


def _ropes(text: "_Fields", family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """The main rotary table and, for Gemma-3, the one of the sliding layers.

    `rope_parameters` (new name, theta inside) may be nested by layer type; `rope_scaling` (old name) replaces it where both
    exist (for Gemma-3 it is merged into the full layers' part); theta may also lie at the top level.
    """
    parameters = text.get("rope_parameters")
    parameters = {} if parameters is None else text.nested("rope_parameters").values
    scaling = {} if text.get("rope_scaling") is None else text.nested("rope_scaling").values
    nested = "full_attention" in parameters or "sliding_attention" in parameters
    if not family.gemma:
        if nested:
            raise ConfigError(f"{text.where}: rope_parameters nested by layer type are supported for Gemma-3 only")
        return _rope(text, scaling or parameters, text.get("rope_theta"), family.rope_theta), None
    full = parameters.get("full_attention") if nested else parameters
    local = parameters.get("sliding_attention") if nested else None
    for name, part in (("full_attention", full), ("sliding_attention", local)):
        if part is not None and not isinstance(part, dict):
            raise ConfigError(f"{text.where}: rope_parameters.{name} must be an object, not {part!r}")
    return (_rope(text, {**(full or {}), **scaling}, text.get("rope_theta"), family.rope_theta),
            _rope(text, local or {}, text.get("rope_local_base_freq"), 10000.0))


def _rope(text: "_Fields", values: dict, top_theta, default_theta: float) -> RopeConfig:
    fields = _Fields({k: v for k, v in values.items() if v is not None}, f"{text.where}: rope")
    kind = fields.text("rope_type", fields.text("type", "default"))
    theta = fields.number("rope_theta", None)
    if theta is None:
        theta = _Fields({} if top_theta is None else {"rope_theta": top_theta}, text.where).number("rope_theta", default_theta)
    if fields.number("partial_rotary_factor", 1.0) != 1.0 or text.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{text.where}: partial_rotary_factor other than 1 is not supported")
    if kind == "mrope":  # an old name for plain frequencies with three position axes
        kind = "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=fields.number("factor"))
    if kind == "llama3":
        rope = RopeConfig(theta, kind, fields.number("factor"), fields.number("low_freq_factor"),
                          fields.number("high_freq_factor"),
                          fields.count("original_max_position_embeddings", text.count("max_position_embeddings", 8192)))
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise ConfigError(f"{text.where}: rope high_freq_factor must be above low_freq_factor")
        return rope
    raise ConfigError(f"{text.where}: rope_type {kind!r} is not supported; supported are default, linear, llama3")


def _mrope_section(text: "_Fields", head_dim: int) -> tuple[int, ...]:
    section = None
    for key in ("rope_scaling", "rope_parameters"):
        if section is None and isinstance(text.get(key), dict):
            section = text.get(key).get("mrope_section")
    section = [24, 20, 20] if section is None else section
    if not (isinstance(section, list) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)
            and sum(section) == head_dim // 2):
        raise ConfigError(f"{text.where}: mrope_section {section} must be three counts whose sum is head_dim / 2 = {head_dim // 2}")
    # Interleaved layout: height takes indices 1, 4, 7, ... and width 2, 5, 8, ...; time keeps the rest.
    if 3 * max(section[1:]) > head_dim // 2 + 2:
        raise ConfigError(f"{text.where}: mrope_section {section} cannot be interleaved over {head_dim // 2} frequencies")
    return tuple(section)


def _eos_token_ids(folder: Path, top: "_Fields", text: "_Fields") -> tuple[int, ...]:
    """Ids that end generation: the first of generation_config.json, config.json, its text part that names any."""
    sources = [top, text]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.insert(0, _Fields(read_json(generation, ConfigError), str(generation)))
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is None or not ids:
            continue
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(f"{source.where}: eos_token_id must be an id or a list of ids, not {value!r}")
        return tuple(dict.fromkeys(ids))
    return ()


def _dtype(top: "_Fields", text: "_Fields") -> torch.dtype | None:
    for fields in (top, text):
        for key in ("dtype", "torch_dtype"):
            name = fields.get(key)
            if name is None or name == "auto":
                continue
            if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
                raise ConfigError(f"{fields.where}: {key} {name!r} is not supported; supported are {', '.join(DTYPES)}")
            return DTYPES[name.removeprefix("torch.")]
    return None


def _image_token_id(top: "_Fields", family_name: str) -> int | None:
    if family_name == "gemma3":
        return top.optional_id("image_token_index", top.optional_id("image_token_id", 262144))
    if family_name == "qwen3_vl":
        return top.optional_id("image_token_id", 151655)
    return None


def _vision(top: "_Fields", family: Family, hidden_size: int) -> VisionConfig | None:
    if family.vision is None or (family.vision == "siglip" and top.get("vision_config") is None):
        return None
    v = top.nested("vision_config")
    if family.vision == "siglip":
        config = VisionConfig(
            kind="siglip", depth=v.count("num_hidden_layers", 12, most=MAX_LAYERS), hidden_size=v.count("hidden_size", 768),
            intermediate_size=v.count("intermediate_size", 3072), num_heads=v.count("num_attention_heads", 12),
            patch_size=v.count("patch_size", 16), in_channels=v.count("num_channels", 3), out_hidden_size=hidden_size,
            hidden_act=v.text("hidden_act", "gelu_pytorch_tanh"), layer_norm_eps=v.number("layer_norm_eps", 1e-6),
            image_size=v.count("image_size", 224), tokens_per_image=top.count("mm_tokens_per_image", 256))
        side, tokens = config.image_size // config.patch_size, math.isqrt(config.tokens_per_image)
        if tokens * tokens != config.tokens_per_image or tokens > side or side % tokens:
            raise ConfigError(f"{top.where}: mm_tokens_per_image {config.tokens_per_image} must be a square whose side "
                              f"divides {side}, the patches on an image's side")
    else:
        config = VisionConfig(
            kind="qwen3_vl", depth=v.count("depth", 27, most=MAX_LAYERS), hidden_size=v.count("hidden_size", 1152),
            intermediate_size=v.count("intermediate_size", 4304), num_heads=v.count("num_heads", 16),
            patch_size=v.count("patch_size", 16), in_channels=v.count("in_channels", 3),
            out_hidden_size=v.count("out_hidden_size", 3584), hidden_act=v.text("hidden_act", "gelu_pytorch_tanh"),
            temporal_patch_size=v.count("temporal_patch_size", 2), spatial_merge_size=v.count("spatial_merge_size", 2),
            num_position_embeddings=v.count("num_position_embeddings", 2304),
            deepstack_indexes=v.indexes("deepstack_visual_indexes", (8, 16, 24)))
        if config.out_hidden_size != hidden_size:
            raise ConfigError(f"{v.where}: out_hidden_size {config.out_hidden_size} must equal the text hidden_size {hidden_size}")
        if math.isqrt(config.num_position_embeddings) ** 2 != config.num_position_embeddings:
            raise ConfigError(f"{v.where}: num_position_embeddings {config.num_position_embeddings} is not a square")
        if any(i >= config.depth for i in config.deepstack_indexes):
            raise ConfigError(f"{v.where}: deepstack_visual_indexes {list(config.deepstack_indexes)} exceed depth {config.depth}")
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(f"{v.where}: activation {config.hidden_act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if config.hidden_size % config.num_heads:
        raise ConfigError(f"{v.where}: hidden_size {config.hidden_size} is not a multiple of its {config.num_heads} heads")
    return config


def _sliced_width(text: "_Fields", family: Family, hidden_size: int) -> int | None:
    if text.get(SLICED) is None:
        return None
    width = text.nested(SLICED).count("width")
    if family.gemma or family.vision or width > hidden_size or text.flag("tie_word_embeddings", False):
        raise ConfigError(f"{text.where}: {SLICED} is for text models of Llama, Mistral and Qwen with a head of its own and a width of at "
                          f"most hidden_size {hidden_size}")
    return width


class _Fields:
    """Typed access to a JSON object. Null counts as absent; a wrong type or range is a ConfigError naming the field."""

    REQUIRED = object()

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def get(self, key: str):
        return self.values.get(key)

    def _typed(self, key, default, test, what):
        value = self.values.get(key)
        if value is None:
            if default is self.REQUIRED or default is None and what == "a positive whole number":
                raise ConfigError(f"{self.where}: {key} is missing")
            return default
        if not test(value):
            shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
            raise ConfigError(f"{self.where}: {key} must be {what}, not {shown}")
        return value

    def count(self, key: str, default: int | None = None, most: int = 2**31) -> int:
        """A size: 1 to `most`. No default = required."""
        value = self._typed(key, default, lambda v: type(v) is int and 0 < v <= 2**31, "a positive whole number")
        if value > most:
            raise ConfigError(f"{self.where}: {key} {value} is more than any model has (at most {most})")
        return value

    def integer(self, key: str, default: int) -> int:
        return self._typed(key, default, lambda v: type(v) is int and 0 <= v <= 2**31, "a whole number, zero or more")

    def number(self, key: str, default=REQUIRED) -> float | None:
        value = self._typed(key, default, lambda v: type(v) in (int, float) and 0 < v < 1e30,
                            "a positive finite number")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, lambda v: type(v) is bool, "true or false")

    def text(self, key: str, default=REQUIRED) -> str:
        return self._typed(key, default, lambda v: type(v) is str, "a string")

    def optional_id(self, key: str, default: int | None = None) -> int | None:
        value = self.values.get(key)
        value = value[0] if isinstance(value, list) and value else value  # some configs list their BOS
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < 2**31:
            raise ConfigError(f"{self.where}: {key} must be a token id, not {value!r}")
        return value

    def indexes(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._typed(key, default, lambda v: isinstance(v, (list, tuple)) and all(type(i) is int and i >= 0 for i in v),
                                 "a list of whole numbers"))

    def nested(self, key: str) -> "_Fields":
        value = self._typed(key, self.REQUIRED, lambda v: isinstance(v, dict), "an object")
        return _Fields(value, f"{self.where}: {key}")
