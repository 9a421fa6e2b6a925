"""One service in its own process: its log, its socket, and a second process."""

import json
import logging
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_harness import wait_for

from rescue_svc.logs import JsonFormatter

from .harness import TOKEN, Server, command

SECRET = "Xylophonquartz"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("process") / "data", token=TOKEN, log_level="debug")
    yield server
    server.stop()


def requests(server):
    return [line for line in server.lines() if line["event"] == "request"]


def logged(server, request_id):
    """Return the line of a request, which is written after the answer."""
    wait_for(lambda: request_id in [line["request_id"] for line in requests(server)])
    return next(line for line in requests(server) if line["request_id"] == request_id)


def test_it_accepts_connections_when_it_says_so(server):
    events = [line["event"].partition(" [")[0] for line in server.lines()]
    assert events.index("Started server process") < events.index("listening")


def test_no_text_in_the_log(server):
    server.write_and_embed("said", (f"the {SECRET} is here", 0, 5))
    assert server.search("said", f"where is the {SECRET}?")
    for body in (
        {"session_id": "said", "chunks": [{"text": SECRET, "token_range": [5, 1]}]},
        {"session_id": SECRET * 9, "chunks": [{"text": SECRET, SECRET: 1}]},
    ):
        server.http.post("/evict/write", json=body)
    for content in (f'{{"{SECRET}', f'["{SECRET}", NaN]'):
        server.http.post("/evict/write", content=content, headers={"content-type": "application/json"})
    server.http.post(f"/{SECRET}", json=SECRET)
    server.http.get("/evict/dump", params={"session_id": f"{SECRET} !"})
    server.http.get("/sessions", headers={"X-Request-ID": f"{SECRET} {SECRET}"})
    server.forget("said")
    ids = [server.http.get("/healthz").headers["x-request-id"] for _ in range(5)]
    wait_for(lambda: [line["request_id"] for line in requests(server)][-5:] == ids)  # one line each, in their order
    assert len(set(ids)) == 5
    for word in (SECRET.lower(), TOKEN, "traceback"):
        assert word not in server.log().lower()


def test_an_internal_error_is_logged_without_text(server):
    server.write("faulty", (f"the {SECRET} is here", 0, 5))
    with sqlite3.connect(server.data_dir / "rescue.db") as database:
        (number,) = database.execute("SELECT id FROM sessions WHERE name = 'faulty'").fetchone()
        database.execute(f"DROP TABLE words_{number}")
    database.close()
    body = {"session_id": "faulty", "query": SECRET}
    answer = server.http.post("/evict/retrieve", json=body, headers={"X-Request-ID": "this-one"})
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    assert answer.headers["retry-after"] == "5"
    line = logged(server, "this-one")
    assert (line["route"], line["status"]) == ("POST /evict/retrieve", 503)
    assert line["ms"] > 0
    assert SECRET.lower() not in server.log().lower()
    try:
        raise ValueError(SECRET)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "a fault", None, sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert (line["error"], line["event"], SECRET in str(line)) == ("ValueError", "a fault", False)
    assert line["at"][0].startswith(__file__)


def test_invalid_http_harms_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /evict/write HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    for raw in (
        head + b"X-Request-ID: cut-short\r\nContent-Length: 100\r\n\r\n{",
        head + b"Content-Length: abc\r\n\r\n",
        b"\x16\x03\x01 not http\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(raw)
        assert server.write("unharmed", ("still alive", 0, 1)).status_code == 201
    assert server.search("unharmed", "alive", hybrid_alpha=0) == ["still alive"]
    assert logged(server, "cut-short")["status"] == 400


@pytest.mark.full
@pytest.mark.parametrize(
    ("flag", "code", "says"),
    [("port", 2, "cannot listen on 127.0.0.1 port {}"), ("data-dir", 1, "{} is in use by another process")],
)
def test_a_second_process_reports_the_conflict(server, tmp_path, flag, code, says):
    taken = {"port": server.url.rpartition(":")[2], "data-dir": server.data_dir}[flag]
    flags = {"data-dir": tmp_path, "port": 0} | {flag: taken}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    line = [sys.executable, "-X", "dev", "-m", "rescue_svc", "serve", *words]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, says.format(taken) in ended.stderr) == (code, True), ended.stderr
    assert not {"Traceback", "ResourceWarning"} & set(re.findall(r"\w+", ended.stderr)), ended.stderr
    assert server.write("unharmed", ("more", 1, 2)).status_code == 201


def test_sessions_and_forget_while_it_runs(server, monkeypatch):
    server.write("a", ("a text", 0, 5), ("b text", 5, 9))
    server.write("b", ("other", 0, 5))
    where = ("--data-dir", server.data_dir)
    listed = json.loads(command("sessions", "--json", *where).out)
    assert [(s["session_id"], s["spans"]) for s in listed[:2]] == [("b", 1), ("a", 2)]
    assert command("sessions", *where).out.splitlines()[1].split()[:3] == ["a", "2", "spans"]
    spaced = command("forget", "my chat", *where)
    assert (spaced.code, "Traceback" in spaced.err) == (1, False)
    refused = command("forget", "a", *where)
    assert (refused.code, "token" in refused.err) == (1, True)
    monkeypatch.setenv("RESCUE_TOKEN", TOKEN)
    assert command("forget", "a", *where).out == "a: 2 spans deleted\n"
    assert server.dump("a")["session_total"] == 0
    assert "no session a" in command("forget", "a", *where).err


@pytest.fixture
def folder():
    """Return a data directory; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_a_folder_that_others_may_write_to_is_reported_with_the_remedy(folder, start_server):
    """They could put a socket of their own there."""
    folder.chmod(0o775)
    server = start_server(folder, embedder="none")
    server.write("a", ("a text", 0, 5))
    (warning,) = [line for line in server.lines() if line["level"] == "warning"]
    failed = command("forget", "a", "--data-dir", folder)
    remedy = f"run `chmod go-w {folder}` and restart the service"
    assert (failed.code, remedy in failed.err, remedy in warning["reason"]) == (1, True, True)
    server.stop()
    folder.chmod(0o755)
    start_server(folder, embedder="none")
    assert command("forget", "a", "--data-dir", folder).out == "a: 1 spans deleted\n"


def test_forget_does_not_wait_for_a_service_that_accepts_no_connection(folder, start_service):
    start_service(folder, embedder="none")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "rescue.sock"))
        (folder / "rescue.sock").chmod(0o600)
        listener.listen(0)
        for _ in range(2):  # fill its queue
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(str(folder / "rescue.sock"))
        failed = command("forget", "a", "--data-dir", folder)
    assert (failed.code, "no service of yours answers" in failed.err) == (1, True)
