"""What PostgreSQL's errors are to us. No message quotes a statement, a row or a password."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from rescue_svc.errors import RescueServiceError, StoreDamagedError, StoreFullError, StoreUnavailableError


@contextmanager
def postgres_errors(where: str) -> Iterator[None]:
    """Turn PostgreSQL's errors into ours; one of ours passes through. `where` names the database."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InternalError, psycopg.InterfaceError) as error:
        raise _translated(error, where) from error
    except (pg.InsufficientPrivilege, pg.UndefinedTable) as error:  # others would be faults of our own statements
        raise _translated(error, where) from error


def _translated(error: psycopg.Error, where: str) -> RescueServiceError:
    match error:
        case pg.DiskFull():
            return StoreFullError(f"the disk of {where} is full; free space, or forget sessions once there is a little")
        case pg.DataCorrupted() | pg.IndexCorrupted():
            return StoreDamagedError(f"{where} is damaged ({name(error)}); restore a dump of `mlx-tq-rescue backup`")
        case pg.InsufficientPrivilege():
            return StoreUnavailableError(f"{where}: the role of RESCUE_STORE lacks a right ({reason(error)}); grant it")
        case pg.ReadOnlySqlTransaction():
            return StoreUnavailableError(f"{where} takes no writes now; name its primary in RESCUE_STORE")
        case pg.UndefinedTable():
            return StoreUnavailableError(f"{where} has lost tables ({reason(error)}); start the service anew")
        case _:
            return StoreUnavailableError(
                f"{where} cannot be used now ({name(error)}); check that the server runs and what its log says"
            )


def name(error: psycopg.Error) -> str:
    """Return what an error is called, such as AdminShutdown."""
    return type(error).__name__


def reason(error: psycopg.Error) -> str:
    """Return the server's line on a right that is missing or a connection that fails; it names objects, not rows."""
    return " ".join((error.diag.message_primary or str(error)).split()) or name(error)
