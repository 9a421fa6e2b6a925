"""Tries schemas and grammars out in a child process before this process compiles them."""

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
from mlx_tq.commands.grammar_child import CompileLimits
from mlx_tq.commands.grammar_source import GrammarError, GrammarSource

_MARGIN_S = 2.0  # that a child may be late on a busy machine before it is abandoned
_START_S = 60.0  # in which the tokenizer has to be loaded


class GrammarLimitError(GrammarError):
    """Compiling a grammar exceeded a limit; the same grammar may pass on a less busy machine."""


class GrammarChecker:
    """The parent's end of `grammar_child`, which it starts, and starts again where it has died.

    Args:
        tokenizer: in the JSON format of Hugging Face tokenizers.
        ends: ids of the tokens that end an answer.
        limits: of each check.
    """

    def __init__(self, tokenizer: str, ends: list[int], limits: CompileLimits | None = None) -> None:
        self._limits = limits or CompileLimits()
        self._arguments = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read again by each process
        json.dump({"tokenizer": tokenizer, "ends": ends, "limits": asdict(self._limits)}, self._arguments)
        self._arguments.flush()
        self._control, self._process = self._start()

    async def check(self, source: GrammarSource) -> None:
        """Return once the grammar has proven to be valid. Cancellation ends the child's work on it.

        Raises:
            GrammarError: it is not valid, or (`GrammarLimitError`) takes too much time or memory.
            RuntimeError: the child process cannot be started.
        """
        for _ in range(2):
            process = self._process
            reply = await self._ask(source)
            if reply:
                return self._explain(reply)
            if self._process is process:
                self._stop()
                self._control, self._process = self._start()
        raise RuntimeError("the process that checks grammars ends as soon as it starts")

    def close(self) -> None:
        """End the child process."""
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
                [sys.executable, "-P", "-m", "mlx_tq.commands.grammar_child", str(theirs.fileno())],
                stdin=self._arguments,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": str(Path(mlx_tq.__file__).parents[1])},  # and none of the server's secrets
                start_new_session=True,  # it ends with us, not by Ctrl-C
            )
        return control, process

    async def _ask(self, source: GrammarSource) -> dict[str, Any]:
        """Return the replies of one child, merged; empty where no child could be forked."""
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
            writer.write(json.dumps({"syntax": source.syntax, "text": source.text}).encode() + b"\n")
            replies |= json.loads(await asyncio.wait_for(reader.readline(), _START_S) or "{}")
            async with asyncio.timeout(self._limits.seconds + _MARGIN_S):
                async for line in reader:
                    replies |= json.loads(line)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()
        return replies

    def _explain(self, reply: dict[str, Any]) -> None:
        """Raise what a child's replies mean, unless the grammar is valid."""
        seconds, gigabytes = self._limits.seconds, self._limits.nbytes / 2**30
        if "error" in reply:
            raise GrammarError(reply["error"], tuple(reply.get("place", ())))
        if reply.get("limit") == "time":
            raise GrammarLimitError(f"compiling it takes more than {seconds:g} s; make it simpler")
        if reply.get("limit") == "memory":
            raise GrammarLimitError(f"compiling it takes more than {gigabytes:g} GB of memory; make it simpler")
        if "valid" not in reply:
            raise GrammarLimitError("compiling it crashed or ran out of memory; make it simpler")
