"""An answer that cannot be written ends with an error, as a response and as a stream."""

import pytest
from starlette.testclient import TestClient

from mlx_tq.cli.options import Request
from mlx_tq.distributed.group import ALONE
from mlx_tq.server import build_parser
from mlx_tq.server.admission import EngineLimits
from mlx_tq.server.app import Api
from mlx_tq.server.guard import Guard
from mlx_tq.server.model_service import ModelService

from .engines import LIMITS


@pytest.fixture
def client(loaded, monkeypatch):
    """Return a client of an API in this process, whose tokenizer cannot decode single tokens."""
    model, tokenizer = loaded

    def decode(ids):
        raise RuntimeError("no such token")

    monkeypatch.setattr(tokenizer._tokenizer, "decode", decode)
    request = Request.from_args(build_parser().parse_args(["--kv-profile", "off"]))
    service = ModelService(request, model, tokenizer, None, EngineLimits(**LIMITS), None, ALONE)
    with TestClient(Api(service, Guard(None, [], 10**6, 8)).app([]), "http://localhost") as client:
        yield client
    service.engine.stop()
    service.engine.join(30)
    service.close()


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"]}),
    ],
)
def test_an_error_while_an_answer_is_written(client, path, extra):
    response = client.post(path, json=extra)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    stream = client.post(path, json={**extra, "stream": True})
    assert stream.status_code == 200
    last = stream.text.strip().split("\n\n")[-1]
    assert "data: {" in last
    assert "internal error" in last
