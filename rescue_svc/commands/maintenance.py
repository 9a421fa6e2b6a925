"""Commands on stored data: list and delete sessions, back up, rebuild. A service may run meanwhile, but for rebuild."""

# ruff: noqa: T201 - prints the output of a command

import json
import os
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import quote

from http_limits.service_socket import SOCKET, connect_private
from rescue_svc.errors import DirectoryInUseError, SessionNotFoundError, SettingsError, StoreUnavailableError
from rescue_svc.index import remove_snapshots
from rescue_svc.opening import open_all
from rescue_svc.settings import Settings
from rescue_svc.store import copies
from rescue_svc.store.files import connect, existing_database, sqlite_errors

FORGET_S = 60.0  # that a service may take to delete a session


def list_sessions(settings: Settings, as_json: bool = False) -> None:
    rows: list[tuple[str, int, int]]
    if settings.store is None:
        path = existing_database(settings.data_dir)
        with sqlite_errors(), closing(connect(path)) as connection:
            rows = connection.execute("SELECT name, spans, text_bytes FROM sessions ORDER BY updated DESC").fetchall()
    else:
        with closing(open_all(settings)[0]) as store:
            rows = [(session.name, session.spans, session.text_bytes) for session in store.sessions()]
    if as_json:
        sessions = [{"session_id": name, "spans": spans, "text_bytes": size} for name, spans, size in rows]
        print(json.dumps(sessions, indent=2))
    else:
        for name, spans, size in rows:
            print(f"{name:<64} {spans:>8} spans {size:>12} bytes")


def forget(settings: Settings, session: str) -> None:
    try:
        store, index = open_all(settings)
    except DirectoryInUseError:
        spans = _forget_by_service(settings, session)
    else:
        with closing(store):
            forgotten = store.forget(session)
            index.forget(forgotten.id)
            store.purge()
        spans = forgotten.spans
    print(f"{session}: {spans} spans deleted")


def _forget_by_service(settings: Settings, session: str) -> int:
    """Delete the session through the service's socket; on a TCP port another program could receive the token."""
    headers = {"Authorization": f"Bearer {settings.token.get_secret_value()}"} if settings.token else {}
    path = settings.data_dir / SOCKET
    try:
        with connect_private(path, FORGET_S) as connected, closing(HTTPConnection("localhost")) as connection:
            connection.sock = connected
            connection.request("DELETE", f"/sessions/{quote(session, safe='')}", headers=headers)
            response = connection.getresponse()
            answer = json.load(response)
        if response.status == HTTPStatus.OK:
            return int(answer["forgotten"])
        detail = answer["detail"]
    except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
        raise StoreUnavailableError(
            f"{settings.data_dir} is in use, but no service of yours answers at {path} ({error}); stop the process "
            "that uses it, and repeat this"
        ) from error
    raise (SessionNotFoundError if response.status == HTTPStatus.NOT_FOUND else StoreUnavailableError)(detail)


def backup(settings: Settings, folder: str) -> None:
    path = Path(os.path.expanduser(folder)).absolute()  # noqa: PTH111  raises nothing for an unknown user
    if settings.store is None:
        size, use = copies.backup(settings.data_dir, path), "use it with --data-dir"
    else:
        from rescue_svc.postgres import dump  # psycopg, which only its users have

        size, use = dump.backup(settings.store.get_secret_value(), path), f"pg_restore takes {dump.DUMP}"
    print(f"{folder}: {size} bytes; {use}. Forgetting a session does not affect backups")


def rebuild(settings: Settings) -> None:
    if settings.store is not None:
        raise SettingsError("rebuild is for SQLite; restore a dump of PostgreSQL with pg_restore")
    rebuilt = copies.rebuild(settings.data_dir)
    remove_snapshots(settings.data_dir)  # indexes are built again on demand
    print(f"kept {rebuilt.spans} spans and {rebuilt.vectors} vectors, lost {rebuilt.lost} spans")
    if rebuilt.damaged_file:
        print(
            f"the damaged database is {rebuilt.damaged_file}; it still contains text: delete it when it is not needed"
        )
