"""Connections to PostgreSQL: requirements, a pool, transactions, and the translation of errors."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from psycopg import errors as pg
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format
from psycopg_pool import ConnectionPool, PoolTimeout

from rescue_svc.errors import SettingsError, StoreDamagedError, StoreFullError, StoreUnavailableError

OLDEST = 15  # the role pg_checkpoint, which deletes removed files immediately
OLDEST_VECTOR = (0, 8)  # iterative scans, for searches with excluded spans
SCHEMA = "mlx_tq_rescue"
LOCK = 0x6D717271  # "mqrq"; services that start together create the schema one after the other

POOL = 12  # connections of a service
CONNECT_S = 3
WAIT_S = 0.5  # for a connection of the pool; then an extra one is opened, or fails with the reason
_CONNECTING: dict[str, Any] = {
    "autocommit": True,
    "connect_timeout": CONNECT_S,
    "application_name": "mlx-tq-rescue",
    "tcp_user_timeout": 10_000,  # ms, to notice a lost network
}
_EXTENSION = """
    SELECT t.oid, n.nspname, e.extversion FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
    JOIN pg_type t ON t.typnamespace = n.oid AND t.typname = 'vector' WHERE e.extname = 'vector'"""
# One statement, so that a connection is ready after one round trip.
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
    """Properties of the server, and what the role may do to remove deleted text from its files."""

    version: str
    vector: str
    checksums: bool  # of pages, which detect damage
    durable: bool  # fsync and full_page_writes: acknowledged writes survive a power cut
    may_checkpoint: bool  # the files of dropped tables are deleted now, not at the next checkpoint of the server
    may_empty_log: bool  # their text in the log, too


_SERVER = """
    SELECT current_setting('server_version'), current_setting('data_checksums') = 'on',
        current_setting('fsync') = 'on' AND current_setting('full_page_writes') = 'on',
        pg_has_role('pg_checkpoint', 'USAGE'),
        pg_has_role('pg_checkpoint', 'USAGE') AND current_setting('wal_recycle') = 'off'
            AND has_function_privilege('pg_switch_wal()', 'EXECUTE')"""


class Connections:
    """A pool of connections in autocommit, safe to use from many threads.

    It raises SettingsError or StoreUnavailableError if it cannot use the URL or the server, without the password.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            parts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:  # its message quotes the URL, password and all
            raise SettingsError("store is not a PostgreSQL URL; give postgresql://USER@HOST:PORT/DATABASE") from None
        self.where = "postgresql://{}{}/{}".format(
            parts.get("host", "localhost"), f":{parts['port']}" if "port" in parts else "", parts.get("dbname", "")
        )
        with self.connect() as first, postgres_errors(self.where):
            if first.info.server_version < OLDEST * 10_000:
                fault = f"is PostgreSQL {first.info.parameter_status('server_version')}"
                raise StoreUnavailableError(f"{self.where} {fault}; {OLDEST} or later is required: upgrade it")
            encoding = first.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise StoreUnavailableError(f"{self.where} has the encoding {encoding}; make a database in UTF8")
            version, *others = first.execute(_SERVER).fetchone() or ()
            self.server = Server(version, self._vector(first), *others)
        self._pool = ConnectionPool(
            url,
            min_size=1,
            max_size=POOL,
            timeout=WAIT_S,
            reconnect_timeout=WAIT_S,  # the next call retries, however long the server was away
            kwargs=_CONNECTING,
            configure=self._configure,
            check=ConnectionPool.check_connection,
            open=True,
        )

    def close(self) -> None:
        self._pool.close()

    @contextmanager
    def take(self) -> Iterator[psycopg.Connection]:
        with postgres_errors(self.where):
            try:
                lent = self._pool.getconn()
            except PoolTimeout:  # all are in use, or the pool has not noticed that the server is available again
                with self.connect() as extra:
                    self._configure(extra)
                    yield extra
                return
            try:
                yield lent
            finally:
                self._pool.putconn(lent)

    def rows_of_session(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on a session's tables; none if the session was deleted meanwhile."""
        with self.take() as connection:
            try:
                return connection.execute(statement, parameters).fetchall()
            except pg.UndefinedTable:
                return []

    def connect(self) -> psycopg.Connection:
        """Open a connection outside the pool; raise StoreUnavailableError with the server's reason."""
        try:
            return psycopg.connect(self._url, **_CONNECTING)
        except psycopg.Error as error:
            raise StoreUnavailableError(
                f"no connection to {self.where}: {reason(error)}; check RESCUE_STORE, and that the server runs"
            ) from None

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
        ((_, _, version),) = first.execute(_EXTENSION).fetchall()
        if tuple(map(int, version.split(".")[:2])) < OLDEST_VECTOR:
            raise StoreUnavailableError(
                f"{self.where} has pgvector {version}; 0.8 or later is required: "
                "install it on the server, then `ALTER EXTENSION vector UPDATE`"
            )
        return str(version)

    def _configure(self, connection: psycopg.Connection) -> None:
        oid, schema, _ = connection.execute(_EXTENSION).fetchone() or (0, "public", "")
        connection.execute(_SETTINGS, [f'{SCHEMA}, "{schema}"'])
        connection.adapters.register_dumper(np.ndarray, type("VectorDumper", (_VectorDumper,), {"oid": oid}))


class _VectorDumper(Dumper):
    """Sends a float32 vector [D] in pgvector's binary format."""

    format = Format.BINARY

    def dump(self, obj: Any) -> Buffer:
        return struct.pack(">hh", len(obj), 0) + bytes(obj.astype(">f4"))


@contextmanager
def transaction(connection: psycopg.Connection) -> Iterator[None]:
    """Run a block in a transaction; raise OperationalError unless the server has confirmed the commit.

    psycopg's own context raises nothing, and sends no COMMIT, if the connection is lost at the end of the block.
    """
    with connection.transaction() as block:
        yield
    if block.status is not psycopg.Transaction.Status.COMMITTED:
        raise psycopg.OperationalError("the connection was lost before the transaction was committed")


@contextmanager
def postgres_errors(where: str) -> Iterator[None]:
    """Translate errors of PostgreSQL to errors of the service, which quote no statement, row or password."""
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InternalError,
        psycopg.InterfaceError,
        pg.InsufficientPrivilege,
        pg.UndefinedTable,  # others would be bugs of our statements
    ) as error:
        name = type(error).__name__
        match error:
            case pg.DiskFull():
                raise StoreFullError(
                    f"the disk of {where} is full; free space, or delete sessions once there is a little"
                ) from error
            case pg.DataCorrupted() | pg.IndexCorrupted():
                fault = f" is damaged ({name}); restore a dump of `mlx-tq-rescue backup`"
                raise StoreDamagedError(where + fault) from error
            case pg.InsufficientPrivilege():
                fault = f": the role of RESCUE_STORE lacks a privilege ({reason(error)}); grant it"
            case pg.ReadOnlySqlTransaction():
                fault = " is read-only; name its primary in RESCUE_STORE"
            case pg.UndefinedTable():
                fault = f" has lost tables ({reason(error)}); restart the service"
            case _:
                fault = f" cannot be used now ({name}); check that the server runs and what its log says"
        raise StoreUnavailableError(where + fault) from error


def reason(error: psycopg.Error) -> str:
    """Return the server's message about a missing privilege or a failed connection; it names objects, not rows."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__
