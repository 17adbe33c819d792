"""Damaged and hostile files: whatever the bytes are, they are read correctly or refused with a CheckpointError."""

import json
import struct
import tempfile
from pathlib import Path

import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipop.checkpoint import DTYPES, Checkpoint
from minipop.files import MAX_JSON_DEPTH, read_json
from minipop.saving import save_tensors
from minipop.errors import CheckpointError

BOUNDED = settings(max_examples=100, deadline=None, derandomize=True, database=None)

NAMES = st.sampled_from(["a", "b", "c", "__metadata__", "é", "\ud800", ""])
NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, 1.0, True, None, "2"]))
DTYPE_NAMES = st.one_of(st.sampled_from([*DTYPES, "F4", "f32", ""]), NUMBERS)
SHAPES = st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS)
JSON_VALUES = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=3), st.floats()),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(NAMES, children, max_size=3), max_leaves=8,
)
ENTRIES = st.one_of(
    st.fixed_dictionaries({"dtype": DTYPE_NAMES, "shape": SHAPES, "data_offsets": st.lists(NUMBERS, max_size=3)}),
    st.builds(lambda begin, n: {"dtype": "U8", "shape": [n], "data_offsets": [begin, begin + n]},  # likely to be right
              st.integers(0, 8), st.integers(0, 8)),
    JSON_VALUES,
)
SHARD_NAMES = st.text(alphabet="a./\\:\0\n", max_size=8).map(lambda text: text + ".safetensors")
INDEXES = st.one_of(
    st.fixed_dictionaries({"weight_map": st.dictionaries(NAMES, st.one_of(SHARD_NAMES, JSON_VALUES), max_size=3)}),
    st.sets(st.sampled_from("abcd"), min_size=2).map(lambda names: {"weight_map": dict.fromkeys(names, "a.safetensors")}),
    st.fixed_dictionaries({"weight_map": JSON_VALUES}),
    JSON_VALUES,
)
FRAGMENTS = st.one_of(st.binary(max_size=3), st.sampled_from([b'"', b"0", b"9", b"-", b"[", b"}", b",", b"e", b"\\u", b"NaN"]))


def examine(content: bytes) -> Checkpoint | None:
    """Open a file with this content. If it is accepted, so does the reference reader, and both see the same tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError as error:
            assert "model.safetensors" in str(error) and "\n" not in str(error) and len(str(error)) < 2000
            return None
        reference = dict(safetensors.deserialize(content))
        assert set(reference) == set(checkpoint)
        for name in checkpoint:
            tensor = checkpoint.tensor(name)
            assert list(tensor.shape) == reference[name]["shape"] and tensor.dtype == DTYPES[reference[name]["dtype"]]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(reference[name]["data"])
        return checkpoint


def good_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0)}
        save_tensors(path, tensors, {"k": "v"})
        return path.read_bytes()


GOOD = good_file()


def test_the_undamaged_file_is_accepted():
    assert examine(GOOD) is not None


@BOUNDED
@given(st.data())
def test_damaged_bytes(data):
    """Bytes overwritten, inserted and cut at random, mostly in the header."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(FRAGMENTS)
    examine(bytes(content))


@BOUNDED
@given(st.integers(0, len(GOOD) - 1))
def test_truncated_files_are_never_accepted(length):
    assert examine(GOOD[:length]) is None


@BOUNDED
@given(st.binary(max_size=64), st.sampled_from([0, 1, 2, 8, 63, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1]))
def test_random_bytes_behind_any_length(content, length):
    examine(struct.pack("<Q", length) + content)
    examine(content)


@BOUNDED
@given(st.lists(st.tuples(NAMES, ENTRIES), max_size=4), st.binary(max_size=16), st.integers(0, 3))
def test_well_formed_headers_of_any_meaning(entries, data, padding):
    """Names may repeat: the header is put together as text."""
    raw = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}" + " " * padding
    examine(struct.pack("<Q", len(raw.encode())) + raw.encode() + data)


@BOUNDED
@given(st.lists(st.integers(0, 6), max_size=5), st.booleans())
def test_tensors_that_tile_the_data_are_accepted(sizes, backwards):
    """The other direction: a legal file is not refused, in whatever order its tensors are listed."""
    header, at = {}, 0
    for number, size in enumerate(sizes):
        header[str(number)] = {"dtype": "U8", "shape": [size, 1], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(dict(reversed(header.items()) if backwards else header.items())).encode()
    checkpoint = examine(struct.pack("<Q", len(raw)) + raw + bytes(range(at)))
    assert checkpoint is not None and checkpoint.nbytes == at


@BOUNDED
@given(INDEXES)
def test_any_index(index):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
        (Path(folder) / "a.safetensors").write_bytes(GOOD)
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError as error:
            assert folder in str(error) and "\n" not in str(error) and len(str(error)) < 3000
        else:
            assert index["weight_map"] == dict.fromkeys(checkpoint, "a.safetensors")


@BOUNDED
@given(st.one_of(st.binary(max_size=40), JSON_VALUES.map(lambda value: json.dumps(value).encode()),
                 st.text(alphabet='{}[]",:0\\u d8e', max_size=40).map(str.encode),
                 st.integers(1, 3000).map(lambda depth: b'{"a":' * depth + b"1" + b"}" * depth)))
def test_any_json(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(raw)
        try:
            value = read_json(path)
        except CheckpointError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert value == json.loads(raw) and raw.count(b"{") <= max(MAX_JSON_DEPTH, 40)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
