"""If a rank is gone, each of the others reports it in one line and exits within ten seconds."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cli.tools import command as words_of
from cli.tools import environment
from processes import read_until

from .together import hostfile

TEXT = "The garden of house 1 has 2 trees and a gate. The garden of house 2 has 3 trees and a gate. The garden"
GENERATE = ("generate", "-p", TEXT, "--ignore-chat-template", "--max-tokens", "3000", "--verbose", "F")
SERVER = ("server", "--port", "0")
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.full
def test_sigterm_ends_a_rank_that_waits_in_a_collective(tmp_path, popen):
    hosts = hostfile(tmp_path / "hosts.json", 2)
    first, second = (
        popen(words_of(*GENERATE), env=environment(MLX_HOSTFILE=str(hosts), MLX_RANK=str(rank)), **PIPES)
        for rank in range(2)
    )
    read_until(first.stdout.fileno(), " ")
    second.send_signal(signal.SIGSTOP)
    time.sleep(1)
    first.terminate()
    said = first.communicate(timeout=10)[1].decode()
    line = "mlx_tq generate: rank 0: terminated (SIGTERM); mlx.launch does this when another rank has ended.\n"
    assert (first.returncode, said) == (1, line)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found by their environment in /proc")
@pytest.mark.parametrize("asked", [GENERATE, SERVER], ids=lambda asked: asked[0])
def test_mlx_launch_ends_the_others(asked, tmp_path, popen):
    launch = Path(sys.executable).with_name("mlx.launch")
    words = [launch, "-n", "2", "--backend", "ring", "--starting-port", "47000", "--", *words_of(*asked)]
    process = popen(words, env=environment(RANKS=str(tmp_path)), **{**PIPES, "stdin": os.pipe()[0]})
    stream, mark_of_start = (process.stderr, "startup complete") if asked is SERVER else (process.stdout, " ")
    read_until(stream.fileno(), mark_of_start)
    pids, marks = [], {f"RANKS={tmp_path}".encode(), b"MLX_RANK=1"}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marks <= {*file.read_bytes().split(b"\0")}:
                pids.append(int(file.parent.name))
    (pid,) = pids
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    said = process.communicate(timeout=60)[1].decode()
    assert time.monotonic() - began < 10
    assert re.findall(r"^mlx_tq \w+: (rank \d): ", said, re.MULTILINE) == ["rank 0"]
