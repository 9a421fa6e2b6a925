"""The folder of an ephemeral service, which is deleted when the service ends."""

import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from http_limits.process_checks import temporary_folder_error
from http_limits.service_socket import SOCKET
from rescue_svc.errors import SettingsError, StoreUnavailableError
from rescue_svc.index import remove_snapshots
from rescue_svc.settings import Settings
from rescue_svc.store.files import DATABASE, INDEXES, LOCK, SEAL, DirectoryLock

log = logging.getLogger(__name__)

_MARK = "rescue.ephemeral"  # lets the next service take over the folder of one that was killed
_WRITTEN = re.compile(
    rf"{re.escape(DATABASE)}(\.rebuilding|\.bad-\d+)?(-wal|-shm|-journal)?|{re.escape(SEAL)}(\.partial)?"
    rf"|{re.escape(SOCKET)}"
)


@contextmanager
def ephemeral_folder(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a private folder, `data_dir` if it is set; delete what the service wrote at the end.

    Raises SettingsError if the folder contains other files, or cannot be created.
    """
    is_given = "data_dir" in settings.model_fields_set
    if is_given:
        folder = settings.data_dir
        _check_empty(folder)
    elif fault := temporary_folder_error():
        raise SettingsError(fault)
    else:
        folder = Path(tempfile.mkdtemp(prefix="mlx-tq-rescue-"))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _MARK).touch(mode=0o600)
        yield settings.model_copy(update={"data_dir": folder})
    finally:
        _delete_files(folder)


def make_permanent(folder: Path) -> None:
    """Keep a folder that an ephemeral service left when it was killed."""
    (folder / _MARK).unlink(missing_ok=True)


def _check_empty(folder: Path) -> None:
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        writable_parent = folder.absolute().parent.is_dir()
    except OSError as error:
        raise SettingsError(f"data_dir {folder} cannot be used ({error.strerror}); name a folder to create") from error
    if not writable_parent:
        raise SettingsError(f"data_dir {folder} cannot be used: {folder.parent} is not a folder; create it first")
    if names and _MARK not in names:
        raise SettingsError(
            f"an ephemeral service deletes its folder, and data_dir {folder} contains other files, such as {names[0]}; "
            "name a folder that is empty or absent, or none for a temporary one"
        )


def _delete_files(folder: Path) -> None:
    """Delete what a service writes, by name, and the folder if it is then empty."""
    lock = DirectoryLock(folder)
    try:
        for path in list(folder.iterdir()):
            if _WRITTEN.fullmatch(path.name):
                path.unlink()
        remove_snapshots(folder)
        for name in (_MARK, LOCK):
            (folder / name).unlink(missing_ok=True)
        for path in (folder / INDEXES, folder):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    except OSError as error:
        raise StoreUnavailableError(f"{folder} cannot be deleted ({error}); it contains text: delete it") from error
    finally:
        lock.release()
    if folder.exists():
        log.warning("the folder contains other files and is not deleted", extra={"data_dir": str(folder)})
