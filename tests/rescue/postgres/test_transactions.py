"""A transaction is committed, or says that it is not."""

from contextlib import suppress

import psycopg
import pytest

from rescue_svc.postgres.connections import transaction


def lose(connection, server):
    """End a connection from the server's side, and have the client notice."""
    server.sql(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
    with suppress(psycopg.OperationalError):
        while connection.pgconn.status == psycopg.pq.ConnStatus.OK:
            connection.pgconn.consume_input()


@pytest.mark.parametrize("alive", [True, False], ids=["alive", "lost as the block ends"])
def test_what_was_not_committed_is_an_error(own, alive):
    """psycopg's own block ends as if all were well."""
    url = own.database()
    own.sql("CREATE TABLE spans (id int)", url)
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            with transaction(connection):
                connection.execute("INSERT INTO spans VALUES (1)")
                if not alive:
                    lose(connection, own)
            acknowledged = True
        except psycopg.OperationalError:
            acknowledged = False
    assert acknowledged == bool(own.sql("SELECT id FROM spans", url)) == alive
