"""An answer that cannot go on ends with an error, as a response and as a stream."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Event

import pytest
from starlette.testclient import TestClient

from mlx_tq.cli.options import Request
from mlx_tq.server import build_parser
from mlx_tq.server.app import Api
from mlx_tq.server.guard import Guard
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.model_pool import ModelPool, PooledModel
from mlx_tq.server.model_service import ModelService
from mlx_tq.speculative.lookup_mode import NO_LOOKUP

from .conftest import ENDLESS
from .engines import limits_of


@contextmanager
def api_of(loaded, *flags):
    """Yield an API of a model in this process, and what starts the model."""
    request = Request.from_args(build_parser().parse_args(["--kv-profile", "off", *flags]))
    service = ModelService(request, *loaded, None, limits_of(), None, NO_LOOKUP, None, metrics := Metrics())
    pool = ModelPool([PooledModel(service.name, lambda: service, metrics)])
    api = Api(pool, Guard(None, [], 10**6, 8))
    try:
        yield api, pool.start
    finally:
        pool.close(30)


@contextmanager
def serving(loaded, *flags):
    """Serve a model in this process; yield the API and its client."""
    with api_of(loaded, *flags) as (api, start), TestClient(api.app([], start), "http://localhost") as client:
        yield api, client


def last_event(stream):
    assert stream.status_code == 200
    return json.loads(stream.text.strip().split("\n\n")[-1].rpartition("data: ")[2])


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"]}),
    ],
)
def test_an_error_while_an_answer_is_written(loaded, monkeypatch, path, extra):
    """As where a tokenizer cannot decode single tokens."""

    def decode(ids):
        raise RuntimeError("no such token")

    monkeypatch.setattr(loaded[1]._tokenizer, "decode", decode)
    with serving(loaded) as (_, client):
        response = client.post(path, json=extra)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "internal error" in str(last_event(client.post(path, json={**extra, "stream": True})))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_has_ended_requests_and_health_say_so(loaded, monkeypatch):
    def fail(value):
        raise RuntimeError("nothing catches this")

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with serving(loaded) as (api, client):
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(api._pool.services[0].metrics.running, "set", fail)
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=body).status_code == 503
        health = client.get("/health")
        assert health.status_code == 503
        assert "the engine has ended; start the server again" in health.text


def test_an_answer_ends_while_an_engine_step_takes_long(loaded, monkeypatch, caplog):
    caplog.set_level("INFO", "mlx_tq.server.app")
    steps, is_slow, release = count(), Event(), Event()
    kind = type(loaded[0])
    forward = kind.__call__

    def slow(*args, **options):
        if next(steps) == 3:
            is_slow.set()
            release.wait(60)
        return forward(*args, **options)

    monkeypatch.setattr(kind, "__call__", slow)
    with serving(loaded) as (api, client), ThreadPoolExecutor() as pool:
        body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": ENDLESS, "stream": True}
        stream = pool.submit(client.post, "/v1/chat/completions", json=body)
        try:
            assert is_slow.wait(60)
            client.portal.call(api.stop)
            assert last_event(stream.result(30))["error"]["code"] == "unavailable"
            assert "error unavailable in the stream" in caplog.text
        finally:
            release.set()
