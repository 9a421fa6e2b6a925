"""What can happen to an archive costs what it held, never a wrong token, and leaves no file behind."""

import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from commands.tools import command, environment, facts

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.sequence.passes import sequence_in

EVICT = EvictConfig("recency:granularity=16:trigger=16", 128, recall=64)
CONFIG = KVConfig(key="q8", value="tq4", prefix=16, window=32, evict=EVICT)
TEXT, QUESTION = facts(40)


def converse(exact, config, after_text=lambda session: None):
    """The tokens of a conversation that asks for what has left, its last turn, and its warnings."""
    warned = []
    with Session(*exact, config, rescue="off", warn=warned.append, max_tokens=8, prefill_step_size=64) as session:
        list(session.respond(TEXT))
        after_text(session)
        list(session.respond(QUESTION))
        return session.ids, session.turns[-1], warned


@contextmanager
def files_of_at_most(nbytes):
    """The disk is full for any file that grows beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limited(nbytes):
    return replace(CONFIG, evict=replace(EVICT, archive_limit=nbytes))


def damage(session):
    """Change a byte of every block."""
    sequence = sequence_in(session.cache)
    sequence.archive.settle()
    for extent in sequence.archived:
        at = extent.start + extent.size - 1
        byte = os.pread(sequence.archive._file, 1, at)[0]
        os.pwrite(sequence.archive._file, bytes([byte ^ 1]), at)


@pytest.fixture(scope="module")
def lost(exact):
    """The tokens where nothing comes back."""
    ids, _, warned = converse(exact, replace(CONFIG, evict=replace(EVICT, recall="off")))
    assert len(warned) == 1
    return ids


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx_tq"


def test_without_a_fault_rows_come_back(exact, folder, lost):
    ids, turn, warned = converse(exact, CONFIG)
    assert (warned, len(turn.recalled) > 0, ids == lost) == ([], True, False)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("fault", ["full disk", "damaged blocks", "read-only folder", "limit"])
def test_a_fault_is_said_once_and_the_tokens_are_those_without_recall(exact, folder, lost, fault, monkeypatch):
    if fault == "full disk":
        with files_of_at_most(1):
            ids, turn, warned = converse(exact, CONFIG)
    elif fault == "damaged blocks":
        ids, turn, warned = converse(exact, CONFIG, damage)
    elif fault == "limit":
        ids, turn, warned = converse(exact, limited(1000))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/sys")  # in which root can make nothing either
        ids, turn, warned = converse(exact, CONFIG)
    assert (ids, turn.recalled) == (lost, ())
    assert len(warned) == 1
    assert "The conversation goes on." in warned[0]


def test_up_to_a_limit_rows_are_archived_and_come_back_also_from_a_file(exact, folder, tmp_path):
    path, most = tmp_path / "chat.safetensors", 100_000
    ids, turn, warned = converse(exact, limited(most), lambda session: session.save(path))
    assert len(warned) == 1
    assert "the archive has reached its limit of 100,000 bytes: blocks that were recalled least leave" in warned[0]
    assert turn.recalled
    with Session(*exact, rescue="off", warn=warned.append, max_tokens=8, prefill_step_size=64) as session:
        session.load(path)
        sequence = sequence_in(session.cache)
        assert sequence.archive.limit == most == session.config.evict.archive_limit
        assert most / 2 < sequence.archive.nbytes <= most
        list(session.respond(QUESTION))
        assert session.ids == ids
        assert session.turns[-1].recalled == turn.recalled


def archives(pid):
    """Archives that a process has open."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # others come and go
            links.append(str(each.readlink()))
    return [link for link in links if "mlx_tq-archive-" in link]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are seen in /proc, which only Linux has")
def test_two_that_are_killed_leave_no_file(folder, tmp_path):
    words = ["generate", "-p", TEXT * 4, "-m", 2000, "--ignore-chat-template", "--kv-evict", "recency"]
    words += ["--kv-budget", 200, "--kv-prefix", 16, "--kv-window", 32, "--kv-recall", "auto"]
    line = command(*words, "--prefill-step-size", 64)
    runs = [subprocess.Popen(line, env=environment(), stdout=-3, stderr=-3) for _ in range(2)]
    try:
        while not all(found := [archives(run.pid) for run in runs]):
            assert all(run.poll() is None for run in runs)
            time.sleep(0.05)
        names = {name for each in found for name in each}
        assert len(names) == 2
        assert all(name.endswith("(deleted)") for name in names)
    finally:
        for run in runs:
            run.send_signal(signal.SIGKILL)
            run.wait()
    assert list(folder.iterdir()) == []
