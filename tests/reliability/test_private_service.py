"""`--rescue auto`: a real service that lives as long as we do."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bad_servers import BadServer, always
from http_harness import wait_for

import mlx_tq.rescue.locator as services
from mlx_tq.errors import RescueError
from mlx_tq.rescue import AUTO, RescueClient, TextSpan, open_service

ROOT = Path(__file__).parents[2]
START_S = 60
FACT = TextSpan(10, 18, "The access code is 417295.")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Nobody answers on the usual port; folders are made where the test can look."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(services, "DEFAULT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")
    monkeypatch.setenv("RESCUE_STORE", "postgresql://a.store.of.others/x")  # which a private service leaves alone
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("RESCUE_TOKEN", raising=False)


def ours():
    return [child for child in psutil.Process().children() if "rescue_svc" in " ".join(child.cmdline())]


def test_started_used_and_ended(tmp_path):
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        (child,) = ours()
        client.write("s", [FACT])
        (found,) = client.retrieve("s", "Which access code?", timeout=START_S)
        assert found[:3] == FACT
        assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C in the terminal does not reach it
        (address,) = [c.laddr for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
        assert address.ip == "127.0.0.1"
    assert not child.is_running()
    assert not list(tmp_path.iterdir())  # nor is any text left


def test_a_killed_one_is_started_again_with_what_it_had():
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        client.write("s", [FACT])
        assert client.flush(START_S)
        (child,) = ours()
        child.kill()
        child.wait()
        wait_for(lambda: client.retrieve("s", "Which access code?", timeout=START_S), START_S)
        assert len(ours()) == 1
    assert not ours()


def test_it_ends_with_a_process_that_is_killed_and_leaves_no_text(popen, tmp_path):
    code = f"""
import psutil, time
from mlx_tq.rescue import RescueClient, TextSpan, open_service
client = RescueClient(open_service("auto"))
client.ready({START_S})
client.write("s", [TextSpan{tuple(FACT)!r}])
assert client.flush({START_S})
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    child = psutil.Process(int(process.stdout.readline()))
    assert child.is_running()
    assert list(tmp_path.iterdir())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    child.wait(START_S)
    assert not list(tmp_path.iterdir())


def test_what_it_says_when_it_cannot_start(monkeypatch):
    monkeypatch.setenv("RESCUE_PROT", "5054")
    with RescueClient(open_service(AUTO)) as client:
        for _ in range(2):  # and it is not started over and over
            with pytest.raises(RescueError, match=r"did not start: .*RESCUE_PROT.*--rescue off"):
                client.ready(START_S)
        assert client.retrieve("s", "what?") == []
        assert "did not start" in client.take_warning()


@pytest.mark.parametrize(("status", "private"), [("200 OK", False), ("401 Unauthorized", True)])
def test_the_usual_one_is_used_if_it_lets_us_in(monkeypatch, status, private):
    with BadServer(always({"status": "ready"}, status)) as usual:
        monkeypatch.setattr(services, "DEFAULT_URL", usual.url)
        with RescueClient(open_service(AUTO)) as client:
            assert client.ready(START_S)
            assert bool(ours()) == private
