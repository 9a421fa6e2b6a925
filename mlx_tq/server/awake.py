"""`StayAwake`: keeps a Mac from sleeping while answers are generated."""

import os
import subprocess
import sys
from contextlib import suppress

# It ends with this process, however that ends.
COMMAND = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())] if sys.platform == "darwin" else None


class StayAwake:
    """Runs macOS's caffeinate between `begin` and `end`; does nothing on other systems."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        if COMMAND is not None and self._process is None:
            with suppress(OSError):  # then the machine may sleep
                self._process = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL)  # noqa: S603  a fixed command

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
