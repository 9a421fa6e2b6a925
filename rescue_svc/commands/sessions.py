"""List the sessions, also while the service runs."""

# ruff: noqa: T201 - prints the output of a command

import json

from rescue_svc.errors import StoreUnavailableError
from rescue_svc.opening import open_all
from rescue_svc.settings import Settings
from rescue_svc.store.files import DATABASE, connect, sqlite_errors


def run(settings: Settings, as_json: bool = False) -> None:
    rows = _read_sqlite(settings) if settings.store is None else _read_postgres(settings)
    if as_json:
        print(
            json.dumps([dict(zip(("session_id", "spans", "text_bytes"), row, strict=True)) for row in rows], indent=2)
        )
    else:
        for name, spans, size in rows:
            print(f"{name:<64} {spans:>8} spans {size:>12} bytes")


def _read_postgres(settings: Settings) -> list[tuple[str, int, int]]:
    store, _ = open_all(settings)
    try:
        return [(session.name, session.spans, session.text_bytes) for session in store.sessions()]
    finally:
        store.close()


def _read_sqlite(settings: Settings) -> list[tuple[str, int, int]]:
    path = settings.data_dir / DATABASE
    if not path.exists():
        raise StoreUnavailableError(f"{settings.data_dir} has no {DATABASE}; name the service's --data-dir")
    with sqlite_errors():
        connection = connect(path)
        rows = connection.execute("SELECT name, spans, text_bytes FROM sessions ORDER BY updated DESC").fetchall()
        connection.close()
    return rows
