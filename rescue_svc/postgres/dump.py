"""A backup by pg_dump: one file, from which pg_restore makes the store in an empty database."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from psycopg.pq import Conninfo

from rescue_svc.errors import StoreUnavailableError
from rescue_svc.postgres.connections import SCHEMA
from rescue_svc.store.files import sync, sync_directory

DUMP = "rescue.dump"


def backup(url: str, folder: Path) -> int:
    """Dump the store into the new `folder`; return the bytes. Safe while services run: it is the store of one moment.

    Raises StoreUnavailableError when `folder` exists or cannot be made, and with what pg_dump says where that fails.
    """
    program = shutil.which("pg_dump")
    if program is None:
        raise StoreUnavailableError("there is no pg_dump; install PostgreSQL's client programs, as new as the server")
    if folder.exists():
        raise StoreUnavailableError(f"{folder} exists; name a folder that does not, as nothing is ever overwritten")
    partial = folder.with_name(f"{folder.name}.partial-{time.time_ns()}")
    try:
        partial.mkdir(parents=True, mode=0o700)
        _dump(program, url, partial / DUMP)
        partial.rename(folder)
        sync_directory(folder.parent)
    except OSError as error:
        raise StoreUnavailableError(f"{folder} cannot be made ({error.strerror}); name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what is left where it failed; once it is renamed, nothing
    return (folder / DUMP).stat().st_size


def _dump(program: str, url: str, file: Path) -> None:
    """Run pg_dump; the password goes by its environment, as arguments show in the list of processes."""
    given = [option for option in Conninfo.parse(url.encode()) if option.val and option.envvar]
    told = {(option.envvar or b"").decode(): (option.val or b"").decode() for option in given}
    words = [program, "--format=custom", "--no-owner", f"--schema={SCHEMA}", f"--file={file}"]
    ended = subprocess.run(words, env=os.environ | told, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise StoreUnavailableError(f"pg_dump failed: {said}")
    with file.open("rb+") as written:
        sync(written.fileno())
