"""A server answers before its model is loaded: health checks at once, other requests when it is ready."""

import re
import signal

import pytest
from cli.tools import zoo_model
from kernel_cache import make_cache_folder

from .harness import Server

CALIBRATES = ("--kv-evict", "triattention", "--kv-calibration", "auto")  # takes seconds on a CPU


class LoadingServer(Server):
    listening = re.compile(r"requests to (\S+) are answered when it is ready")


@pytest.fixture
def loading(tmp_path):
    folder = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=1024)
    make_cache_folder(tmp_path / "cache")
    server = LoadingServer(folder, tmp_path / "log", *CALIBRATES, XDG_CACHE_HOME=str(tmp_path / "cache"))
    yield server
    if server.process.poll() is None:
        server.stop()


def test_requests_wait_for_the_model_and_health_checks_do_not(loading):
    health = loading.http.get("/health")
    assert health.status_code == 503
    assert health.json()["error"]["message"] == "loading the model; try again later"
    assert loading.post("/v1/completions", prompt="hi", max_tokens=1).status_code == 200
    assert loading.http.get("/health").json() == {"status": "ok"}


@pytest.mark.full
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_it_while_the_model_loads(loading, sent, code):
    assert loading.http.get("/health").status_code == 503
    assert loading.stop(sent) == code
    assert "listening on" not in loading.log()
    assert "Finished server process" in loading.log()
