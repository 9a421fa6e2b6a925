"""Read a message, stream the answer, show what the cache holds. Answers go to stdout, everything else to stderr."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mlx_tq.chat.screen import show_banner, show_last_exchange, show_memory, show_stats, show_turn
from mlx_tq.cli.foreign_text import say
from mlx_tq.cli.frame import DONE, INTERRUPTED
from mlx_tq.cli.joining import collect_stats, show_ranks
from mlx_tq.cli.progress import prefill_progress
from mlx_tq.cli.screen import console, warn
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.session import Session
from mlx_tq.session.recall import archive_warning

with suppress(ImportError):  # not on every system; without it lines cannot be edited
    import readline  # gives input() its history and editing

    if "libedit" not in (readline.__doc__ or ""):  # which has another syntax, and no such thing
        readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one message, with all its lines

BLOCK = '"""'  # begins and ends a message of several lines
HELP = f"""\
/stats        what the conversation takes
/save FILE    write the conversation to a file, a new one or one of a conversation
/load FILE    go on with one from a file
/reset        begin anew
/help         this
/quit         leave; so does Ctrl-D
 /...         after a space, a message that begins with a slash; so does a path
{BLOCK}           begins and ends a message of several lines
Ctrl-C        stop the answer; twice at the prompt leaves"""


class Chat:
    """A session in a terminal, or with lines from a pipe.

    Args:
        session: to talk in.
        warnings: that the session leaves, to be shown when its answer has its line to itself.
        ranks: that talk together; the first one reads.
    """

    def __init__(self, session: Session, warnings: list[str], ranks: Ranks = ALONE) -> None:
        self._session, self._warnings, self._ranks = session, warnings, ranks
        self._terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text cost their line, not the chat
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats,
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
                said = self._ranks.broadcast_when_ready(self._next)
                warned = False
            except KeyboardInterrupt:
                if warned or not self._terminal:
                    return INTERRUPTED
                warned = True
                console.print("\nCtrl-C once more leaves", style="dim")
                continue
            if said is None or said[0].strip() in ("/quit", "/exit"):
                return DONE
            self._take(*said)

    def _next(self) -> tuple[str, bool] | None:
        """The next message and whether it is a command; None where the input ends."""
        try:
            message = self._read()
        except EOFError:
            return None
        name = message.strip().partition(" ")[0]
        return message, message.startswith("/") and "\n" not in message and not _is_path(name)

    def _take(self, message: str, is_command: bool) -> None:
        """Do what a message says. What cannot be done is said, and the conversation goes on."""
        try:
            if is_command:
                name, _, rest = message.strip().partition(" ")
                if name not in self._commands:
                    raise ConfigError(
                        f"{name} is no command; valid are {', '.join(self._commands)}, /quit. A message may begin with "
                        "a slash after a space."
                    )
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
            with _stops(self._session) if self._ranks.is_alone else nullcontext(), prefill_progress() as progress:
                for piece in self._session.respond(message, progress=progress):
                    say(piece)
        except KeyboardInterrupt:  # the second one in a turn
            if not self._ranks.is_alone:  # which may be at different tokens
                raise
        say("\n")
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
        try:
            while (line := self._line("| ")).strip() != BLOCK:
                lines.append(line)
        except EOFError:
            warn(f"the input ended before the {BLOCK} that ends a message: its {len(lines)} lines were not sent.")
            raise
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _stats(self, _: str) -> None:
        show_stats(self._session)
        if not self._ranks.is_alone:
            show_ranks(collect_stats(self._ranks, self._session.stats, archive_warning(self._session.cache)))

    def _save(self, path: str) -> None:
        self._check_alone("/save")
        self._session.save(_named(path, "/save"))
        console.print(f"saved to {path}", style="dim", markup=False)

    def _load(self, path: str) -> None:
        self._check_alone("/load")
        self._session.load(_named(path, "/load"))
        show_banner(self._session)
        show_last_exchange(self._session)
        show_memory(self._session.stats)

    def _check_alone(self, name: str) -> None:
        if not self._ranks.is_alone:
            raise ConfigError(f"{name} is for one process: each of {self._ranks.size} ranks has a part of the cache.")

    def _reset(self, _: str) -> None:
        self._session.reset()
        console.print("the conversation is forgotten", style="dim")


def _named(path: str, command: str) -> Path:
    if not path:
        raise ConfigError(f"{command} needs a file, such as {command} chat.safetensors.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{command} {path}: {error}. Write the folder itself.") from error


def _is_path(word: str) -> bool:
    """A word that begins with a slash is a path where it has another one, or is there."""
    return "/" in word[1:] or Path(word).exists()


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
