"""Checkpoints written to disk, in Hugging Face layout, complete or not at all. The reverse of checkpoint.py."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import ALIGNMENT, DTYPE_NAMES, INDEX_FILE, SINGLE_FILE
from .errors import CheckpointError
from .files import is_unicode, one_line, quote, temporary_beside


def save_checkpoint(
    folder: str | os.PathLike,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: dict,
    *,
    extra_files: Mapping[str, str | bytes] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face checkpoint folder: config.json and model.safetensors, or above `max_shard_bytes` shards and an index.

    `tensors` may be a generator of (name, tensor) pairs: only one shard of them is held at a time. Tied weights are written as
    often as they are given. `extra_files` maps plain file names (tokenizer.json, ...) to their contents.

    Everything is written under temporary names first and moved into place when complete; files of an older checkpoint that would
    be in the way (its shards, its index) are removed at the end. If anything fails, the folder is left as it was.
    Raises CheckpointError for bad names or tensors, and when the disk is full or cannot be written.
    """
    folder, token = Path(folder), secrets.token_hex(4)
    texts = {"config.json": _to_json(config), **_checked_extra_files(extra_files or {})}
    staged: dict[str, Path] = {}  # final name -> temporary file
    shards: list[tuple[Path, list[str], int]] = []  # temporary file, tensor names, bytes
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for batch in _batches(tensors, max_shard_bytes):
            temporary = folder / f".shard-{len(shards) + 1}.{token}.tmp"
            shards.append((temporary, list(batch), sum(tensor.nbytes for tensor in batch.values())))
            _write_safetensors(temporary, batch)
        weight_map = {}
        for number, (temporary, names, _) in enumerate(shards, 1):
            final = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            staged[final] = temporary
            weight_map.update(dict.fromkeys(names, final))
        if len(shards) > 1:
            total = sum(nbytes for *_, nbytes in shards)
            texts[INDEX_FILE] = _to_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        for final, data in texts.items():
            staged[final] = folder / f".{final}.{token}.tmp"
            with open(staged[final], "xb") as file:
                file.write(data)
                _flush(file)
        older = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
        stale = [name for name in os.listdir(folder) if older.fullmatch(name) and name not in staged]
        _move_into_place(folder, staged, stale, token)
    except OSError as problem:
        raise CheckpointError(_write_problem(folder, problem)) from None
    finally:
        for temporary in [*(shard[0] for shard in shards), *staged.values()]:
            temporary.unlink(missing_ok=True)
        if created and folder.is_dir() and not os.listdir(folder):
            folder.rmdir()


def save_tensors(path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, complete or not at all; a file of that name is replaced. Errors as in `save_checkpoint`."""
    path = Path(path)
    temporary = temporary_beside(path)
    if not all(isinstance(text, str) and is_unicode(text) for item in (metadata or {}).items() for text in item):
        raise CheckpointError(f"{path}: the metadata of a safetensors file must map text to text")
    try:
        _write_safetensors(temporary, dict(_checked(tensors)), metadata)
        os.replace(temporary, path)
    except OSError as problem:
        raise CheckpointError(_write_problem(path, problem)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _checked(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs, each made sure to be one that a safetensors file can hold."""
    seen = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(name, str) or name == "__metadata__" or not is_unicode(name):
            raise CheckpointError(f"{quote(name)} cannot be the name of a tensor in a safetensors file")
        if name in seen:
            raise CheckpointError(f"tensor {quote(name)} is given twice")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {quote(name)} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be saved")
        seen.add(name)
        yield name, tensor.detach()


def _batches(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group the tensors, in order, into shards of at most `max_bytes` (a larger tensor gets a shard of its own)."""
    batch, nbytes = {}, 0
    for name, tensor in _checked(tensors):
        if batch and nbytes + tensor.nbytes > max_bytes:
            yield batch
            batch, nbytes = {}, 0
        batch[name] = tensor
        nbytes += tensor.nbytes
    yield batch


def _write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one new file, laid out so that the tensors can be used where they lie when it is mapped.

    The header is padded to ALIGNMENT; tensors that keep the next one aligned come first, then the others, wide dtypes first.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].dtype.itemsize))
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers insists on the format
    at = 0
    for name, tensor in ordered:
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    with open(path, "xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, tensor in ordered:
            if tensor.nbytes:
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        _flush(file)


def _flush(file) -> None:
    """Force a file to the disk. Some file systems notice only now that they are full: better before the rename than after."""
    file.flush()
    os.fsync(file.fileno())


def _move_into_place(folder: Path, staged: dict[str, Path], stale: list[str], token: str) -> None:
    """Give every staged file its final name and drop what it replaces and the `stale` files; on an error, undo all of it."""
    moves = []
    asides = [(folder / name, folder / f".{name}.{token}.old") for name in [*staged, *stale] if os.path.lexists(folder / name)]
    try:
        for source, target in [*asides, *((temporary, folder / name) for name, temporary in staged.items())]:
            if source.is_dir() and not source.is_symlink():
                raise IsADirectoryError(errno.EISDIR, f"{source.name} is a folder")
            os.replace(source, target)
            moves.append((source, target))
    except BaseException:
        for source, target in reversed(moves):
            os.replace(target, source)
        raise
    for _, aside in asides:
        aside.unlink()


def _write_problem(path: Path, problem: OSError) -> str:
    if problem.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"{path}: no space left on the disk to write it; nothing was changed. Free some space, or choose another disk"
    return f"{path}: cannot be written: {problem.strerror or one_line(problem)}; nothing was changed"


def _to_json(value: dict) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"cannot be written as JSON: {one_line(problem)}") from None


def _checked_extra_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    contents = {}
    for name, data in files.items():
        reserved = name == "config.json" or name.endswith((".safetensors", ".safetensors.index.json"))
        if not re.fullmatch(r"\w[\w.-]*", name) or reserved:
            raise CheckpointError(f"{quote(name)} cannot be an extra file: not a plain name, or one the checkpoint uses")
        if isinstance(data, str) and not is_unicode(data):
            raise CheckpointError(f"extra file {name}: holds half a surrogate pair, which is no text")
        contents[name] = data.encode() if isinstance(data, str) else bytes(data)
    return contents
