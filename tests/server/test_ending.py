"""A signal ends the server: answers in progress end with a word, and the exit code says how."""

import signal

import httpx
import openai
import pytest

from .conftest import ENDLESS, PACKED
from .harness import Server

CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}


@pytest.mark.parametrize("sig", CODES, ids=lambda sig: sig.name)
def test_signal_in_the_middle_of_streams(folder, tmp_path, sig):
    server = Server(folder, tmp_path / "log", *PACKED, "--decode-concurrency", "1")
    streams = []
    try:
        options = {"stream": True, "max_tokens": 4000, "logit_bias": ENDLESS}
        stream = server.chat("hi", **options)
        streams.append(stream)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        server.process.send_signal(sig)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert server.process.wait(60) == CODES[sig]
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
    finally:
        for stream in streams:
            stream.close()
        server.stop()
    assert "Traceback" not in server.log()


def test_idle(folder, tmp_path):
    server = Server(folder, tmp_path / "log", *PACKED)
    assert server.stop(signal.SIGINT) == 130
    assert "Traceback" not in server.log()
