"""Files that are written whole or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_replaceable(path: Path) -> bool:
    """`path` is a file or nothing yet: no folder, device or pipe."""
    return path.is_file() or not path.exists()


@contextmanager
def written_whole(path: str | Path, suffix: str = "") -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is removed otherwise.

    A symbolic link stays one: the file behind it is replaced.

    Args:
        path: of the file, which may exist.
        suffix: that the temporary name ends with, where a writer insists on one.

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
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
