"""Checkpoints: what is read is exactly what the file says, and whatever is wrong with a file is named in one line."""

import contextlib
import errno
import functools
import json
import math
import os
import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minipop import checkpoint as module
from minipop import files
from minipop.checkpoint import (
    DTYPES,
    Checkpoint,
    detect_quantization,
    load_parameters,
    resolve_checkpoint,
)
from minipop.errors import CheckpointError, ConfigError, MinipopError
from minipop.files import read_json
from minipop.measuring import peak_memory
from minipop.saving import save_checkpoint, save_tensors


@contextlib.contextmanager
def fails(*words: str, error: type[Exception] = CheckpointError):
    """Expect an error whose message is one line of bearable length and holds all the words."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message and len(message) < 3000


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file by hand: `header` as JSON, or as it is if it is bytes; `length` instead of its true length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def random_tensors(dtypes=tuple(DTYPES.values()), seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes, from random bits, with odd, empty and scalar shapes."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for dtype in dtypes:
        for shape in [(3, 5), (), (0,), (4, 0, 2), (1, 1, 7)]:
            data = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,),
                                 generator=generator, dtype=torch.uint8)
            tensor = data.view(dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
            tensors[f"{dtype}.{'x'.join(map(str, shape))}"] = tensor
    return tensors


def save_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], **extra_index: str) -> Path:
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} | extra_index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


TWO_SHARDS = {"model-00001-of-00002.safetensors": {"a": torch.arange(4.0), "b": torch.ones(2, 3)},
              "model-00002-of-00002.safetensors": {"c": torch.full((5,), 7.0)}}


# ---- headers -------------------------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_equals_the_reference_reader(tmp_path):
    save_file(random_tensors(), tmp_path / "model.safetensors", {"format": "pt", "note": "é"})
    reference = load_file(tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == set(checkpoint) == set(reference) and len(checkpoint) == len(reference)
        for name, tensor in reference.items():
            assert name in checkpoint and same(checkpoint.tensor(name), tensor)
            assert checkpoint.shape(name) == tuple(tensor.shape) and checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in reference.values())
        assert checkpoint.metadata == {"format": "pt", "note": "é"}


def test_header_without_padding_puts_tensors_at_odd_addresses(tmp_path):
    """A header of any length is legal; a tensor at an address its dtype does not allow is copied, and its values are right."""
    values = torch.tensor([1.5, -2.0, 3.25])
    for pad in range(8):
        raw = json.dumps({"w": entry(shape=[3], offsets=[0, 12])}).encode() + b" " * pad
        checkpoint = Checkpoint.open_file(write(tmp_path / f"{pad}.safetensors", raw, bits(values)))
        tensor = checkpoint.tensor("w")
        assert torch.equal(tensor, values) and tensor.data_ptr() % 4 == 0


@pytest.mark.filterwarnings("error")
def test_reading_gives_no_warning_and_writing_into_a_tensor_leaves_the_file_alone(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.arange(6.0)})
    before = path.read_bytes()
    checkpoint = Checkpoint.open_file(path)
    checkpoint.tensor("w").zero_()
    del checkpoint
    assert path.read_bytes() == before


def test_tensors_outlive_the_closed_checkpoint(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"w": torch.arange(6.0)})
    with Checkpoint.open_file(tmp_path / "x.safetensors") as checkpoint:
        tensor = checkpoint.tensor("w")
    assert torch.equal(tensor, torch.arange(6.0))
    with fails("x.safetensors", "closed", "'w'"):
        checkpoint.tensor("w")
    with fails("no tensor 'nope'"):
        checkpoint.shape("nope")


EIGHT = b"\0" * 8
BAD_HEADERS = {
    "length far beyond the file": (b"{}", b"123456", 2**63 - 1, ["header claims", "100000000"]),
    "length over the limit": (b"{}", b"", 100_000_001, ["header claims 100000001"]),
    "length beyond the file": (b"{}", b"", 3, ["truncated", "header alone needs 11", "10 bytes"]),
    "length zero": (b"", EIGHT, None, ["does not begin with '{'"]),
    "leading blank": (b' {"a": 1}', b"", None, ["does not begin with '{'"]),
    "a list": (b"[]", b"", None, ["does not begin with '{'"]),
    "cut JSON": (b'{"a": ', b"", None, ["header: not valid JSON", "Expecting value"]),
    "two objects": (b"{} {}", b"", None, ["not valid JSON", "Extra data"]),
    "not UTF-8": (b'{"\xff": 1}', b"", None, ["not UTF-8"]),
    "NaN": (b'{"a": NaN}', b"", None, ["NaN is not a JSON number"]),
    "deep": (b'{"a": ' + b"[" * 200_000, b"", None, ["nested too deep"]),
    "long integer": (b'{"a": ' + b"9" * 10_000 + b"}", b"", None, ["not valid JSON"]),
    "half a surrogate pair": (b'{"\\ud800": 1}', b"", None, ["surrogate"]),
    "same tensor twice": (b'{"a": {}, "a": {}}', b"", None, ["'a' occurs twice"]),
    "same field twice": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', b"", None, ["'dtype' occurs twice"]),
    "metadata not strings": ({"__metadata__": {"a": 1}}, b"", None, ["__metadata__", "strings"]),
    "metadata a list": ({"__metadata__": ["a"]}, b"", None, ["__metadata__"]),
    "tensor not an object": ({"w": [1]}, b"", None, ["'w'", "must have exactly dtype, shape and data_offsets"]),
    "field missing": ({"w": {"dtype": "F32", "shape": [2]}}, EIGHT, None, ["'w'", "must have exactly"]),
    "field unknown": ({"w": entry(stride=[1])}, EIGHT, None, ["'w'", "must have exactly"]),
    "dtype unknown": ({"w": entry("F31")}, EIGHT, None, ["'w'", "dtype 'F31'", "not supported"]),
    "dtype not a string": ({"w": entry(["F32"])}, EIGHT, None, ["'w'", "dtype ['F32']"]),
    "dtype of less than a byte": ({"w": entry("F4", [16])}, EIGHT, None, ["dtype 'F4'", "not supported"]),
    "shape negative": ({"w": entry(shape=[-2])}, EIGHT, None, ["'w'", "shape [-2]"]),
    "shape a float": ({"w": entry(shape=[2.0])}, EIGHT, None, ["shape [2.0]"]),
    "shape a bool": ({"w": entry(shape=[2, True])}, EIGHT, None, ["shape [2, True]"]),
    "shape a number": ({"w": entry(shape=2)}, EIGHT, None, ["shape 2"]),
    "shape null": ({"w": entry(shape=None)}, EIGHT, None, ["shape None"]),
    "shape overflows": ({"w": entry(shape=[2**32, 2**32])}, EIGHT, None, ["product below 2**63"]),
    "empty shape overflows": ({"w": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}, b"", None, ["product below 2**63"]),
    "too many dimensions": ({"w": entry(shape=[1] * 65, offsets=[0, 4])}, EIGHT[:4], None, ["at most 64"]),
    "offsets backwards": ({"w": entry(offsets=[8, 0])}, EIGHT, None, ["'w'", "data_offsets [8, 0]", "begin <= end"]),
    "offsets negative": ({"w": entry(offsets=[-8, 0])}, EIGHT, None, ["data_offsets [-8, 0]"]),
    "three offsets": ({"w": entry(offsets=[0, 4, 8])}, EIGHT, None, ["data_offsets [0, 4, 8]"]),
    "offsets huge": ({"w": entry(offsets=[0, 10**4000])}, EIGHT, None, ["data_offsets [0, 1000"]),
    "size and shape differ": ({"w": entry(shape=[2, 2])}, EIGHT, None, ["'w'", "spans 8 bytes", "F32 [2, 2] needs 16"]),
    "overlap": ({"v": entry(), "w": entry(offsets=[4, 12])}, b"\0" * 12, None, ["'w'", "overlaps"]),
    "same place": ({"v": entry(), "w": entry()}, EIGHT, None, ["'w'", "overlaps"]),
    "hole": ({"v": entry(), "w": entry(offsets=[12, 20])}, b"\0" * 20, None, ["'w'", "hole"]),
    "hole at the start": ({"w": entry(offsets=[4, 12])}, b"\0" * 12, None, ["'w'", "hole"]),
    "truncated data": ({"w": entry()}, EIGHT[:7], None, ["truncated", "download it again"]),
    "trailing data": ({"w": entry()}, EIGHT + b"x", None, ["belong to no tensor"]),
    "data without tensors": ({}, EIGHT, None, ["belong to no tensor"]),
}


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_bad_header_is_refused(kind, tmp_path):
    header, data, length, words = BAD_HEADERS[kind]
    write(tmp_path / "model.safetensors", header, data, length)
    with fails("model.safetensors", *words):
        Checkpoint.open(tmp_path)


def test_names_from_a_hostile_header_are_shown_short_and_escaped(tmp_path):
    write(tmp_path / "model.safetensors", {"evil\n\x1b[31m" + "x" * 100_000: entry(shape=[3])}, EIGHT)
    with fails("'evil\\n\\x1b[31mxxx", "...") as caught:
        Checkpoint.open(tmp_path)
    assert "\x1b" not in str(caught.value)


def test_many_equal_keys_are_found_in_linear_time(tmp_path):
    keys = ",".join(f'"{i}":1' for i in range(100_000))
    write(tmp_path / "model.safetensors", ("{" + keys + ',"99999":1}').encode())
    with fails("'99999' occurs twice"):
        Checkpoint.open(tmp_path)


def test_a_real_gguf_or_text_file_with_the_wrong_name(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 100)
    with fails("model.safetensors", "not a safetensors file"):
        Checkpoint.open(tmp_path)


# ---- files and folders ---------------------------------------------------------------------------------------------------------


def test_files_that_are_no_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    lfs_pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for content, words in [(b"", ["0 bytes", "too short"]), (b"1234567", ["7 bytes", "too short"]),
                           (lfs_pointer, ["Git LFS pointer", "git lfs pull"])]:
        path.write_bytes(content)
        with fails("model.safetensors", *words):
            Checkpoint.open(tmp_path)
    path.unlink()
    path.mkdir()
    with fails("model.safetensors", "not a regular file"):
        Checkpoint.open(tmp_path)
    path.rmdir()
    path.symlink_to("../blobs/gone")
    with fails("model.safetensors", "link to ../blobs/gone", "does not exist"):
        Checkpoint.open(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with fails("model.safetensors", "not a regular file"):  # and it does not wait for someone to write
        Checkpoint.open(tmp_path)


def test_unreadable_file_and_folder(tmp_path, monkeypatch):
    """By a stand-in for open and listdir, because permissions do not bind the superuser."""
    save_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", denied, raising=False)
        with fails("model.safetensors", "cannot be read", "Permission denied"):
            Checkpoint.open(tmp_path)
        with fails("config.json", "no such file"):
            read_json(tmp_path / "config.json")
    monkeypatch.setattr(os, "listdir", denied)
    with fails(str(tmp_path), "folder cannot be read", "Permission denied"):
        Checkpoint.open(tmp_path)


def test_shards_equal_the_reference_reader(tmp_path):
    checkpoint = Checkpoint.open(save_shards(tmp_path, {**TWO_SHARDS, "sub/more.safetensors": {"d": torch.ones(1)}}))
    assert checkpoint.names == ("a", "b", "c", "d")
    for file, tensors in TWO_SHARDS.items():
        for name, tensor in tensors.items():
            assert same(checkpoint.tensor(name), tensor) and checkpoint.file(name) == tmp_path / file


def test_the_single_file_wins_over_an_index_as_in_transformers(tmp_path):
    save_shards(tmp_path, TWO_SHARDS)
    save_file({"only": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).names == ("only",)


def test_an_only_file_of_another_name_is_taken(tmp_path):
    save_file({"only": torch.ones(2)}, tmp_path / "pytorch.safetensors")
    (tmp_path / "._pytorch.safetensors").write_bytes(b"a macOS resource fork")
    assert Checkpoint.open(tmp_path).names == ("only",)


def test_shards_without_an_index(tmp_path):
    for file, tensors in TWO_SHARDS.items():
        save_file(tensors, tmp_path / file)
    with fails("neither model.safetensors nor model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with fails("neither", "model-00002-of-00002.safetensors", "download"):
        Checkpoint.open(tmp_path)


def test_hugging_face_cache_layout_with_links(tmp_path):
    """snapshots/<commit>/<file> are links into ../../blobs, outside the folder that is opened."""
    blobs, snapshot = tmp_path / "models--org--m" / "blobs", tmp_path / "models--org--m" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_shards(snapshot, TWO_SHARDS)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"blob{number}")
        file.symlink_to(f"../../blobs/blob{number}")
    checkpoint = Checkpoint.open(snapshot)
    assert torch.equal(checkpoint.tensor("c"), torch.full((5,), 7.0)) and checkpoint.names == ("a", "b", "c")
    (blobs / "blob1").unlink()
    with fails("model-00002-of-00002.safetensors", "link to ../../blobs/blob1", "does not exist"):
        Checkpoint.open(snapshot)


def test_damaged_shards(tmp_path):
    folder = save_shards(tmp_path, TWO_SHARDS)
    first, second = sorted(folder.glob("*.safetensors"))
    good = first.read_bytes(), second.read_bytes()

    second.unlink()
    with fails("lacks shards", second.name, "download"):
        Checkpoint.open(folder)
    for cut in (0, 5, 20, len(good[1]) - 1):
        second.write_bytes(good[1][:cut])
        with fails(second.name, "download it again"):
            Checkpoint.open(folder)
    first.write_bytes(good[1])  # swapped
    second.write_bytes(good[0])
    with fails(first.name, "lacks tensors", "'a'", "'b'", "swapped"):
        Checkpoint.open(folder)
    first.write_bytes(good[0])  # the same shard under both names
    with fails(second.name, first.name, "holds too", "'a'", "exactly one shard"):
        Checkpoint.open(folder)


def test_index_and_shards_must_list_the_same_tensors(tmp_path):
    folder = save_shards(tmp_path, TWO_SHARDS, ghost="model-00001-of-00002.safetensors")
    with fails("model-00001-of-00002.safetensors", "lacks tensors", "'ghost'"):
        Checkpoint.open(folder)
    save_shards(tmp_path, {"model-00001-of-00002.safetensors": TWO_SHARDS["model-00001-of-00002.safetensors"]})
    save_file({"a": torch.ones(4), "b": torch.ones(2), "stray": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with fails("model-00001-of-00002.safetensors", "does not list", "'stray'"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/x.safetensors", "a/../../b.safetensors",
                                  "..\\b.safetensors", "C:/x.safetensors", "C:x.safetensors", "./a.safetensors",
                                  "a//b.safetensors", "", ".", "..",
                                  "a\0b.safetensors", "a\nb.safetensors", 7, None, ["a.safetensors"], {"a": "b"}])
def test_index_may_only_name_files_inside_the_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with fails("model.safetensors.index.json", "'w'", "only a relative path inside the folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text, words", [
    ("{}", ["weight_map"]), ('{"weight_map": []}', ["weight_map"]), ('{"weight_map": {}}', ["weight_map"]), ("[]", ["object"]),
    ('{"weight_map": {"w": "pytorch_model.bin"}}', ["pytorch_model.bin", "no *.safetensors file"]),
    ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', ["'w' occurs twice"]),
    ('{"weight_map": {"w": "a.safetensors"}}', ["lacks shards", "a.safetensors"]),
])
def test_bad_index(text, words, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with fails(*words):
        Checkpoint.open(tmp_path)


def test_folders_that_hold_something_else(tmp_path):
    def folder(name, *files):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"x")
        return tmp_path / name

    cases = [
        (folder("empty"), ["folder is empty", "config.json and *.safetensors"]),
        (folder("lora", "adapter_config.json", "adapter_model.safetensors"), ["LoRA adapter", "merge"]),
        (folder("gguf", "config.json", "m-Q4.gguf"), ["GGUF weights only ('m-Q4.gguf')", "safetensors release"]),
        (folder("bin", "config.json", "pytorch_model-00001-of-00002.bin"), ["pickled PyTorch", "safetensors", "save_pretrained"]),
        (folder("meta", "consolidated.00.pth", "params.json"), ["pickled PyTorch", "consolidated.00.pth"]),
        (folder("flax", "flax_model.msgpack"), ["Flax weights only"]),
    ]
    for path, words in cases:
        with fails(str(path), *words):
            resolve_checkpoint(path)
        with fails(str(path), *words):
            Checkpoint.open(path)
    tokenizer_only = folder("tokenizer", "tokenizer.json", "config.json")
    assert resolve_checkpoint(tokenizer_only) == tokenizer_only  # enough to tokenize with
    with fails(str(tokenizer_only), "no *.safetensors", "'config.json', 'tokenizer.json'"):
        Checkpoint.open(tokenizer_only)
    with fails("nowhere", "no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with fails("config.json", "not a folder"):
        Checkpoint.open(tokenizer_only / "config.json")


# ---- resolving a name ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub; `calls` lists what was asked. Raises `hub.error` if set, else gives back `hub.folder`."""

    class Hub:
        error = folder = None

        def snapshot_download(self, name, **options):
            self.calls.append((name, options))
            if self.error and not (options.get("local_files_only") and self.folder):
                raise self.error
            return str(self.folder)

    hub = Hub()
    hub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_folder_is_taken_as_it_is(tmp_path, hub, monkeypatch):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert resolve_checkpoint(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_checkpoint(tmp_path.name) == Path(tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_checkpoint(f"~/{tmp_path.name}") == tmp_path
    assert not hub.calls


def test_a_hub_name_is_downloaded_without_pickles(tmp_path, hub):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    hub.folder = tmp_path
    assert resolve_checkpoint("some-org/Model_1.5-B") == tmp_path
    [(name, options)] = hub.calls
    assert name == "some-org/Model_1.5-B"
    assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "tokenizer.model", "*.jinja"}


def test_without_a_network_the_cache_is_enough(tmp_path, monkeypatch):
    """The real client on a cache folder made by hand, as if the first, online attempt had failed."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--m" / "refs").mkdir()
    (tmp_path / "models--org--m" / "refs" / "main").write_text("0" * 40)
    save_file({"a": torch.ones(1)}, snapshot / "model.safetensors")
    real = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)

    def no_network(name, local_files_only=False, **options):
        if not local_files_only:
            raise ConnectionError("no route\nto host")
        return real(name, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    assert Checkpoint.open(resolve_checkpoint("org/m")).names == ("a",)
    with fails("'org/other'", "not a folder", "not in the local Hugging Face cache", "ConnectionError: no route", "the network"):
        resolve_checkpoint("org/other")


def test_a_name_the_hub_does_not_know(hub):
    class NotFound(huggingface_hub.errors.RepositoryNotFoundError):
        def __init__(self):  # the real one wants a response
            Exception.__init__(self, "404")

    hub.error = NotFound()
    with fails("'org/secret'", "no such model", "accept the model's terms", "hf auth login"):
        resolve_checkpoint("org/secret")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./a", "../a/b", "/no/such/folder", "org/..", "org/", "/m", "o--g/m",
                                  "org/a b", "C:\\models\\x", "org\\model", "-x/y", "org/m\n", "https://huggingface.co/org/m"])
def test_what_is_neither_a_folder_nor_a_hub_name_is_not_asked_for(name, hub):
    with fails("is not a folder", "looked for", "form org/model"):
        resolve_checkpoint(name)
    assert not hub.calls


@pytest.mark.parametrize("name", ["", "  ", "a\0b", "x" * 5000, "~nosuchuser12345/x", "x/" * 3000])
def test_impossible_names(name, hub):
    with pytest.raises(CheckpointError):
        resolve_checkpoint(name)
    assert not hub.calls


@pytest.mark.parametrize("file, words", [
    ("m.gguf", ["GGUF", "safetensors release"]), ("model.safetensors", ["one file", "folder it is in"]),
    ("pytorch_model.bin", ["pickled"]), ("model.pt", ["pickled"]), ("notes.txt", ["not a folder"]),
])
def test_a_file_instead_of_a_folder(file, words, tmp_path, hub):
    (tmp_path / file).write_bytes(b"x")
    with fails(file, *words):
        resolve_checkpoint(tmp_path / file)
    (tmp_path / file).unlink()
    (tmp_path / file).symlink_to("gone")
    with fails(file, "link to gone"):
        resolve_checkpoint(tmp_path / file)


# ---- filling a model -----------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """An embedding, a fused projection, a plain one, a norm, a persistent integer buffer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 32, bias=False)
        self.block = nn.ModuleDict({"norm": nn.LayerNorm(16), "out": nn.Linear(16, 16)})
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)


SOURCES = {
    "embed.weight": ("E",), "qkv.weight": ("q", "k", "v"), "block.norm.weight": ("n.w",), "block.norm.bias": ("n.b",),
    "block.out.weight": ("o.w",), "block.out.bias": ("o.b",), "steps": ("steps",),
}


def tiny_tensors(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"E": (32, 16), "q": (16, 16), "k": (8, 16), "v": (8, 16), "n.w": (16,), "n.b": (16,), "o.w": (16, 16), "o.b": (16,)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return tensors | {"steps": torch.tensor([41])}


def tiny(tmp_path, change=(), drop=(), dtype=torch.float32) -> tuple[nn.Module, Checkpoint]:
    tensors = tiny_tensors(dtype) | dict(change)
    save_tensors(tmp_path / "model.safetensors", {name: tensor for name, tensor in tensors.items() if name not in drop})
    with torch.device("meta"):
        model = Tiny()
    return model, Checkpoint.open(tmp_path)


def load(model, checkpoint, sources=SOURCES, dtype=torch.float32, **options):
    load_parameters(model, checkpoint, sources, dtype=dtype, device="cpu", **options)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_parameter_is_filled_in_its_dtype(stored, dtype, tmp_path):
    model, checkpoint = tiny(tmp_path, dtype=stored)
    load(model, checkpoint, dtype=dtype)
    tensors = tiny_tensors(stored)
    for name, parts in SOURCES.items():
        expected = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        actual = model.get_parameter(name) if name != "steps" else model.steps
        assert same(actual.detach(), expected if name == "steps" else expected.to(dtype)), name
        assert not actual.requires_grad
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model.inv_freq.is_meta  # not persistent: not the loader's business


def test_scalars_and_empty_and_integer_tensors_are_filled(tmp_path):
    model = nn.Module()
    model.scale = nn.Parameter(torch.empty((), device="meta"))
    model.none = nn.Parameter(torch.empty(0, 3, device="meta"))
    model.register_buffer("ids", torch.empty(2, dtype=torch.uint16, device="meta"))
    tensors = {"scale": torch.tensor(2.5), "none": torch.empty(0, 3), "ids": torch.tensor([7, 65535], dtype=torch.uint16)}
    save_tensors(tmp_path / "model.safetensors", tensors)
    for dtype in (torch.float32, torch.bfloat16):
        load(model, Checkpoint.open(tmp_path), {name: (name,) for name in tensors}, dtype)
        assert same(model.scale.detach(), torch.tensor(2.5, dtype=dtype)) and same(model.ids, tensors["ids"])
        assert same(model.none.detach(), torch.empty(0, 3, dtype=dtype))


def test_small_chunks_fill_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)
    model, checkpoint = tiny(tmp_path)
    load(model, checkpoint, dtype=torch.float64)
    tensors = tiny_tensors()
    assert same(model.qkv.weight.detach(), torch.cat([tensors[name] for name in "qkv"]).double())


def test_aligned_weights_are_views_of_the_file_and_others_are_copies(tmp_path):
    model, checkpoint = tiny(tmp_path)
    load(model, checkpoint)
    assert checkpoint.tensor("E").data_ptr() % module.ALIGNMENT == 0  # as save_tensors promises for tensors of such sizes
    assert model.embed.weight.data_ptr() == checkpoint.tensor("E").data_ptr()
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.embed.weight.zero_()  # pruning in place, say
    assert (tmp_path / "model.safetensors").read_bytes() == before

    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    write(tmp_path / "model.safetensors", raw[8 : 8 + length] + b" " * 4, raw[8 + length :])  # everything 4 bytes off
    with torch.device("meta"):
        model = Tiny()
    load(model, Checkpoint.open(tmp_path))
    assert model.embed.weight.data_ptr() % module.ALIGNMENT == 0
    assert torch.equal(model.embed.weight, tiny_tensors()["E"])


def test_tied_weights_stay_tied(tmp_path):
    model, checkpoint = tiny(tmp_path)
    model.head = nn.Linear(16, 32, bias=False, device="meta")
    model.head.weight = model.embed.weight
    load(model, checkpoint)
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, tiny_tensors()["E"])
    with fails("filled more than once", "embed.weight = head.weight"):
        load(model, checkpoint, {**SOURCES, "head.weight": ("E",)})


def test_ignored_tensors_may_be_there_or_not(tmp_path):
    extra = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "odd[1]": torch.ones(1)}
    model, checkpoint = tiny(tmp_path, extra)
    with fails("not used by the model", "'layers.0.rotary_emb.inv_freq' in model.safetensors", "'odd[1]'"):
        load(model, checkpoint)
    load(model, checkpoint, ignore=["*rotary_emb.inv_freq", "odd[1]", "absent"])
    assert not model.embed.weight.is_meta


@pytest.mark.parametrize("change, drop, sources, words", [
    ({}, ["k"], {}, ["not in the checkpoint", "'k' (for qkv.weight)"]),
    ({}, [], {"block.out.bias": ("o.bias",)}, ["not in the checkpoint: 'o.bias'", "not used by the model: 'o.b'"]),
    ({}, [], {"block.out.bias": ()}, ["without a source: block.out.bias"]),
    ({}, [], {"steps": ()}, ["without a source: steps"]),
    ({}, [], {"inv_freq": ("o.b",)}, ["does not have: inv_freq"]),
    ({}, [], {"typo.weight": ("E",)}, ["does not have: typo.weight", "more than once: 'E' (for embed.weight and typo.weight)"]),
    ({}, [], {"qkv.weight": ("q", "q")}, ["used more than once: 'q'", "not used by the model: 'k'"]),
    ({"E": torch.ones(31, 16)}, [], {}, ["wrong shape", "'E' [31, 16] in model.safetensors, but embed.weight is [32, 16]"]),
    ({"E": torch.ones(16, 32)}, [], {}, ["'E' [16, 32]"]),
    ({"E": torch.ones(512)}, [], {}, ["'E' [512]"]),
    ({"E": torch.ones(32, 16, 1)}, [], {}, ["'E' [32, 16, 1]"]),
    ({"k": torch.ones(9, 16)}, [], {}, ["'q' [16, 16] + 'k' [9, 16] + 'v' [8, 16]", "qkv.weight is [32, 16]"]),
    ({"k": torch.ones(8, 8)}, [], {}, ["'k' [8, 8]", "qkv.weight is [32, 16]"]),
    ({"k": torch.ones(())}, [], {}, ["'k' []", "qkv.weight is [32, 16]"]),
    ({"steps": torch.ones(1)}, [], {}, ["'steps' in model.safetensors is torch.float32, but steps is torch.int64"]),
    ({"E": torch.ones(32, 16, dtype=torch.int8)}, [], {}, ["quantised", "not supported", "'E' in model.safetensors (I8)"]),
    ({"E": torch.ones(32, 16).to(torch.float8_e4m3fn)}, [], {}, ["quantised", "'E' in model.safetensors (F8_E4M3)"]),
    ({"E": torch.ones(32, 4, dtype=torch.uint8)}, [], {}, ["quantised", "(U8)", "'E' [32, 4]"]),
])
def test_weights_that_do_not_fit_are_named_and_nothing_is_assigned(change, drop, sources, words, tmp_path):
    model, checkpoint = tiny(tmp_path, change, drop)
    with fails(str(tmp_path), "do not fit", *words):
        load(model, checkpoint, {**SOURCES, **sources})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_long_lists_are_cut(tmp_path):
    model, checkpoint = tiny(tmp_path, {f"extra{i:02d}": torch.ones(1) for i in range(25)})
    with fails("'extra09'", "and 15 more") as caught:
        load(model, checkpoint)
    assert "extra10" not in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["E", "v", "n.b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_found_and_named(bad, name, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 50)
    tensors = tiny_tensors()
    tensors[name].view(-1)[-3] = bad
    model, checkpoint = tiny(tmp_path, tensors)
    with fails("not finite", f"{name!r} in model.safetensors (NaN or infinity)"):
        load(model, checkpoint, dtype=dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    load(model, checkpoint, dtype=dtype, check_finite=False)
    assert not model.embed.weight.is_meta


def test_infinities_that_cancel_are_found(tmp_path):
    tensors = tiny_tensors()
    tensors["E"][0, :2] = torch.tensor([math.inf, -math.inf])
    with fails("'E' in model.safetensors (NaN or infinity)"):
        load(*tiny(tmp_path, tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_weights_are_accepted_although_their_sum_overflows(dtype, tmp_path):
    model, checkpoint = tiny(tmp_path, {"E": torch.full((32, 16), torch.finfo(dtype).max, dtype=dtype)}, dtype=dtype)
    load(model, checkpoint, dtype=dtype)
    assert model.embed.weight.isfinite().all()


def test_weights_that_the_chosen_dtype_cannot_hold_are_named(tmp_path):
    tensors = tiny_tensors()
    tensors["k"][3, 3] = 70_000.0
    with fails("'k' in model.safetensors (too large for torch.float16)"):
        load(*tiny(tmp_path, tensors), dtype=torch.float16)


def test_impossible_dtype_and_device(tmp_path):
    model, checkpoint = tiny(tmp_path)
    with fails("torch.int8", "torch.bfloat16"):
        load(model, checkpoint, dtype=torch.int8)
    for device in ["nonsense", "cuda:99"]:
        with fails(f"device '{device}' cannot be used"):
            load_parameters(model, checkpoint, SOURCES, dtype=torch.float32, device=device)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_tensor_that_must_be_copied_is_never_in_memory_twice(tmp_path):
    """Such as Gemma's embedding at an odd address: with its file's pages beside the copy, loading would peak at twice its size."""
    size = 64 * 2**20
    save_file({"w": torch.ones(size // 4096, 2048, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2048, size // 4096, bias=False)
    with peak_memory(torch.device("cpu")) as peak:
        load(model, Checkpoint.open(tmp_path), {"weight": ("w",)}, dtype=torch.float16)
    assert size <= peak.bytes < 1.3 * size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_release_gives_the_pages_back_and_the_tensor_reads_the_same_again(tmp_path):
    path = tmp_path / "x.safetensors"
    big = torch.arange(1 << 20, dtype=torch.float32)
    save_tensors(path, {"first": torch.ones(3), "big": big, "last": torch.ones(3)})

    def resident() -> int:  # KiB of the file that are in this process's memory
        lines = Path("/proc/self/smaps").read_text().split("\n")
        at = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
        return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    checkpoint = Checkpoint.open_file(path)
    tensor = checkpoint.tensor("big")
    assert torch.equal(tensor, big)
    assert resident() >= 4000
    checkpoint.release("big")
    assert resident() < 100
    checkpoint.release("first")  # less than a page: nothing to give back, nothing broken
    assert torch.equal(tensor, big) and torch.equal(checkpoint.tensor("first"), torch.ones(3))


# ---- quantised checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, names, words", [
    *[({"quantization_config": {"quant_method": method}}, [], [method, "unquantised"])
      for method in ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors"]],
    ({"quantization_config": {"load_in_4bit": True}}, [], ["bitsandbytes"]),
    ({"quantization_config": {"bits": 4}}, [], ["unnamed method"]),
    ({"quantization_config": ["what"]}, [], ["unnamed method"]),
    ({"compression_config": {"quant_method": "sparseml"}}, [], ["compression_config", "sparseml"]),
    ({"text_config": {"quantization_config": {"quant_method": "torchao"}}}, [], ["torchao"]),
    *[({}, ["ok.weight", "layers.0.proj" + suffix], ["layers.0.proj" + suffix, method]) for suffix, method in [
        (".qweight", "GPTQ"), (".qzeros", "AWQ"), (".g_idx", "GPTQ"), (".SCB", "int8"), (".weight_scale_inv", "FP8"),
        (".weight.absmax", "4-bit"), (".weight_packed", "compressed-tensors")]],
    ({}, ["mlp.experts_blocks", "mlp.experts_scales"], ["mlp.experts_blocks", "MXFP4"]),
])
def test_quantised_checkpoints_are_named(config, names, words):
    with fails("quantised", *words):
        detect_quantization(config, names)


def test_plain_checkpoints_are_not_called_quantised(tmp_path):
    save_tensors(tmp_path / "model.safetensors", {"layers.0.q_proj.weight": torch.ones(1), "vision_blocks": torch.ones(1)})
    detect_quantization({"quantization_config": None, "text_config": None}, Checkpoint.open(tmp_path))
    detect_quantization({"quantization_config": {}, "text_config": {"hidden_size": 1}}, Checkpoint.open(tmp_path))


# ---- writing -------------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saved_file_equals_the_reference_reader(tmp_path):
    tensors = random_tensors(seed=1)
    tensors["transposed"] = torch.arange(6.0).view(2, 3).T
    tensors["view"] = tensors["transposed"][1:]  # shares memory: written on its own
    tensors["grad"] = nn.Parameter(torch.ones(2))
    folder = tmp_path / "new" / "m"
    save_checkpoint(folder, tensors, {"model_type": "x", "é": [1]}, extra_files={"a.txt": "é", "b.bin": b"\xff"})
    files = contents(folder)
    assert set(files) == {"config.json", "model.safetensors", "a.txt", "b.bin"}
    assert files["a.txt"] == "é".encode() and files["b.bin"] == b"\xff"
    assert json.loads(files["config.json"]) == {"model_type": "x", "é": [1]}
    reference, own = load_file(folder / "model.safetensors"), Checkpoint.open(folder)
    assert set(reference) == set(own) == set(tensors)
    for name, tensor in tensors.items():
        assert same(reference[name], tensor.detach()) and same(own.tensor(name), tensor.detach()), name
    assert own.metadata == {"format": "pt"}


def test_saved_shards_from_a_generator(tmp_path):
    made = []

    def tensors():
        for number in range(5):
            made.append(number)
            yield f"w{number}", torch.full((10,), float(number))  # 40 bytes each

    save_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=100)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(contents(tmp_path)) == {"config.json", "model.safetensors.index.json", *names}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200} and index["weight_map"]["w2"] == names[1]
    checkpoint = Checkpoint.open(tmp_path)
    assert all(torch.equal(checkpoint.tensor(f"w{number}"), torch.full((10,), float(number))) for number in made)
    save_checkpoint(tmp_path, {"big": torch.ones(100)}, {}, max_shard_bytes=1)  # larger than a shard: one of its own
    assert set(contents(tmp_path)) == {"config.json", "model.safetensors"}, "older shards would be stale"


def test_no_tensors_at_all(tmp_path):
    save_checkpoint(tmp_path, {}, {})
    assert Checkpoint.open(tmp_path).names == () and Checkpoint.open(tmp_path).nbytes == 0


def test_saving_over_a_mapped_checkpoint_is_safe(tmp_path):
    save_checkpoint(tmp_path, {"w": torch.arange(4096.0)}, {"version": 1})
    checkpoint = Checkpoint.open(tmp_path)
    save_checkpoint(tmp_path, {"w": checkpoint.tensor("w") * 2}, {"version": 2})
    assert torch.equal(checkpoint.tensor("w"), torch.arange(4096.0))
    assert torch.equal(Checkpoint.open(tmp_path).tensor("w"), torch.arange(4096.0) * 2)


def shadow(function, fail_at: int, problem: BaseException):
    """A stand-in for `function` that raises on its `fail_at`-th call."""
    calls = []

    def shadowed(*args):
        calls.append(args)
        if len(calls) == fail_at:
            raise problem
        return function(*args)

    return shadowed


@pytest.mark.parametrize("where, fail_at, problem, words", [
    # Five files are written (two shards, index, config, notes); then three old ones move aside, and the five into place.
    *[("fsync", call, OSError(errno.ENOSPC, "No space left on device"), ["no space left on the disk"]) for call in range(1, 6)],
    *[("replace", call, PermissionError(errno.EACCES, "Permission denied"), ["cannot be written", "Permission denied"])
      for call in range(1, 9)],
])
def test_a_failure_at_any_point_leaves_the_old_files_and_no_others(where, fail_at, problem, words, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, {"old": torch.ones(3)}, {"version": 1}, extra_files={"notes.txt": "old"})
    before = contents(tmp_path)
    new = {"a": torch.ones(10), "b": torch.ones(10)}
    with monkeypatch.context() as patch:
        patch.setattr(os, where, shadow(getattr(os, where), fail_at, problem))
        with fails(str(tmp_path), "nothing was changed", *words):
            save_checkpoint(tmp_path, new, {"version": 2}, extra_files={"notes.txt": "new"}, max_shard_bytes=40)
    assert contents(tmp_path) == before
    save_checkpoint(tmp_path, new, {"version": 2}, extra_files={"notes.txt": "new"}, max_shard_bytes=40)
    assert set(Checkpoint.open(tmp_path)) == {"a", "b"}


def test_a_failed_first_save_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", shadow(os.fsync, 2, OSError(errno.ENOSPC, "No space left on device")))
    with fails("no space left"):
        save_checkpoint(tmp_path / "m", {"a": torch.ones(3)}, {})
    assert not (tmp_path / "m").exists()


def test_a_write_that_stops_half_way(tmp_path):
    """The real thing: the operating system refuses to write beyond 100 kB."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save in [lambda: save_checkpoint(tmp_path, {"a": torch.ones(100_000)}, {}),
                 lambda: save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(100_000)})]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with fails(str(tmp_path), "cannot be written", "nothing was changed"):
                save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(tmp_path) == {}


def test_an_interrupted_generator_leaves_nothing(tmp_path):
    def tensors():
        yield "a", torch.ones(100)
        yield "b", torch.ones(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=100)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("tensors, config, options, words", [
    ([("a", torch.ones(1)), ("a", torch.ones(1))], {}, {}, ["'a' is given twice"]),
    ({"__metadata__": torch.ones(1)}, {}, {}, ["'__metadata__'"]),
    ({"\ud800": torch.ones(1)}, {}, {}, ["'\\ud800'"]),
    ({7: torch.ones(1)}, {}, {}, ["7", "name of a tensor"]),
    ({"a": torch.ones(1, device="meta")}, {}, {}, ["'a'", "meta", "cannot be saved"]),
    ({"a": torch.ones(1, dtype=torch.complex128)}, {}, {}, ["'a'", "complex128", "cannot be saved"]),
    ({"a": torch.ones(1).to_sparse()}, {}, {}, ["'a'", "sparse", "cannot be saved"]),
    ({}, {"a": math.nan}, {}, ["JSON"]),
    ({}, {"a": object()}, {}, ["JSON"]),
    ({}, {}, {"extra_files": {"../x": "y"}}, ["'../x'", "extra file"]),
    ({}, {}, {"extra_files": {"config.json": "y"}}, ["'config.json'", "extra file"]),
    ({}, {}, {"extra_files": {"model.safetensors": "y"}}, ["'model.safetensors'", "extra file"]),
    ({}, {}, {"extra_files": {"x": "\ud800"}}, ["extra file x", "surrogate"]),
])
def test_what_cannot_be_saved(tensors, config, options, words, tmp_path):
    with fails(*words):
        save_checkpoint(tmp_path, tensors, config, **options)
    assert contents(tmp_path) == {}


def test_saving_where_a_file_or_folder_is_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    with fails("file", "cannot be written"):
        save_checkpoint(tmp_path / "file", {}, {})
    (tmp_path / "m" / "config.json").mkdir(parents=True)
    with fails("config.json is a folder", "nothing was changed"):
        save_checkpoint(tmp_path / "m", {"a": torch.ones(1)}, {})
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]
    with fails("nowhere", "cannot be written"):
        save_tensors(tmp_path / "nowhere" / "x.safetensors", {})


def test_save_tensors_keeps_metadata_and_replaces_whole_files(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(3)}, {"plan": "deepest"})
    assert Checkpoint.open_file(path).metadata == {"format": "pt", "plan": "deepest"}
    with safetensors.safe_open(path, "pt") as reference:
        assert reference.metadata() == {"format": "pt", "plan": "deepest"}
    before = path.read_bytes()
    with fails("metadata", "text to text"):
        save_tensors(path, {}, {"a": 1})
    monkeypatch.setattr(os, "fsync", shadow(os.fsync, 1, OSError(errno.ENOSPC, "full")))
    with fails("x.safetensors", "no space left"):
        save_tensors(path, {"a": torch.zeros(3)})
    assert contents(tmp_path) == {"x.safetensors": before}


# ---- JSON ----------------------------------------------------------------------------------------------------------------------


def test_read_json_reads_what_json_allows(tmp_path):
    path = tmp_path / "c.json"
    value = {"a": [1, -2.5, 1e-300, True, None, "é\n", "\U0001f600"], "b": {"a": {"a": {}}}, "": []}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        path.write_text(text, "utf-8")
        assert read_json(path) == value == read_json(str(path))
    path.write_text('{"a": ' + "[" * 99 + "]" * 99 + "}")
    assert isinstance(read_json(path)["a"], list)


@pytest.mark.parametrize("raw, words", [
    (b"", ["not valid JSON"]), (b"{", ["not valid JSON", "line 1 column 2"]), (b'{"a": 1,}', ["not valid JSON"]),
    (b"[1]", ["JSON object, not list"]), (b"null", ["JSON object, not NoneType"]), (b'"x"', ["JSON object, not str"]),
    (b'{"a": 1, "a": 2}', ["'a' occurs twice"]), (b'{"x": {"b": 1, "c": 0, "b": 1}}', ["'b' occurs twice"]),
    (b'{"a": NaN}', ["NaN"]), (b'{"a": -Infinity}', ["-Infinity"]), (b'{"a": 1e999}', ["1e999"]),
    (b"\xff\xfe{\0", ["not UTF-8"]), (b'{"a": "\xe9"}', ["not UTF-8", "byte 7"]), (b"\xef\xbb\xbf{}", ["BOM"]),
    (b'{"a": "\\udfff"}', ["surrogate"]), (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", ["too deep"]),
    (b'{"a":' * 100_000, ["too deep"]), (b'{"a": ' + b"1" * 5000 + b"}", ["not valid JSON"]),
    (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS pointer"]), (b"<!DOCTYPE html>", ["not valid JSON"]),
])
def test_read_json_refuses_the_rest(raw, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with fails("config.json", *words, error=ConfigError):
        read_json(path, ConfigError)


def test_read_json_of_what_is_no_file(tmp_path, monkeypatch):
    with fails("none.json", "no such file"):
        read_json(tmp_path / "none.json")
    with fails("not a regular file"):
        read_json(tmp_path)
    with fails("not a regular file"):
        read_json("/dev/zero")
    (tmp_path / "c.json").symlink_to("gone")
    with fails("c.json", "link to gone"):
        read_json(tmp_path / "c.json")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 10)
    (tmp_path / "big.json").write_text('{"a": 12345}')
    with fails("big.json", "larger than 10 bytes"):
        read_json(tmp_path / "big.json")


def test_errors_are_value_errors_of_one_family():
    assert issubclass(CheckpointError, MinipopError) and issubclass(MinipopError, ValueError)
