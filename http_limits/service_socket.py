"""The Unix socket of a rescue service, by which other programs of its user find it.

Any user can listen on a port. The socket is in the service's data directory, where only its owner can create files, so
that a program of that owner listens on it.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "rescue.sock"


def default_data_dir() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-tq-rescue"
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "mlx-tq-rescue"


@contextmanager
def private_listener(path: Path) -> Iterator[socket.socket]:
    """Yield a socket that listens at `path` and that only this user can connect to; remove it at the end.

    Replaces one that a killed process left. Raises OSError if others may write to its folder, or if the path exceeds
    100 bytes or so.
    """
    _check_folder(path.parent)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            path.chmod(0o600)  # before it listens: no one can have connected
            listener.listen()
            yield listener
        finally:
            path.unlink(missing_ok=True)


def connect_private(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the socket at `path`, of which no call takes longer than `timeout_s`.

    Raises OSError if nothing listens there, or unless only a program of this user can have created it.
    """
    _check_folder(path.parent)
    file = path.lstat()
    if not stat.S_ISSOCK(file.st_mode) or file.st_uid != os.geteuid() or file.st_mode & 0o077:
        raise PermissionError(f"{path} is not a socket of this user alone")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _check_folder(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}; run this as that user")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users may write to {folder}; run `chmod go-w {folder}` and restart the service")
