"""Files read with suspicion and written with care: strict JSON in, whole files out, and one-line messages about both."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .errors import CheckpointError, MinipopError

MAX_JSON_BYTES = 200_000_000  # the largest real one, Gemma-3's tokenizer.json, has 33 MB
MAX_JSON_DEPTH = 100


def read_json(path: str | os.PathLike, error: type[Exception] = CheckpointError) -> dict:
    """Read a JSON file that holds an object. Raises `error` with one line about whatever is wrong with it.

    Stricter than the json module, because the file may come from anywhere: UTF-8 only, no key twice in an object, no NaN or
    infinity, at most MAX_JSON_BYTES long and MAX_JSON_DEPTH deep.
    """
    path = Path(path)
    with open_regular(path, error) as file:
        try:
            raw = file.read(MAX_JSON_BYTES + 1)
        except OSError as problem:
            raise error(f"{path}: cannot be read: {problem.strerror}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise error(f"{path}: larger than {MAX_JSON_BYTES} bytes, too large for a JSON file of a model")
    refuse_lfs_pointer(path, raw, error)
    return parse_json(raw, str(path), error)


def parse_json(raw: bytes, where: str, error: type[Exception]) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        value = dict(pairs)
        if len(value) < len(pairs):
            for key, _ in pairs:
                if value.pop(key, refuse) is refuse:  # gone already
                    raise ValueError(f"the key {quote(key)} occurs twice in one object")
        return value

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    def finite(digits: str) -> float:
        return value if math.isfinite(value := float(digits)) else refuse(digits[:40])

    try:
        text = raw.decode()
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    except RecursionError:
        raise error(f"{where}: nested too deep") from None
    except ValueError as problem:  # JSONDecodeError, our own, and integers with thousands of digits
        raise error(f"{where}: not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{where}: must hold a JSON object, not {type(value).__name__}")
    if _depth_exceeds(value, MAX_JSON_DEPTH):
        raise error(f"{where}: nested too deep")
    # Half of a surrogate pair can be written as an escape, but it is no character: printing or encoding it would fail later.
    if re.search(r"\\u[dD][89a-fA-F]", text) and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise error(f"{where}: holds half a surrogate pair, which is no text")
    return value


def _depth_exceeds(value: dict, limit: int) -> bool:
    """True if lists and objects are nested more than `limit` deep. Level by level, so that depth costs no recursion."""
    level: list = [value]
    for _ in range(limit):
        level = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)
                 if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def write_text(path: str | os.PathLike, text: str, error: type[Exception] = MinipopError) -> None:
    """Write a text file whole or not at all: under a temporary name first, then renamed. Raises `error` with one line."""
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path, suffix: str = ".tmp") -> Path:
    """A new hidden name in the same folder, never too long, even where the file's own name is or there is none (`/`)."""
    return path.parent / f".{path.name[:50]}.{secrets.token_hex(4)}{suffix}"


def check_writable(folder: str | os.PathLike) -> None:
    """Raises OSError unless files can be made there. Rights alone do not tell: a file system may be read-only, or none for files."""
    tempfile.TemporaryFile(dir=folder).close()


def open_regular(path: Path, error: type[Exception]):
    """Open a regular file for reading, or raise `error` with the reason. Pipes and devices are refused before they can block."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path}: not a regular file")
        return open(path, "rb")
    except FileNotFoundError:
        if os.path.islink(path):
            raise error(f"{path}: a link to {os.readlink(path)}, which does not exist; download it again") from None
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None


def refuse_lfs_pointer(path: Path, start: bytes, error: type[Exception]) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise error(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file")


def is_unicode(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def listing(items: Iterable[str], limit: int = 10) -> str:
    items = list(items)
    return ", ".join(items[:limit]) + (f", ... and {len(items) - limit} more" if len(items) > limit else "")


def quote(value: object, limit: int = 200) -> str:
    """A value from a file, safe to print: quoted, with control characters escaped, not too long."""
    text = ascii(value) if isinstance(value, str) and not is_unicode(value) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def show_shape(shape: Iterable[int]) -> str:
    return str(list(shape))


def one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:300] if str(problem) else type(problem).__name__
