"""Test-compile schemas and grammars in a separate process before this process compiles them."""

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import mlx_tq
from mlx_tq.cli.grammar_forkserver import NUM_MASKS, CompileLimits
from mlx_tq.cli.grammar_source import GrammarError, GrammarSource

_GRACE_S = 2.0  # how late a worker may reply on a busy machine before we give up
_LOAD_S = 60.0  # for the fork server to load the tokenizer


class GrammarLimitError(GrammarError):
    """Compiling a grammar exceeded a limit; the same grammar may pass on a less busy machine."""


class GrammarChecker:
    """Client of `grammar_forkserver`. Starts the fork server, and restarts it if it dies.

    Args:
        tokenizer: in the `tokenizer.json` format.
        ends: ids of the tokens that end an answer.
        limits: of each check.
    """

    def __init__(self, tokenizer: str, ends: list[int], limits: CompileLimits | None = None) -> None:
        self._limits = limits or CompileLimits()
        self._arguments = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read again at each restart
        json.dump({"tokenizer": tokenizer, "ends": ends, "limits": asdict(self._limits)}, self._arguments)
        self._arguments.flush()
        self._control, self._process = self._start()

    async def check(self, source: GrammarSource) -> GrammarError | int:
        """Return the bytes that a grammar keeps when compiled, or what is wrong with it. Cancelling ends the worker.

        Raises:
            GrammarLimitError: compiling takes too much time or memory, or crashes.
            RuntimeError: the fork server cannot be started.
        """
        for _ in range(2):
            process = self._process
            reply = await self._ask(source)
            if reply:
                return self._explain(reply)
            if self._process is process:
                self._stop()
                self._control, self._process = self._start()
        raise RuntimeError("the process that checks grammars exits right after it starts")

    def close(self) -> None:
        """Stop the fork server."""
        self._stop()
        self._arguments.close()

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        control, theirs = socket.socketpair()
        self._arguments.seek(0)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-P", "-m", "mlx_tq.cli.grammar_forkserver", str(theirs.fileno())],
                stdin=self._arguments,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": str(Path(mlx_tq.__file__).parents[1])},  # and none of the server's secrets
                start_new_session=True,  # it ends with us, not by Ctrl-C
            )
        return control, process

    async def _ask(self, source: GrammarSource) -> dict[str, Any]:
        """Return the merged replies of one worker, or {} if the fork server is dead."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
            except OSError:
                ours.close()
                return {}
        replies: dict[str, Any] = {}
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(json.dumps(asdict(source)).encode() + b"\n")
            replies |= json.loads(await asyncio.wait_for(reader.readline(), _LOAD_S) or "{}")
            async with asyncio.timeout(self._limits.seconds + _GRACE_S):
                async for line in reader:
                    replies |= json.loads(line)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()
        return replies

    def _explain(self, reply: dict[str, Any]) -> GrammarError | int:
        limits, remedy = self._limits, "simplify the schema or grammar"
        if "error" in reply:
            return GrammarError(reply["error"], tuple(reply.get("path", ())))
        if "limit" in reply:
            exceeded = {
                "time": f"compiling takes more than {limits.seconds:g} s",
                "memory": f"compiling takes more than {limits.nbytes / 2**30:g} GB of memory",
                "retained memory": f"it takes more than {limits.retained_nbytes / 2**20:g} MB of memory when compiled",
                "mask time": f"computing {NUM_MASKS} token masks takes more than {limits.mask_seconds:g} s",
            }
            raise GrammarLimitError(f"{exceeded[reply['limit']]}; {remedy}")
        if "valid" not in reply:
            raise GrammarLimitError(f"compiling crashed or ran out of memory; {remedy}")
        return int(reply["nbytes"])
