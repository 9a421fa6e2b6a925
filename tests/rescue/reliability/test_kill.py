"""kill -9 at any moment: what was acknowledged is there, and the index equals the store."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, Store
from rescue_svc.store.files import DATABASE, connect
from rescue_svc.store.migrations import MIGRATIONS

from ..harness import Server, wait_for

CAPS = Caps(10**6, 10**6, 10**4)


class Writer(threading.Thread):
    """Writes numbered spans until the service is gone; remembers which were acknowledged and which were sent."""

    def __init__(self, server: Server, session: str, first: int) -> None:
        super().__init__(daemon=True)
        self.server, self.session, self.first = server, session, first
        self.acknowledged: set[int] = set()
        self.sent: set[int] = set()

    def run(self):
        number = self.first
        while True:
            batch = range(number, number + random.randint(1, 8))
            self.sent.update(batch)
            try:
                answer = self.server.write(self.session, *((f"fact number {n}", 2 * n, 2 * n + 1) for n in batch))
            except (httpx.TransportError, RuntimeError):  # killed, or the client closed after it
                return
            assert answer.status_code == 201, answer.text
            self.acknowledged.update(batch)
            number = batch.stop


def kept(server, session):
    dump = server.dump(session)
    assert dump["session_total"] == len(dump["token_ranges"])
    return {start // 2 for start, _ in dump["token_ranges"]}


def writing_and_killed(serve, folder, rounds):
    """One data directory, killed `rounds` times while two writers write; returns the spans acknowledged."""
    writers = []
    for round_number in range(rounds):
        every_tenth = round_number % 10 == 0
        server = serve(folder, embedder="hashing" if every_tenth else "none")
        for writer in writers[-2:]:
            found = kept(server, writer.session)
            assert writer.acknowledged <= found <= writer.sent
        if every_tenth and writers:
            server.wait_until_embedded()
            listed = server.client.get("/sessions").json()["sessions"]
            assert all(s["embedded"] == s["session_total"] for s in listed)
            for s in listed:
                resumed = server.client.post(f"/sessions/{s['session_id']}/resume").json()
                assert resumed["vectors"] == s["session_total"]
        pair = [Writer(server, f"round-{round_number}-{side}", 1000 * side) for side in (1, 2)]
        for writer in pair:
            writer.start()
        wait_for(lambda: all(w.acknowledged for w in pair))  # noqa: B023 - called at once
        pair[0].join(random.uniform(0, 0.1))
        server.kill()
        for writer in pair:
            writer.join()
        writers += pair
    server = serve(folder)
    for writer in writers:
        found = kept(server, writer.session)
        assert writer.acknowledged <= found <= writer.sent
    server.stop()
    return sum(len(writer.acknowledged) for writer in writers)


def test_kill_while_writing(serve, tmp_path, scale):
    """100 kills, of four services on four folders side by side: a start is most of a round."""
    folders = [tmp_path / f"data-{number}" for number in range(4)]
    with ThreadPoolExecutor(len(folders)) as lanes:
        acknowledged = list(lanes.map(lambda folder: writing_and_killed(serve, folder, 25 * scale), folders))
    assert sum(acknowledged) > 200 * scale


def test_kill_while_saving_an_index(serve, scale):
    server = serve()
    for first in range(0, 2560, 256):
        server.write("s", *((f"item {n} of many", n, n + 1) for n in range(first, first + 256)))
    server.wait_until_embedded()
    expected = server.retrieve("s", "item 77 of many", hybrid_alpha=1, top_k=8)
    for _ in range(10 * scale):

        def hibernate_forever(server=server):
            with contextlib.suppress(httpx.TransportError, RuntimeError):  # until the service is gone
                while True:
                    server.client.post("/sessions/s/resume")
                    server.client.post("/sessions/s/hibernate")

        thread = threading.Thread(target=hibernate_forever)
        thread.start()
        thread.join(random.uniform(0.02, 0.15))
        server.kill()
        thread.join()
        server = serve()
        assert server.client.post("/sessions/s/resume").json()["vectors"] == 2560
        server.wait_until_embedded()
        assert server.retrieve("s", "item 77 of many", hybrid_alpha=1, top_k=8) == expected
        assert not list(server.data_dir.glob("index/*.bad-*"))


OLD_VERSION = """
import sys, pathlib
sys.path.insert(0, {root!r})
from rescue_svc.store.files import connect, DATABASE
from rescue_svc.store.migrations import migrate
import os, signal
connection = connect(pathlib.Path({folder!r}) / DATABASE)
steps = 0
def step(statement):
    global steps
    steps += 1
    if steps == {kill_at}:
        os.kill(os.getpid(), signal.SIGKILL)
connection.set_trace_callback(step)
migrate(connection)
"""


def test_kill_at_every_statement_of_every_migration(tmp_path):
    """The database is of version 0, 1, ...; the program dies before each statement in turn; the next start goes on."""
    for version in range(len(MIGRATIONS)):
        died, kill_at = True, 0
        while died:
            kill_at += 1
            folder = tmp_path / f"{version}-{kill_at}"
            folder.mkdir()
            connection = connect(folder / DATABASE)
            for number, steps in enumerate(MIGRATIONS[:version], start=1):
                for statement in steps:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")
            connection.close()
            script = OLD_VERSION.format(root=str(Path.cwd()), folder=str(folder), kill_at=kill_at)
            died = subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
            store = Store(folder, CAPS)
            assert store.write("s", [NewSpan(0, 1, -1, 0.0, "after")]) == (1, 1)
            store.close()
        assert kill_at > 3  # it did die on the way


def test_kill_while_backing_up(serve, popen, tmp_path, scale):
    server = serve(embedder="none")
    text = "a long text " * 600
    for first in range(0, 2048, 256):
        server.write("s", *((f"{n} {text}", n, n + 1) for n in range(first, first + 256)))
    for round_number in range(5 * scale):
        folder = tmp_path / f"backup-{round_number}"
        process = popen(
            [sys.executable, "-m", "rescue_svc.cli", "backup", str(folder), "--data-dir", str(server.data_dir)]
        )
        wait_for(lambda folder=folder: list(tmp_path.glob(f"{folder.name}.partial-*/*")))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not folder.exists()  # a cut backup is never taken for one
    assert server.dump("s")["session_total"] == 2048
    folder = tmp_path / "backup-whole"
    subprocess.run(
        [sys.executable, "-m", "rescue_svc.cli", "backup", str(folder), "--data-dir", str(server.data_dir)], check=True
    )
    assert serve(folder, embedder="none").dump("s") == server.dump("s")


def embedder_processes(server):
    return [c for c in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(c.cmdline())]


def embedder_process(server):
    (child,) = embedder_processes(server)
    return child


def test_kill_of_the_embedder_alone(serve, scale):
    server = serve()
    server.write("s", ("the code is 481729", 0, 5), ("nothing", 10, 12))
    server.wait_until_embedded()
    for _ in range(3 * scale):
        assert server.retrieve("s", "code", top_k=1)["mode"] == "hybrid"
        embedder_process(server).kill()
        answer = server.retrieve("s", "code", top_k=1)
        assert answer["chunks"][0]["text"] == "the code is 481729"
        assert (answer["mode"], answer["degraded"] is None) in (("bm25", False), ("hybrid", True))
        wait_for(lambda: server.retrieve("s", "code", top_k=1)["mode"] == "hybrid")
    assert server.process.poll() is None


def test_an_embedder_that_hangs_is_replaced(serve):
    server = serve(embed_timeout_s=0.5, query_timeout_s=0.2)
    server.write("s", ("the code is 481729", 0, 5))
    server.wait_until_embedded()
    hung = embedder_process(server)
    hung.suspend()
    answer = server.retrieve("s", "code")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", "the code is 481729")
    assert "longer than 0.2 s" in answer["degraded"]
    wait_for(lambda: server.retrieve("s", "code")["mode"] == "hybrid")
    assert embedder_process(server).pid != hung.pid


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="needs prlimit, which is Linux's")
def test_an_embedder_that_cannot_start_is_tried_again(serve):
    """No file is left to open for a pipe; once there is, the next question brings it back."""
    server = serve()
    server.write("s", ("the code is 481729", 0, 5))
    server.wait_until_embedded()
    server.retrieve("s", "code")
    service = psutil.Process(server.process.pid)
    usual = service.rlimit(psutil.RLIMIT_NOFILE)
    service.rlimit(psutil.RLIMIT_NOFILE, (3, usual[1]))
    embedder_process(server).kill()
    wait_for(lambda: server.ready()["embedder"]["state"] == "unavailable")
    answer = server.retrieve("s", "code")
    assert (answer["mode"], answer["chunks"][0]["text"]) == ("bm25", "the code is 481729")
    assert "could not start" in answer["degraded"]
    service.rlimit(psutil.RLIMIT_NOFILE, usual)
    wait_for(lambda: server.retrieve("s", "code")["mode"] == "hybrid")


def test_the_embedder_ends_with_the_service(serve):
    server = serve()
    server.wait_until_embedded()
    child = embedder_process(server)
    server.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert "Traceback" not in server.log_path.read_text()  # it ended quietly


def test_an_idle_embedder_gives_its_memory_back(serve):
    server = serve(embed_idle_s=0.3)
    server.write("s", ("the code is 481729", 0, 5))
    wait_for(lambda: server.ready()["embedder"]["state"] == "idle")
    wait_for(lambda: embedder_processes(server) == [])
    assert server.retrieve("s", "code")["mode"] == "bm25"  # this question wakes it
    wait_for(lambda: server.retrieve("s", "code")["mode"] == "hybrid")
