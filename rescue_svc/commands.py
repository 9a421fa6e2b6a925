"""The commands of `mlx-tq-rescue`, one function each."""

import json
import logging
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import uvicorn

from rescue_svc import launchd, logs
from rescue_svc.app import create_app
from rescue_svc.connections import BACKLOG, connections, listening_socket
from rescue_svc.doctor import examine
from rescue_svc.ending import Ending
from rescue_svc.ephemeral import keep, own_folder
from rescue_svc.errors import (
    DirectoryInUseError,
    RescueServiceError,
    SessionNotFoundError,
    SettingsError,
    StoreUnavailableError,
)
from rescue_svc.index import remove_orphans
from rescue_svc.opening import open_all
from rescue_svc.service import RescueService
from rescue_svc.settings import Settings
from rescue_svc.store import copies
from rescue_svc.store.files import DATABASE, connect, sqlite_errors

log = logging.getLogger(__name__)

GRACE_S = 10
CONNECTIONS = 512  # or four for each request that may be in progress, where these are more


def serve(settings: Settings) -> None:
    """Run until a signal ends it; the store is sealed on the way out, or deleted where it was made for one program."""
    logs.configure(settings.log_level)
    ending = Ending()
    if settings.ephemeral:
        ending.listen()  # before the first file: a signal in between would leave it
        ending.follow_stdin()
        with own_folder(settings) as own:
            _serve(own, ending)
    else:
        _serve(settings, ending)
    if ending.interrupted:
        raise KeyboardInterrupt


def _serve(settings: Settings, ending: Ending) -> None:
    with _listen(settings) as listener:
        _answer(settings, ending, listener)


def _answer(settings: Settings, ending: Ending, listener: socket.socket) -> None:
    service = RescueService(settings)
    ending.listen()
    try:
        if not settings.ephemeral and settings.store is None:
            keep(settings.data_dir)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        protocol = connections(max(CONNECTIONS, 4 * settings.max_in_flight))
        where = {"url": url, "store": service.store.about(), "connections": protocol.max_connections}
        log.info("listening", extra=where)
        config = uvicorn.Config(
            create_app(service),
            http=protocol,
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
        )
        ending.run(uvicorn.Server(config), listener)
    finally:
        service.close()
        log.info("closed")


def _listen(settings: Settings) -> socket.socket:
    try:
        return listening_socket(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); set --port or free it"
        ) from error


def doctor(settings: Settings, as_json: bool = False) -> None:
    """Print what works; fail if something does not."""
    findings = examine(settings)
    if as_json:
        _print_json([vars(finding) for finding in findings])
    else:
        for finding in findings:
            _print(f"{'ok ' if finding.ok else 'BAD'} {finding.what:<9} {finding.says}")
    if not all(finding.ok for finding in findings):
        raise RescueServiceError("something does not work; the lines marked BAD say what to do")


def rebuild(settings: Settings) -> None:
    """Make the database anew and drop the index files, which are built again when needed."""
    if settings.store is not None:
        raise SettingsError("rebuild makes a database of SQLite anew; of PostgreSQL restore a dump with pg_restore")
    found = copies.rebuild(settings.data_dir)
    remove_orphans(settings.data_dir, set())
    _print(f"kept {found.spans} spans and {found.vectors} vectors, lost {found.lost} spans")
    if found.set_aside:
        _print(f"the damaged database is {found.set_aside}; it still holds text: delete it when you need it no more")


def backup(settings: Settings, folder: str) -> None:
    """Copy the database into a new folder."""
    path = Path(folder).expanduser().absolute()
    if settings.store is None:
        size, use = copies.backup(settings.data_dir, path), "use it with --data-dir"
    else:
        from rescue_svc.postgres import dump  # psycopg, which only its users have

        size, use = dump.backup(settings.store.get_secret_value(), path), f"pg_restore takes {dump.DUMP}"
    _print(f"{folder}: {size} bytes; {use}. Forgetting a session does not reach into backups")


def sessions(settings: Settings, as_json: bool = False) -> None:
    """List the sessions straight from the database, whether or not a service runs."""
    rows = _sessions_of_folder(settings) if settings.store is None else _sessions_of_store(settings)
    if as_json:
        _print_json([dict(zip(("session_id", "spans", "text_bytes"), row, strict=True)) for row in rows])
    else:
        for name, spans, size in rows:
            _print(f"{name:<64} {spans:>8} spans {size:>12} bytes")


def _sessions_of_store(settings: Settings) -> list[tuple[str, int, int]]:
    store, _ = open_all(settings)
    try:
        return [(session.name, session.spans, session.text_bytes) for session in store.sessions()]
    finally:
        store.close()


def _sessions_of_folder(settings: Settings) -> list[tuple[str, int, int]]:
    path = settings.data_dir / DATABASE
    if not path.exists():
        raise StoreUnavailableError(f"{settings.data_dir} holds no {DATABASE}; name the service's --data-dir")
    with sqlite_errors():
        connection = connect(path)
        rows = connection.execute("SELECT name, spans, text_bytes FROM sessions ORDER BY updated DESC").fetchall()
        connection.close()
    return rows


def forget(settings: Settings, session: str) -> None:
    """Forget a session: by the running service if there is one, else in the database itself."""
    try:
        spans = _forget_here(settings, session)
    except DirectoryInUseError:
        spans = _ask_service_to_forget(settings, session)
    _print(f"{session}: {spans} spans forgotten")


def _forget_here(settings: Settings, session: str) -> int:
    store, index = open_all(settings)
    try:
        forgotten = store.forget(session)
        index.forget(forgotten.id)
    finally:
        store.close()
    return forgotten.spans


def _ask_service_to_forget(settings: Settings, session: str) -> int:
    request = urllib.request.Request(f"http://{settings.host}:{settings.port}/sessions/{session}", method="DELETE")
    if settings.token:
        request.add_header("Authorization", f"Bearer {settings.token.get_secret_value()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return int(json.load(answer)["forgotten"])
    except urllib.error.HTTPError as error:
        detail = json.load(error)["detail"]
        raise (SessionNotFoundError if error.code == 404 else StoreUnavailableError)(detail) from error
    except (OSError, ValueError) as error:
        raise StoreUnavailableError(
            f"{settings.data_dir} is in use, but no service answers on {settings.host}:{settings.port}; give its --port"
        ) from error


def install_launchd(settings: Settings, print_only: bool = False) -> None:
    """Write the launchd job, or show it."""
    if print_only:
        sys.stdout.buffer.write(launchd.job(launchd.program(), settings, Path.home() / "Library" / "Logs"))
        return
    path = launchd.install(settings)
    _print(f"{path} written; start it now with: launchctl bootstrap gui/$(id -u) {path}")


def _print(line: str) -> None:
    print(line)  # noqa: T201 - the answer of a command


def _print_json(value: object) -> None:
    _print(json.dumps(value, indent=2))
