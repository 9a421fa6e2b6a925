"""An ephemeral service deletes what it wrote, however it ends, and nothing else."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rescue_svc.ephemeral import ephemeral_folder, make_permanent
from rescue_svc.errors import DirectoryInUseError, SettingsError, StoreUnavailableError
from rescue_svc.settings import load_settings

from ..harness import LocalService, Server

STOP_S = 60  # a bound for a busy machine
SECRET = "the harbor master counts gulls"


@contextmanager
def ephemeral(**chosen):
    """Run one in this process that contains a text."""
    with ephemeral_folder(load_settings(ephemeral=True, **chosen)) as settings, ExitStack() as stack:
        service = LocalService(settings.data_dir)
        stack.callback(service.stop)
        service.write_and_embed("s", (SECRET, 0, 5))
        yield service


@pytest.fixture
def left_by_a_kill(tmp_path):
    """Return a folder as kill -9 leaves it."""
    with ephemeral() as service:
        assert service.data_dir.parent == Path(tempfile.gettempdir())  # by default
        return service.killed(tmp_path / "killed")


def refuse(folder, says):
    with pytest.raises(SettingsError, match=says), ephemeral_folder(load_settings(ephemeral=True, data_dir=folder)):
        pass


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path, start_service):
    folder, file = tmp_path / "Documents", tmp_path / "a file"
    folder.mkdir()
    for thesis in (file, folder / "thesis.txt"):
        thesis.write_text("thesis")
    refuse(folder, "thesis.txt.*name a folder that is empty")
    refuse(file, "cannot be used")
    refuse(tmp_path / "no" / "such", "cannot be used")
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert {path.read_text() for path in (file, folder / "thesis.txt")} == {"thesis"}
    assert not (tmp_path / "no").exists()
    permanent = start_service()
    permanent.write("s", (SECRET, 0, 5))
    permanent.stop()
    refuse(permanent.data_dir, "contains other files")
    assert start_service().dump("s")["token_ranges"] == [[0, 5]]


def test_files_of_others_are_not_deleted(tmp_path, caplog):
    theirs = {tmp_path / "data" / name for name in ("index/2024.txt", "rescue.db.txt")}
    with ephemeral(data_dir=tmp_path / "data"):
        for path in theirs:
            path.write_text("thesis")
    assert {path for path in (tmp_path / "data").rglob("*") if path.is_file()} == theirs
    assert "not deleted" in caplog.text


@pytest.mark.full
def test_a_store_that_cannot_be_closed_is_deleted(tmp_path):
    """Another program reads the database, so its log cannot be emptied."""
    with ExitStack() as stack:
        service = stack.enter_context(ephemeral(data_dir=tmp_path / "data"))
        reader = sqlite3.connect(service.data_dir / "rescue.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM spans").fetchall()
        service.write("s", ("a later text", 5, 9))
        with pytest.raises(StoreUnavailableError, match="another program"):
            stack.close()
    reader.close()
    assert not service.data_dir.exists()


def test_the_folder_of_a_killed_service_is_used_again(left_by_a_kill):
    with ephemeral(data_dir=left_by_a_kill) as again:
        with pytest.raises(DirectoryInUseError), ephemeral(data_dir=left_by_a_kill):  # a second one at once
            pass
        assert again.dump("s")["token_ranges"] == [[0, 5]]
    assert not left_by_a_kill.exists()


def test_a_permanent_service_keeps_the_folder_of_a_killed_one(left_by_a_kill, start_service):
    make_permanent(left_by_a_kill)
    assert start_service(left_by_a_kill).dump("s")["token_ranges"] == [[0, 5]]
    refuse(left_by_a_kill, "contains other files")


# As processes, which end by signals and by their standard input.


@pytest.fixture(autouse=True)
def _default_hangup():
    """Let children start with the default action of SIGHUP, which `nohup make test` ignores."""
    previous = signal.signal(signal.SIGHUP, lambda *_: None)  # exec resets a handler, but not SIG_IGN
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture
def start(popen, tmp_path):
    """Return a function that starts an ephemeral service with its temporary and home folders in `tmp_path`."""
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "TMPDIR": str(tmp_path / "tmp"),
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-m", "rescue_svc", "serve", "--ephemeral", "true", "--port", "0"]

    def run(*flags, stdin=subprocess.PIPE, **options):
        words = [*command, "--embedder", "hashing", *map(str, flags)]
        return popen(words, stdin=stdin, stderr=subprocess.PIPE, env=environment, **options)

    return run


@pytest.fixture
def listening(tmp_path):
    """Run one that contains a text; the test closes its standard input."""
    server = Server(tmp_path / "data", logs=tmp_path, stdin=subprocess.PIPE, ephemeral="true")
    server.write("s", (SECRET, 0, 5))
    assert (server.data_dir / "rescue.db-wal").exists()
    yield server
    server.kill()
    server.process.stdin.close()


@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(n, marks=pytest.mark.full) for n in (None, signal.SIGTERM, signal.SIGHUP)),
        signal.SIGINT,
    ],
)
def test_its_files_are_deleted_at_the_end(listening, number):
    if number is None:
        listening.process.stdin.close()
    else:
        listening.process.send_signal(number)
    assert listening.process.wait(STOP_S) == (130 if number == signal.SIGINT else 0)
    assert not listening.data_dir.exists()


def test_repeated_signals(listening):
    """A program may close the pipe and also send signals."""
    listening.process.stdin.close()
    while listening.process.poll() is None:
        with suppress(ProcessLookupError):
            listening.process.terminate()
        time.sleep(0.001)
    assert not listening.data_dir.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(".", signal.SIGINT, marks=pytest.mark.full),
        ("rescue.db-wal", signal.SIGHUP),
        pytest.param("index", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_signal_during_the_start(start, tmp_path, moment, number):
    folder = tmp_path / "data"
    process = start("--data-dir", folder)
    while not (folder / moment).exists():
        assert process.poll() is None
    process.send_signal(number)
    _, stderr = process.communicate(timeout=STOP_S)
    assert process.returncode in (0, 130), stderr
    assert not folder.exists()


REFUSED = ("--data-dir", "data", "--embedder", "word2vec")


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "options", "code"),
    [
        ((), {"stdin": None, "preexec_fn": lambda: os.close(0)}, 0),
        pytest.param(REFUSED, {"stdin": subprocess.PIPE}, 2, marks=pytest.mark.full),
        (REFUSED, {"stdin": subprocess.DEVNULL}, 2),
    ],
    ids=["standard input closed", "refused", "refused, standard input at its end"],
)
def test_an_end_before_the_first_request_leaves_nothing(start, tmp_path, flags, options, code):
    process = start(*flags, cwd=tmp_path, **options)
    _, stderr = process.communicate(timeout=STOP_S)
    assert (process.returncode, b"Traceback" in stderr) == (code, False)
    assert not list((tmp_path / "tmp").iterdir())
    assert not (tmp_path / "home").exists(), "the default folder of a permanent service"
    assert not (tmp_path / "data").exists()
