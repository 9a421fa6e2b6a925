"""Run `mlx_tq.server` in the background for as long as a client runs."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_tq.cli.options import API_KEY_VARIABLE
from mlx_tq.clients.endpoint import authorization
from mlx_tq.errors import MlxTqError, one_line

_HOST = "127.0.0.1"
_GRACE_S = 10  # after which a process that was asked to end is killed; a server takes 5 s for running answers
_POLL_S = 0.1


def server_command(model: str | None, flags: list[str], port: int | str) -> list[str]:
    chosen = ["--model", model] if model else []
    return [sys.executable, "-m", "mlx_tq.server", *chosen, *flags, "--port", str(port)]


def url_of_port(port: int | str) -> str:
    return f"http://{_HOST}:{port}"


@contextmanager
def started_server(model: str | None, flags: list[str], key: str | None, log_path: Path) -> Iterator[str]:
    """Start the server on a free port, yield its URL once it has generated a token, and stop it after the block.

    It runs in a session of its own: Ctrl-C in the terminal is for the client.
    """
    with socket.create_server((_HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with log_path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  our own command
            server_command(model, flags, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, url_of_port(port), key, log_path)
        yield url_of_port(port)
    finally:
        stop_process(process)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, and SIGKILL if it does not follow or if waiting is interrupted."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, key: str | None, log_path: Path) -> None:
    """Wait until the server is healthy and has generated one token; loading may download a model."""
    import httpx2  # a quarter of a second, which --help does without

    with httpx2.Client(base_url=url, headers=authorization(key), timeout=None, trust_env=False) as client:
        while True:
            if (code := process.poll()) is not None:
                lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
                raise MlxTqError(f"the server ended with exit code {code}: {' '.join(lines[-1:])}")
            with suppress(httpx2.HTTPError):
                if client.get("/health").is_success:
                    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                    response = client.post("/v1/chat/completions", json=body)
                    break
            time.sleep(_POLL_S)
    if response.status_code == httpx2.codes.UNAUTHORIZED:
        raise MlxTqError(f"the server refuses the API key. Set it in {API_KEY_VARIABLE}, not in --server-args.")
    if not response.is_success:
        raise MlxTqError(f"the server does not answer a chat: {one_line(response.text)}.")
