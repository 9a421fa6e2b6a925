"""Full and read-only disks, and a clock that goes back."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from rescue_svc.errors import StoreUnavailableError

from ..harness import IN_FULL_EACH_STORE

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


@pytest.fixture
def small_disk(tmp_path: Path):
    """Mount a tmpfs of four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def page(number):
    """Return an incompressible text and its token range."""
    rng = random.Random(number)
    return " ".join(f"{rng.getrandbits(40):010x}" for _ in range(700)), number, number + 1


def fill(service, number):
    """Write pages from this number on until the disk is full; return the number of the session's pages."""
    first = number
    while (answer := service.write("s", page(number))).status_code == 201:
        number += 1
        assert number < 5000
    assert (answer.status_code, answer.json()["code"]) == (507, "store_full")
    assert "free space, or delete sessions" in answer.json()["detail"]
    assert number > first + 10
    assert service.dump("s")["token_ranges"] == [[n, n + 1] for n in range(number)]
    return number


@ROOT_ONLY
def test_a_full_disk_loses_nothing(small_disk, start_service):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**21))
    service = start_service(small_disk / "data", embedder="none")
    written = fill(service, 0)
    assert service.search("s", page(7)[0][:10]) == [page(7)[0]]
    ballast.unlink()
    assert service.write("s", page(written)).status_code == 201
    after = start_service(service.killed(small_disk.with_name("after")), embedder="none")
    assert after.dump("s")["token_ranges"] == [[n, n + 1] for n in range(written + 1)]
    service.stop()


@ROOT_ONLY
def test_a_read_only_disk_is_refused_at_the_start(small_disk, start_service):
    (small_disk / "file").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "data", small_disk / "file" / "data"):
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            start_service(folder)


@IN_FULL_EACH_STORE
def test_a_clock_may_go_back(start_service, monkeypatch):
    service = start_service()
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 4e9)
        service.write("s", ("written in the future", 0, 5))
    service.write("s", ("written in the past", 9, 12))
    service.write("t", ("another", 0, 5))
    service.wait_until_embedded()
    listed = service.sessions()
    assert list(listed) == ["s", "t"]
    assert listed["s"]["updated"] == 4e9 > listed["t"]["updated"]
    assert service.dump("s")["token_ranges"] == [[0, 5], [9, 12]]
    assert len(service.search("s", "written")) == 2
    service.stop()
    assert start_service().dump("s")["session_total"] == 2
