"""Measure the latency of /health and the log size of `mlx_tq.server` and the rescue service under load.

The load comes from another process: half-sent heads, slow bodies, or clients that send requests one after the other; a
refused client waits a second. /health uses a new connection each time, as a supervisor does.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.reports import save
from benchmarks.rescue.process import percentiles, service

AGAIN_S = 1.0
CROWDS = {"nobody else": 0, "half-sent heads": 2000, "slow bodies": 200, "clients": 64}


@contextmanager
def model_server() -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen([sys.executable, "-m", "mlx_tq", "server", "--port", "0"], stderr=stderr)
        try:
            while "listening on " not in log.read_text():
                time.sleep(0.05)
            yield log.read_text().partition("listening on ")[2].split()[0], log
        finally:
            process.terminate()
            process.wait()


@contextmanager
def rescue_service() -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory() as folder, service(Path(folder) / "data", "none") as running:
        chunks = [
            {
                "text": f"item {n} weighs {n * 37 % 91} grams",
                "token_range": [9 * n, 9 * n + 9],
                "layer": -1,
                "score": 0.5,
            }
            for n in range(200)
        ]
        running.client.post("/evict/write", json={"session_id": "s", "chunks": chunks}).raise_for_status()
        yield running.url, Path(running.log.name)


SERVERS = {
    "mlx_tq.server": (
        model_server,
        "/health",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    ),
    "rescue service": (rescue_service, "/healthz", "/evict/retrieve", {"session_id": "s", "query": "item 7"}),
}


def crowd(url: str, path: str, body: dict[str, object], kind: str, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    head = f"{'GET' if kind == 'half-sent heads' else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    sent = (
        head if kind == "half-sent heads" else f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    )
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def hold() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(sent.encode())
                await reader.read()
                writer.close()
            except OSError:
                pass
            await asyncio.sleep(AGAIN_S)

    async def ask(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post(path, json=body)
            if answer.status_code in (429, 503):
                await asyncio.sleep(AGAIN_S)
            elif answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text}")

    async def main() -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
            await asyncio.gather(*(ask(client) if kind == "clients" else hold() for _ in range(count)))

    asyncio.run(main())


def health(url: str, path: str, seconds: float) -> tuple[list[float], int]:
    """Call /health ten times a second; return the times, and how many calls failed or had another status."""
    times, wrong, end = [], 0, time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
        try:
            connection.request("GET", path)
            wrong += connection.getresponse().status != 200
        except OSError:
            wrong += 1
        connection.close()
        times.append(time.perf_counter() - started)
        time.sleep(max(0.0, 0.1 - times[-1]))
    return times, wrong


def measure(name: str, seconds: float) -> Iterator[dict[str, object]]:
    serving, where, path, body = SERVERS[name]
    with serving() as (url, log):
        for kind, count in CROWDS.items():
            pushing = multiprocessing.Process(target=crowd, args=(url, path, body, kind, count), daemon=True)
            if count:
                pushing.start()
                time.sleep(3)
            logged = log.stat().st_size
            times, wrong = health(url, where, seconds)
            logged = log.stat().st_size - logged
            if count:
                if not pushing.is_alive():
                    raise RuntimeError(f"the {kind} gave up on {name}")
                pushing.terminate()
                pushing.join()
            figures = {
                **percentiles(times),
                "most_ms": round(1000 * max(times), 2),
                "asked": len(times),
                "wrong": wrong,
            }
            yield {
                "server": name,
                "crowd": kind,
                "count": count,
                **figures,
                "logged_kb": round(logged / 1000, 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of health under each crowd")
    seconds = parser.parse_args().seconds
    figures = []
    for name in SERVERS:
        for figure in measure(name, seconds):
            print(json.dumps(figure), flush=True)
            figures.append(figure)
    load = {"load_average": [round(load, 1) for load in os.getloadavg()], "cores": psutil.cpu_count()}
    command = "chrt -r 10 python -m benchmarks.server.bench_flood"
    save("server_flood.json", command, **load, seconds=seconds, figures=figures)


if __name__ == "__main__":
    main()
