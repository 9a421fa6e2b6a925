"""How a service is told to end: by a signal, or by the end of its standard input."""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import uvicorn

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ending:
    """Remembers that the end was asked for, and asks the server for it.

    It raises nothing wherever the program is: what is written, sealed or deleted on the way out is so in full, also
    where the signal comes again.

    Attributes:
        interrupted: it was asked for by Ctrl-C.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._asked = False
        self._server: uvicorn.Server | None = None

    def listen(self) -> None:
        """Take the signals from here on, but for those that whoever started us has us ignore."""
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._ask(number))

    def follow_stdin(self) -> None:
        """End with standard input: a pipe ends with whoever holds its other end, killed or not."""
        threading.Thread(target=self._watch, daemon=True, args=[sys.stdin is not None]).start()

    def run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        """Serve until the end is asked for, which may have been before."""
        self._server = server  # before the question: a signal between the two reaches the server
        if not self._asked:
            server.run(sockets=[listener])

    def _watch(self, is_open: bool) -> None:
        with suppress(OSError):  # such as a terminal that is gone
            while is_open and os.read(0, 4096):
                pass
        self._ask()

    def _ask(self, number: int | None = None) -> None:
        self._asked = True
        self.interrupted |= number == signal.SIGINT
        if self._server is not None:
            self._server.should_exit = True
