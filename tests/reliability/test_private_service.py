"""`--rescue auto` starts a service that ends with its process."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from bad_servers import BadServer, always
from http_harness import wait_for
from rescue.harness import Server

from mlx_tq.errors import RescueError
from mlx_tq.rescue import AUTO, RescueClient, TextSpan, open_service

ROOT = Path(__file__).parents[2]
START_S = 60
FACT = TextSpan(10, 18, "The access code is 417295.")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Let no service of this user run; create folders in `tmp_path`."""
    monkeypatch.setenv("RESCUE_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")
    monkeypatch.setenv("RESCUE_STORE", "postgresql://another.store/x")  # a private service does not use it
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("RESCUE_TOKEN", raising=False)


def services():
    return [child for child in psutil.Process().children() if "rescue_svc" in " ".join(child.cmdline())]


@pytest.mark.full
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


@pytest.mark.full
def test_a_killed_service_is_restarted_with_its_data():
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        client.write("s", [FACT])
        assert client.flush(START_S)
        files = psutil.Process().num_fds()
        (child,) = services()
        child.kill()
        child.wait()
        wait_for(lambda: client.retrieve("s", "Which access code?", timeout=START_S), START_S)
        assert len(services()) == 1
        assert psutil.Process().num_fds() == files  # pipe and log of the killed one are closed
    assert not services()


@pytest.mark.full
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
            with pytest.raises(RescueError, match=r"did not start: .*RESCUE_PROT"):
                client.ready(START_S)
        assert client.retrieve("s", "what?") == []
        assert "did not start" in client.take_warning()


# The service of this user in the default folder.


@pytest.fixture
def folder(monkeypatch):
    """Return the default folder; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("RESCUE_DATA_DIR", path)
        yield Path(path)


@pytest.fixture
def start(folder):
    """Return a function that starts a service in the default folder, or in one below it."""
    with ExitStack() as stack:

        def started(name=".", **settings):
            server = Server(folder / name, logs=folder, embedder="none", **settings)
            stack.callback(server.kill)
            return server

        yield started


def uses_own_service():
    """Return whether `auto` uses the running service; text and token go to the one that it uses."""
    running = services()
    with RescueClient(open_service(AUTO)) as client:
        assert client.ready(START_S)
        client.write("s", [FACT])
        assert client.flush(START_S)
        return services() == running


@pytest.mark.full
def test_the_running_service_is_used_over_its_socket(start, monkeypatch):
    monkeypatch.setenv("RESCUE_TOKEN", "a-token-of-sixteen")
    one, other = start("one", token="a-token-of-sixteen"), start("other", token="a-token-of-sixteen")
    for server in (one, other):
        monkeypatch.setenv("RESCUE_DATA_DIR", str(server.data_dir))
        assert uses_own_service()
        assert server.dump("s")["session_total"] == 1
    monkeypatch.setenv("RESCUE_TOKEN", "another-of-sixteen")
    assert not uses_own_service()


@pytest.mark.full
def test_a_dead_service_is_replaced_and_can_be_restarted(start, folder):
    start().kill()
    assert (folder / "rescue.sock").is_socket()
    assert not uses_own_service()
    server = start()
    assert uses_own_service()
    assert server.stop() == 0
    assert not (folder / "rescue.sock").exists()


def forge(folder, trick):
    """Return the address where a program of another user would listen."""
    path = folder / "rescue.sock"
    match trick:
        case "a port":
            return ("127.0.0.1", 5054)
        case "a link":
            path.symlink_to(folder / "other.sock")
            return str(folder / "other.sock")
        case "a folder for all":
            folder.chmod(0o777)
    return str(path)


IN_FULL = [pytest.param(trick, marks=pytest.mark.full) for trick in ("a link", "a folder for all")]


@pytest.mark.full
@pytest.mark.parametrize("trick", ["a port", "open to all", "another owner", *IN_FULL])
def test_others_get_neither_text_nor_token(folder, monkeypatch, trick):
    monkeypatch.setenv("RESCUE_TOKEN", "a-token-of-sixteen")
    seen = []
    try:
        server = BadServer(always({"status": "ready", "accepted": 1}, seen=seen), forge(folder, trick))
    except OSError as error:
        pytest.skip(f"the default port is taken: {error}")
    if trick != "a port":
        (folder / "rescue.sock").chmod(0o666 if trick == "open to all" else 0o600)
    if trick == "another owner":
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(folder / "rescue.sock", 12345, 12345)
    with server:
        assert not uses_own_service()
    assert not seen


def test_the_forged_socket_would_work_if_it_were_private(folder):
    """Shows that the test above can fail."""
    with BadServer(always({"status": "ready", "accepted": 1}), str(folder / "rescue.sock")):
        (folder / "rescue.sock").chmod(0o600)
        assert uses_own_service()
