"""Several services on one database: sessions, the embedding queue, indexes, dump and restore."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import psycopg
import pytest

from rescue_svc.errors import SessionNotFoundError, StoreUnavailableError
from rescue_svc.postgres import schema, vectors
from rescue_svc.postgres.connections import transaction
from rescue_svc.store import NewSpan

from ..harness import LocalService, command

DIM = 4


def spans(first, count, text="fact"):
    return [NewSpan(n, n + 1, -1, 0.0, f"{text} number {n}") for n in range(first, first + count)]


def unit(waiting):
    return np.eye(DIM, dtype=np.float32)[[item.span % DIM for item in waiting]]


def test_services_create_the_tables_once_and_share_a_session(postgres, opening):
    url = postgres.database()
    with ThreadPoolExecutor(4) as together:
        stores = [store for store, _ in together.map(lambda _: opening(url), range(4))]
        written = list(together.map(lambda n: stores[n % 4].write("s", spans(n * 10, 20)), range(12)))
    # The calls overlap by half.
    assert sum(new for new, _ in written) == max(total for _, total in written) == 130
    for store in stores:
        session = store.session("s")
        (span,) = [span for span in store.spans(session) if span.start == 129]
        assert (session.spans, len(store.spans(session)), store.count_pending("test-1")) == (130, 130, 130)
        assert list(store.bm25(session, "129", 8, set())) == [span.id]


def test_each_span_is_embedded_by_one_of_them(postgres, opening):
    """While one fails the other embeds the next spans. Failed spans return to the queue."""
    url, seen = postgres.database(), []
    (first, _), (second, _) = opening(url), opening(url)
    first.write("s", spans(0, 6))

    def embed(waiting):
        seen.extend(item.span for item in waiting)
        return unit(waiting)

    def embed_and_fail(waiting):
        embed(waiting)
        assert second.embed_next("test-1", 2, embed)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first.embed_next("test-1", 2, embed_and_fail)
    assert seen == [1, 2, 3, 4]
    assert first.count_pending("test-1") == 4
    while second.embed_next("test-1", 2, embed):
        pass
    assert seen[4:] == [1, 2, 5, 6]
    assert first.count_pending("test-1") == 0


def test_a_session_may_be_forgotten_while_it_is_embedded_and_read(postgres, opening):
    url = postgres.database()
    (first, index), (second, _) = opening(url), opening(url)
    first.write("s", spans(0, 4))
    session = first.session("s")

    def forgotten_meanwhile(waiting):
        assert second.forget("s").spans == 4
        return unit(waiting)

    assert first.embed_next("test-1", 4, forgotten_meanwhile)
    query = np.eye(DIM, dtype=np.float32)[0]
    assert index.search(session.id, query, 8, set()) == index.similarities(session.id, query, [1]) == {}
    assert (first.bm25(session, "fact", 8, set()), first.spans(session), first.page(session, 0, 9)) == ({}, [], [])
    assert first.count_pending("test-1") == 0
    while first.embed_next("test-1", 4, unit):
        pass
    with pytest.raises(SessionNotFoundError):
        first.forget("s")


def test_writers_and_forgetters_at_once_neither_fail_nor_mix(postgres, opening):
    url, done = postgres.database(), threading.Event()
    stores = [opening(url)[0] for _ in range(2)]

    def embed():
        while not done.is_set():
            stores[0].embed_next("test-1", 8, unit)

    def work(n):
        for step in range(6):
            stores[n % 2].write(f"s{n % 3}", spans(100 * n + step, 2, "other"))
            with suppress(SessionNotFoundError):  # another has just done it
                assert stores[(n + step) % 2].forget(f"s{n % 3}").spans > 0

    with ThreadPoolExecutor(5) as threads:
        embedding = threads.submit(embed)
        list(threads.map(work, range(4)))
        done.set()
        embedding.result()
    for session in stores[0].sessions():
        assert len(stores[0].spans(session)) == session.spans
    tables = postgres.sql("SELECT relname FROM pg_class WHERE relname ~ '^(spans|vectors)_[0-9]+$'", url)
    ids = [session.id for session in stores[0].sessions()]
    assert {*tables} == {(f"{kind}_{session}",) for session in ids for kind in ("spans", "vectors")}


def test_a_migration_that_fails_leaves_nothing(postgres, opening, monkeypatch):
    url = postgres.database()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", ((*schema.MIGRATIONS[0], "SELECT * FROM nowhere"),))
        with pytest.raises(StoreUnavailableError):
            opening(url)
    assert postgres.sql("SELECT to_regnamespace('mlx_tq_rescue')", url) == [(None,)]
    assert opening(url)[0].write("s", spans(0, 1)) == (1, 1)


def test_a_large_session_gets_one_index(postgres, opening, monkeypatch):
    """HNSW agrees with the exact search, also where most near spans are excluded."""
    monkeypatch.setattr(vectors, "HNSW_FROM", 300)
    url, dim = postgres.database(), 16
    store, hnsw = opening(url, dim=dim)
    exact = opening(url, dim=dim, index="exact")[1]
    rng = np.random.default_rng(1)

    def random_vectors(waiting):
        rows = rng.standard_normal((len(waiting), dim)).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    for first in range(0, 400, 100):
        store.write("s", spans(first, 100))
        store.embed_next("test-1", 100, random_vectors)
    (session,) = store.sessions()
    assert postgres.sql(f"SELECT indexdef FROM pg_indexes WHERE indexname = 'nearest_{session.id}'", url)
    for excluded in (set(), set(range(1, 380))):
        query = random_vectors([None])[0]
        truth = exact.search(session.id, query, 10, excluded)
        results = hnsw.search(session.id, query, 10, excluded)
        assert list(truth.values()) == sorted(truth.values(), reverse=True)
        assert len(results.keys() & truth.keys()) >= 9
        assert not results.keys() & excluded
    # Services that embed spans of a large session at once build one index.
    postgres.sql(f"DROP INDEX mlx_tq_rescue.nearest_{session.id}", url)
    store.write("s", spans(400, 30))
    others = [opening(url, dim=dim)[0] for _ in range(3)]
    with ThreadPoolExecutor(3) as together:
        assert all(together.map(lambda other: other.embed_next("test-1", 10, random_vectors), others))
    valid = "SELECT indisvalid FROM pg_index JOIN pg_class ON oid = indexrelid WHERE relname = "
    assert postgres.sql(f"{valid}'nearest_{session.id}'", url) == [(True,)]


@pytest.mark.full
def test_a_restored_dump_equals_the_store(postgres, tmp_path, monkeypatch):
    url = postgres.database()
    service = LocalService(tmp_path, store=url)
    service.write_and_embed("s", ("kept in the backup", 0, 5), ("and this", 5, 9))
    expected = service.retrieve("s", "backup")
    monkeypatch.setenv("RESCUE_STORE", url)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "pg_dump is missing" in command("backup", tmp_path / "monday").err
    monkeypatch.setenv("PATH", str(postgres.bin))
    backup = command("backup", tmp_path / "monday")
    assert backup.code == 0, backup.err
    assert "exists" in command("backup", tmp_path / "monday").err
    service.write("s", ("after the backup", 9, 12))
    service.stop()
    restored = postgres.database()
    postgres.sql("CREATE EXTENSION vector", restored)
    subprocess.run([postgres.bin / "pg_restore", "--dbname", restored, tmp_path / "monday" / "rescue.dump"], check=True)
    service = LocalService(tmp_path, store=restored)
    service.wait_until_embedded()
    assert service.retrieve("s", "backup") == expected
    assert service.dump("s")["token_ranges"] == [[0, 5], [5, 9]]
    service.stop()
    assert command("sessions").out.split()[:3] == ["s", "3", "spans"]
    assert command("forget", "s").out == "s: 3 spans deleted\n"


@pytest.mark.parametrize("expectation", [nullcontext(), pytest.raises(psycopg.OperationalError)], ids=["alive", "lost"])
def test_a_transaction_that_is_not_committed_raises(killable, expectation):
    """psycopg's own block ends without an error."""
    url, is_alive = killable.database(), isinstance(expectation, nullcontext)
    killable.sql("CREATE TABLE spans (id int)", url)
    with psycopg.connect(url, autocommit=True) as connection, expectation, transaction(connection):
        connection.execute("INSERT INTO spans VALUES (1)")
        if not is_alive:
            killable.sql(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
            with suppress(psycopg.OperationalError):
                while connection.pgconn.status == psycopg.pq.ConnStatus.OK:  # until the client notices
                    connection.pgconn.consume_input()
    assert bool(killable.sql("SELECT id FROM spans", url)) == is_alive
