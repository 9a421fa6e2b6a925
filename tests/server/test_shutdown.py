"""A signal ends the server: running answers end with an error, and the exit code says how."""

import signal

import httpx
import openai
import pytest

from .conftest import ENDLESS, PACKED
from .harness import Server


def test_a_signal_in_the_middle_of_a_stream(folder, tmp_path):
    server = Server(folder, tmp_path / "log", *PACKED, "--decode-concurrency", "1")
    try:
        stream = server.chat("hi", stream=True, max_tokens=4000, logit_bias=ENDLESS)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
        stream.close()
    finally:
        server.stop()
    assert "Traceback" not in server.log()


def test_idle(folder, tmp_path):
    server = Server(folder, tmp_path / "log", *PACKED)
    assert server.stop(signal.SIGINT) == 130
    assert "Traceback" not in server.log()
