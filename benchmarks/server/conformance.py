"""Compare our server and mlx-lm's with OpenAI's documentation, by requests of the official client.

    python -m benchmarks.server.conformance

Both serve the embedded model. A row in which ours differs from the documentation says why.
"""

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai

from benchmarks.reports import save
from benchmarks.server.bench_streams import serving
from benchmarks.server.requests import REQUESTS, outcome
from mlx_tq.models import embedded_path

START_S = 300


@contextmanager
def mlx_lm_serving():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(embedded_path()), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - started < START_S:
            try:
                httpx.get(f"{url}/v1/models")
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def outcomes(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    return [outcome(request, client) for request in REQUESTS]


def main():
    with serving() as url:
        ours = outcomes(url)
    with mlx_lm_serving() as url:
        theirs = outcomes(url)
    rows = [
        {
            "request": request.name,
            "documented": request.documented,
            "ours": {"as_documented": our[0], "seen": our[1]},
            "mlx_lm": {"as_documented": their[0], "seen": their[1]},
            "why": request.why if not our[0] else "",
        }
        for request, our, their in zip(REQUESTS, ours, theirs, strict=True)
    ]
    for row in rows:
        print(json.dumps(row))
    save("server_conformance.json", "python -m benchmarks.server.conformance", rows=rows)


if __name__ == "__main__":
    main()
