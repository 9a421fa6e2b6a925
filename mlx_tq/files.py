"""Atomic file writes that replace only files of their own kind, and the user's cache folder."""

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from mlx_tq.errors import CacheFormatError

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def cache_folder() -> Path:
    """Return the user's cache folder of mlx_tq."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_tq"


def is_replaceable(path: Path) -> bool:
    """Return whether `path` is a regular file or does not exist."""
    return path.is_file() or not path.exists()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> FileIO:
    """Open a regular file unbuffered; raise OSError for anything else, such as a link, a pipe or a device.

    The flags of `os.open` may create it, for its owner alone.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # else opening a pipe would wait
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb" if flags == os.O_RDONLY else "rb+", buffering=0)  # noqa: PTH123  a descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def check_kind(path: str | Path, kind: str, has_kind: Callable[[Mapping[str, str]], bool]) -> None:
    """Raise CacheFormatError if a file exists at `path` and `has_kind` is false for its safetensors metadata."""
    file = Path(path)
    if not os.path.isfile(path):  # noqa: PTH113  Path.is_file raises for long names
        return
    # A foreign file may hold anything.
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else {}
        if has_kind(dict(header.get("__metadata__", {}))):
            return
    raise CacheFormatError(f"{path} is not a {kind} and is not replaced. Name another file, or remove it first.")


@contextmanager
def atomic_write(path: str | Path, suffix: str = "", *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary file next to `path`, which replaces it unless the block raises.

    A symbolic link stays one: the file behind it is replaced. Writers that insist on an extension get it by `suffix`.
    Without `sync`, a power cut may leave a damaged file.
    """
    target = Path(path).resolve()
    if not is_replaceable(target):
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe, not a file")
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, f"folder {target.parent} does not exist")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{suffix}")
    try:
        yield temporary
        if sync:
            sync_file(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until the data of a file is on the disk."""
    with path.open("rb") as file:
        sync_descriptor(file.fileno())


def sync_descriptor(descriptor: int) -> None:
    """Wait until the data of an open file is on the disk. On macOS, fsync alone leaves it in the drive's cache."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)  # macOS alone has it
    if full_sync is not None:
        with suppress(OSError):  # network drives refuse it
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)
