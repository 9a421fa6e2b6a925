"""The process that tries schemas and grammars out, as compiling one can crash, take all memory, or never end.

It loads the tokenizer once and forks for each grammar, so that no grammar affects another and none has to wait for a
process to start. `grammar_checker` is its parent and explains the messages.
"""

import contextlib
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_tq.commands.grammar_source import GrammarSource, subschemas

# A lexer state takes 1 to 2 kB. Verbose errors carry the parser's whole state.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
STACK_BYTES = 2**28  # compiling recurses: a chain of references of the longest text would overflow a usual stack
_PLACE_S = 1.0  # for the search of the fault's place
_MAX_DEPTH = 16  # of a reported place
_MASKS = 32  # that are computed before a grammar is called valid
_POLL_S = 0.05


def compile_grammar(source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of its grammar; its `get_error()` says what is wrong with the grammar.

    Raises:
        ValueError: a schema that is nested too deeply.
    """
    return LLMatcher(tokenizer, source.to_llguidance(), log_level=0, limits=LIMITS)


def first_line(message: str) -> str:
    """Return a message of llguidance without the picture of the place that it draws."""
    first, *others = message.splitlines() or [""]
    return " ".join([first, *(line for line in others if line.startswith("error: "))])[:200]


@dataclass(frozen=True)
class CompileLimits:
    """What compiling one grammar may take.

    Attributes:
        seconds: of wall-clock time.
        nbytes: of memory.
    """

    seconds: float = 5.0
    nbytes: int = 2**30


def _serve(control: socket.socket, tokenizer: LLTokenizer, limits: CompileLimits) -> None:
    """Fork for each connection that arrives over `control`, until the parent closes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b'{"started": true}\n')
            if os.fork() == 0:
                control.close()
                _Trial(connection, tokenizer, limits).run()


class _Trial:
    """Tries one grammar out in a process of its own, which ends with the reply."""

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer, limits: CompileLimits) -> None:
        self._connection, self._tokenizer, self._limits = connection, tokenizer, limits
        self._deadline = time.monotonic() + limits.seconds
        self._faulty = False

    def run(self) -> None:
        """Reply and exit. The main thread watches time, memory and the parent; llguidance releases the GIL."""
        _limit_this_process(self._limits)
        request = json.loads(self._connection.makefile("rb").readline() or b"null")
        if request is None:
            os._exit(0)
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._try, args=(GrammarSource(**request),)).start()
        start = _peak_memory()
        while time.monotonic() < self._deadline:
            if select.select([self._connection], [], [], _POLL_S)[0]:  # the parent has closed its end
                os._exit(0)
            if _peak_memory() - start > self._limits.nbytes:
                self._end(limit="memory")
        self._end(limit="time")

    def _try(self, source: GrammarSource) -> None:
        try:
            matcher = compile_grammar(source, self._tokenizer)
        except ValueError as error:
            self._end(error=first_line(str(error)))
        except MemoryError:
            self._end(limit="memory")
        message = matcher.get_error() or _walk(matcher)
        if not message:
            self._end(valid=True)
        fault = first_line(message)
        self._reply(error=fault)
        self._faulty, self._deadline = True, min(self._deadline, time.monotonic() + _PLACE_S)
        self._end(place=_place_of(json.loads(source.text), fault) if source.syntax == "json_schema" else ())

    def _reply(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the parent has left
            self._connection.sendall(json.dumps(fields).encode() + b"\n")

    def _end(self, **fields: Any) -> NoReturn:
        """Send the last reply. Limits no longer matter once the fault is known and only its place is missing."""
        if not (self._faulty and "limit" in fields):
            self._reply(**fields)
        os._exit(0)


def _walk(matcher: LLMatcher) -> str:
    """Compute masks along random tokens; return the error of the first mask, if there is one.

    A later error says only that this walk was too complex, and a real answer may not be.
    """
    chosen = random.Random(0)
    for step in range(_MASKS):
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return "" if step else matcher.get_error()
        start = chosen.randrange(len(mask))
        rotated = mask[start:] + mask[:start]
        skipped = len(rotated) - len(rotated.lstrip(b"\0"))
        if skipped == len(rotated):
            break
        bits = [bit for bit in range(8) if rotated[skipped] >> bit & 1]
        matcher.consume_token(8 * ((start + skipped) % len(mask)) + chosen.choice(bits))
    return ""


def _limit_this_process(limits: CompileLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # macOS knows no such file and does not enforce the limit
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + STACK_BYTES + limits.nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Ends a loop that never releases the GIL, under which the main thread cannot watch the time.
    signal.setitimer(signal.ITIMER_REAL, limits.seconds + 1)


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _place_of(schema: dict[str, Any], fault: str) -> tuple[str, ...]:
    """Return the way to the innermost part that has the same fault when it stands alone with the definitions."""
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part, place = schema, tuple[str, ...]()
    while len(place) < _MAX_DEPTH:
        inner = (each for each in subschemas(part) if _fault({**each[1], **definitions}) == fault)
        step = next(inner, None)
        if step is None:
            break
        place, part = (*place, *step[0]), step[1]
    return place


def _fault(schema: dict[str, Any]) -> str:
    source = GrammarSource.of_schema(schema)
    return first_line(LLMatcher.validate_grammar(source.to_llguidance(), limits=LIMITS))


def main(control: int) -> None:
    """Read the tokenizer from standard input, then serve."""
    arguments = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer(arguments["tokenizer"], eos_token=arguments["ends"])
    _serve(socket.socket(fileno=control), tokenizer, CompileLimits(**arguments["limits"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
