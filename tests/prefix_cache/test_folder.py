"""The folder of the store: whole records or none, for its owner alone; those used longest ago leave first."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from cli.tools import environment

from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.folder import BLOCKS, POINTS, Folder

WRITES = """
import sys
from pathlib import Path
from mlx_tq.prefix_cache.folder import BLOCKS, Folder
folder, start = Folder(Path(sys.argv[1]), 10**7), int(sys.argv[2])
with folder.writing() as may:
    print(may, flush=True)
    for number in range(start, start + 10_000):
        folder.write(BLOCKS, str(number), str(number).encode() * 30_000)
"""


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "store")


def put(folder, *names, size=1000):
    with folder.writing() as may:
        assert may
        for name in names:
            folder.write(BLOCKS, name, name.encode() * size)


def names(folder):
    return [record.path.name for record in folder.records()]


def test_a_record_is_there_for_its_owner_alone(folder):
    put(folder, "a")
    assert folder.read(BLOCKS, "a") == b"a" * 1000
    assert folder.read(POINTS, "a") is None
    paths = [folder.path, *folder.path.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_dir()} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_file()} == {"0o600"}


def test_flipped_bytes_truncations_and_exchanged_files_are_missing(folder):
    put(folder, "a", "b")
    path = folder.path / BLOCKS / "a"
    whole, places = path.read_bytes(), random.Random(1)
    for place in (*range(40), *(places.randrange(len(whole)) for _ in range(60))):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]):
            path.write_bytes(data)
            assert folder.read(BLOCKS, "a") is None
            assert not path.exists()
    path.write_bytes((folder.path / BLOCKS / "b").read_bytes())
    assert folder.check() == (2, 1)
    assert names(folder) == ["b"]


def test_what_was_used_longest_ago_leaves_first(tmp_path):
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    put(folder, *"abcde")
    for time_, name in enumerate("abcde"):
        os.utime(folder.path / BLOCKS / name, ns=(time_, time_))
    assert folder.read(BLOCKS, "a")
    put(folder, "f")
    assert names(folder) == ["c", "d", "e", "a", "f"]
    assert folder.clear() > 4000
    assert names(folder) == []


def test_protected_records_stay_up_to_half_of_the_limit(tmp_path):
    folder = Folder(tmp_path / "store", limit=10 * 1100)
    put(folder, *"abcdefgh")
    folder.use([(BLOCKS, name) for name in "abcdefgh"], protect=True)
    assert all(record.protected for record in folder.records())
    put(folder, *"ijk")
    assert "".join(sorted(names(folder))) == "bcdefghijk", "the oldest beyond half of the limit"
    folder.use([(BLOCKS, name) for name in "bc"])
    put(folder, *"lmnop")
    assert "".join(sorted(names(folder))) == "bcfghlmnop", "b and c were used last, so d and e are beyond it"


def test_a_clock_that_goes_back(tmp_path):
    """Records of the future are read and used; at the limit some leave, whichever they are."""
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    put(folder, *"abcde")
    later = time.time_ns() + 3600 * 10**9
    for name in "abcde":
        os.utime(folder.path / BLOCKS / name, ns=(later, later))
    assert folder.read(BLOCKS, "a")
    put(folder, *"fg")
    found = folder.records()
    assert sum(record.size for record in found) <= folder.limit
    assert all(folder.read(BLOCKS, record.path.name) for record in found)
    assert not any(record.protected for record in found)


def test_one_writes_at_a_time(folder):
    other = Folder(folder.path)
    with folder.writing(), other.writing() as may:
        assert not may
    with other.writing() as may:
        assert may
        other.write(BLOCKS, "theirs", b"x" * 5000)
    put(folder, "ours")
    told = (folder.path / "lock").read_text()
    assert int(told) == sum(record.size for record in folder.records()) > 5000


@pytest.mark.parametrize("times", [20, pytest.param(180, marks=pytest.mark.full)])
def test_killed_while_it_writes(folder, times):
    """Records are whole or missing, at the next start nothing else is left, and the lock is free."""
    delay = random.Random(times)
    for start in range(0, 10_000 * times, 10_000):
        words = [sys.executable, "-c", WRITES, str(folder.path), str(start)]
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"True\n"
        time.sleep(delay.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    put(folder, "after")
    assert len(names(folder)) > 1
    assert all(folder.read(BLOCKS, name) for name in names(folder))
    assert {path.name for path in (folder.path / BLOCKS).iterdir()} == set(names(folder))


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.txt\)\. Name an empty or a new folder"):
        Folder(tmp_path)
    with pytest.raises(ConfigError, match=r"no store of prefixes can be kept in .*Not a directory"):
        Folder(tmp_path / "thesis.txt" / "store")
