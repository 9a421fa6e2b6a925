"""Faults of an archive lose its rows, change no other token, and leave no file."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from cli.tools import command, environment, facts
from kernel_cache import make_cache_folder

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.__main__ import main
from mlx_tq.cache.blocks import keys_start
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.prompt_cache.recall import search_layers

EVICT = EvictConfig("recency:granularity=16:trigger=16", 128, recall=64)
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32, evict=EVICT)
TEXT, QUESTION = facts(40)
# The same as flags.
FLAGS = ["--kv-evict", "recency:granularity=16:trigger=16", "--kv-budget", 128, "--kv-recall", 64]
FLAGS += ["--kv-sinks", 16, "--kv-window", 32, "--prefill-step-size", 64, "--dtype", "float32"]
GENERATE = ["generate", "-p", TEXT + QUESTION, "-m", 24, "--ignore-chat-template", "--json", *FLAGS]


def converse(exact, config, after_text=lambda session: None):
    """Return the tokens of a conversation that asks for an evicted fact, its last turn, and its warnings."""
    warned = []
    with Session(*exact, config, rescue="off", warn=warned.append, max_tokens=8, prefill_step_size=64) as session:
        list(session.respond(TEXT))
        after_text(session)
        list(session.respond(QUESTION))
        return session.ids, session.turns[-1], warned


@contextmanager
def files_of_at_most(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limited(nbytes):
    return replace(CONFIG, evict=replace(EVICT, archive_limit=nbytes))


def written(session):
    """The archive, and its blocks, all of which are in the file."""
    sequence = layer_group_of(session.cache)
    sequence.archive.settle()
    return sequence.archive, sequence.archived


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of archives; check that no file is in it after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(make_cache_folder(tmp_path)))
    yield tmp_path / "mlx_tq"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".so")]


def generated(capsys, *more):
    """Return the report of `mlx_tq.generate`, and its warnings."""
    assert main([str(word) for word in (*GENERATE, *more)]) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out), [line for line in shown.err.splitlines() if "warning" in line]


@pytest.mark.full
def test_after_a_fault_tokens_equal_those_without_recall(folder, monkeypatch, capsys):
    expected, warnings = generated(capsys, "--kv-recall", "off")
    assert len(warnings) == 1
    recalled = generated(capsys)[0]
    assert recalled["recalled"]["positions"]
    for fault in ("limit", "read-only folder"):
        if fault == "read-only folder":
            monkeypatch.setenv("XDG_CACHE_HOME", "/sys")  # where root cannot write either
        report, warnings = generated(capsys, *(["--kv-archive-limit", "1KB"] if fault == "limit" else []))
        assert report["text"] == expected["text"] != recalled["text"], fault
        assert report["recalled"]["positions"] == [], fault
        assert len(warnings) == 1, fault
        assert "The conversation continues." in warnings[0]


@pytest.fixture(scope="module")
def ids_without_recall(exact):
    return converse(exact, replace(CONFIG, evict=replace(EVICT, recall="off")))[0]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["full disk", "limit", "read-only folder"])
def test_a_session_warns_once_of_a_fault_and_continues(exact, folder, ids_without_recall, fault, monkeypatch):
    if fault == "read-only folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/sys")
    with files_of_at_most(1) if fault == "full disk" else nullcontext():
        ids, turn, warned = converse(exact, limited(1000) if fault == "limit" else CONFIG)
    assert (ids, turn.recalled, len(warned)) == (ids_without_recall, (), 1)
    assert "The conversation continues." in warned[0]


@pytest.mark.full
def test_a_limited_archive_is_saved_with_the_session(exact, folder, tmp_path):
    path, most = tmp_path / "chat.safetensors", 200_000
    ids, turn, warned = converse(exact, limited(most), lambda session: session.save(path))
    assert len(warned) == 1
    assert "the archive has reached its limit of 200,000 bytes: the least recalled blocks are deleted" in warned[0]
    assert turn.recalled
    with Session(*exact, rescue="off", warn=warned.append, max_tokens=8, prefill_step_size=64) as session:
        session.load(path)
        sequence = layer_group_of(session.cache)
        assert sequence.archive.limit == most == session.config.evict.archive_limit
        assert most / 2 < sequence.archive.nbytes <= most
        list(session.respond(QUESTION))
        assert session.ids == ids
        assert session.turns[-1].recalled == turn.recalled


@dataclass
class Found:
    """The first position of a block that a question recalls, and the end of each block in the file."""

    first: int
    ends: list[int]


@pytest.fixture(scope="module")
def found(exact):
    ends = []
    _, turn, _ = converse(exact, CONFIG, lambda session: ends.extend(e.start + e.nbytes for e in written(session)[1]))
    return Found(turn.recalled[0], sorted(ends))


def block_of(session, found):
    archive, blocks = written(session)
    return archive, next(block for block in blocks if block.positions[0] == found.first)


@pytest.fixture(scope="module")
def without(exact, found):
    """Tokens and last turn of a conversation that has not that block."""
    ids, turn, _ = converse(exact, CONFIG, lambda session: block_of(session, found)[1].delete())
    return ids, turn.recalled


def keys_of(archive, block):
    """Return where a block's keys of the first layer that searches begin, and their bytes."""
    layers, count = archive.shapes, len(block.positions)
    first = search_layers(len(layers))[0]
    before = sum(shape.key_count(count) for shape in layers[:first])
    return block.start + keys_start(count) + 2 * before, 2 * layers[first].key_count(count)


# What is written where: into a block's last value, or the scale of its first q8 key (head size 128).
DAMAGES = {"value": (-2, b"??"), "no number": (128, b"\0\x7e"), "largest number": (128, b"\xff\x7b")}
DAMAGED = ["1 block of the archive is damaged: what it held cannot be recalled. The conversation continues."]


@pytest.mark.parametrize("how", ["value", "no number", pytest.param("largest number", marks=pytest.mark.full)])
def test_a_damaged_block_is_ignored(exact, folder, found, without, how):
    """The question needs the block."""
    at, data = DAMAGES[how]

    def damage_one(session):
        archive, block = block_of(session, found)
        begin = block.start + block.nbytes if at < 0 else keys_of(archive, block)[0]
        os.pwrite(archive._file, data, begin + at)

    ids, turn, warned = converse(exact, CONFIG, damage_one)
    assert (ids, turn.recalled) == without
    assert turn.recalled
    assert warned == DAMAGED


@pytest.mark.full
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.full), -1])
def test_a_block_with_huge_keys_is_detected_as_damaged(exact, folder, found, place):
    """The question does not need the block, but every token of it would attend to it."""

    def other(session):
        archive, blocks = written(session)
        return archive, [block for block in blocks if block.positions[0] != found.first][place]

    def damage_one(session):
        begin, size = keys_of(*other(session))
        os.pwrite(other(session)[0]._file, b"\xff\x7b" * (size // 2), begin)

    wanted, turn, _ = converse(exact, CONFIG, lambda session: other(session)[1].delete())
    ids, damaged, warned = converse(exact, CONFIG, damage_one)
    assert (ids, damaged.recalled, warned) == (wanted, turn.recalled, DAMAGED)
    assert turn.recalled


@pytest.mark.full
def test_if_all_blocks_are_damaged_later_ones_are_recalled(exact, folder):
    def lose(session, leave):
        archive, blocks = written(session)
        for block in blocks:
            block.delete() if leave else os.pwrite(archive._file, b"??", block.start + block.nbytes - 2)
            gone.update(block.positions.tolist())

    gone = set()
    wanted, without, _ = converse(exact, CONFIG, partial(lose, leave=True))
    ids, turn, warned = converse(exact, CONFIG, partial(lose, leave=False))
    assert (ids, turn.recalled) == (wanted, without.recalled)
    assert not gone & set(turn.recalled)
    assert len(warned) == 1
    assert "blocks of the archive are damaged: what they held cannot be recalled" in warned[0]


@pytest.mark.full
def test_blocks_that_fit_on_a_full_disk_are_recalled(exact, folder, found):
    room, stack = found.ends[len(found.ends) // 2], ExitStack()

    def fill(session):
        for block in written(session)[1]:
            if block.start + block.nbytes > room:
                block.delete()
        stack.enter_context(files_of_at_most(room))

    with stack:
        wanted, fits, _ = converse(exact, CONFIG, fill)
    with files_of_at_most(room):
        ids, turn, warned = converse(exact, CONFIG)
    assert (ids, turn.recalled) == (wanted, fits.recalled)
    assert turn.recalled
    assert len(warned) == 1
    assert "cannot be archived (File too large)" in warned[0]


def archive_of(run, folder):
    """Return the name of the unlinked archive that a process has open."""
    while run.poll() is None:
        for link in Path(f"/proc/{run.pid}/fd").iterdir():
            with suppress(OSError):  # closed since they were listed
                name = str(link.readlink())
                if name.startswith(f"{folder}/") and "/kernels/" not in name:
                    assert name.endswith("(deleted)")
                    return name
        time.sleep(0.01)
    raise AssertionError(f"it ended: {run.stdout.read()}")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are seen in /proc, which only Linux has")
def test_processes_have_separate_archives_and_a_killed_one_leaves_no_file(folder, popen, capsys):
    pipes = {"env": environment(), "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    chat = popen(command("chat", "-m", 2000, *FLAGS), **pipes)
    print(TEXT, file=chat.stdin, flush=True)
    own = archive_of(chat, folder)
    other = popen(command(*GENERATE), **pipes)
    assert archive_of(other, folder) != own
    chat.kill()
    together = json.loads(other.communicate()[0])
    alone, _ = generated(capsys)
    assert together["text"] == alone["text"]
    assert together["recalled"]["positions"] == alone["recalled"]["positions"] != []
    assert chat.wait() == -signal.SIGKILL


ENDS = """
import sys, threading, weakref
from pathlib import Path
from mlx_tq.session.worker import Worker
from mlx_tq.prompt_cache.archive import Archive

class Owner: pass

owner, worker, leaving = Owner(), Worker(), threading.Event()
weakref.finalize(owner, worker.end)  # as a session ends its thread
archive = Archive([], Path(sys.argv[1]))
weakref.finalize(owner, leaving.set)  # the first to be called, as the newest
look = lambda: (leaving.wait(), archive._queue.put(threading.Event()), archive.settle(), print("settled"))
threading.Thread(target=lambda: worker.run(look), daemon=True).start()
"""


@pytest.mark.full
def test_a_program_ends_while_a_thread_waits_for_the_archive(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "settled\n"), done.stderr
    assert list(tmp_path.iterdir()) == []
