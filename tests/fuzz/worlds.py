"""Small complete checkpoints, made without any other library: weights in two shards, index, config, tokenizer, image settings."""

import atexit
import copy
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minipop.saving import save_checkpoint
from minipop.models.names import Sources, expand
from minipop.vision import qwen, siglip
from tests.tiny import CONFIGS, tiny_model

LAYERS = 3
SPECIALS = ("<bos>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<start_of_image>",
            "<image_soft_token>", "<end_of_image>")
VOCAB = 256 + len(SPECIALS) + 3  # padded: the last ids are in the model's vocabulary only
IDS = {token: 256 + i for i, token in enumerate(SPECIALS)}
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- 'PLACEHOLDER' }}{%- else %}{{- part['text'] }}
{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PLACEHOLDERS = {"qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_vl")


@dataclass(frozen=True)
class World:
    """A checkpoint on disk, not to be changed, and what its files hold."""

    folder: Path
    files: dict[str, bytes]

    def json(self, name: str):
        return json.loads(self.files[name])


@functools.cache
def world(family: str) -> World:
    """The checkpoint of a family; deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="minipop-world-")) / family
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    tensors = tensors_of(tiny_model(family, num_layers=LAYERS, layer_windows=_windows(family), vocab_size=VOCAB))
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_checkpoint(folder, tensors, config(family), extra_files=_texts(family), max_shard_bytes=size // 2 + 4096)
    return World(folder, {path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def config(family: str) -> dict:
    """config.json of a family's world."""
    values = copy.deepcopy(CONFIGS[family])
    text = values.get("text_config", values)
    text.update(vocab_size=VOCAB, num_hidden_layers=LAYERS, eos_token_id=IDS["<|im_end|>"], tie_word_embeddings=family != "llama",
                max_position_embeddings=512)
    if family == "qwen3_vl":
        values |= {"image_token_id": IDS["<|image_pad|>"], "vision_start_token_id": IDS["<|vision_start|>"]}
    if family == "gemma3":
        values["image_token_index"] = IDS["<image_soft_token>"]
    return values


def byte_tokenizer() -> Tokenizer:
    """One token a byte, no merges: every text has exactly one spelling."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def _windows(family: str) -> tuple[int | None, ...]:
    return (5, 5, None) if family == "gemma3" else (None,) * LAYERS


def _texts(family: str) -> dict[str, str]:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                "chat_template": TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS.get(family, ""))}
    if family == "llama":
        settings |= {"bos_token": "<bos>", "add_bos_token": True}
    texts = {"tokenizer.json": byte_tokenizer().to_str(), "tokenizer_config.json": json.dumps(settings),
             "generation_config.json": json.dumps({"eos_token_id": [IDS["<|im_end|>"]], "do_sample": False})}
    images = {"qwen3_vl": {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024},
              "gemma3": {"size": {"height": 16, "width": 16}}}
    if family in images:
        texts["preprocessor_config.json"] = json.dumps(images[family])
    return texts


def tensors_of(model) -> dict[str, Tensor]:
    """A model's weights by the names checkpoints give them: the rename tables, read backwards."""
    config = model.config
    prefix = "model." if config.vision is None else "model.language_model."
    sources: Sources = expand(model.weights, prefix, i=config.num_layers)
    if config.family == "qwen3_vl":
        sources |= expand(qwen.WEIGHTS, "model.visual.", "vision.", i=config.vision.depth, t=len(config.vision.deepstack_indexes))
    elif config.vision is not None:
        sources |= expand(siglip.WEIGHTS, "model.vision_tower.vision_model.", "vision.", i=config.vision.depth)
        sources |= expand(siglip.PROJECTOR_WEIGHTS, "model.multi_modal_projector.", "vision.")
    if not config.tie_word_embeddings:
        sources["head.weight"] = ("lm_head.weight",)
    parameters, tensors = dict(model.named_parameters()), {}
    for ours, theirs in sources.items():
        if ours not in parameters:
            continue  # a bias or a norm that this family does not have
        tensor = parameters[ours].detach()
        if len(theirs) == 3 and ours.startswith("layers."):
            parts = tensor.split([config.queries_width, config.kv_width, config.kv_width])
        else:
            parts = tensor.chunk(len(theirs))
        tensors |= {name: part.clone() for name, part in zip(theirs, parts, strict=True)}
    return tensors


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """A new folder with these files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
