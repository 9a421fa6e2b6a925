"""The child process that runs the embedder, because FAISS and torch crash in one process on macOS.

Frames over a pipe, no pickle: a request is a JSON list [whether these are queries, texts]; a reply is one byte of kind,
then the payload. The first reply has the number of dimensions.
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
    """Load the embedder and answer until the pipe closes, which it also does when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    logging.disable()  # libraries might log text
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            embedder = choice.build()
            embedder.embed(["warm-up"])
        except Exception as error:  # noqa: BLE001 - the parent reports whatever it is
            pipe.send_bytes(FAILED + _reason(error).encode())
            return
        pipe.send_bytes(READY + str(embedder.dim).encode())
        embed_queries = getattr(embedder, "embed_queries", embedder.embed)
        while True:
            are_queries, texts = json.loads(pipe.recv_bytes())
            try:
                reply = VECTORS + (embed_queries if are_queries else embedder.embed)(texts).astype("<f4").tobytes()
            except Exception as error:  # noqa: BLE001 - one bad text must not end the embedder
                reply = FAILED + type(error).__name__.encode()
            pipe.send_bytes(reply)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RescueServiceError) else f"{type(error).__name__}: {error}"
