"""The folder of a prefix cache: whole records or none, for their owner only, the least recently used evicted first."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from cli.tools import environment

from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder

WRITES = """
import sys
from pathlib import Path
from mlx_tq.prefix_cache.folder import BLOCKS, Folder
folder, start = Folder(Path(sys.argv[1]), 10**7), int(sys.argv[2])
with folder.writing() as may_write:
    print(may_write, flush=True)
    for number in range(start, start + 10_000):
        folder.write(BLOCKS, str(number), str(number).encode() * 30_000)
"""


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "store")


def write(folder, *keys):
    with folder.writing() as may_write:
        assert may_write
        for key in keys:
            folder.write(BLOCKS, key, key.encode() * 1000)


def keys(folder):
    return [record.path.name for record in folder.records()]


def test_only_the_owner_can_read_a_record(folder):
    write(folder, "a")
    assert folder.read(BLOCKS, "a") == b"a" * 1000
    assert folder.read(CHECKPOINTS, "a") is None
    paths = [folder.path, *folder.path.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_dir()} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_file()} == {"0o600"}


def test_changed_truncated_and_exchanged_files_are_missing(folder):
    write(folder, "a", "b")
    path = folder.path / BLOCKS / "a"
    whole, chance = path.read_bytes(), random.Random(1)
    for place in (*range(40), *(chance.randrange(len(whole)) for _ in range(60))):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]):
            path.write_bytes(data)
            assert folder.read(BLOCKS, "a") is None
            assert not path.exists()
    path.write_bytes((folder.path / BLOCKS / "b").read_bytes())
    assert folder.check() == (2, 1)
    assert keys(folder) == ["b"]


def test_the_least_recently_used_are_evicted_first(tmp_path):
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    write(folder, *"abcde")
    for time_, key in enumerate("abcde"):
        os.utime(folder.path / BLOCKS / key, ns=(time_, time_))
    assert folder.read(BLOCKS, "a")
    write(folder, "f")
    assert keys(folder) == ["c", "d", "e", "a", "f"]
    assert folder.clear() > 4000
    assert keys(folder) == []


def test_protected_records_stay_up_to_half_of_the_limit(tmp_path):
    folder = Folder(tmp_path / "store", limit=10 * 1100)
    write(folder, *"abcdefgh")
    folder.touch([(BLOCKS, key) for key in "abcdefgh"], protect=True)
    assert all(record.is_protected for record in folder.records())
    write(folder, *"ijk")
    assert "".join(sorted(keys(folder))) == "bcdefghijk", "the oldest beyond half of the limit"
    folder.touch([(BLOCKS, key) for key in "bc"])
    write(folder, *"lmnop")
    assert "".join(sorted(keys(folder))) == "bcfghlmnop", "b and c were used last, so d and e are beyond it"


def test_a_clock_that_goes_back(tmp_path):
    """Records of the future can be used; at the limit some are evicted, whichever they are."""
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    write(folder, *"abcde")
    later = time.time_ns() + 3600 * 10**9
    for key in "abcde":
        os.utime(folder.path / BLOCKS / key, ns=(later, later))
    assert folder.read(BLOCKS, "a")
    write(folder, *"fg")
    records = folder.records()
    assert sum(record.size for record in records) <= folder.limit
    assert all(folder.read(BLOCKS, record.path.name) for record in records)
    assert not any(record.is_protected for record in records)


def test_one_process_writes_at_a_time(folder):
    other = Folder(folder.path)
    with folder.writing(), other.writing() as may_write:
        assert not may_write
    with other.writing() as may_write:
        assert may_write
        other.write(BLOCKS, "theirs", b"x" * 5000)
    write(folder, "ours")
    nbytes = int((folder.path / "lock").read_text())
    assert nbytes == sum(record.size for record in folder.records()) > 5000


def test_a_file_that_is_being_written_is_no_record(folder):
    write(folder, "a")
    (folder.path / BLOCKS / ".b.tmp").write_bytes(b"half")
    assert folder.check() == (1, 0)
    assert folder.clear() > 1000
    assert (folder.path / BLOCKS / ".b.tmp").exists()


@pytest.mark.parametrize("times", [20, pytest.param(180, marks=pytest.mark.full)])
def test_a_process_that_is_killed_while_it_writes(folder, times):
    """Records are whole or missing; the next writer removes all else, and the lock is free."""
    delay = random.Random(times)
    for start in range(0, 10_000 * times, 10_000):
        words = [sys.executable, "-c", WRITES, str(folder.path), str(start)]
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"True\n"
        time.sleep(delay.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    write(folder, "after")
    assert len(keys(folder)) > 1
    assert all(folder.read(BLOCKS, key) for key in keys(folder))
    assert {path.name for path in (folder.path / BLOCKS).iterdir()} == set(keys(folder))


def test_a_folder_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.txt\)\. Name an empty or a new folder"):
        Folder(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be used as a prefix cache: Not a directory"):
        Folder(tmp_path / "thesis.txt" / "store")
