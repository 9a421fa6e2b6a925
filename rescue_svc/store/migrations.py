"""The database schema as an ordered list of migrations; `PRAGMA user_version` counts those applied."""

import sqlite3

from rescue_svc.errors import StoreDamagedError
from rescue_svc.store.files import transaction

APPLICATION_ID = 0x6D717271  # "mqrq" marks our files among SQLite databases

# AUTOINCREMENT: the id of a deleted row is never used again.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"PRAGMA application_id = {APPLICATION_ID}",
        """CREATE TABLE sessions (
            id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, spans INTEGER NOT NULL,
            text_bytes INTEGER NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, expires REAL) STRICT""",
        """CREATE TABLE spans (
            id INTEGER PRIMARY KEY AUTOINCREMENT, session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
            start INTEGER NOT NULL, stop INTEGER NOT NULL, layer INTEGER NOT NULL, score REAL NOT NULL,
            digest BLOB NOT NULL, seal INTEGER NOT NULL, UNIQUE (session, digest)) STRICT""",
        "CREATE INDEX spans_by_start ON spans (session, start, stop)",
    ),
    (
        """CREATE TABLE embeddings (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            span INTEGER NOT NULL UNIQUE REFERENCES spans(id) ON DELETE CASCADE,
            session INTEGER NOT NULL, model TEXT NOT NULL, seal INTEGER NOT NULL) STRICT""",
        "CREATE INDEX embeddings_by_session ON embeddings (session, model, seq)",
    ),
)


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the missing migrations, each in a transaction; raise StoreDamagedError for a foreign or newer database."""
    done = connection.execute("PRAGMA user_version").fetchone()[0]
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and owner != APPLICATION_ID:
        raise StoreDamagedError(
            f"the database is not of this program (application id {owner:#x}, not {APPLICATION_ID:#x}); "
            "restore a backup or name another --data-dir"
        )
    if done > len(MIGRATIONS):
        raise StoreDamagedError(
            f"the database has version {done}, this program supports {len(MIGRATIONS)}; "
            "upgrade mlx-tq or restore a backup"
        )
    for version, steps in enumerate(MIGRATIONS[done:], start=done + 1):
        with transaction(connection):
            for statement in (*steps, f"PRAGMA user_version = {version}"):
                connection.execute(statement)
