"""Test-compile grammars in processes of their own: compiling one can crash, take all memory, or never end.

`GrammarChecker` starts a fork server (this module as a program), which loads the tokenizer once and forks a worker for
each grammar. So no grammar affects another, and none waits for a process to start.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

import mlx_tq
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource, subschemas

# A lexer state takes 1 to 2 kB. Verbose errors carry the parser's whole state.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
STACK_BYTES = 2**28  # compiling recurses: a chain of references of the longest text would overflow the default stack
_NUM_MASKS = 32  # computed before a grammar counts as valid
_MAX_DEPTH = 16  # of the path to an error
_LOCATE_S = 1.0  # for finding where in a schema an error is
_POLL_S = 0.05
_GRACE_S = 2.0  # how late a worker may reply on a busy machine
_LOAD_S = 60.0  # for the fork server to load the tokenizer


@dataclass(frozen=True)
class CompileLimits:
    """Limits of one worker: wall-clock time, memory while compiling and afterwards, and time for the masks."""

    seconds: float = 5.0
    nbytes: int = 2**30
    retained_nbytes: int = 100 * 2**20
    mask_seconds: float = 0.25


class GrammarLimitError(GrammarError):
    """Compiling a grammar exceeded a limit; the same grammar may pass on a less busy machine."""


def compile_grammar(source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of its grammar, whose `get_error()` says what is wrong with it."""
    return LLMatcher(tokenizer, source.to_llguidance(), log_level=0, limits=LIMITS)


def shorten_message(message: str) -> str:
    """Return a message of llguidance without its source excerpt."""
    first, *others = message.splitlines() or [""]
    return " ".join([first, *(line for line in others if line.startswith("error: "))])[:200]


# The client, in the server's process.


class GrammarChecker:
    """Starts the fork server, restarts it if it dies, and asks it to check grammars.

    `tokenizer` is in the `tokenizer.json` format; `eos_ids` end an answer.
    """

    def __init__(self, tokenizer: str, eos_ids: list[int], limits: CompileLimits | None = None) -> None:
        self._limits = limits or CompileLimits()
        self._arguments = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read again at each restart
        json.dump({"tokenizer": tokenizer, "eos_ids": eos_ids, "limits": asdict(self._limits)}, self._arguments)
        self._arguments.flush()
        self._start()

    async def check(self, source: GrammarSource) -> GrammarError | int:
        """Return the bytes that a compiled grammar retains, or what is wrong with it. Cancelling ends the worker.

        Raise `GrammarLimitError` if compiling takes too much time or memory, or crashes.
        """
        for _ in range(2):
            process = self.process
            reply = await self._request(source)
            if "error" in reply:
                return GrammarError(reply["error"], tuple(reply.get("path", ())))
            if "nbytes" in reply:
                return int(reply["nbytes"])
            if reply:
                exceeded = reply.get("exceeded", "compiling crashed or ran out of memory")
                raise GrammarLimitError(f"{exceeded}; simplify the schema or grammar")
            if self.process is process:
                self._stop()
                self._start()
        raise RuntimeError("the process that checks grammars exits right after it starts")

    def close(self) -> None:
        self._stop()
        self._arguments.close()

    def _stop(self) -> None:
        self._control.close()
        self.process.kill()
        self.process.wait()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._arguments.seek(0)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - the fork server, which is ourselves
                [sys.executable, "-P", "-m", "mlx_tq.grammar.sandbox", str(theirs.fileno())],
                stdin=self._arguments,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": str(Path(mlx_tq.__file__).parents[1])},  # and none of the server's secrets
                start_new_session=True,  # it ends with us, not by Ctrl-C
            )

    async def _request(self, source: GrammarSource) -> dict[str, Any]:
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


# The fork server and its workers.


def serve(control: socket.socket, tokenizer: LLTokenizer, limits: CompileLimits) -> None:
    """Fork a worker for each connection that arrives over `control`, until the client closes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b'{"started": true}\n')
            if os.fork() == 0:
                control.close()
                CompileWorker(connection, tokenizer, limits).run()


class CompileWorker:
    """Compiles one grammar in a process of its own, which ends with the last reply."""

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer, limits: CompileLimits) -> None:
        self._connection, self._tokenizer, self._limits = connection, tokenizer, limits
        self._deadline = time.monotonic() + limits.seconds
        self._max_memory = f"{limits.nbytes / 2**30:g} GB of memory"
        self._error_sent = False

    def run(self) -> NoReturn:
        """Reply and exit. The main thread watches time, memory and the client; llguidance releases the GIL."""
        limits, start, exceeded = self._limits, _peak_memory(), f"{self._limits.seconds:g} s"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # macOS has no /proc and does not enforce RLIMIT_AS
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = mapped + STACK_BYTES + limits.nbytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Kills the process if code holds the GIL, under which the main thread cannot watch the time.
        signal.setitimer(signal.ITIMER_REAL, limits.seconds + 1)
        request = json.loads(self._connection.makefile("rb").readline() or b"null")
        if request is None:
            os._exit(0)
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._compile, args=(GrammarSource(**request), _current_memory())).start()
        while time.monotonic() < self._deadline:
            if select.select([self._connection], [], [], _POLL_S)[0]:  # the client has closed its end
                os._exit(0)
            if _peak_memory() - start > limits.nbytes:
                exceeded = self._max_memory
                break
        if self._error_sent:  # only its path is missing
            os._exit(0)
        self._end(exceeded=f"compiling takes more than {exceeded}")

    def _compile(self, source: GrammarSource, start_memory: int) -> None:
        limits = self._limits
        try:
            matcher = compile_grammar(source, self._tokenizer)
        except ValueError as error:
            self._end(error=shorten_message(str(error)))
        except MemoryError:
            self._end(exceeded=f"compiling takes more than {self._max_memory}")
        started = time.process_time()  # however busy the machine is
        message = matcher.get_error() or _compute_random_masks(matcher)
        retained = _current_memory() - start_memory
        if retained > limits.retained_nbytes:
            self._end(exceeded=f"it takes more than {limits.retained_nbytes / 2**20:g} MB of memory when compiled")
        if time.process_time() - started > limits.mask_seconds:
            self._end(exceeded=f"computing {_NUM_MASKS} token masks takes more than {limits.mask_seconds:g} s")
        if not message:
            self._end(nbytes=max(0, retained))
        error_text = shorten_message(message)
        self._reply(error=error_text)
        self._error_sent, self._deadline = True, min(self._deadline, time.monotonic() + _LOCATE_S)
        self._end(path=_find_error(json.loads(source.text), error_text) if source.syntax == "json_schema" else ())

    def _reply(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            self._connection.sendall(json.dumps(fields).encode() + b"\n")

    def _end(self, **fields: Any) -> NoReturn:
        self._reply(**fields)
        os._exit(0)


def _compute_random_masks(matcher: LLMatcher) -> str:
    """Compute masks along random tokens. Return the error of the first mask, or "".

    A later error only means that these tokens were too complex, and a real answer may not be.
    """
    rng = random.Random(0)
    for step in range(_NUM_MASKS):
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return "" if step else matcher.get_error()
        start = rng.randrange(len(mask))
        rotated = mask[start:] + mask[:start]
        skipped = len(rotated) - len(rotated.lstrip(b"\0"))
        if skipped == len(rotated):
            break
        bits = [bit for bit in range(8) if rotated[skipped] >> bit & 1]
        matcher.consume_token(8 * ((start + skipped) % len(mask)) + rng.choice(bits))
    return ""


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _current_memory() -> int:
    """Return resident bytes; on macOS, which has no cheap way to ask, the peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return _peak_memory()


def _find_error(schema: dict[str, Any], error: str) -> tuple[str, ...]:
    """Return the path of the innermost subschema that gives the same error when compiled alone with the definitions."""

    def is_cause(part: dict[str, Any]) -> bool:
        grammar = GrammarSource.of_schema({**part, **definitions}).to_llguidance()
        return shorten_message(LLMatcher.validate_grammar(grammar, limits=LIMITS)) == error

    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part, path = schema, tuple[str, ...]()
    while len(path) < _MAX_DEPTH:
        step = next((entry for entry in subschemas(part) if is_cause(entry[1])), None)
        if step is None:
            break
        path, part = (*path, *step[0]), step[1]
    return path


if __name__ == "__main__":
    arguments = json.load(sys.stdin.buffer)
    vocabulary = LLTokenizer(arguments["tokenizer"], eos_token=arguments["eos_ids"])
    serve(socket.socket(fileno=int(sys.argv[1])), vocabulary, CompileLimits(**arguments["limits"]))
