"""The child process that holds the embedder. FAISS and torch crash in one process on macOS, so torch lives here.

Frames over a pipe, no pickle: a request is a JSON list, of whether it asks and of its texts; an answer is one byte of
kind, then the payload. The first answer says how many dimensions the vectors have.
"""

import contextlib
import json
import logging
import signal
from multiprocessing.connection import Connection

from rescue_svc.embed.registry import Choice
from rescue_svc.errors import RescueServiceError

READY, VECTORS, FAILED = b"R", b"V", b"F"


def serve(pipe: Connection, choice: Choice) -> None:
    """Load the embedder, say so, and answer until the pipe closes: with the parent this process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    logging.disable()  # libraries log what they please; nothing of a text may reach a log
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            embedder = choice.build()
            embedder.embed(["warm-up"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            pipe.send_bytes(FAILED + _reason(error).encode())
            return
        pipe.send_bytes(READY + str(embedder.dim).encode())
        ways = (embedder.embed, getattr(embedder, "embed_questions", embedder.embed))
        while True:
            asks, texts = json.loads(pipe.recv_bytes())
            try:
                answer = VECTORS + ways[asks](texts).astype("<f4").tobytes()
            except Exception as error:  # noqa: BLE001 - one bad text must not end the embedder
                answer = FAILED + type(error).__name__.encode()
            pipe.send_bytes(answer)


def _reason(error: Exception) -> str:
    """Say what our own errors say; of others only the kind and message of loading, which saw no text yet."""
    return str(error) if isinstance(error, RescueServiceError) else f"{type(error).__name__}: {error}"
