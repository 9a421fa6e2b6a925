"""Read a message, stream the answer, show what the cache holds. Answers go to stdout, everything else to stderr."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mlx_tq.chat.screen import show_memory, show_stats, show_turn
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.session import Session
from mlx_tq.ui import console, warn

with suppress(ImportError):  # not on every system; without it lines cannot be edited
    import readline  # noqa: F401  gives input() its history and editing

INTERRUPTED = 130
BLOCK = '"""'  # begins and ends a message of several lines
HELP = f"""\
/stats        what the conversation takes
/save FILE    write the conversation to a file
/load FILE    go on with one from a file
/reset        begin anew
/help         this
/quit         leave; so does Ctrl-D
{BLOCK}           begins and ends a message of several lines
Ctrl-C        stop the answer; twice at the prompt leaves"""


class Chat:
    """A session in a terminal, or with lines from a pipe.

    Args:
        session: to talk in.
        warnings: that the session leaves, to be shown when its answer has its line to itself.
    """

    def __init__(self, session: Session, warnings: list[str]) -> None:
        self._session, self._warnings = session, warnings
        self._terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text cost their line, not the chat
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": lambda _: show_stats(session),
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/help": lambda _: console.print(HELP, markup=False),
        }

    def run(self) -> int:
        """Until the input ends: 0, or 130 for Ctrl-C."""
        warned = False
        while True:
            try:
                message = self._read()
                warned = False
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if warned or not self._terminal:
                    return INTERRUPTED
                warned = True
                console.print("\nCtrl-C once more leaves", style="dim")
                continue
            if message.strip() in ("/quit", "/exit"):
                return 0
            self._take(message)

    def _take(self, message: str) -> None:
        """Do what a message says. What cannot be done is said, and the conversation goes on."""
        try:
            if message.startswith("/") and "\n" not in message:
                name, _, rest = message.strip().partition(" ")
                if name not in self._commands:
                    raise ConfigError(f"{name} is no command; valid are {', '.join(self._commands)}, /quit.")
                self._commands[name](rest.strip())
            elif message.strip():
                self._answer(message)
        except (ConfigError, CacheFormatError) as error:
            warn(str(error))
        while self._warnings:
            warn(self._warnings.pop(0))

    def _answer(self, message: str) -> None:
        before = len(self._session.turns)
        try:
            with _stops(self._session):
                for piece in self._session.respond(message):
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:  # the second one in a turn
            pass
        sys.stdout.write("\n")
        sys.stdout.flush()
        if len(self._session.turns) > before:
            show_turn(self._session)
        else:
            console.print("interrupted before the answer: the message is undone", style="dim")
        show_memory(self._session.stats)

    def _read(self) -> str:
        line = self._line("> ")
        if line.strip() != BLOCK:
            return line
        lines = []
        while (line := self._line("| ")).strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _save(self, path: str) -> None:
        self._session.save(_named(path, "/save"))
        console.print(f"saved to {path}", style="dim", markup=False)

    def _load(self, path: str) -> None:
        self._session.load(_named(path, "/load"))
        show_memory(self._session.stats)

    def _reset(self, _: str) -> None:
        self._session.reset()
        console.print("the conversation is forgotten", style="dim")


def _named(path: str, command: str) -> str:
    if not path:
        raise ConfigError(f"{command} needs a file, such as {command} chat.safetensors.")
    return path


@contextmanager
def _stops(session: Session) -> Iterator[None]:
    """Ctrl-C ends the answer after its next token; a second one at once."""
    pressed = False

    def stop(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        session.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
