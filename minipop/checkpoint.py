"""Checkpoints on disk: find one, read it strictly, pour it into a model. (saving.py writes one.)

Top to bottom, the path of a weight: `resolve_checkpoint` turns what the user typed into a folder; `Checkpoint` validates every
safetensors header in it and maps the files; `load_parameters` fills a model that was built on the meta device. A downloaded file is untrusted input, so nothing is believed that was not checked first: lengths,
offsets, dtypes, shapes, the shard index, and that the values are finite numbers. Pickled weights are never opened.

The file format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the tensors' bytes, one after the other. It is little-endian throughout, as is every
machine that PyTorch supports.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .errors import CheckpointError
from .files import listing, one_line, open_regular, parse_json, quote, read_json, refuse_lfs_pointer, show_shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = "pickled PyTorch"
FOREIGN_FORMATS = {".gguf": "GGUF", ".bin": PICKLED, ".pt": PICKLED, ".pth": PICKLED, ".ckpt": PICKLED, ".h5": "TensorFlow",
                   ".msgpack": "Flax", ".onnx": "ONNX"}
QUANTISED_SUFFIXES = {
    ".qweight": "GPTQ or AWQ", ".qzeros": "GPTQ or AWQ", ".g_idx": "GPTQ", ".SCB": "bitsandbytes int8",
    ".absmax": "bitsandbytes 4-bit", ".quant_map": "bitsandbytes 4-bit", "_scale_inv": "FP8",
    ".weight_scale": "FP8 or compressed-tensors", ".weight_packed": "compressed-tensors", "_blocks": "MXFP4",
}

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # what a weight may be stored as, and computed in

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64  # PyTorch's own limit
ALIGNMENT = 64  # bytes: where matrix kernels read at full speed; weights 16 bytes off it slow bf16 decoding by some 15%
CHUNK = 1 << 20  # elements copied and checked at a time: small enough that the check finds the copy still in the cache


# ---- finding a folder ----------------------------------------------------------------------------------------------------------


def resolve_checkpoint(path_or_name: str | os.PathLike) -> Path:
    """The checkpoint folder meant by `path_or_name`: an existing folder, or `org/model` on the Hugging Face Hub.

    A Hub model is downloaded into the usual cache (safetensors, JSON, tokenizer.model and chat templates only); without a network
    the cache alone is enough. Raises CheckpointError if there is neither, or if the folder can be seen to be something else:
    a LoRA adapter, GGUF or pickled weights only, or empty.
    """
    name = os.fspath(path_or_name)
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise CheckpointError(f"{name!r} does not name a checkpoint; give a folder, or org/model on the Hugging Face Hub")
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~ of a user that does not exist
        raise CheckpointError(f"{quote(name)} does not name a checkpoint: no such user") from None
    if not os.path.isdir(path) and os.path.lexists(path):
        raise CheckpointError(_not_a_folder(path))
    folder = path if os.path.isdir(path) else _download(name)
    _refuse_foreign_formats(folder, _listdir(folder))
    return folder


def _not_a_folder(path: Path) -> str:
    """Why a file (or worse) is no checkpoint folder, and what to give instead."""
    if not os.path.exists(path):
        return f"{path}: a link to {os.readlink(path)}, which does not exist"
    if path.suffix == ".safetensors":
        return f"{path}: this is one file of a checkpoint; give the folder it is in ({path.parent})"
    if kind := FOREIGN_FORMATS.get(path.suffix):
        return f"{path}: {kind} weights are not read; {_way_out(kind)}"
    return f"{path}: not a folder; a checkpoint is a folder with config.json and *.safetensors"


def _way_out(kind: str) -> str:
    release = "use the model's original safetensors release"
    convert = f"unpickling can run code, so {release}, or convert once with transformers' save_pretrained"
    return convert if kind == PICKLED else release


def _download(name: str) -> Path:
    """Fetch `org/model` from the Hub, or find it in the local cache."""
    missing = f"{quote(name)} is not a folder (looked for {quote(str(Path(name).expanduser().absolute()))})"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII) or ".." in name or "--" in name:
        raise CheckpointError(f"{missing}, nor has it the form org/model of the Hugging Face Hub; check the spelling of the path")
    from huggingface_hub import snapshot_download  # imported here: only this function needs it, and it is slow to import
    from huggingface_hub.errors import RepositoryNotFoundError

    wanted = {"allow_patterns": ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"],
              "ignore_patterns": ["consolidated*.safetensors", "original/*"]}  # second copies of the weights, in other formats
    try:
        return Path(snapshot_download(name, **wanted))
    except Exception as problem:  # the hub's client raises the errors of its HTTP library, which differ between its versions
        try:
            return Path(snapshot_download(name, local_files_only=True, **wanted))
        except Exception:
            if isinstance(problem, RepositoryNotFoundError):  # covers gated repositories too: the Hub answers both alike
                raise CheckpointError(f"{missing}, and the Hugging Face Hub has no such model or does not show it to you; "
                                      "check the name, or accept the model's terms on its page and run `hf auth login`") from None
            raise CheckpointError(f"{missing}, is not in the local Hugging Face cache, and cannot be downloaded "
                                  f"({one_line(problem)}); check the network, or give a folder that exists") from None


def _listdir(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as problem:
        raise CheckpointError(f"{folder}: the folder cannot be read: {problem.strerror}") from None


def _refuse_foreign_formats(folder: Path, names: list[str]) -> None:
    """Name what a folder is when it can be seen from its file names that it holds no complete safetensors model."""
    if not names:
        raise CheckpointError(f"{folder}: the folder is empty; a checkpoint has config.json and *.safetensors")
    if "adapter_config.json" in names:
        raise CheckpointError(f"{folder}: a LoRA adapter, not a whole model; merge it into its base model and save that "
                              "(peft's merge_and_unload, then save_pretrained)")
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return
    for name in names:
        if kind := FOREIGN_FORMATS.get(Path(name).suffix):
            raise CheckpointError(f"{folder}: has {kind} weights only ({quote(name)}), no *.safetensors; {_way_out(kind)}")


# ---- reading a checkpoint ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies. `start` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int
    path: Path


class Checkpoint:
    """Read-only view of the tensors in one or more safetensors files; behaves like a container of their names.

    All headers are validated before the first tensor is handed out; the data are mapped into memory and read by the operating
    system when first touched. The mapping is private: writing into a tensor never changes the file. Replacing a file (as
    `save_checkpoint` does) is safe while it is mapped; cutting it short in place is not, as with any mapped file.
    """

    def __init__(self, where: Path, paths: Iterable[Path]):
        """Map and validate `paths`. Most callers want `open` or `open_file`."""
        self.where = where
        self.metadata: dict[str, str] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            mapping, entries, metadata = _map_file(path)
            if shared := sorted(entries.keys() & self._entries.keys()):
                raise CheckpointError(f"{path}: holds tensors that {self._entries[shared[0]].path.name} holds too: "
                                      f"{listing(map(quote, shared))}; each must be in exactly one shard: download them again")
            self._maps[path] = mapping
            self._entries.update(entries)
            self.metadata.update(metadata)

    @classmethod
    def open(cls, folder: str | os.PathLike) -> Checkpoint:
        """Open the weights of a checkpoint folder.

        The first of these that is there (transformers uses the same order): model.safetensors; model.safetensors.index.json with
        the shards it lists; the only *.safetensors file. With an index, shards and index must agree about every tensor.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):
            raise CheckpointError(_not_a_folder(folder) if os.path.lexists(folder) else f"{folder}: no such folder")
        names = _listdir(folder)
        _refuse_foreign_formats(folder, names)
        if SINGLE_FILE in names:
            return cls(folder, [folder / SINGLE_FILE])
        if INDEX_FILE in names:
            weight_map = _read_index(folder / INDEX_FILE)
            files = list(dict.fromkeys(weight_map.values()))
            if missing := [file for file in files if not os.path.lexists(folder / file)]:
                raise CheckpointError(f"{folder}: lacks shards that {INDEX_FILE} lists: {listing(map(quote, missing))}; "
                                      "download them again")
            checkpoint = cls(folder, [folder / file for file in files])
            checkpoint._check_index(folder / INDEX_FILE, weight_map)
            return checkpoint
        files = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
        if not files:
            raise CheckpointError(f"{folder}: no *.safetensors in this folder (found: {listing(map(quote, names))})")
        shard = re.search(r"-(\d{5})-of-(\d{5})\.safetensors$", files[0])
        if len(files) > 1 or (shard and int(shard[2]) > 1):
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} says which of these make up the model: "
                                  f"{listing(map(quote, files))}; an interrupted download? download the folder again")
        return cls(folder, [folder / files[0]])

    @classmethod
    def open_file(cls, path: str | os.PathLike) -> Checkpoint:
        """Open a single safetensors file of any name."""
        return cls(Path(path), [Path(path)])

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        """Index and shards must agree: a tensor listed but absent, or present but not listed, means that files were mixed up."""
        absent = [name for name, file in weight_map.items()
                  if name not in self or self.file(name) != index.parent / file]
        if absent:
            raise CheckpointError(f"{index.parent / weight_map[absent[0]]}: lacks tensors that {index.name} places in it: "
                                  f"{listing(map(quote, absent))}; swapped shards, or another model's: download them again")
        extra = [name for name in self if name not in weight_map]
        if extra:
            raise CheckpointError(f"{self.file(extra[0])}: holds tensors that {index.name} does not list: "
                                  f"{listing(map(quote, extra))}; the files are from different models: download them again")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in file order."""
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.where}: no tensor {quote(name)} in this checkpoint")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () for a scalar."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in."""
        return self._entry(name).dtype

    def file(self, name: str) -> Path:
        """The file a tensor is in, for messages."""
        return self._entry(name).path

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(entry.nbytes for entry in self._entries.values())

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU in its stored dtype. Treat it as read-only.

        It is a view of the mapped file without a copy, unless the file places it at an address that its dtype does not allow.
        A view keeps the mapping alive, also after `close`.
        """
        entry = self._entry(name)
        if not self._maps:
            raise CheckpointError(f"{self.where}: this checkpoint was closed; open it again to read {quote(name)}")
        if entry.nbytes == 0:  # frombuffer refuses empty views
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = torch.frombuffer(self._maps[entry.path], dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % entry.dtype.itemsize:
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Tell the operating system that a tensor's pages, or those of its bytes begin .. end - 1, are not needed any more.

        (They were copied to where they belong.) Only whole pages that nothing else shares are given back. Reading the tensor again is
        allowed and reads the file again.
        """
        entry = self._entry(name)
        first = -(-(entry.start + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.start + min(entry.nbytes if end is None else end, entry.nbytes)) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and entry.path in self._maps and hasattr(mmap, "MADV_DONTNEED"):  # a hint: Windows has no such call
            self._maps[entry.path].madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Let go of the files. Tensors handed out before stay valid; each mapping goes with the last of them."""
        self._maps.clear()  # not mmap.close(): torch does not tell a mapping that a tensor still looks at it

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _map_file(path: Path) -> tuple[mmap.mmap, dict[str, _Entry], dict[str, str]]:
    """Map one safetensors file and validate its header. Gives back the mapping, the tensors and the metadata."""
    with open_regular(path, CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file; download it again")
        try:
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # private and writable: what torch.frombuffer wants
        except (OSError, OverflowError) as problem:
            raise CheckpointError(f"{path}: cannot be mapped into memory: {one_line(problem)}") from None
    refuse_lfs_pointer(path, mapping[:64], CheckpointError)
    length = int.from_bytes(mapping[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed; "
                              "not a safetensors file, or damaged")
    if 8 + length > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes, but its header alone needs {8 + length}; download it again")
    return mapping, *_parse_header(path, mapping[8 : 8 + length], size)


def _parse_header(path: Path, raw: bytes, size: int) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Validate the JSON header of a file of `size` bytes. After this, every entry describes bytes that exist and are its own."""
    if raw[:1] != b"{":
        raise CheckpointError(f"{path}: the header does not begin with '{{'; not a safetensors file, or damaged")
    header = parse_json(raw, f"{path}: header", CheckpointError)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")

    entries, spans = {}, []
    for name, info in header.items():
        where = f"{path}: tensor {quote(name)}"
        if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(f"{where} has the dtype {quote(dtype)}, which is not supported (known: {', '.join(DTYPES)})")
        if not _is_sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(side, 1) for side in shape) >= 2**63:
            raise CheckpointError(f"{where} has the shape {quote(shape)}; expected at most {MAX_DIMS} integers >= 0 "
                                  "with a product below 2**63")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(f"{where} has the data_offsets {quote(offsets)}; expected [begin, end] with begin <= end")
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != nbytes:
            raise CheckpointError(f"{where} spans {offsets[1] - offsets[0]} bytes, but {dtype} {show_shape(shape)} needs {nbytes}")
        entries[name] = _Entry(DTYPES[dtype], tuple(shape), 8 + len(raw) + offsets[0], nbytes, path)
        spans.append((*offsets, name))

    # Sorted by place, the tensors must tile the data: no byte twice, none left over.
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {quote(name)} begins at byte {begin} and {fault}, which ends at byte {at}")
        at = end
    expected = 8 + len(raw) + at
    if size != expected:
        fault = "truncated" if size < expected else "has bytes that belong to no tensor"
        raise CheckpointError(f"{path}: {fault}: {size} bytes, but its header describes {expected}; download it again")
    return entries, metadata


def _is_sizes(value: object) -> bool:
    """True for a list of ints in 0..2**63-1. `type(...) is int` because JSON's true is an int to isinstance."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _read_index(path: Path) -> dict[str, str]:
    """The weight_map of an index file: tensor name -> shard file, each a plain relative path that stays inside the folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object that names the file of each tensor")
    for name, file in weight_map.items():
        # Lexical, because the file itself may well be a link: the Hugging Face cache links into ../../blobs.
        plain = isinstance(file, str) and not re.search(r"[\\:\0-\x1f\x7f]", file)
        if not plain or any(part in ("", ".", "..") for part in file.split("/")):
            raise CheckpointError(f"{path}: the file of {quote(name)} is {quote(file)}; only a relative path inside the folder "
                                  "is allowed")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: the file of {quote(name)} is {quote(file)}, which is no *.safetensors file")
    return weight_map


# ---- filling a model -----------------------------------------------------------------------------------------------------------


def load_parameters(
    model: nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, tuple[str, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ignore: Iterable[str] = (),
    check_finite: bool = True,
) -> None:
    """Fill every parameter and persistent buffer of `model`, which was built on the meta device, from `checkpoint`.

    `sources` maps each name in the model to the checkpoint tensors it is made of, concatenated along dim 0 in that order: one in
    the common case, (q, k, v) for a fused projection. Floating weights become `dtype`; anything else keeps its dtype.
    A parameter that sits in the model under several names (tied weights) is filled through one of them and stays shared.
    `ignore` lists checkpoint tensors that the model may leave out: names, or patterns such as "*rotary_emb.inv_freq".

    A parameter on the CPU with one source, in the right dtype and at a multiple of ALIGNMENT, is not copied: it stays a view of
    the mapped file (writing to it never changes the file). Everything else is copied, piece by piece, and gives its file pages
    back, so memory peaks near the model's own size.

    Raises CheckpointError, before anything is assigned, naming tensors and files: a parameter without a source, a source that is
    not in the file, a tensor that nobody uses or that is used twice, a wrong shape, quantised weights, and (unless `check_finite`
    is False) values that are NaN or infinite, or that become infinite in `dtype`.
    """
    if dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"cannot load weights as {dtype}; choose one of {', '.join(map(str, WEIGHT_DTYPES))}")
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:  # AssertionError: a PyTorch built without that kind of device
        raise CheckpointError(f"device {str(device)!r} cannot be used: {one_line(problem)}") from None
    slots = _slots(model)
    _check_fit(slots, checkpoint, sources, dtype, tuple(ignore))

    filled: list[tuple[_Slot, Tensor]] = []
    faults: list[str] = []
    for slot in slots:
        name = next(name for name in slot.names if sources.get(name))
        wanted = dtype if slot.tensor.is_floating_point() else slot.tensor.dtype
        parts = sources[name]
        tensor = checkpoint.tensor(parts[0])
        if len(parts) == 1 and device.type == "cpu" and tensor.dtype == wanted and tensor.data_ptr() % ALIGNMENT == 0:
            if check_finite and not _all_finite(tensor):
                faults.append(_fault(checkpoint, parts[0], wanted))
        else:
            try:
                tensor = torch.empty(slot.tensor.shape, dtype=wanted, device=device)
            except (RuntimeError, TypeError) as problem:  # TypeError: a dtype that the device does not have
                raise CheckpointError(f"{checkpoint.where}: cannot allocate on {device}: {name} {show_shape(slot.tensor.shape)}: "
                                      f"{one_line(problem)}") from None
            row = 0
            for source in parts:
                part = checkpoint.tensor(source)
                rows = tensor if len(parts) == 1 else tensor.narrow(0, row, len(part))
                if not _copy(rows, part, check_finite, partial(checkpoint.release, source)):
                    faults.append(_fault(checkpoint, source, wanted))
                row += 0 if len(parts) == 1 else len(part)
                checkpoint.release(source)
        filled.append((slot, tensor))
    if faults:
        raise CheckpointError(f"{checkpoint.where}: weights that are not finite numbers: {listing(faults)}; the file is "
                              "damaged, or the dtype too narrow for it")
    for slot, tensor in filled:
        slot.assign(tensor)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc): it keeps what it may need again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class _Slot:
    """One parameter or persistent buffer of the model, with every place (module, attribute) where it sits and its names there."""

    tensor: Tensor
    names: list[str]
    places: list[tuple[nn.Module, str]]

    def assign(self, tensor: Tensor) -> None:
        value = nn.Parameter(tensor, requires_grad=False) if isinstance(self.tensor, nn.Parameter) else tensor
        for module, attribute in self.places:
            setattr(module, attribute, value)


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for attribute, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None:
                slot = slots.setdefault(id(tensor), _Slot(tensor, [], []))
                slot.names.append(f"{prefix}.{attribute}" if prefix else attribute)
                slot.places.append((module, attribute))
    return list(slots.values())


def _check_fit(slots: list[_Slot], checkpoint: Checkpoint, sources: Mapping[str, tuple[str, ...]], dtype: torch.dtype,
               ignore: tuple[str, ...]) -> None:
    """Compare model, sources and checkpoint in all directions, and report everything that does not fit in one error."""
    known = {name for slot in slots for name in slot.names}
    users: dict[str, list[str]] = {}  # checkpoint tensor -> the parameters made of it
    for name, parts in sources.items():
        for part in parts:
            users.setdefault(part, []).append(name)
    absent = [f"{quote(part)} (for {names[0]})" for part, names in users.items() if part not in checkpoint]
    twice = [f"{quote(part)} (for {' and '.join(names)})" for part, names in users.items() if len(names) > 1]
    unused = [f"{quote(name)} in {checkpoint.file(name).name}" for name in checkpoint
              if name not in users and name not in ignore and not any(fnmatchcase(name, pattern) for pattern in ignore)]
    unfilled, refilled, misfits, quantised = [], [], [], []
    for slot in slots:
        given = [name for name in slot.names if sources.get(name)]
        if len(given) != 1:
            (refilled if given else unfilled).append(" = ".join(given) or slot.names[0])
            continue
        parts = [part for part in sources[given[0]] if part in checkpoint]
        if len(parts) < len(sources[given[0]]):
            continue  # reported as absent
        for part in parts:
            stored, described = checkpoint.dtype(part), f"{quote(part)} in {checkpoint.file(part).name}"
            if slot.tensor.is_floating_point() and stored not in WEIGHT_DTYPES:
                quantised.append(f"{described} ({DTYPE_NAMES[stored]})")
            elif not slot.tensor.is_floating_point() and stored != slot.tensor.dtype:
                misfits.append(f"{described} is {stored}, but {given[0]} is {slot.tensor.dtype}")
        shapes = [checkpoint.shape(part) for part in parts]
        if _concatenated(shapes) != tuple(slot.tensor.shape):
            described = " + ".join(f"{quote(part)} {show_shape(shape)}" for part, shape in zip(parts, shapes))
            misfits.append(f"{described} in {checkpoint.file(parts[0]).name}, but {given[0]} is {show_shape(slot.tensor.shape)}")

    problems = [f"{what}: {listing(items)}" for what, items in [
        ("quantised weights, which are not supported (use the unquantised release)", quantised),
        ("not in the checkpoint", absent),
        ("not used by the model", unused),
        ("of the wrong shape or dtype", misfits),
        ("used more than once", twice),
        ("parameters of the model without a source", unfilled),
        ("parameters filled more than once", refilled),
        ("sources for what the model does not have", [name for name in sources if name not in known]),
    ] if items]
    if problems:
        raise CheckpointError(f"{checkpoint.where}: weights and model do not fit: {'; '.join(problems)}")


def _concatenated(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of these tensors concatenated along dim 0, or None if they cannot be."""
    first = shapes[0]
    if len(shapes) == 1:
        return first
    if not all(shape and shape[1:] == first[1:] for shape in shapes):
        return None
    return (sum(shape[0] for shape in shapes), *first[1:])


def _copy(target: Tensor, source: Tensor, check_finite: bool, release: Callable[[int, int], None]) -> bool:
    """Copy `source` over `target` (contiguous, same shape), converting dtype and device. False if the result is not finite.

    release: told which of the source's bytes have been copied, so that a large tensor never lies in memory twice.
    """
    target, source = target.view(-1), source.view(-1)
    finite = True
    for start in range(0, target.numel(), CHUNK):
        chunk = target[start : start + CHUNK]
        chunk.copy_(source[start : start + CHUNK])
        finite = finite and (not check_finite or _all_finite(chunk))
        release(start * source.element_size(), (start + CHUNK) * source.element_size())
    return finite


def _all_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite.

    A sum is the cheapest proof (10 to 30 times faster than isfinite on the CPU): once a NaN or an infinity enters it, it never
    becomes finite again. Finite numbers may add up to infinity, though, so only then each element is looked at.
    """
    if not tensor.is_floating_point():
        return True
    chunks = tensor.view(-1).split(CHUNK)
    return all(math.isfinite(chunk.sum().item()) or bool(chunk.isfinite().all()) for chunk in chunks)


def _fault(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> str:
    """Describe a tensor that did not arrive as finite numbers: was it broken before, or by the conversion?"""
    cause = f"too large for {dtype}" if _all_finite(checkpoint.tensor(name)) else "NaN or infinity"
    return f"{quote(name)} in {checkpoint.file(name).name} ({cause})"


def detect_quantization(config: Mapping, checkpoint: Iterable[str]) -> None:
    """Raise CheckpointError, naming the method, if the config or the tensor names say that the weights are quantised."""
    advice = "quantised checkpoints are not supported; use the unquantised (bf16) release of the model"
    text_config = config.get("text_config")
    for section in (config, text_config if isinstance(text_config, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if quantization := section.get(key):
                method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
                if method is None and any(field.startswith(("load_in_", "_load_in_")) for field in quantization):
                    method = "bitsandbytes"  # its first versions wrote no quant_method
                raise CheckpointError(f"config.json: {key} says that the weights are quantised with "
                                      f"{method if isinstance(method, str) else 'an unnamed method'}; {advice}")
    names = set(checkpoint)
    for name in names:
        for suffix, method in QUANTISED_SUFFIXES.items():
            if name.endswith(suffix) and (suffix != "_blocks" or name.removesuffix(suffix) + "_scales" in names):
                raise CheckpointError(f"tensor {quote(name)} says that the weights are quantised ({method}); {advice}")
