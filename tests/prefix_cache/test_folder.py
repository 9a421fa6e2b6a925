"""The folder of a prefix cache: whole records or none, for their owner only, the least recently used evicted first."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
        folder.write(BLOCKS, f"{number:064x}", str(number).encode() * 30_000)
"""


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "store")


def key_of(letter):
    return f"{ord(letter):064x}"


def path_of(folder, letter, kind=BLOCKS):
    return folder.path / kind / key_of(letter)


def write(folder, *letters):
    with folder.writing() as may_write:
        assert may_write
        for letter in letters:
            folder.write(BLOCKS, key_of(letter), letter.encode() * 1000)


def read(folder, letter):
    return folder.read(BLOCKS, key_of(letter))


def letters(folder):
    return [chr(int(record.path.name, 16)) for record in folder.records()]


def set_time(folder, letter, time_):
    os.utime(path_of(folder, letter), ns=(time_, time_))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_owner_can_read_a_record(folder):
    write(folder, "a")
    assert read(folder, "a") == b"a" * 1000
    assert folder.read(CHECKPOINTS, key_of("a")) is None
    paths = [folder.path, *folder.path.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_dir()} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in paths if path.is_file()} == {"0o600"}


def test_changed_truncated_and_exchanged_files_are_missing(folder):
    write(folder, "a", "b")
    path = path_of(folder, "a")
    whole, chance = path.read_bytes(), random.Random(1)
    for place in (*range(40), *(chance.randrange(len(whole)) for _ in range(60))):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]):
            path.write_bytes(data)
            assert read(folder, "a") is None
            assert path.exists() == (not b"TQR1".startswith(data[:4])), "what does not begin like one stays"
            path.unlink(missing_ok=True)
    path.write_bytes((path_of(folder, "b")).read_bytes())
    assert folder.check() == (2, 1)
    assert letters(folder) == ["b"]


def test_the_least_recently_used_are_evicted_first(tmp_path):
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    write(folder, *"abcde")
    for time_, letter in enumerate("abcde"):
        set_time(folder, letter, time_)
    assert read(folder, "a")
    write(folder, "f")
    assert letters(folder) == ["c", "d", "e", "a", "f"]
    assert folder.clear() > 4000
    assert letters(folder) == []


def test_protected_records_stay_up_to_half_of_the_limit(tmp_path):
    folder = Folder(tmp_path / "store", limit=10 * 1100)
    write(folder, *"abcdefgh")
    folder.touch([(BLOCKS, key_of(letter)) for letter in "abcdefgh"], protect=True)
    assert all(record.is_protected for record in folder.records())
    write(folder, *"ijk")
    assert "".join(sorted(letters(folder))) == "bcdefghijk", "the oldest beyond half of the limit"
    folder.touch([(BLOCKS, key_of(letter)) for letter in "bc"])
    write(folder, *"lmnop")
    assert "".join(sorted(letters(folder))) == "bcfghlmnop", "b and c were used last, so d and e are beyond it"


def test_a_clock_that_goes_back(tmp_path):
    """Records of the future can be used; at the limit some are evicted, whichever they are."""
    folder = Folder(tmp_path / "store", limit=5 * 1100)
    write(folder, *"abcde")
    later = time.time_ns() + 3600 * 10**9
    for letter in "abcde":
        set_time(folder, letter, later)
    assert read(folder, "a")
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
        other.write(BLOCKS, key_of("t"), b"x" * 5000)
    write(folder, "o")
    nbytes = int((folder.path / "lock").read_text())
    assert nbytes == sum(record.size for record in folder.records()) > 5000


def test_a_file_that_is_being_written_is_no_record(folder):
    write(folder, "a")
    temporary = folder.path / BLOCKS / f".{key_of('b')}.0123abcd"
    temporary.write_bytes(b"TQR1 half")
    assert folder.check() == (1, 0)
    assert folder.clear() > 1000
    assert temporary.exists()
    (folder.path / "lock").write_bytes(b"")  # as after its writer was killed
    write(folder, "c")
    assert not temporary.exists()


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
    with folder.writing():
        folder.write(BLOCKS, "f" * 64, b"after")
    names = {record.path.name for record in folder.records()}
    assert len(names) > 1
    assert all(folder.read(BLOCKS, name) for name in names)
    assert {path.name for path in (folder.path / BLOCKS).iterdir()} == names


@pytest.mark.parametrize("name", ["thesis.txt", "blocks/thesis.txt", "checkpoints/survey.csv", "lock", ".notes"])
def test_a_folder_of_other_files_is_refused_and_stays_as_it_is(tmp_path, name):
    folder = tmp_path / "mine"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("a")
    (folder / "checkpoints").mkdir(exist_ok=True)
    folder.chmod(0o755)
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"it holds other files \(.*\)\. Name an empty or a new folder"):
        Folder(folder)
    assert contents(folder) == before
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_finder_has_opened_is_empty(tmp_path):
    (tmp_path / ".DS_Store").write_bytes(b"Bud1")
    (tmp_path / ".localized").touch()
    write(Folder(tmp_path), "a")
    assert (tmp_path / ".DS_Store").read_bytes() == b"Bud1"


def test_a_link_in_place_of_its_folder_of_records_is_refused(folder, tmp_path):
    other = Folder(tmp_path / "other")
    write(other, "a")
    (folder.path / BLOCKS).rmdir()
    (folder.path / BLOCKS).symlink_to(other.path / BLOCKS)
    with pytest.raises(ConfigError, match="cannot be used as a prefix cache: its blocks is a link"):
        Folder(folder.path)
    with pytest.raises(OSError, match="is a link"), folder.writing():
        pass
    assert read(other, "a")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"cannot be used as a prefix cache: Not a directory"):
        Folder(tmp_path / "thesis.txt" / "store")


def test_files_that_are_no_records_are_never_deleted(tmp_path):
    """Whatever their names are: records begin with four letters that are looked for before one is deleted."""
    folder = Folder(tmp_path, limit=3000)
    write(folder, "a")
    for name in ("survey.csv", ".notes", f".{key_of('d')}", key_of("e"), key_of("f")[1:]):
        (folder.path / BLOCKS / name).write_bytes(b"x" * 5000)
    (folder.path / "thesis.txt").write_text("x")
    before = {path: data for path, data in contents(tmp_path).items() if data[:1] == b"x"}
    folder.check()
    assert folder.read(BLOCKS, key_of("e")) is None
    folder.remove(BLOCKS, key_of("e"))
    (folder.path / "lock").write_bytes(b"")
    write(folder, *"bc")
    Folder(tmp_path).clear()
    assert before.items() <= contents(tmp_path).items()
    assert len(before) == 6
    with pytest.raises(ValueError, match="is not the key of a record"):
        folder.read(BLOCKS, "../../thesis.txt")


# What somebody with the user's rights puts in place of a record.
PLANTED = {
    "a pipe": os.mkfifo,
    "a link to endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "a terabyte": lambda path: path.touch() or os.truncate(path, 2**40),
    "a terabyte that begins like a record": lambda path: path.write_bytes(b"TQR1") and os.truncate(path, 2**40),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_whatever_is_planted_is_a_miss(folder, plant):
    write(folder, "b")
    plant(path_of(folder, "a"))
    assert read(folder, "a") is None
    write(folder, "a")
    folder.touch([(BLOCKS, key_of("a"))], protect=True)
    folder.sync(BLOCKS, key_of("a"))
    assert folder.check()[1] <= 1
    assert read(folder, "b") == b"b" * 1000
    assert not (folder.path / BLOCKS / "nothing").exists()
    assert folder.clear() < 5000


@pytest.mark.parametrize("plant", [*PLANTED.values()][:5], ids=[*PLANTED][:5])
def test_a_lock_that_is_no_file(folder, plant):
    plant(folder.path / "lock")
    with pytest.raises(OSError, match=r"lock"), folder.writing():
        pass


def test_a_lock_that_is_a_link_does_not_truncate_a_file(folder, tmp_path):
    (tmp_path / "thesis.txt").write_text("a")
    (folder.path / "lock").symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(OSError, match="lock"), folder.writing():
        pass
    assert (tmp_path / "thesis.txt").read_text() == "a"


def test_a_record_that_vanishes_while_it_is_checked_is_not_damaged(folder):
    """Another process evicts and writes meanwhile."""
    with ThreadPoolExecutor(1) as pool:

        def churn():
            busy = Folder(folder.path, limit=20 * 1100)
            for _ in range(40):
                write(busy, *(chr(code) for code in range(1000, 1100)))

        churning = pool.submit(churn)
        while not churning.done():
            assert folder.check()[1] == 0
        churning.result()
    assert 0 < len(folder.records()) <= 20


@pytest.mark.parametrize(
    ("is_damaged", "finds_none"),
    [
        (False, lambda folder: read(folder, "a") is None),
        (True, lambda folder: read(folder, "a") is None),
        (True, lambda folder: folder.check() == (1, 0)),
    ],
)
def test_a_record_that_is_stored_while_an_old_one_is_read_stays(folder, monkeypatch, is_damaged, finds_none):
    """Another process stores it after this one has seen that it is missing or damaged."""
    opened, path = os.open, path_of(folder, "a")
    if is_damaged:
        path.write_bytes(b"TQR1 half")

    def open_(name, *args, **options):
        if name != path:
            return opened(name, *args, **options)
        monkeypatch.undo()
        try:
            return opened(name, *args, **options)
        finally:
            path.unlink(missing_ok=True)
            write(Folder(folder.path), "a")

    monkeypatch.setattr(os, "open", open_)
    assert finds_none(folder)
    assert read(folder, "a") == b"a" * 1000


def test_records_of_a_clock_that_was_years_ahead_are_evicted_first(tmp_path):
    folder = Folder(tmp_path / "store", limit=10 * 1100)
    write(folder, *"abcdefgh")
    ahead = time.time_ns() + 10 * 365 * 86_400 * 10**9
    for letter in "abcdefgh":
        set_time(folder, letter, ahead)
    assert read(folder, "a")
    assert not any(record.is_protected for record in folder.records())
    write(folder, *"ijklmnopq")
    assert {*"ijklmnopq"} <= {*letters(folder)}
    assert [letter for letter in letters(folder) if letter < "i"] in ([], ["a"])


def test_a_full_disk_makes_room(folder, monkeypatch):
    """The disk, below the limit of the folder, has room for five records."""
    opened = os.open

    def open_(path, flags, *args, **options):
        used = sum(file.stat().st_size for file in (folder.path / BLOCKS).iterdir())
        if flags & os.O_CREAT and Path(path).parent.name == BLOCKS and used > 4 * 1100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    write(folder, *"abcdefgh")
    assert letters(folder) == [*"defgh"]
    assert (folder.path / "lock").read_text() == str(sum(record.size for record in folder.records()))
    for path in (folder.path / BLOCKS).iterdir():
        path.unlink()
    (folder.path / BLOCKS / "other").write_bytes(b"x" * 5000)
    with pytest.raises(OSError, match="No space left"):
        write(folder, "i")


def test_a_disk_that_stays_full_costs_at_most_one_record(folder, monkeypatch):
    """Eviction frees nothing where snapshots keep the files."""
    write(folder, *"abc")
    opened = os.open

    def open_(path, flags, *args, **options):
        if flags & os.O_CREAT and Path(path).parent.name == BLOCKS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(OSError, match="No space left"), folder.writing():
        folder.write(BLOCKS, key_of("d"), b"d" * 5000)
    assert letters(folder) == [*"abc"], "they would not make room for it"
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            write(folder, "d")
    assert letters(folder) == [*"bc"]


def test_a_folder_that_was_deleted_is_made_again(folder):
    write(folder, *"ab")
    shutil.rmtree(folder.path)
    assert read(folder, "a") is None
    write(folder, "c")
    assert letters(folder) == ["c"]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    (folder.path / "thesis.txt").write_text("a")
    with pytest.raises(OSError, match="holds other files"), folder.writing():
        pass
    assert [path.name for path in folder.path.iterdir()] == ["thesis.txt"]
