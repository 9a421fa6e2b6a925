"""Schemas and grammars that are made to end or stall the server."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from socket import create_connection

import httpx
import psutil
import pytest
from cli.test_grammar_checker import LOWEST, SLOW, regexes
from http_harness import wait_for

from .conftest import ENDLESS, PACKED
from .harness import running
from .test_formats import CODE, held_to, regex

PLAIN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
FORCING = {"type": "grammar", "syntax": "lark", "definition": "start: T T\nT: /b+/"}
LIMIT_S = 20  # for a check of 5 s on a busy machine


def asking(response_format):
    return {**PLAIN, "max_tokens": 40, "response_format": response_format}


def test_an_error_does_not_repeat_a_long_key(server):
    answer = server.post(**asking(held_to({"properties": {"k" * 60_000: {"type": "strng"}}})))
    assert answer.status_code == 400
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "asked",
    [
        held_to({"type": "integer", "minimum": LOWEST, "maximum": LOWEST}),
        held_to({"properties": {"a": {"const": -1e300}}}),
        FORCING,
        held_to({"allOf": regexes(24)}),
        held_to(SLOW),
        pytest.param(
            held_to({"allOf": [{"multipleOf": 7919}, {"multipleOf": 104729}, {"multipleOf": 1299709}]}),
            marks=pytest.mark.full,
        ),
        pytest.param(regex("(a?b?)" * 9000), marks=pytest.mark.full),
    ],
    ids=["lowest integer", "lowest constant", "lark", "24 parts", "24 nested parts", "multipleOf", "regex"],
)
def test_hostile_schemas_get_400_without_delaying_others(server, asked):
    with ThreadPoolExecutor(2) as pool:
        began = time.perf_counter()
        hostile = [pool.submit(server.post, **asking(asked)) for _ in range(2)]
        time.sleep(0.1)
        health = []
        for _ in range(5):
            asked_at = time.perf_counter()
            assert server.http.get("/health").status_code == 200
            health.append(time.perf_counter() - asked_at)
        assert server.post(**PLAIN).status_code == 200
        plain = time.perf_counter() - began
        answers = [each.result() for each in hostile]
    assert {answer.status_code for answer in answers} == {400}
    assert all(answer.json()["error"]["param"].startswith("response_format") for answer in answers)
    assert max(health) < 1
    assert plain < 4
    assert time.perf_counter() - began < LIMIT_S


def test_one_client_does_not_keep_others_from_their_schemas(server):
    other = httpx.Client(base_url=server.url, timeout=60, transport=httpx.HTTPTransport(local_address="127.0.0.2"))
    with other, ThreadPoolExecutor(2) as pool:
        hostile = [pool.submit(server.post, **asking(held_to({**SLOW, "title": str(n)}))) for n in range(2)]
        time.sleep(0.5)
        began = time.perf_counter()
        assert other.post("/v1/chat/completions", json=asking(held_to(CODE))).status_code == 200
        assert time.perf_counter() - began < 4, "checks of 5 s take both slots of one client"
        for each in hostile:
            assert each.result().status_code == 400


def test_a_disconnect_cancels_the_check(server):
    def workers():
        return [child for each in psutil.Process(server.process.pid).children() for child in each.children()]

    host, port = server.url.removeprefix("http://").split(":")
    body = httpx.Request("POST", server.url, json=asking(held_to(SLOW))).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with closing(create_connection((host, int(port)))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(workers)
    wait_for(lambda: not workers(), timeout=2)
    assert server.post(**PLAIN).status_code == 200


def gone(server):
    """How many clients left before their answer."""
    return server.metrics().get('mlx_tq_requests_total{route="/v1/chat/completions",status="499"}', 0)


def test_a_client_that_leaves_no_longer_waits_for_its_session(server):
    held = {"X-Session-Id": "waits"}
    busy = {**PLAIN, "max_tokens": 150, "logit_bias": ENDLESS}
    body = {**asking(held_to({**CODE, "title": "waits"})), "max_tokens": 2}
    before = gone(server)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.http.post, "/v1/chat/completions", json=busy, headers=held)
        wait_for(lambda: server.metrics()["mlx_tq_running"] == 1)
        with httpx.Client(base_url=server.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/chat/completions", json=body, headers=held)
        assert not first.done()
        wait_for(lambda: gone(server) > before, timeout=5)
        assert first.result().status_code == 200


def test_a_schema_is_checked_once(server):
    schema = {**CODE, "title": "checked once"}
    assert server.post(**asking(held_to(schema))).status_code == 200
    (forker,) = psutil.Process(server.process.pid).children()
    forker.suspend()
    try:
        assert server.post(**asking(held_to(schema))).status_code == 200
    finally:
        forker.resume()


def test_allow_lark(folder, tmp_path):
    with running(folder, tmp_path / "log", *PACKED, "--allow-lark") as server:
        yes = {**FORCING, "definition": 'start: "yes" | "no"'}
        assert server.chat("hi", response_format=yes).choices[0].message.content in ("yes", "no")
        answer = server.post(**asking(FORCING)).json()["choices"][0]
        assert answer["message"]["content"].strip("b") == ""
        assert answer["finish_reason"] == "length"
