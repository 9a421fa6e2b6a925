"""Schemas and grammars made to crash or stall the server."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from grammar.test_sandbox import LOWEST, SLOW, regexes
from http_harness import connections, polled, post_bytes, wait_for

from .conftest import ENDLESS
from .test_response_formats import CODE, regex_format, schema_format

PLAIN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
FORCING = {"type": "grammar", "syntax": "lark", "definition": "start: T T\nT: /b+/"}
CHECK_S = 5  # what a check may take; a server that it blocks answers no sooner
LIMIT_S = 20  # for a check on a busy machine


def body_of(response_format):
    return {**PLAIN, "max_tokens": 40, "response_format": response_format}


@pytest.mark.parametrize(
    "response_format",
    [
        schema_format({"type": "integer", "minimum": LOWEST, "maximum": LOWEST}),
        schema_format({"properties": {"a": {"const": -1e300}}}),
        FORCING,
        schema_format({"allOf": regexes(24)}),
        pytest.param(schema_format(SLOW), marks=pytest.mark.full),
        pytest.param(
            schema_format({"allOf": [{"multipleOf": 7919}, {"multipleOf": 104729}, {"multipleOf": 1299709}]}),
            marks=pytest.mark.full,
        ),
        pytest.param(regex_format("(a?b?)" * 9000), marks=pytest.mark.full),
    ],
    ids=["lowest integer", "lowest constant", "lark", "24 parts", "24 nested parts", "multipleOf", "regex"],
)
def test_hostile_schemas_get_400_without_delaying_others(server, response_format):
    with ThreadPoolExecutor(2) as pool, polled(server, "/health") as health:
        started = time.perf_counter()
        hostile = [pool.submit(server.post, **body_of(response_format)) for _ in range(2)]
        time.sleep(0.1)
        assert server.post(**PLAIN).status_code == 200
        plain = time.perf_counter() - started
        answers = [future.result() for future in hostile]
    assert {answer.status_code for answer in answers} == {400}
    assert all(answer.json()["error"]["param"].startswith("response_format") for answer in answers)
    assert max(health) < CHECK_S
    assert plain < CHECK_S
    assert time.perf_counter() - started < LIMIT_S


@pytest.mark.full
def test_one_client_does_not_block_the_schemas_of_others(server):
    other = httpx.Client(base_url=server.url, timeout=60, transport=httpx.HTTPTransport(local_address="127.0.0.2"))
    with other, ThreadPoolExecutor(2) as pool:
        hostile = [pool.submit(server.post, **body_of(schema_format({**SLOW, "title": str(n)}))) for n in range(2)]
        time.sleep(0.5)
        started = time.perf_counter()
        assert other.post("/v1/chat/completions", json=body_of(schema_format(CODE))).status_code == 200
        assert time.perf_counter() - started < 4, "checks of 5 s take both slots of one client"
        for future in hostile:
            assert future.result().status_code == 400


def test_a_disconnect_cancels_the_check(server):
    def workers():
        return [worker for forker in psutil.Process(server.process.pid).children() for worker in forker.children()]

    with connections(server.url, 1, post_bytes("/v1/chat/completions", body_of(schema_format(SLOW)))):
        wait_for(workers)
    wait_for(lambda: not workers(), timeout=2)
    assert server.post(**PLAIN).status_code == 200


def num_disconnects(server):
    return server.metrics().get('mlx_tq_requests_total{route="/v1/chat/completions",status="499"}', 0)


@pytest.mark.full
def test_a_disconnected_client_stops_waiting_for_its_session(server):
    headers = {"X-MLX-TQ-Session": "waits"}
    busy = {**PLAIN, "max_tokens": 150, "logit_bias": ENDLESS}
    body = {**body_of(schema_format({**CODE, "title": "waits"})), "max_tokens": 2}
    before = num_disconnects(server)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.http.post, "/v1/chat/completions", json=busy, headers=headers)
        wait_for(lambda: server.metrics()["mlx_tq_running"] == 1)
        with httpx.Client(base_url=server.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/chat/completions", json=body, headers=headers)
        assert not first.done()
        wait_for(lambda: num_disconnects(server) > before, timeout=5)
        assert first.result().status_code == 200


def test_a_schema_is_checked_once(server):
    schema = {**CODE, "title": "checked once"}
    assert server.post(**body_of(schema_format(schema))).status_code == 200
    (forker,) = psutil.Process(server.process.pid).children()
    forker.suspend()
    try:
        assert server.post(**body_of(schema_format(schema))).status_code == 200
    finally:
        forker.resume()


@pytest.mark.full
def test_allow_lark(start):
    server = start("--allow-lark")
    yes = {**FORCING, "definition": 'start: "yes" | "no"'}
    assert server.chat("hi", response_format=yes).choices[0].message.content in ("yes", "no")
    answer = server.post(**body_of(FORCING)).json()["choices"][0]
    assert answer["message"]["content"].strip("b") == ""
    assert answer["finish_reason"] == "length"
