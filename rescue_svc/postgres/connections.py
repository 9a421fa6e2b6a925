"""Connections to one PostgreSQL: what must be so before it is used, a pool, and what each connection is told first."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.errors import UndefinedTable
from psycopg.pq import Format
from psycopg_pool import ConnectionPool, PoolTimeout

from rescue_svc.errors import SettingsError, StoreUnavailableError
from rescue_svc.postgres.faults import postgres_errors, reason

OLDEST = 15  # the role pg_checkpoint, by which forgotten files go at once
OLDEST_VECTOR = (0, 8)  # a search by HNSW goes on where what it found is left out
SCHEMA = "mlx_tq_rescue"
LOCK = 0x6D717271  # "mqrq": services that start at once make what is missing one after the other

POOL = 12  # connections of a service
CONNECT_S = 3  # a server that does not answer for longer is not there
WAIT_S = 0.5  # for a connection of the pool; then one is made beside it, or says why it cannot be
_CONNECTING: dict[str, Any] = {
    "autocommit": True,
    "connect_timeout": CONNECT_S,
    "application_name": "mlx-tq-rescue",
    "tcp_user_timeout": 10_000,  # ms: a network that is gone is noticed
}
_EXTENSION = """
    SELECT t.oid, n.nspname, e.extversion FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
    JOIN pg_type t ON t.typnamespace = n.oid AND t.typname = 'vector' WHERE e.extname = 'vector'"""
# One statement: a connection is ready after one exchange.
_SETTINGS = """
    SELECT set_config(name, value, false) FROM (VALUES
        ('search_path', %s),
        ('jit', 'off'), -- compiling takes longer than any search
        ('lock_timeout', '30s'), ('statement_timeout', '60s'),
        ('idle_in_transaction_session_timeout', '0'), -- while texts are embedded
        ('hnsw.ef_search', '100'), ('hnsw.iterative_scan', 'strict_order'),
        ('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'))) AS chosen(name, value)"""


@dataclass(frozen=True)
class Server:
    """What a server is, and what the role may do to make forgotten text leave its files."""

    version: str
    vector: str
    checksums: bool  # of pages: damage is found where it is read
    durable: bool  # fsync and full_page_writes: what was acknowledged survives a power cut
    may_checkpoint: bool  # the files of dropped tables go now, and not at the next checkpoint of the server's own
    may_empty_log: bool  # so does what its log holds of them


_SERVER = """
    SELECT current_setting('server_version'), current_setting('data_checksums') = 'on',
        current_setting('fsync') = 'on' AND current_setting('full_page_writes') = 'on',
        pg_has_role('pg_checkpoint', 'USAGE'),
        pg_has_role('pg_checkpoint', 'USAGE') AND current_setting('wal_recycle') = 'off'
            AND has_function_privilege('pg_switch_wal()', 'EXECUTE')"""


class Connections:
    """A pool of connections to the database of a URL, each in autocommit. Safe to use from many threads.

    Raises SettingsError for what is no URL, and StoreUnavailableError for a server that cannot be reached, is too old,
    or has no pgvector that the role may use. None of their messages holds the password.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            parts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # its message quotes the URL, password and all
            raise SettingsError("store is no PostgreSQL URL; give postgresql://USER@HOST:PORT/DATABASE") from None
        self.where = "postgresql://{}{}/{}".format(
            parts.get("host", "localhost"), f":{parts['port']}" if "port" in parts else "", parts.get("dbname", "")
        )
        with self.connect() as first, postgres_errors(self.where):
            self.server = self._examine(first)
        self._pool = ConnectionPool(
            url,
            min_size=1,
            max_size=POOL,
            timeout=WAIT_S,
            reconnect_timeout=WAIT_S,  # then the next call has it try again, however long the server was away
            kwargs=_CONNECTING,
            configure=self._configure,
            check=ConnectionPool.check_connection,
            open=True,
        )

    def close(self) -> None:
        """Close all of them."""
        self._pool.close()

    @contextmanager
    def take(self) -> Iterator[psycopg.Connection]:
        """Lend a connection; raises StoreUnavailableError where there is none."""
        with postgres_errors(self.where):
            try:
                lent = self._pool.getconn()
            except PoolTimeout:  # all are in use, or the server was away and the pool has not noticed that it is back
                with self.connect() as beside:
                    self._configure(beside)
                    yield beside
                return
            try:
                yield lent
            finally:
                self._pool.putconn(lent)

    def rows_of_session(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on a session's tables; none where it was forgotten meanwhile."""
        with self.take() as connection:
            try:
                return connection.execute(statement, parameters).fetchall()
            except UndefinedTable:
                return []

    def connect(self) -> psycopg.Connection:
        """Return a connection beside the pool; raises StoreUnavailableError with the reason that the server gives."""
        try:
            return psycopg.connect(self._url, **_CONNECTING)
        except psycopg.Error as error:
            raise StoreUnavailableError(
                f"no connection to {self.where}: {reason(error)}; check RESCUE_STORE, and that the server runs"
            ) from None

    def _examine(self, first: psycopg.Connection) -> Server:
        if first.info.server_version < OLDEST * 10_000:
            old = first.info.parameter_status("server_version")
            raise StoreUnavailableError(f"{self.where} is PostgreSQL {old}; {OLDEST} or later is needed: upgrade it")
        encoding = first.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreUnavailableError(f"{self.where} has the encoding {encoding}; make a database in UTF8")
        version, *others = first.execute(_SERVER).fetchone() or ()
        return Server(version, self._vector(first), *others)

    def _vector(self, first: psycopg.Connection) -> str:
        if not first.execute(_EXTENSION).fetchone():
            if not first.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone():
                raise StoreUnavailableError(f"the server of {self.where} has no pgvector; install 0.8 or later")
            try:
                first.execute("SELECT pg_advisory_lock(%s)", [LOCK])  # until this connection ends
                first.execute("CREATE EXTENSION IF NOT EXISTS vector")
            except psycopg.errors.InsufficientPrivilege:
                raise StoreUnavailableError(
                    f"the role of RESCUE_STORE may not add pgvector to {self.where}; "
                    "have an administrator run `CREATE EXTENSION vector` there"
                ) from None
        found = first.execute(_EXTENSION).fetchone()
        assert found is not None  # noqa: S101 - it was just made; this tells the type checker
        version = str(found[2])
        if tuple(map(int, version.split(".")[:2])) < OLDEST_VECTOR:
            raise StoreUnavailableError(
                f"{self.where} has pgvector {version}; 0.8 or later is needed: "
                "install it on the server, then `ALTER EXTENSION vector UPDATE`"
            )
        return version

    def _configure(self, connection: psycopg.Connection) -> None:
        oid, schema, _ = connection.execute(_EXTENSION).fetchone() or (0, "public", "")
        connection.execute(_SETTINGS, [f'{SCHEMA}, "{schema}"'])
        connection.adapters.register_dumper(np.ndarray, _vector_dumper(oid))


def _vector_dumper(of_type: int) -> type[Dumper]:
    """Return what sends a float32 vector [D] in pgvector's binary form."""

    class VectorDumper(Dumper):
        format = Format.BINARY
        oid = of_type

        def dump(self, obj: Any) -> Buffer:
            return struct.pack(">hh", len(obj), 0) + bytes(obj.astype(">f4"))

    return VectorDumper
