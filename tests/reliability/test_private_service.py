"""`--rescue auto` starts a service that ends with its process."""

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

from mlx_tq.errors import RescueError
from mlx_tq.rescue import AUTO, RescueClient, TextSpan, locator, open_service

ROOT = Path(__file__).parents[2]
START_S = 60
FACT = TextSpan(10, 18, "The access code is 417295.")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Let no service answer on the default port; create folders in `tmp_path`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(locator, "DEFAULT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")
    monkeypatch.setenv("RESCUE_STORE", "postgresql://another.store/x")  # a private service does not use it
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("RESCUE_TOKEN", raising=False)


def services():
    return [child for child in psutil.Process().children() if "rescue_svc" in " ".join(child.cmdline())]


def test_started_used_and_ended(tmp_path):
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        (child,) = services()
        client.write("s", [FACT])
        (span,) = client.retrieve("s", "Which access code?", timeout=START_S)
        assert span[:3] == FACT
        assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C in the terminal does not reach it
        (address,) = [c.laddr for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
        assert address.ip == "127.0.0.1"
    assert not child.is_running()
    assert not list(tmp_path.iterdir())


def test_a_killed_service_is_restarted_with_its_data():
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        client.write("s", [FACT])
        assert client.flush(START_S)
        (child,) = services()
        child.kill()
        child.wait()
        wait_for(lambda: client.retrieve("s", "Which access code?", timeout=START_S), START_S)
        assert len(services()) == 1
    assert not services()


def test_it_ends_with_a_killed_process_and_leaves_no_text(popen, tmp_path):
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


def test_a_failing_start_is_reported_and_not_repeated(monkeypatch):
    monkeypatch.setenv("RESCUE_PROT", "5054")
    with RescueClient(open_service(AUTO)) as client:
        for _ in range(2):
            with pytest.raises(RescueError, match=r"did not start: .*RESCUE_PROT.*--rescue off"):
                client.ready(START_S)
        assert client.retrieve("s", "what?") == []
        assert "did not start" in client.take_warning()


@pytest.mark.parametrize(("status", "private"), [("200 OK", False), ("401 Unauthorized", True)])
def test_the_default_service_is_used_if_it_accepts_the_token(monkeypatch, status, private):
    with BadServer(always({"status": "ready"}, status)) as server:
        monkeypatch.setattr(locator, "DEFAULT_URL", server.url)
        with RescueClient(open_service(AUTO)) as client:
            assert client.ready(START_S)
            assert bool(services()) == private
