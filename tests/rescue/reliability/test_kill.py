"""kill -9 at any moment: acknowledged spans are stored, and the index equals the store."""

import contextlib
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from http_harness import wait_for

from rescue_svc.store import NewSpan
from rescue_svc.store.files import DATABASE, connect
from rescue_svc.store.migrations import MIGRATIONS, migrate

from ..harness import IN_FULL_EACH_STORE, Server


class Writer(threading.Thread):
    """Writes numbered spans until the service ends, and records which were sent and which acknowledged."""

    def __init__(self, server: Server, session: str, last_statuses: tuple[int, ...]) -> None:
        super().__init__(daemon=True)
        self.server, self.session, self.last_statuses = server, session, last_statuses
        self.acknowledged, self.sent, self.stopping = set(), set(), False
        self.start()

    def run(self):
        while not self.stopping:
            first = len(self.sent)
            batch = range(first, first + random.randint(1, 8))
            self.sent.update(batch)
            try:
                answer = self.server.write(self.session, *((f"fact number {n}", 2 * n, 2 * n + 1) for n in batch))
            except (httpx.TransportError, RuntimeError):  # killed, or the client closed after it
                return
            if answer.status_code in self.last_statuses:
                return
            assert answer.status_code == 201, answer.text
            self.acknowledged.update(batch)


def start_writers(servers, name, last_statuses=()):
    """Return a writer for each server when all of them have written."""
    writers = [Writer(server, f"{name}-{place}", last_statuses) for place, server in enumerate(servers)]
    wait_for(lambda: all(writer.acknowledged for writer in writers))
    writers[0].join(random.uniform(0, 0.1))
    return writers


def check_spans(server, writers):
    """Check that all acknowledged spans are stored, and no others than were sent."""
    for writer in writers:
        dump = server.dump(writer.session)
        assert dump["session_total"] == len(dump["token_ranges"])
        assert writer.acknowledged <= {start // 2 for start, _ in dump["token_ranges"]} <= writer.sent


def check_index(server):
    """Check that each span has a vector."""
    server.wait_until_embedded()
    for name, session in server.sessions().items():
        assert session["embedded"] == session["session_total"] == server.resume(name)["vectors"]


def write_and_kill(start_server, folder, rounds):
    """Kill services on one data folder while two writers write; return the number of acknowledged spans."""
    writers = []
    for number in range(rounds):
        server = start_server(folder, embedder="none" if number % 10 else "hashing")
        check_spans(server, writers[-2:])
        if number % 10 == 0:
            check_index(server)
        writers += start_writers([server, server], f"round-{number}")
        server.kill()
        for writer in writers[-2:]:
            writer.join()
    server = start_server(folder)
    check_spans(server, writers)
    check_index(server)
    server.stop()
    return sum(len(writer.acknowledged) for writer in writers)


def test_kill_while_writing(start_server, tmp_path, times):
    """100 kills, on two folders side by side because a start takes most of a round."""
    folders = [tmp_path / "one", tmp_path / "two"]
    with ThreadPoolExecutor(2) as pool:
        acknowledged = list(pool.map(lambda folder: write_and_kill(start_server, folder, times(50)), folders))
    assert sum(acknowledged) > times(200)


def write_numbered(server, count, text):
    for first in range(0, count, 256):
        server.write("s", *((text.format(n), n, n + 1) for n in range(first, first + 256)))


@pytest.mark.full
def test_kill_while_saving_an_index(start_server, times):
    server = start_server()
    write_numbered(server, 2560, "item {} of many")
    server.wait_until_embedded()
    expected = server.retrieve("s", "item 77 of many", hybrid_alpha=1, top_k=8)

    def hibernate_forever():
        with contextlib.suppress(httpx.TransportError, RuntimeError):  # until the service is gone
            while True:
                server.resume("s")
                server.hibernate("s")

    for _ in range(times(20)):
        thread = threading.Thread(target=hibernate_forever)
        thread.start()
        thread.join(random.uniform(0.02, 0.15))
        server.kill()
        thread.join()
        server = start_server()
        assert server.resume("s")["vectors"] == 2560
        server.wait_until_embedded()
        assert server.retrieve("s", "item 77 of many", hybrid_alpha=1, top_k=8) == expected
        assert not list(server.data_dir.glob("index/*.bad-*"))


@pytest.mark.parametrize("version", range(len(MIGRATIONS)))
def test_kill_at_every_statement_of_a_migration(opening, tmp_path, version):
    """The files before each statement are those that kill -9 would leave."""
    folder, moments = tmp_path / "data", []
    folder.mkdir()
    connection = connect(folder / DATABASE)
    for number, steps in enumerate(MIGRATIONS[:version], start=1):
        for statement in steps:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number}")
    connection.set_trace_callback(lambda _: moments.append(shutil.copytree(folder, tmp_path / str(len(moments)))))
    migrate(connection)
    connection.close()
    assert len(moments) > 6
    for moment in moments:
        assert opening(data_dir=moment)[0].write("s", [NewSpan(0, 1, -1, 0.0, "after")]) == (1, 1)


@pytest.mark.full
def test_kill_while_backing_up(start_server, popen, tmp_path, times):
    server = start_server(embedder="none")
    write_numbered(server, 2048, "{} " + "a long text " * 600)

    def command(folder):
        return [sys.executable, "-m", "rescue_svc", "backup", str(folder), "--data-dir", str(server.data_dir)]

    for number in range(times(10)):
        folder = tmp_path / f"backup-{number}"
        process = popen(command(folder))
        wait_for(lambda folder=folder: list(tmp_path.glob(f"{folder.name}.partial-*/*")))
        process.kill()
        process.wait()
        assert not folder.exists()  # an incomplete backup has another name
    assert server.dump("s")["session_total"] == 2048
    subprocess.run(command(tmp_path / "whole"), check=True)
    assert start_server(tmp_path / "whole", embedder="none").dump("s") == server.dump("s")


FACT = "the code is 481729"


def is_hybrid(service):
    return lambda: service.retrieve("s", "code", top_k=1)["mode"] == "hybrid"


def with_fact(service):
    service.write_and_embed("s", (FACT, 0, 5), ("nothing", 10, 12))
    return service


@IN_FULL_EACH_STORE
def test_kill_of_the_embedder_alone(start_service, times):
    service = with_fact(start_service())
    for _ in range(times(30)):
        assert is_hybrid(service)()
        psutil.Process(service.service.embedder.pid).kill()
        answer = service.retrieve("s", "code", top_k=1)
        assert answer["chunks"][0]["text"] == FACT
        assert (answer["mode"], answer["degraded"] is None) in (("bm25", False), ("hybrid", True))
        wait_for(is_hybrid(service))


@IN_FULL_EACH_STORE
def test_an_embedder_that_hangs_is_replaced(start_service, caplog):
    service = with_fact(start_service(embed_timeout_s=0.5, query_timeout_s=0.2))
    hung = service.service.embedder.pid
    psutil.Process(hung).suspend()
    answer = service.retrieve("s", "code")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", FACT)
    assert "longer than 0.2 s" in answer["degraded"]
    wait_for(is_hybrid(service))
    reasons = [record.reason for record in caplog.records if record.name == "rescue_svc.embed.worker"]
    assert reasons[0] == "the embedder did not respond within 0.5 s"
    assert service.service.embedder.pid != hung


@pytest.mark.full
@IN_FULL_EACH_STORE
def test_an_idle_embedder_ends_and_queries_and_writes_restart_it(start_service):
    service = with_fact(start_service(embed_idle_s=1, query_timeout_s=60))
    embedder = service.service.embedder
    wait_for(lambda: (service.ready()["embedder"]["state"], embedder.pid) == ("idle", None))
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: service.retrieve("s", "code"), range(8)))
    assert {(answer["mode"], answer["degraded"]) for answer in answers} == {("hybrid", None)}
    starts = embedder.starts
    wait_for(lambda: service.ready()["embedder"]["state"] == "idle")
    assert service.write("s", (FACT, 0, 5)).json()["accepted"] == 0
    wait_for(lambda: embedder.starts == starts + 1)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="needs prlimit, which is Linux's")
def test_an_embedder_that_cannot_start_is_retried_and_ends_with_the_service(start_server):
    """It may open no file for a pipe; the next question after that restarts it."""
    server = with_fact(start_server())
    process = psutil.Process(server.process.pid)

    def embedder():
        (child,) = [c for c in process.children() if "spawn_main" in " ".join(c.cmdline())]
        return child

    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, usual[1]))
    embedder().kill()
    wait_for(lambda: server.ready()["embedder"]["state"] == "unavailable")
    answer = server.retrieve("s", "code")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", FACT)
    assert "could not start" in answer["degraded"]
    process.rlimit(psutil.RLIMIT_NOFILE, usual)
    wait_for(is_hybrid(server))
    child = embedder()
    server.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert "Traceback" not in server.log()
