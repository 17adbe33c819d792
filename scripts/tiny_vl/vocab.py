"""The tokenizer of the tiny Qwen3-VL: a byte-level BPE of a few hundred entries and a ChatML template.

Merges are learnt from the questions and the closed answers only. Upper-case letters and digits are never merged, so what a
picture says is read out one character at a time, and a word never seen in training costs the model nothing new.
"""
from __future__ import annotations

import json
import random
from pathlib import Path

from . import scenes

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' or 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('this model reads text and images only') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus(n: int = 6000, seed: int = 0) -> list[str]:
    """Questions and answers without what is read out, and the words of the chat template."""
    rng, lines = random.Random(f"corpus {seed}"), ["system\nuser\nassistant\n"] * 50
    while len(lines) < n:
        scene = scenes.make_scene(rng, text=rng.random() < 0.2)
        asked = scenes.ask(rng, scene)
        if asked:
            readable = [item.text for item in scene.texts]
            answer = "" if asked.answer in readable else asked.answer
            for text in readable:
                answer = answer.replace(text, "")
            lines += [asked.question, asked.question[0].lower() + asked.question[1:], "\n" + answer]
    return lines


def train_tokenizer(size: int = 560):
    """A `tokenizers.Tokenizer` of at most `size` entries, the specials last; the same every time."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size - len(SPECIALS), show_progress=False, min_frequency=2,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja as Hugging Face lays them out."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor",
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "unk_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "additional_special_tokens": [t for t in SPECIALS if t not in ("<|endoftext|>",)],
        "added_tokens_decoder": {str(tokenizer.token_to_id(t)): {"content": t, "special": True, "normalized": False,
                                                                 "lstrip": False, "rstrip": False, "single_word": False}
                                 for t in SPECIALS},
        "clean_up_tokenization_spaces": False, "model_max_length": 1024, "split_special_tokens": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
