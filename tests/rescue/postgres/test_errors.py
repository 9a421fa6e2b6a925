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


def role(server, name, *statements):
    """Create a role without privileges."""
    for statement in (f"CREATE ROLE {name} LOGIN", *statements):
        server.sql(statement)
    return name


def unreachable(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"postgresql://u:{PASSWORD}@127.0.0.1:{port}/rescue"


def no_privilege(server):
    url = server.database()
    server.sql("CREATE EXTENSION vector", url)
    return url.replace("postgres@", role(server, "guest") + "@")


def no_pgvector(server):
    bare = role(server, "bare", "ALTER ROLE bare SET extension_control_path = '/nowhere'")
    return server.database().replace("postgres@", bare + "@")


def old_pgvector(server):
    url = server.database()
    server.sql("CREATE EXTENSION vector", url)
    server.sql("UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'", url)
    return url


def another_encoding(server):
    server.sql("DROP DATABASE IF EXISTS bytes")
    server.sql("CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    return server.url("bytes")


def name_in(url):
    return url.partition("@/")[2].partition("?")[0]


def standby(server):
    url = server.database()
    server.sql(f"ALTER DATABASE {name_in(url)} SET default_transaction_read_only = on")
    return url


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


FAULTS = {
    "unreachable": (
        unreachable,
        r"no connection to postgresql://127.0.0.1:\d+/rescue: .*refused.*; check RESCUE_STORE",
    ),
    "no database": (lambda server: server.url("nowhere"), 'no connection to .*: .*database "nowhere" does not exist'),
    "no role": (lambda server: server.url(user="stranger"), 'no connection to .*: .*role "stranger" does not exist'),
    "no privilege": (no_privilege, r"RESCUE_STORE lacks a privilege \(permission denied for database .*\); grant it"),
    "may not add pgvector": (
        lambda server: server.database().replace("postgres@", role(server, "visitor") + "@"),
        "may not add pgvector to .*; have an administrator run `CREATE EXTENSION vector`",
    ),
    "no pgvector": (no_pgvector, "the server of .* has no pgvector; install 0.8 or later"),
    "old pgvector": (
        old_pgvector,
        "has pgvector 0.7.4; 0.8 or later is required: .* `ALTER EXTENSION vector UPDATE`",
    ),
    "another encoding": (another_encoding, "has the encoding SQL_ASCII; make a database in UTF8"),
    "a standby": (standby, "is read-only; name its primary in RESCUE_STORE"),
    "old server": (old_server, "is PostgreSQL 13.5; 15 or later is required"),
}


@pytest.mark.parametrize(("make_url", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_reported_with_its_remedy(postgres, opening, make_url, says):
    with pytest.raises(StoreUnavailableError, match=says) as raised:
        opening(make_url(postgres))
    assert PASSWORD not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"store": f"mysql://u:{PASSWORD}@localhost/x"}, "store is not a PostgreSQL URL"),
        ({"store": f"postgresql://u:{PASSWORD}@localhost:a port/x"}, "store is not a PostgreSQL URL"),
        ({"store": "postgresql://localhost/x", "ephemeral": "true"}, "give one of the two"),
        ({"store": "postgresql://localhost/x", "index": "faiss"}, "hnsw"),
        ({"index": "hnsw"}, "faiss"),
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
    url = postgres.database()
    postgres.sql("CREATE EXTENSION vector", url)
    modest = url.replace("postgres@", role(postgres, "modest") + "@")
    postgres.sql(f"GRANT CREATE ON DATABASE {name_in(url)} TO modest")
    for rights, says in (
        ((), "with the server's checkpoints$"),
        (("GRANT pg_checkpoint TO modest",), "at once, its log when that is reused$"),
        (("GRANT EXECUTE ON FUNCTION pg_switch_wal() TO modest",), "at once$"),
    ):
        for right in rights:
            postgres.sql(right, url)
        store = opening(modest)[0]
        assert re.search(f"forgotten text is deleted from disk {says}", store.describe())
        store.write("s", [NewSpan(0, 1, -1, 0.0, "a text")])
        assert store.forget("s").spans == 1


def test_commands_describe_the_server_or_its_fault(postgres, monkeypatch):
    monkeypatch.setenv("RESCUE_STORE", postgres.database())
    healthy = command("doctor", "--embedder", "none")
    assert healthy.code == 0, healthy.out
    assert "pgvector's HNSW" in healthy.out
    assert "PostgreSQL 18" in healthy.out
    assert "page checksums on, forgotten text is deleted from disk at once: 0 sessions, 0 spans" in healthy.out
    monkeypatch.setenv("RESCUE_STORE", unreachable(postgres))
    failed = command("doctor", "--embedder", "none")
    assert (failed.code, "BAD store" in failed.out) == (1, True)
    for words in (("sessions",), ("serve", "--port", "0"), ("forget", "s"), ("backup", "nowhere")):
        stderr = command(*words).err
        assert "127.0.0.1" in stderr
        assert PASSWORD not in stderr
    assert "restore a dump" in command("rebuild").err
