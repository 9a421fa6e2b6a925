"""Ranks under test: processes on mlx's ring, forked from one that has imported what they need."""

import json
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.__main__ import main

LIMIT = 900  # seconds after which a rank counts as stuck; four that share two busy cores take minutes
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["mlx_lm", "mlx_tq.cli.answer", "mlx_tq.cli.chat_terminal", "mlx_tq.server.engine", __name__]
)


class RankResult(NamedTuple):
    """Return value or exit code of a rank, and what it printed."""

    value: Any
    out: str
    err: str

    @property
    def code(self):
        return self.value


def run(folder, size, work, *args, said=""):
    """Run `work(*args)` on each of `size` ranks, or in one process without ranks, and return the results.

    Their files are in `folder`; `said` is the input of the first.
    """
    folder.mkdir(exist_ok=True)
    hosts, where = hostfile(folder / "hosts.json", size), [folder / f"rank{rank}" for rank in range(size)]
    where[0].with_suffix(".in").write_text(said)
    places = [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if size > 1 else {} for rank in range(size)]
    processes = [_CONTEXT.Process(target=_rank, args=(*pair, work, args)) for pair in zip(where, places, strict=True)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        stuck = process.is_alive()
        process.kill()
        assert not stuck, [path.with_suffix(".err").read_text() for path in where]
    results = []
    for path in where:
        value = path.with_suffix(".value")
        returned = pickle.loads(value.read_bytes()) if value.exists() else None
        results.append(RankResult(returned, *(path.with_suffix(suffix).read_text() for suffix in (".out", ".err"))))
    return results


def command(folder, size, *words, said=""):
    """Run `mlx_tq WORDS` on each rank; the values are exit codes."""
    return run(folder, size, main, [str(word) for word in words], said=said)


def hostfile(path, size):
    """Write a file that names a free port of this machine for each rank."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    path.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
    for each in sockets:
        each.close()
    return path


def _rank(path, environment, work, args):
    os.environ.update(environment)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(path.with_suffix(suffix), os.O_CREAT | os.O_WRONLY)
        os.dup2(file, stream)
    own = path.with_suffix(".in")
    sys.stdin, value = (own if own.exists() else Path(os.devnull)).open(), None
    try:
        value = work(*args)
    except SystemExit as end:
        value = end.code
    except Exception:  # noqa: BLE001  the test shows it
        traceback.print_exc()
    path.with_suffix(".value").write_bytes(pickle.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the fork server's process would do at its end is not ours
