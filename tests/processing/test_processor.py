"""Whole processors, conversations and prompts with images, against the reference's: token ids and pixel values equal."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, Gemma3Processor, PreTrainedTokenizerFast, Qwen3VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import minipop
from minipop.errors import ConfigError, ImageError, PromptError, TokenizerError

CORPUS = ["What is in this picture?\n\nA red cat and a blue house.", "user\nmodel\n\n\nhello\n\n\n\nworld",
          "Compare the two:\n\n\n", "I typed < | start_of_image > < soft_token > by hand"] * 5

QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
QWEN_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

GEMMA_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
                  "<image_soft_token>"]
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>").replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>").replace("assistant", "model")
GEMMA_TEMPLATE = "{{ bos_token }}" + GEMMA_TEMPLATE


class QwenReference(Qwen3VLProcessor):
    def check_argument_for_proper_class(self, *_):
        """The reference insists on a video processor, which needs torchvision."""


def write_json(path, value):
    path.write_text(json.dumps(value))


def make_qwen(folder):
    """A tiny Qwen3-VL folder without weights, and the reference processor of the same tokenizer and settings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=QWEN_SPECIALS, show_progress=False,
                                                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        chat_template=QWEN_TEMPLATE)
    images = Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 512, "longest_edge": 16384}, image_mean=[0.5] * 3,
                                      image_std=[0.5] * 3)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    write_json(folder / "config.json", {
        "model_type": "qwen3_vl", "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16,
                          "patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
                        "intermediate_size": 16, "vocab_size": len(tokenizer), "rope_scaling": {"mrope_section": [4, 2, 2]}}})
    return QwenReference(image_processor=images, tokenizer=tokenizer, chat_template=QWEN_TEMPLATE)


def make_gemma(folder):
    """The same for Gemma-3: 4 tokens an image; a run of line breaks is one token, as in the real vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, special_tokens=GEMMA_SPECIALS, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", tokenizer.token_to_id("<bos>"))])
    assert len(tokenizer.encode("\n\n\n", add_special_tokens=False).ids) == 1
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        chat_template=GEMMA_TEMPLATE, extra_special_tokens={
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"})
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    write_json(folder / "config.json", {
        "model_type": "gemma3", "mm_tokens_per_image": 4,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        "vision_config": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
                          "intermediate_size": 16},
        "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                        "head_dim": 16, "intermediate_size": 16, "vocab_size": len(tokenizer)}})
    return Gemma3Processor(image_processor=images, tokenizer=tokenizer, chat_template=GEMMA_TEMPLATE, image_seq_length=4)


MAKERS = {"qwen": make_qwen, "gemma": make_gemma}
TOKENIZE = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
PLACEHOLDERS = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>"}


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def pair(request, tmp_path_factory):
    """(family, minipop's processor, the reference's)"""
    folder = tmp_path_factory.mktemp(request.param)
    reference = MAKERS[request.param](folder)
    return request.param, minipop.load_processor(folder), reference


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_part(*size):
    return {"type": "image", "image": noise(*size)}


def text_part(text):
    return {"type": "text", "text": text}


def assert_equal(inputs, reference):
    assert inputs.token_ids.tolist() == reference["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        ours, theirs = getattr(inputs, name), reference.get(name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


CONTENTS = {
    "a string": "What is in this picture?",
    "text only": [text_part("What is in "), text_part("this picture?")],
    "first": [image_part(40, 20), text_part("What is it?")],
    "last": [text_part("What is it?\n"), image_part(20, 40)],
    "middle": [text_part("This: "), image_part(64, 64), text_part("\nis what?")],
    "alone": [image_part(33, 65)],
    "two": [text_part("Compare"), image_part(10, 90), text_part(" and "), image_part(50, 50), text_part("!")],
    "two in a row": [image_part(16, 16), image_part(100, 30), text_part("\n\nWhich?")],
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_conversation_equals_the_reference(pair, content):
    _, processor, reference = pair
    messages = [{"role": "user", "content": content}]
    assert_equal(processor(messages), reference.apply_chat_template(messages, **TOKENIZE))


def test_a_long_conversation_equals_the_reference(pair):
    _, processor, reference = pair
    messages = [{"role": "user", "content": CONTENTS["two"]}, {"role": "assistant", "content": "The first."},
                {"role": "user", "content": "Why?"}, {"role": "assistant", "content": [text_part("It is red.")]},
                {"role": "user", "content": CONTENTS["last"]}]
    assert_equal(processor(messages), reference.apply_chat_template(messages, **TOKENIZE))


@pytest.mark.parametrize("text, sizes", [
    ("What is it?", []), ("@What is it?", [(40, 20)]), ("What\n@", [(40, 20)]), ("a @ b", [(20, 40)]), ("@", [(1, 1)]),
    ("@ and\n@\n\nhello", [(64, 64), (10, 90)]), ("@@", [(30, 30), (40, 40)])])
def test_a_prompt_equals_the_reference(pair, text, sizes):
    family, processor, reference = pair
    text, images = text.replace("@", PLACEHOLDERS[family]), [noise(*size) for size in sizes]
    assert_equal(processor(text, images), reference(text=text, images=images or None, return_tensors="pt"))
    if len(images) == 1:  # a single image need not be in a list
        assert_equal(processor(text, images[0]), reference(text=text, images=images, return_tensors="pt"))


def test_a_prompt_has_one_bos(pair):
    family, processor, reference = pair
    bos = reference.tokenizer.bos_token_id
    for text in ("hello", "<bos>hello"):
        assert processor(text).token_ids.tolist().count(bos) == (1 if family == "gemma" else 0)


def test_images_may_be_paths_bytes_and_files(pair, tmp_path):
    _, processor, _ = pair
    picture, path = noise(40, 20), tmp_path / "picture.png"
    picture.save(path)
    expected = processor([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    for source in (path, str(path), path.read_bytes(), open(path, "rb")):
        inputs = processor([{"role": "user", "content": [{"type": "image", "image": source}]}])
        assert torch.equal(inputs.token_ids, expected.token_ids) and torch.equal(inputs.pixel_values, expected.pixel_values)
        if hasattr(source, "close"):
            source.close()


def test_qwen_counts_tokens_by_size_and_gemma_does_not(pair):
    family, processor, _ = pair
    inputs = processor([{"role": "user", "content": CONTENTS["two"]}])
    count = (inputs.token_ids == processor.image_token_id).sum().item()
    if family == "qwen":
        assert inputs.image_grid_thw.tolist() == [[1, 12, 2], [1, 6, 6]]
        assert count == 12 * 2 // 4 + 6 * 6 // 4
        assert inputs.pixel_values.shape == (12 * 2 + 6 * 6, 3 * 2 * 8 * 8)
    else:
        assert count == 2 * 4 and inputs.pixel_values.shape == (2, 3, 28, 28)


def test_the_callers_messages_are_not_changed(pair):
    _, processor, _ = pair
    part = image_part(20, 20)
    messages = [{"role": "user", "content": [part, text_part("hi")]}]
    processor(messages)
    assert messages == [{"role": "user", "content": [part, text_part("hi")]}] and part["image"].size == (20, 20)


# ---------------------------------------------------------------- placeholders


def test_a_placeholder_typed_by_the_user_stays_text(pair):
    family, processor, _ = pair
    typed = f"I typed {PLACEHOLDERS[family]} and {processor.image_processor.image_token} by hand"
    for content in ([image_part(40, 20), text_part(typed)], [text_part(typed), image_part(40, 20)]):
        inputs = processor([{"role": "user", "content": content}])
        clean = processor([{"role": "user", "content": [image_part(40, 20), text_part("x")]}])
        assert (inputs.token_ids == processor.image_token_id).sum() == (clean.token_ids == processor.image_token_id).sum()
        assert typed in processor.tokenizer.decode(inputs.token_ids.tolist(), skip_special=False)
    assert processor([{"role": "user", "content": typed}]).pixel_values is None


@pytest.mark.parametrize("places, images", [(0, 1), (1, 0), (2, 1), (1, 2), (0, 3)])
def test_placeholders_and_images_must_agree(pair, places, images):
    family, processor, _ = pair
    text = "hello " + PLACEHOLDERS[family] * places
    with pytest.raises(PromptError, match=f"{places} image placeholders? .*{images} images?$") as caught:
        processor(text, [noise(20, 20)] * images)
    assert "\n" not in str(caught.value)


def test_an_image_token_written_into_a_prompt_is_refused(tmp_path):
    make_gemma(tmp_path)
    processor = minipop.load_processor(tmp_path)
    with pytest.raises(PromptError, match="3 image tokens .* its images make 0: mark each image by one <start_of_image>"):
        processor("<image_soft_token>" * 3)
    with pytest.raises(PromptError, match="5 image tokens .* its images make 4"):
        processor("<image_soft_token><start_of_image>", noise(20, 20))


def test_expand_leaves_guarded_placeholders_alone(pair):
    family, processor, _ = pair
    typed = PLACEHOLDERS[family] + processor.image_processor.image_token
    rendered = processor.tokenizer.render_chat([{"role": "user", "content": [text_part(typed), {"type": "image"}]}])
    rendered, pixel_values, grid = processor.expand(rendered, [noise(40, 20)])
    assert rendered.count(processor.image_processor.image_token) == {"qwen": 2, "gemma": 4}[family]
    assert processor.tokenizer.encode_rendered(rendered).count(processor.image_token_id) == {"qwen": 2, "gemma": 4}[family]
    assert len(pixel_values) == {"qwen": 8, "gemma": 1}[family] and (grid is None) == (family == "gemma")
    assert processor.expand("no images", None) == ("no images", None, None)
    assert processor.expand("no images", []) == ("no images", None, None)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("part", [{"type": "video", "video": "a.mp4"}, {"type": "image"}, {"type": "image", "image": None},
                                  {"type": "text"}, {"type": "text", "text": 3}, {"text": "no type"}, "a string", None])
def test_parts_that_are_neither_text_nor_image(pair, part):
    with pytest.raises((PromptError, TokenizerError), match="message 0: content: part 1: ") as caught:
        pair[1]([{"role": "user", "content": [text_part("hi"), part]}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 3, {"role": "user", "content": "hi"}])
def test_prompts_of_another_kind(pair, prompt):
    with pytest.raises(PromptError, match="a prompt is a string or a list of messages"):
        pair[1](prompt)


def test_images_beside_a_conversation(pair):
    with pytest.raises(PromptError, match="belong into its messages"):
        pair[1]([{"role": "user", "content": "hi"}], [noise(4, 4)])


def test_a_bad_image_is_named(pair):
    with pytest.raises(ImageError, match="there is no image file 'gone.png'"):
        pair[1]([{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}])


def edit(path, **changes):
    write_json(path, {**json.loads(path.read_text()), **changes})


def test_a_text_only_checkpoint_has_no_processor(tmp_path):
    make_gemma(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    for changes in ({"model_type": "gemma3_text", **text}, {"model_type": "llama", **text},
                    {"model_type": "gemma3", "vision_config": None}):
        edit(tmp_path / "config.json", **changes)
        with pytest.raises(ConfigError, match="has no images: it is a text-only checkpoint") as caught:
            minipop.load_processor(tmp_path)
        assert str(tmp_path) in str(caught.value)


def test_tokenizer_and_model_must_agree_on_the_image_token(tmp_path):
    make_qwen(tmp_path)
    edit(tmp_path / "config.json", image_token_id=7)
    with pytest.raises(ConfigError, match=re.escape("encodes <|image_pad|> as [5], but the model's image token has the id 7")):
        minipop.load_processor(tmp_path)


def test_image_settings_and_model_must_agree(tmp_path):
    make_qwen(tmp_path)
    edit(tmp_path / "preprocessor_config.json", patch_size=16)
    with pytest.raises(ConfigError, match="patch_size is 16, but the model's vision encoder has 8"):
        minipop.load_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="has no preprocessor_config.json"):
        minipop.load_processor(tmp_path)


# ---------------------------------------------------------------- the demo checkpoint

DEMO = Path(__file__).parents[2] / "weights" / "tiny-qwen3-vl"


@pytest.mark.skipif(not (DEMO / "config.json").exists(), reason="the demo checkpoint is not there")
def test_the_demo_checkpoint_equals_the_reference():
    images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    template = (DEMO / "chat_template.jinja").read_text()
    reference = QwenReference(image_processor=images, tokenizer=tokenizer, chat_template=template)
    processor = minipop.load_processor(DEMO)
    for content in CONTENTS.values():
        messages = [{"role": "user", "content": content}]
        assert_equal(processor(messages), reference.apply_chat_template(messages, **TOKENIZE))
