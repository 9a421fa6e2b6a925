"""Transactions that are committed when their block has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


@contextmanager
def transaction(connection: psycopg.Connection) -> Iterator[None]:
    """Do all of a block or nothing; raises OperationalError unless the server has said that it is committed.

    psycopg's own context says nothing where the connection turns out to be lost as its block ends: it then sends no
    COMMIT and raises no error.
    """
    with connection.transaction() as block:
        yield
    if block.status is not psycopg.Transaction.Status.COMMITTED:
        raise psycopg.OperationalError("the connection was lost before the transaction was committed")
