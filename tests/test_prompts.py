"""The prompts that importance and drift are measured with."""

from pathlib import Path

import pytest
import torch

from minipop import PromptError, load_processor
from minipop.prompts import BUILT_IN, PICTURES, drawn_prompt, measuring_prompts, paragraphs

TINY_VL = Path(__file__).parent.parent / "weights" / "tiny-qwen3-vl"


class Templated:
    has_chat_template = True


class Plain:
    has_chat_template = False


def test_built_in_texts():
    assert len(set(BUILT_IN)) == 40 and all(text == text.strip() for text in BUILT_IN)
    prompts = measuring_prompts(None, Templated, pictures=False)
    assert prompts[0].content == [{"role": "user", "content": BUILT_IN[0]}] and len({p.digest for p in prompts}) == 40
    assert [p.content for p in measuring_prompts(None, Plain, pictures=False)] == list(BUILT_IN)


def test_built_in_pictures():
    processor = load_processor(TINY_VL)
    prompts = measuring_prompts(None, processor.tokenizer, pictures=True)
    assert len({p.digest for p in prompts}) == PICTURES == len(prompts)
    inputs = [p.inputs(processor.tokenizer, processor) for p in prompts]
    assert len({tuple(i.pixel_values.flatten().tolist()) for i in inputs}) == PICTURES
    again = drawn_prompt(7).inputs(processor.tokenizer, processor)
    assert torch.equal(again.pixel_values, inputs[7].pixel_values) and torch.equal(again.token_ids, inputs[7].token_ids)


@pytest.mark.parametrize("text, expected", [
    ("one\n\ntwo", ["one", "two"]), ("\n \n a\nb \n\t\n\n\nc\n", ["a\nb", "c"]), ("\ufeffone\r\n\r\ntwo\r\n", ["one", "two"])])
def test_paragraphs(tmp_path, text, expected):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert paragraphs(str(tmp_path / "a.txt")) == expected


@pytest.mark.parametrize("name, data, message", [
    ("a.txt", b"", "no text in it"), ("a.txt", b" \n\t\n", "no text in it"), ("a.txt", b"a\xff", "not UTF-8"),
    ("a.jsonl", b"", "no prompts in it"), ("a.jsonl", b"{}", "a.jsonl line 1")])
def test_refuses(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PromptError, match=message):
        measuring_prompts(str(tmp_path / name), Plain, pictures=False)
    with pytest.raises(PromptError, match="no such file"):
        measuring_prompts(str(tmp_path / "nowhere.txt"), Plain, pictures=False)
