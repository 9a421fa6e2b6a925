"""Faults of a server are reported at the start, with the remedy and without the password."""

import re
import socket
import struct
import threading

import pytest

from rescue_svc.errors import SettingsError, StoreDamagedError, StoreUnavailableError
from rescue_svc.settings import load_settings
from rescue_svc.store import NewSpan

from ..harness import command

PASSWORD = "Xylophonquartz"
UNREACHABLE = f"postgresql://u:{PASSWORD}@127.0.0.1:1/rescue"


def database_after(*statements, user="postgres", name=None):
    """Return a function that runs statements in a new database of a server, and returns the URL of that or another."""

    def prepare(server):
        url = server.database()
        own_name = url.partition("@/")[2].partition("?")[0]
        for statement in statements:
            server.sql(statement.format(own_name), url)
        return server.url(name or own_name, user)

    return prepare


def old_server(server):
    """Speak the first messages of PostgreSQL's protocol, version 3."""
    listener = socket.create_server(("127.0.0.1", 0))

    def message(kind, body):
        return kind + struct.pack("!i", len(body) + 4) + body

    def answer():
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            settings = {"server_version": "13.5", "server_encoding": "UTF8", "client_encoding": "UTF8"}
            status = [message(b"S", f"{name}\0{value}\0".encode()) for name, value in settings.items()]
            hello = [message(b"R", bytes(4)), *status, message(b"K", bytes(8)), message(b"Z", b"I")]
            client.sendall(b"".join(hello))
            client.recv(4096)

    threading.Thread(target=answer, daemon=True).start()
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    return f"postgresql://u:{PASSWORD}@{where}/rescue?sslmode=disable&gssencmode=disable"


EXTENSION = "CREATE EXTENSION vector"
FAULTS = {
    "no connection to postgresql://127.0.0.1:1/rescue: .*refused.*; check RESCUE_STORE": lambda _: UNREACHABLE,
    'no connection to .*: .*database "nowhere" does not exist': database_after(name="nowhere"),
    'no connection to .*: .*role "stranger" does not exist': database_after(user="stranger"),
    r"RESCUE_STORE lacks a privilege \(permission denied for database .*\); grant it": database_after(
        EXTENSION, "CREATE ROLE guest LOGIN", user="guest"
    ),
    "may not add pgvector to .*; have an administrator run `CREATE EXTENSION vector`": database_after(
        "CREATE ROLE visitor LOGIN", user="visitor"
    ),
    "the server of .* has no pgvector; install 0.8 or later": database_after(
        "CREATE ROLE bare LOGIN", "ALTER ROLE bare SET extension_control_path = '/nowhere'", user="bare"
    ),
    "has pgvector 0.7.4; 0.8 or later is required: .* `ALTER EXTENSION vector UPDATE`": database_after(
        EXTENSION, "UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'"
    ),
    "has the encoding SQL_ASCII; make a database in UTF8": database_after(
        "CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0", name="bytes"
    ),
    "is read-only; name its primary in RESCUE_STORE": database_after(
        "ALTER DATABASE {} SET default_transaction_read_only = on"
    ),
    "is PostgreSQL 13.5; 15 or later is required": old_server,
}


@pytest.mark.parametrize(("says", "make_url"), FAULTS.items())
def test_a_fault_is_reported_with_its_remedy(postgres, opening, says, make_url):
    with pytest.raises(StoreUnavailableError, match=says) as raised:
        opening(make_url(postgres))
    assert PASSWORD not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"store": f"mysql://u:{PASSWORD}@localhost/x"}, "store is not a PostgreSQL URL"),
        ({"store": f"postgresql://u:{PASSWORD}@localhost:a port/x"}, "store is not a PostgreSQL URL"),
        ({"store": "postgresql://localhost/x", "ephemeral": "true"}, "give one of the two"),
        ({"index": "hnsw"}, "SQLite uses FAISS"),
    ],
)
def test_contradictory_settings(opening, settings, says):
    with pytest.raises(SettingsError, match=says) as raised:
        opening(settings.pop("store", None), **settings)
    assert PASSWORD not in str(raised.value)
    assert PASSWORD not in repr(load_settings(store=f"postgresql://u:{PASSWORD}@localhost/x"))


def test_the_store_of_a_newer_version_is_refused(postgres, opening):
    url = postgres.database()
    opening(url)[0].write("s", [])
    postgres.sql("UPDATE mlx_tq_rescue.version SET steps = 99", url)
    with pytest.raises(StoreDamagedError, match="version 99, this program supports 1; upgrade"):
        opening(url)


def test_privileges_decide_how_soon_text_is_deleted(postgres, opening):
    grant = "GRANT CREATE ON DATABASE {} TO modest"
    modest = database_after(EXTENSION, "CREATE ROLE modest LOGIN", grant, user="modest")(postgres)
    for right, says in (
        (None, "with the server's checkpoints$"),
        ("pg_checkpoint", "immediately, its log when that is reused$"),
        ("EXECUTE ON FUNCTION pg_switch_wal()", "immediately$"),
    ):
        if right:
            postgres.sql(f"GRANT {right} TO modest", modest.replace("modest@", "postgres@"))
        store = opening(modest)[0]
        assert re.search(f"deleted text leaves the disk {says}", store.describe())
        store.write("s", [NewSpan(0, 1, -1, 0.0, "a text")])
        assert store.forget("s").spans == 1


def test_commands_describe_the_server_or_its_fault(postgres, monkeypatch):
    monkeypatch.setenv("RESCUE_STORE", postgres.database())
    healthy = command("doctor", "--embedder", "none")
    assert healthy.code == 0, healthy.out
    assert "pgvector's HNSW" in healthy.out
    assert "PostgreSQL 18" in healthy.out
    assert "page checksums on, deleted text leaves the disk immediately: 0 sessions, 0 spans" in healthy.out
    monkeypatch.setenv("RESCUE_STORE", UNREACHABLE)
    failed = command("doctor", "--embedder", "none")
    assert (failed.code, "BAD store" in failed.out) == (1, True)
    for words in (("sessions",), ("serve", "--port", "0"), ("forget", "s"), ("backup", "nowhere")):
        stderr = command(*words).err
        assert "127.0.0.1" in stderr
        assert PASSWORD not in stderr
    assert "restore a dump" in command("rebuild").err
