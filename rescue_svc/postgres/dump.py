"""Backup with pg_dump: one file, which pg_restore loads into an empty database."""

import os
import shutil
import subprocess
from pathlib import Path

from psycopg.pq import Conninfo

from rescue_svc.errors import StoreUnavailableError
from rescue_svc.postgres.connections import SCHEMA
from rescue_svc.store.files import new_folder

DUMP = "rescue.dump"


def backup(url: str, folder: Path) -> int:
    """Dump the store into a new folder; return its bytes. Services may run meanwhile: it is a consistent snapshot.

    The password is in the environment of pg_dump, because arguments are visible in the list of processes.
    """
    program = shutil.which("pg_dump")
    if program is None:
        raise StoreUnavailableError("pg_dump is missing; install PostgreSQL's client programs, as new as the server")
    options = [option for option in Conninfo.parse(url.encode()) if option.val and option.envvar]
    variables = {(option.envvar or b"").decode(): (option.val or b"").decode() for option in options}
    with new_folder(folder) as partial:
        command = [program, "--format=custom", "--no-owner", f"--schema={SCHEMA}", f"--file={partial / DUMP}"]
        result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["it gave no reason"])[0]
            raise StoreUnavailableError(f"pg_dump failed: {reason}")
    return (folder / DUMP).stat().st_size
