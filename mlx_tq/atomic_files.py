"""Files that are written whole or not at all, and in the place of none but their own kind."""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_tq.errors import CacheFormatError

_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit


def is_replaceable(path: Path) -> bool:
    """`path` is a file or nothing yet: no folder, device or pipe."""
    return path.is_file() or not path.exists()


def check_kind(path: str | Path, kind: str, is_same: Callable[[Mapping[str, str]], bool]) -> None:
    """Raise where `path` is a file of another kind than the one that is to take its place.

    Args:
        path: of the file, which need not exist.
        kind: for the message.
        is_same: tells the kind by the strings in a safetensors header.

    Raises:
        CacheFormatError: it is.
    """
    file = Path(path)
    if not file.is_file():
        return
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # whatever a foreign file leads to
        if is_same(_strings(file)):
            return
    raise CacheFormatError(f"{path} is no {kind}, and is not replaced. Name another file, or remove it first.")


def _strings(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself; of another file nothing, or a ValueError."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length)) if length <= _LONGEST_HEADER else {}
    return dict(header["__metadata__"]) if "__metadata__" in header else {}


@contextmanager
def atomic_write(path: str | Path, suffix: str = "", *, sync: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is removed otherwise.

    A symbolic link stays one: the file behind it is replaced.

    Args:
        path: of the file, which may exist.
        suffix: that the temporary name ends with, where a writer insists on one.
        sync: wait for the disk. Without, a power cut may leave a damaged file behind.

    Raises:
        OSError: `path` is a folder, a device or a pipe, which cannot be replaced, or nothing can be written there.
    """
    target = Path(path).resolve()
    if not is_replaceable(target):
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe, not a file")
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, f"there is no folder {target.parent}")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{suffix}")
    try:
        yield temporary
        if sync:
            wait_for_disk(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def wait_for_disk(path: Path) -> None:
    """Return once what was written to a file is on the disk."""
    with path.open("rb") as written:
        os.fsync(written.fileno())
