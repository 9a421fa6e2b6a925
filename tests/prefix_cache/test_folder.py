"""The folder of a prefix cache: whole records or none, for their owner only, and those of least worth are removed."""

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

import numpy as np
import pytest
from cli.tools import environment

from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.summary import Summary

SIZE = 4096  # bytes that a record takes of the disk here
WRITES = """
import sys
from pathlib import Path
import numpy as np
from mlx_tq.prefix_cache.folder import CHECKPOINTS, Folder
from mlx_tq.prefix_cache.summary import Summary
folder, start = Folder(Path(sys.argv[1]), 10**7), int(sys.argv[2])
with folder.writing() as may_write:
    print(may_write, flush=True)
    for number in range(start, start + 10_000):
        summary = Summary("root", np.arange(9, dtype=np.int32), (), 0, False).to_bytes()
        folder.write(CHECKPOINTS, f"{number:064x}", summary + str(number).encode() * 30_000)
"""


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "store")


def key_of(letter):
    return f"{ord(letter):064x}"


def path_of(folder, letter):
    return folder.path / CHECKPOINTS / key_of(letter)


def content_of(letter, tokens=10, blocks=""):
    keys = tuple(key_of(block) for block in blocks)
    return Summary("root", np.arange(tokens, dtype=np.int32), keys, 0, has_prefixes=False).to_bytes() + letter.encode()


def write(folder, *letters, tokens=10, blocks=""):
    """Write checkpoints, each after the blocks that it names."""
    with folder.writing() as may_write:
        assert may_write
        for letter in letters:
            folder.make_room(SIZE * (1 + len(blocks)), [])
            for block in blocks:
                folder.write(BLOCKS, key_of(block), b"x" * 1000)
            folder.write(CHECKPOINTS, key_of(letter), content_of(letter, tokens, blocks))


def read(folder, letter):
    return folder.read(key_of(letter))


def blocks_of(folder):
    return "".join(sorted(chr(int(path.name, 16)) for path in (folder.path / BLOCKS).iterdir()))


def letters(folder):
    names = [record.path.name for record in folder.records() if record.path.parent.name == CHECKPOINTS]
    return [chr(int(name, 16)) for name in names]


def set_time(folder, letter, time_):
    os.utime(path_of(folder, letter), ns=(time_, time_))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_owner_can_read_a_record(folder):
    write(folder, "a", blocks="b")
    assert read(folder, "a") == content_of("a", blocks="b")
    assert read(folder, "b") is None
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


def test_a_block_is_read_into_parts_and_is_removed_if_it_is_damaged(folder):
    write(folder, "a", blocks="b")
    path = folder.path / BLOCKS / key_of("b")
    parts = [bytearray(400), bytearray(600)]

    def read_block(*sizes):
        return folder.read_block(
            key_of("b"), [memoryview(part)[:size] for part, size in zip(parts, sizes, strict=True)]
        )

    assert read_block(400, 600)
    assert b"".join(parts) == b"x" * 1000
    data = bytearray(path.read_bytes())
    for damage in (bytes(data[:-1]), bytes(data) + b"x", bytes(data[:500]) + b"y" + bytes(data[501:])):
        path.write_bytes(damage)
        assert not read_block(400, 600)
        assert not path.exists()
    assert not read_block(400, 600), "it is missing"
    path.write_bytes(data)
    assert not read_block(400, 599)


def test_what_was_used_least_recently_is_removed_first(tmp_path):
    folder = Folder(tmp_path / "store", limit=5 * SIZE)
    write(folder, *"abcde")
    for time_, letter in enumerate("abcde"):
        set_time(folder, letter, time_)
    folder.touch(key_of("a"))
    write(folder, "f")
    assert letters(folder) == ["d", "e", "a", "f"], "a removal frees a twentieth of the limit more"
    assert folder.clear() == 4 * SIZE
    assert letters(folder) == []


def test_a_long_prompt_stays_longer(tmp_path):
    folder = Folder(tmp_path / "store", limit=6 * SIZE)
    write(folder, "a", tokens=1000)
    write(folder, *"bcde")
    for time_, letter in enumerate("abcde"):
        set_time(folder, letter, time_)
    write(folder, *"fgh")
    assert {*letters(folder)} == {*"afgh"}


def test_a_short_prompt_in_use_stays_longer_than_long_ones_that_are_not(tmp_path):
    folder = Folder(tmp_path / "store", limit=330 * SIZE)
    write(folder, "s", tokens=100)
    for number in range(360):
        turn = chr(1000 + number)
        write(folder, turn, tokens=600)
        set_time(folder, turn, number)
        if number % 12 == 0:
            set_time(folder, "s", number)
    assert read(folder, "s") is not None
    assert len(letters(folder)) <= 330


def test_a_block_leaves_with_the_last_checkpoint_that_names_it(tmp_path):
    folder = Folder(tmp_path / "store", limit=8 * SIZE)
    write(folder, "a", blocks="stu")
    write(folder, "b", blocks="stv")
    for time_, letter in enumerate("ab"):
        set_time(folder, letter, time_)
    assert blocks_of(folder) == "stuv"
    write(folder, "c", blocks="wx")
    assert (letters(folder), blocks_of(folder)) == (["b", "c"], "stvwx")
    folder.limit = 4 * SIZE
    write(folder, "d")
    assert (letters(folder), blocks_of(folder)) == (["d"], "")


def test_blocks_without_a_checkpoint_are_removed(tmp_path):
    """Those of a writer that was killed before it wrote their checkpoint."""
    folder = Folder(tmp_path)
    write(folder, "a", blocks="s")
    with folder.writing():
        for block in "tu":
            folder.write(BLOCKS, key_of(block), b"x" * 1000)
    (tmp_path / "lock").write_bytes(b"")  # as after its writer was killed
    assert blocks_of(folder) == "stu"
    write(Folder(tmp_path), "b")
    assert blocks_of(folder) == "s"
    folder.remove(CHECKPOINTS, key_of("a"))
    folder.limit = 2 * SIZE
    write(folder, *"cd")
    assert blocks_of(folder) == ""


def test_what_is_written_now_is_not_removed_for_room(tmp_path):
    folder = Folder(tmp_path, limit=5 * SIZE)
    write(folder, "a", blocks="st")
    with folder.writing():
        folder.make_room(3 * SIZE, [key_of("s")])
        assert (letters(folder), blocks_of(folder)) == ([], "s")
        folder.write(BLOCKS, key_of("u"), b"x" * 1000)
        folder.make_room(4 * SIZE, [])
        assert blocks_of(folder) == "su"
        folder.write(CHECKPOINTS, key_of("c"), content_of("c", blocks="su"))
    assert (letters(folder), blocks_of(folder)) == (["c"], "su")


def test_the_bytes_of_an_hour_are_limited(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    folder = Folder(tmp_path, hourly_limit=10 * SIZE)
    write(folder, *"abcdef")
    assert folder.may_write(4 * SIZE)
    assert not folder.may_write(4 * SIZE + 1)
    now += 1800
    write(folder, *"gh")
    assert not folder.may_write(2 * SIZE + 1)
    now += 1860
    assert folder.may_write(8 * SIZE), "the first six were written more than an hour ago"
    assert not folder.may_write(8 * SIZE + 1)


def test_a_clock_that_goes_back(tmp_path):
    """Records of the future can be used, and are removed first."""
    folder = Folder(tmp_path / "store", limit=5 * SIZE)
    write(folder, *"abcd")
    for letter in "abc":
        set_time(folder, letter, time.time_ns() + 3600 * 10**9)
    assert read(folder, "a")
    write(folder, *"ef")
    assert letters(folder)[-3:] == ["d", "e", "f"]
    assert sum(record.size for record in folder.records()) <= folder.limit


def test_one_process_writes_at_a_time(folder):
    other = Folder(folder.path)
    with folder.writing(), other.writing() as may_write:
        assert not may_write
    with other.writing() as may_write:
        assert may_write
        other.write(CHECKPOINTS, key_of("t"), content_of("t") + b"x" * 5000)
    write(folder, "o")
    nbytes = int((folder.path / "lock").read_text())
    assert nbytes == sum(record.size for record in folder.records()) > 5000


def test_a_file_that_is_being_written_is_no_record(folder):
    write(folder, "a")
    temporary = folder.path / CHECKPOINTS / f".{key_of('b')}.0123abcd"
    temporary.write_bytes(b"TQR1 half")
    assert folder.check() == (1, 0)
    assert folder.clear() > 1000
    assert temporary.exists()
    (folder.path / "lock").write_bytes(b"")  # as after its writer was killed
    write(folder, "c")
    assert not temporary.exists()


@pytest.mark.full
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
    write(folder, "f")
    names = {record.path.name for record in folder.records()}
    assert len(names) > 1
    assert all(folder.read(name) for name in names)
    assert {path.name for path in (folder.path / CHECKPOINTS).iterdir()} == names


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
    folder = Folder(tmp_path, limit=2 * SIZE)
    write(folder, "a")
    for name in ("survey.csv", ".notes", f".{key_of('d')}", key_of("e"), key_of("f")[1:]):
        (folder.path / CHECKPOINTS / name).write_bytes(b"x" * 5000)
    (folder.path / "thesis.txt").write_text("x")
    before = {path: data for path, data in contents(tmp_path).items() if data[:1] == b"x"}
    folder.check()
    assert read(folder, "e") is None
    folder.remove(CHECKPOINTS, key_of("e"))
    (folder.path / "lock").write_bytes(b"")
    write(folder, *"bc")
    Folder(tmp_path).clear()
    assert before.items() <= contents(tmp_path).items()
    assert len(before) == 6
    with pytest.raises(ValueError, match="is not the key of a record"):
        folder.read("../../thesis.txt")


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
    folder.touch(key_of("a"))
    folder.sync(key_of("a"))
    assert folder.check()[1] <= 1
    assert read(folder, "b") == content_of("b")
    assert {*folder.checkpoints()} >= {key_of("b")}
    assert not (folder.path / CHECKPOINTS / "nothing").exists()
    assert folder.clear() <= 2 * SIZE


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


@pytest.mark.full
def test_a_record_that_vanishes_while_it_is_checked_is_not_damaged(folder):
    """Another process evicts and writes meanwhile."""
    with ThreadPoolExecutor(1) as pool:

        def churn():
            busy = Folder(folder.path, limit=20 * SIZE)
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
    assert read(folder, "a") == content_of("a")


def test_a_full_disk_makes_room(folder, monkeypatch):
    """The disk, below the limit of the folder, has room for five records."""
    opened = os.open

    def open_(path, flags, *args, **options):
        used = sum(1 for file in (folder.path / CHECKPOINTS).iterdir())
        if flags & os.O_CREAT and Path(path).parent.name == CHECKPOINTS and used > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    write(folder, *"abcdefgh")
    assert letters(folder) == [*"defgh"]
    assert (folder.path / "lock").read_text() == str(sum(record.size for record in folder.records()))
    for path in (folder.path / CHECKPOINTS).iterdir():
        path.unlink()
    for number in range(5):
        (folder.path / CHECKPOINTS / f"other{number}").touch()
    with pytest.raises(OSError, match="No space left"):
        write(folder, "i")


def test_a_disk_that_stays_full_costs_at_most_one_record(folder, monkeypatch):
    """Eviction frees nothing where snapshots keep the files."""
    write(folder, *"abc")
    opened = os.open

    def open_(path, flags, *args, **options):
        if flags & os.O_CREAT and Path(path).parent.name == CHECKPOINTS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(OSError, match="No space left"), folder.writing():
        folder.write(CHECKPOINTS, key_of("d"), b"d" * 4 * SIZE)
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
