"""The log says what happened, with the id of the request, and never what was said."""

import json
import logging
import sqlite3
import sys

from rescue_svc.logs import JsonFormatter

from ..harness import wait_for

SECRET = "Xylophonquartz"


def test_no_text_in_the_log(serve):
    server = serve(log_level="debug", token="a-token-of-the-tests")
    server.write("s", (f"the {SECRET} is here", 0, 5))
    server.wait_until_embedded()
    server.retrieve("s", f"where is the {SECRET}?")
    post = server.client.post
    post("/evict/write", json={"session_id": "s", "chunks": [{"text": SECRET, "token_range": [5, 1]}]})
    post("/evict/write", json={"session_id": SECRET * 9, "chunks": [{"text": SECRET, SECRET: 1}]})
    post("/evict/write", content=f'{{"{SECRET}'.encode(), headers={"content-type": "application/json"})
    post("/evict/write", content=f'["{SECRET}", NaN]'.encode())
    post(f"/{SECRET}", json=SECRET)
    server.client.get("/evict/dump", params={"session_id": f"{SECRET} !"})
    server.client.get("/sessions", headers={"X-Request-ID": f"{SECRET} {SECRET}"})
    server.client.delete("/sessions/s")
    server.stop()
    log = server.log_path.read_text()
    assert SECRET.lower() not in log.lower()
    assert "a-token-of-the-tests" not in log
    assert "Traceback" not in log


def test_a_fault_of_our_own_is_logged_by_place_and_answered(serve):
    server = serve(embedder="none")
    server.write("s", (f"the {SECRET} is here", 0, 5))
    with sqlite3.connect(server.data_dir / "rescue.db") as database:
        database.execute("DROP TABLE words_1")  # behind the service's back
    database.close()
    answer = server.client.post(
        "/evict/retrieve", json={"session_id": "s", "query": SECRET}, headers={"X-Request-ID": "this-one"}
    )
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    wait_for(lambda: [line for line in server.log() if line.get("request_id") == "this-one"])  # it follows the answer
    (line,) = [line for line in server.log() if line.get("request_id") == "this-one"]
    assert (line["route"], line["status"]) == ("POST /evict/retrieve", 503)
    assert line["ms"] > 0
    assert SECRET.lower() not in server.log_path.read_text().lower()


def test_an_exception_is_logged_without_its_message():
    try:
        raise ValueError(SECRET)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "a fault", None, sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert (line["error"], line["event"]) == ("ValueError", "a fault")
    assert line["at"][0].startswith(__file__)
    assert SECRET not in str(line)


def test_every_request_has_one_line(serve):
    server = serve(embedder="none")
    ids = [server.client.get("/healthz").headers["x-request-id"] for _ in range(5)]
    wait_for(lambda: [line["request_id"] for line in server.log() if line["event"] == "request"] == ids)
    assert len(set(ids)) == 5
