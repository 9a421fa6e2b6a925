"""Full disks, directories that cannot be written, a second process, a clock that goes back."""

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from ..harness import Server, ServerExitedError

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


@pytest.fixture
def small_disk(tmp_path: Path):
    """A tmpfs of four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@ROOT_ONLY
def test_a_full_disk_loses_nothing(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"0" * 2**20)
    server = Server(small_disk / "data", embedder="none", logs=small_disk.parent)
    acknowledged, number = [], 0
    try:
        while True:
            answer = server.write("s", (f"{number} " + "text " * 1500, number, number + 1))
            if answer.status_code != 201:
                break
            acknowledged.append([number, number + 1])
            number += 1
        assert (answer.status_code, answer.json()["code"]) == (507, "store_full")
        assert len(acknowledged) > 10
        assert server.dump("s")["token_ranges"] == acknowledged
        assert server.retrieve("s", "text 7", top_k=1)["chunks"]
        ballast.unlink()
        assert server.write("s", ("small", number, number + 1)).status_code == 201
        server.kill()
        server = Server(small_disk / "data", embedder="none", logs=small_disk.parent)
        assert server.dump("s")["token_ranges"] == [*acknowledged, [number, number + 1]]
        server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()


@ROOT_ONLY
def test_a_read_only_disk_is_said_at_the_start(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ServerExitedError, match="cannot be written") as exited:
        Server(small_disk / "data", logs=small_disk.parent)
    assert exited.value.code == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it may not; the read-only disk stands in for it")
def test_a_read_only_directory_is_said_at_the_start(tmp_path):
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(ServerExitedError, match="cannot be written"):
        Server(tmp_path / "data")


def test_a_path_through_a_file_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerExitedError, match="cannot be written") as exited:
        Server(tmp_path / "file" / "data", logs=tmp_path)
    assert exited.value.code == 1


def test_a_second_process_is_refused_and_harms_nothing(serve):
    first = serve(embedder="none")
    first.write("s", ("kept", 0, 1))
    with pytest.raises(ServerExitedError, match="in use by another process") as exited:
        serve(embedder="none")
    assert exited.value.code == 1
    assert first.write("s", ("more", 1, 2)).json()["session_total"] == 2


def test_a_clock_that_goes_back_changes_nothing(serve):
    server = serve()
    server.write("s", ("written in the future", 0, 5))
    server.kill()
    with sqlite3.connect(server.data_dir / "rescue.db") as database:
        database.execute("UPDATE sessions SET created = 4e9, updated = 4e9")  # as if the clock had been years ahead
    database.close()
    server = serve()
    server.write("s", ("written in the past", 9, 12))
    server.write("t", ("another", 0, 5))
    server.wait_until_embedded()
    listed = {s["session_id"]: s for s in server.client.get("/sessions").json()["sessions"]}
    assert listed["s"]["updated"] == 4e9
    assert listed["t"]["updated"] < 4e9
    assert server.dump("s")["token_ranges"] == [[0, 5], [9, 12]]
    assert len(server.retrieve("s", "written")["chunks"]) == 2
    server.stop()
    assert serve().dump("s")["session_total"] == 2
