"""The database schema: tables that all sessions share, as an ordered list of migrations, and two tables per session.

So no search sees words or vectors of other sessions, an HNSW index contains only its session, and deleting drops
whole files: a deleted row would leave its bytes in the page.
"""

import psycopg

from rescue_svc.errors import StoreDamagedError
from rescue_svc.postgres.connections import LOCK, SCHEMA, transaction

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE SEQUENCE span_ids",
        """CREATE TABLE sessions (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE,
            spans bigint NOT NULL DEFAULT 0, text_bytes bigint NOT NULL DEFAULT 0, words bigint NOT NULL DEFAULT 0,
            created double precision NOT NULL, updated double precision NOT NULL, expires double precision,
            model text)""",
        "ALTER TABLE sessions ALTER name SET STATISTICS 0",  # names in statistics would outlive their session
        # Spans without a vector. Rows of a deleted session are deleted with the next batch.
        "CREATE TABLE queue (span bigint PRIMARY KEY, session bigint NOT NULL)",
        "CREATE INDEX ON queue (session)",
        # Words arrive in lower case and without diacritics, and only have to be stemmed.
        "CREATE TEXT SEARCH DICTIONARY porter (TEMPLATE = pg_catalog.snowball, LANGUAGE = porter)",
        "CREATE TEXT SEARCH DICTIONARY plain (TEMPLATE = pg_catalog.simple)",
        "CREATE TEXT SEARCH CONFIGURATION words (PARSER = pg_catalog.default)",
        "ALTER TEXT SEARCH CONFIGURATION words ADD MAPPING FOR asciiword, word, numword WITH porter",
        "ALTER TEXT SEARCH CONFIGURATION words ADD MAPPING FOR int, uint, float, sfloat, version WITH plain",
    ),
)


def migrate(connection: psycopg.Connection) -> None:
    """Apply the missing migrations in one transaction; raise StoreDamagedError for a newer database."""
    with transaction(connection):
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        if connection.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.version"]).fetchone() == (None,):
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            connection.execute(f"CREATE TABLE {SCHEMA}.version AS SELECT 0 AS steps")
        connection.execute(f"SET LOCAL search_path = {SCHEMA}")
        ((done,),) = connection.execute("SELECT steps FROM version").fetchall()
        if done > len(MIGRATIONS):
            raise StoreDamagedError(
                f"the database has version {done}, this program supports {len(MIGRATIONS)}; "
                "upgrade mlx-tq or restore a dump"
            )
        for step in (statement for steps in MIGRATIONS[done:] for statement in steps):
            connection.execute(step)
        connection.execute("UPDATE version SET steps = %s", [len(MIGRATIONS)])


def create_tables(connection: psycopg.Connection, session: int) -> None:
    """Create the tables of a session, without planner statistics of text, which would outlive the session."""
    connection.execute(
        f"""
        CREATE TABLE spans_{session:d} (
            id bigint PRIMARY KEY, start bigint NOT NULL, stop bigint NOT NULL, layer integer NOT NULL,
            score double precision NOT NULL, length integer NOT NULL, text text NOT NULL, digest bytea NOT NULL UNIQUE,
            words tsvector NOT NULL);
        ALTER TABLE spans_{session:d} ALTER text SET STATISTICS 0, ALTER words SET STATISTICS 0,
            ALTER digest SET STATISTICS 0;
        CREATE INDEX ON spans_{session:d} (start, stop);
        CREATE INDEX ON spans_{session:d} USING gin (words) WITH (gin_pending_list_limit = 256);
        CREATE TABLE vectors_{session:d} (span bigint PRIMARY KEY, vector vector NOT NULL);
        ALTER TABLE vectors_{session:d} ALTER vector SET STATISTICS 0"""
    )
