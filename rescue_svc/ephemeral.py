"""The folder of an ephemeral service: taken where it holds nothing of others, and cleared by name at the end."""

import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rescue_svc.errors import SettingsError, StoreUnavailableError
from rescue_svc.index import remove_orphans
from rescue_svc.settings import Settings
from rescue_svc.store.files import DATABASE, INDEXES, LOCK, SEAL, DirectoryLock

log = logging.getLogger(__name__)

_MARK = "rescue.ephemeral"  # in a folder that an ephemeral service wrote, so that after a kill another may take it
_WRITTEN = re.compile(
    rf"{re.escape(DATABASE)}(\.rebuilding|\.bad-\d+)?(-wal|-shm|-journal)?|{re.escape(SEAL)}(\.partial)?"
)


@contextmanager
def own_folder(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a folder of the service's own; at the end what the service wrote in it is deleted.

    That is a new temporary one, or `data_dir` where it was set. The folder goes too, unless others put something in it.

    Raises:
        SettingsError: `data_dir` holds files of others, or cannot be made.
        DirectoryInUseError: another service runs in it, whose files stay.
        StoreUnavailableError: what was written cannot be deleted.
    """
    given = "data_dir" in settings.model_fields_set
    folder = settings.data_dir if given else Path(tempfile.mkdtemp(prefix="mlx-tq-rescue-"))
    if given:
        _check(folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _MARK).touch(mode=0o600)
        yield settings.model_copy(update={"data_dir": folder})
    finally:
        _clear(folder)


def keep(folder: Path) -> None:
    """Make of a folder that an ephemeral service left one that lasts."""
    (folder / _MARK).unlink(missing_ok=True)


def _check(folder: Path) -> None:
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        writable_parent = folder.absolute().parent.is_dir()
    except OSError as error:
        raise SettingsError(f"data_dir {folder} cannot be taken ({error.strerror}); name a folder to make") from error
    if not writable_parent:
        raise SettingsError(f"data_dir {folder} cannot be taken: {folder.parent} is no folder; make it first")
    if names and _MARK not in names:
        raise SettingsError(
            f"an ephemeral service deletes what it wrote, and data_dir {folder} holds what it did not write, such as "
            f"{names[0]}; name a folder that is empty or absent, or none: it then makes a temporary one"
        )


def _clear(folder: Path) -> None:
    """Delete what a service writes, by name. Raises DirectoryInUseError where one still runs there."""
    lock = DirectoryLock(folder)
    try:
        for path in list(folder.iterdir()):
            if _WRITTEN.fullmatch(path.name):
                path.unlink()
        remove_orphans(folder, set())
        for name in (_MARK, LOCK):
            (folder / name).unlink(missing_ok=True)
        for emptied in (folder / INDEXES, folder):
            if emptied.is_dir() and not any(emptied.iterdir()):
                emptied.rmdir()
    except OSError as error:
        raise StoreUnavailableError(f"{folder} cannot be cleared ({error}); it holds text: delete it") from error
    finally:
        lock.release()
    if folder.exists():
        log.warning("the folder holds what this service did not write, and stays", extra={"data_dir": str(folder)})
