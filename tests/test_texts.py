"""Text to calibrate with, and how it is cut."""

import argparse

import pytest

from minipop import PromptError
from minipop.texts import MODULES, default_text, read_text, text_sequences


class Characters:
    """A tokenizer with an id a character, and 0 for the BOS."""

    def encode(self, text, add_bos=True):
        return [0] * add_bos + [ord(character) for character in text]


TEXTS = ["".join(map(chr, range(1, 60))), "".join(map(chr, range(60, 100)))]  # 99 tokens


def test_sequences_do_not_overlap():
    whole = text_sequences(Characters(), TEXTS, 100, 11, 0)
    assert len(whole) == 9 and all(ids[0] == 0 and len(ids) == 11 for ids in whole)  # BOS and ten others
    assert sorted(token for ids in whole for token in ids[1:]) == list(range(1, 91))
    some = text_sequences(Characters(), TEXTS, 4, 11, 0)
    assert len({tuple(ids) for ids in some}) == 4 and all(ids in whole for ids in some)
    assert some == text_sequences(Characters(), TEXTS, 4, 11, 0) != text_sequences(Characters(), TEXTS, 4, 11, 1)


@pytest.mark.parametrize("length", [1, 101])
def test_too_little_text(length):
    with pytest.raises(PromptError, match=f"the text has 99 tokens, too few for one sequence of {length}"):
        text_sequences(Characters(), TEXTS, 4, length, 0)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "text").write_bytes("\ufeffd\u00e9j\u00e0 vu".encode())
    assert read_text(tmp_path / "text") == "d\u00e9j\u00e0 vu"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("binary", "not UTF-8 text"), ("none", "no such file"), (".", "not a regular file")):
        with pytest.raises(PromptError, match=reason):
            read_text(tmp_path / name)


def test_the_built_in_text_is_long_and_not_what_perplexity_is_measured_on():
    texts = default_text()
    assert sum(map(len, texts)) > 128 * 2048 * 4 and "argparse" not in MODULES
    assert not any(argparse.__doc__[:200] in text for text in texts)
