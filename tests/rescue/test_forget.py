"""DELETE leaves no byte of the text in any file, with PostgreSQL in no file of the server."""

import random
import shutil
import time
from contextlib import closing, suppress

import pytest
from http_harness import wait_for

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.errors import SessionNotFoundError
from rescue_svc.store import NewSpan, session_tables
from rescue_svc.store.files import connect

from .harness import EACH_STORE, IN_FULL_EACH_STORE

SECRET = "Xylophonquartz"  # a word that nothing else on the disk holds
BYTES = SECRET.lower().encode()


def traces(files):
    """Return the files that contain the secret, in any case, or the vector of a text."""
    vector = HashingEmbedder().embed([f"the {SECRET} number 5 is 5"])[0].tobytes()[:64]
    names = []
    for path in files:
        with suppress(FileNotFoundError):  # removed since it was listed
            content = path.read_bytes()
            if BYTES in content.lower() or vector in content:
                names.append(path.name)
    return names


def secrets(count):
    return [(f"the {SECRET} number {n} is {n}", 3 * n, 3 * n + 2) for n in range(count)]


@EACH_STORE
def test_no_trace_remains(start_service, storage):
    service = start_service()
    service.write("kept", ("an innocent text", 0, 5))
    for first in range(0, 1000, 200):
        service.write("secret", *secrets(1000)[first : first + 200])
    service.wait_until_embedded()
    assert service.search("secret", SECRET)
    service.hibernate("secret")
    in_files = service.service.index.name == "faiss"
    if in_files:
        (service.data_dir / "index" / "2.index.bad-1").write_bytes(BYTES)  # as if a damaged one had been renamed
    # The search works: it is in the database or its log, and there in the index and the file aside.
    assert len(traces(storage.files(service.data_dir))) >= (3 if in_files else 1)
    assert service.forget("secret").json()["forgotten"] == 1000
    assert traces(storage.files(service.data_dir)) == []
    assert service.search("kept", "innocent")
    service.stop()
    assert traces(storage.files(service.data_dir)) == []


@pytest.fixture
def soon(monkeypatch):
    """Forget expired sessions at once."""
    monkeypatch.setattr("rescue_svc.service.expiry.CHECK_S", 0.05)
    monkeypatch.setattr("rescue_svc.service.expiry.GRACE_S", 0.1)


def write_temporary(service, name, temporary=True):
    chunk = {"text": f"{SECRET} {name} {temporary}", "token_range": [0, 5]}
    body = {"session_id": name, "chunks": [chunk], "temporary": temporary}
    assert service.http.post("/evict/write", json=body).status_code == 201


def write_expired(service, name):
    service.service.store.write(name, [NewSpan(0, 5, -1, 0.0, f"{SECRET} {name}")], expires=time.time())


@EACH_STORE
def test_temporary_sessions_expire_and_are_forgotten(soon, start_service, storage):
    service = start_service(embedder="none")
    for name, temporary in [("alive", True), ("named", False), ("mixed", True), ("mixed", False)]:
        write_temporary(service, name, temporary)
    write_expired(service, "dead")
    wait_for(lambda: service.sessions().keys() == {"alive", "named", "mixed"})
    assert service.http.post("/sessions/dead/renew").status_code == 404
    assert [name for name, session in service.sessions().items() if session["expires"]] == ["alive"]
    for name in ("alive", "named", "mixed"):
        service.forget(name)
    assert traces(storage.files(service.data_dir)) == []


@EACH_STORE
def test_a_renewal_lets_a_temporary_session_live_on(start_service):
    service = start_service(embedder="none")
    write_temporary(service, "named", temporary=False)
    write_expired(service, "alive")
    expired = service.sessions()["alive"]["expires"]
    renewed = service.http.post("/sessions/alive/renew").json()
    assert renewed == {"session_id": "alive", "expires": service.sessions()["alive"]["expires"]}
    assert renewed["expires"] > expired + 3600
    with pytest.raises(SessionNotFoundError):  # it was renewed after it was found expired
        service.service.store.forget("alive", expired_at=expired)
    assert service.sessions().keys() == {"named", "alive"}
    assert service.http.post("/sessions/named/renew").json() == {"session_id": "named", "expires": None}


@pytest.mark.full
def test_vectors_are_deleted_also_where_another_program_keeps_the_log(start_service):
    service = start_service()
    service.write_and_embed("secret", *secrets(10))
    service.retrieve("secret", SECRET)
    service.hibernate("secret")
    assert len(list((service.data_dir / "index").iterdir())) == 1
    with closing(connect(service.data_dir / "rescue.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sessions").fetchone()
        assert service.forget("secret").status_code == 503
    assert list((service.data_dir / "index").iterdir()) == []


def test_a_fault_while_forgetting_does_not_end_it(soon, start_service):
    service = start_service(embedder="none")
    (service.data_dir / "index" / "1.index").mkdir()  # as a file that cannot be deleted
    write_expired(service, "first")
    wait_for(lambda: not service.sessions())
    write_expired(service, "second")
    wait_for(lambda: not service.sessions())


def test_the_planner_samples_no_names(opening, postgres, tmp_path):
    """Its statistics would outlive a session."""
    url = postgres.database()
    store, _ = opening(store=url)
    for number in range(20):
        store.write(f"name-{number}", [NewSpan(0, 1, -1, 0.0, "a text")])
    postgres.sql("ANALYZE", url)
    sampled = postgres.sql("SELECT attname FROM pg_stats WHERE tablename = 'sessions'", url)
    assert ("created",) in sampled
    assert ("name",) not in sampled


@IN_FULL_EACH_STORE
def test_no_trace_remains_while_others_write_and_search(start_service, storage, times):
    service = start_service()
    for number in range(times(100)):
        service.write("secret", *secrets(random.randint(1, 256)))
        service.write(f"other-{number}", ("an innocent text", 0, 5))
        if random.random() < 0.5:
            service.wait_until_embedded()
        service.retrieve("secret", SECRET)
        assert service.forget("secret").status_code == 200
        assert traces(storage.files(service.data_dir)) == []


def test_no_trace_remains_where_the_database_moves_rows(opening, tmp_path):
    """SQLite moves rows to other pages as a table grows and shrinks, and does not zero what they leave."""
    store, _ = opening(data_dir=tmp_path)
    rng = random.Random(4)
    for number in range(60):
        store.write("secret", [NewSpan(n, n + 1, -1, 0.0, f"{SECRET} {n}") for n in range(rng.randint(1, 100))])
        store.write("other", [NewSpan(number, number + 1, -1, 0.0, "innocent " * rng.randint(1, 20))])
        store.forget("secret")
        store.purge()
        assert traces([tmp_path / "rescue.db"]) == []


def test_a_crash_during_forget_is_completed_at_the_next_start(start_service, storage, tmp_path):
    """The deletion is committed; the next start empties the log and removes the index."""
    first = start_service()
    first.write_and_embed("secret", *secrets(100))
    first.retrieve("secret", SECRET)
    first.hibernate("secret")
    folder = first.killed(tmp_path / "killed")
    with closing(connect(folder / "rescue.db")) as connection, closing(connect(folder / "rescue.db")):
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("BEGIN")
        session_tables.drop(connection, 1)
        connection.execute("DELETE FROM sessions")
        connection.execute("COMMIT")
        copy = shutil.copytree(folder, tmp_path / "copy")  # the second connection keeps the log from being emptied
    assert len(traces(storage.files(copy))) >= 2
    service = start_service(copy)
    assert traces(storage.files(copy)) == []
    assert service.sessions() == {}
