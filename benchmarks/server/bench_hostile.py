"""Measure the latency of ordinary requests and /health, and memory growth, while each attack runs.

    python -m benchmarks.server.bench_hostile [--seconds 10]

Writes benchmarks/results/server_hostile.json. Each attack repeats in a process of its own until its time is over. It
comes from 127.0.0.1, as do the ordinary requests and /health.
"""

import argparse
import json
import multiprocessing
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.reports import save
from benchmarks.server.bench_flood import model_server, rescue_service

CHAT = "/v1/chat/completions"
LOWEST = -(2**63)


def _chat(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **options}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return _chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def _grammar(syntax: str, text: str) -> dict[str, Any]:
    return _chat(response_format={"type": "grammar", "syntax": syntax, "definition": text})


def _regexes(count: int) -> dict[str, Any]:
    parts = [{"type": "string", "pattern": f".*{chr(97 + n)}{n}.*"} for n in range(count)]
    return {"title": str(random.random()), "allOf": [{"allOf": parts[:12]}, {"allOf": parts[12:]}]}


def post_repeatedly(count: int, path: str, body: Callable[[], Any], **headers: str) -> Callable[[str, float], None]:
    """Return an attack of `count` clients, each of which posts again after each answer."""

    def attack(url: str, end: float) -> None:
        def work(number: int) -> None:
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                while time.monotonic() < end:
                    value = body()
                    content = value if isinstance(value, bytes) else json.dumps(value).encode()
                    try:
                        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
                        time.sleep(0.2 if answer.status_code == 429 else 0)
                    except httpx.TransportError:
                        time.sleep(0.1)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(work, range(count)))

    return attack


def send_trailers(path: str, line: bytes) -> Callable[[str, float], None]:
    """Return an attack of four connections that send endless trailers."""

    def attack(url: str, end: float) -> None:
        def work(_: int) -> None:
            while time.monotonic() < end:
                with _connect(url) as connection, _pause_on_error():
                    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
                    connection.sendall(head.encode() + b"X-T: b")
                    while time.monotonic() < end:
                        connection.sendall(line * (2**16 // len(line)))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    return attack


def pipeline_without_reading(url: str, end: float) -> None:
    """Keep 256 connections that pipeline requests and never read; replace about 100 a second."""
    opened: list[socket.socket] = []
    while time.monotonic() < end:
        with _pause_on_error():
            opened.append(_connect(url))
            opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            opened[-1].setblocking(False)
            opened[-1].send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        if len(opened) > 256:
            opened.pop(0).close()
            time.sleep(0.01)


def _connect(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port or 80), timeout=10)


@contextmanager
def _pause_on_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        time.sleep(0.01)


DIGITS = "".join(random.choices("0123456789 ", k=9_900_000))
SERVER: dict[str, Callable[[str, float], None]] = {
    "nothing": lambda url, end: None,
    "lowest integer": post_repeatedly(
        4, CHAT, lambda: _schema({"type": "integer", "minimum": LOWEST, "maximum": LOWEST})
    ),
    "forced byte": post_repeatedly(4, CHAT, lambda: _grammar("lark", "start: T T\nT: /b+/")),
    "44 times 16 regexes": post_repeatedly(44, CHAT, lambda: _schema(_regexes(16))),
    "24 regexes": post_repeatedly(4, CHAT, lambda: _schema(_regexes(24))),
    "multipleOf": post_repeatedly(
        4, CHAT, lambda: _schema({"allOf": [{"multipleOf": n} for n in (7919, 104729, 1299709)]})
    ),
    "regex of 54 kB": post_repeatedly(4, CHAT, lambda: _grammar("regex", "(a?b?)" * 9000)),
    "trailers": send_trailers(CHAT, b"b" * 64 + b"\r\nX-T: "),
    "one trailer": send_trailers(CHAT, b"b"),
    "unread answers": pipeline_without_reading,
    "10,000 wrong messages": post_repeatedly(2, CHAT, lambda: {"messages": [1] * 10_000}),
    "100,000 unknown keys": post_repeatedly(2, CHAT, lambda: _chat(**{f"k{n}": 1 for n in range(100_000)})),
    "context size": post_repeatedly(2, CHAT, lambda: _chat(repetition_penalty=1.1, repetition_context_size=10**30)),
    "penalty": post_repeatedly(2, CHAT, lambda: _chat(repetition_penalty=1e-38)),
    "seeds": post_repeatedly(2, CHAT, lambda: _chat(seed=2**64 - 1, n=2, temperature=1)),
    "prompts of 9.9 MB": post_repeatedly(8, CHAT, lambda: {"messages": [{"role": "user", "content": DIGITS}]}),
    "prompts of 1 MB": post_repeatedly(
        8, CHAT, lambda: {"messages": [{"role": "user", "content": DIGITS[:1_000_000]}]}
    ),
    "10,000 marks": post_repeatedly(
        2, CHAT, lambda: {"messages": [{"role": "user", "content": "<|im_end|>" * 10_000}]}, **{"X-MLX-TQ-Session": "s"}
    ),
}
RESCUE: dict[str, Callable[[str, float], None]] = {
    "nothing": lambda url, end: None,
    "trailers": send_trailers("/evict/write", b"b" * 64 + b"\r\nX-T: "),
    "one trailer": send_trailers("/evict/write", b"b"),
    "unread answers": pipeline_without_reading,
    "600,000 unknown keys": post_repeatedly(2, "/evict/write", lambda: {f"k{n}": 1 for n in range(600_000)}),
    "8 MB of tokens": post_repeatedly(
        2, "/evict/write", lambda: {"session_id": "s", "chunks": [{"text": "a", "tokens": [1] * 65_000}] * 40}
    ),
}
SERVICES = {
    "mlx_tq.server": (model_server, SERVER, "/health", CHAT, _chat()),
    "rescue service": (rescue_service, RESCUE, "/healthz", "/evict/retrieve", {"session_id": "s", "query": "item 7"}),
}


def time_request(url: str, method: str, path: str, body: Any = None) -> tuple[float, int]:
    started, status = time.perf_counter(), 0
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        status = response.status
    except OSError:
        pass
    finally:
        connection.close()
    return time.perf_counter() - started, status


def measure_under_attack(
    url: str, attack: Callable[[str, float], None], plain: tuple[str, str, str, Any], seconds: float
) -> Any:
    """Return the largest times of /health and of ordinary requests during an attack, and count statuses but 200."""
    health_path, *request = plain
    attacking = multiprocessing.Process(target=attack, args=(url, time.monotonic() + seconds), daemon=True)
    attacking.start()
    end, health, requests = time.monotonic() + seconds, [], []

    def watch() -> None:
        while time.monotonic() < end:
            health.append(time_request(url, "GET", health_path))
            time.sleep(0.05)

    watching = threading.Thread(target=watch)
    watching.start()
    while time.monotonic() < end:
        requests.append(time_request(url, *request))
    watching.join()
    attacking.terminate()
    attacking.join()
    return {
        "plain_max_s": round(max(duration for duration, _ in requests), 3),
        "health_max_s": round(max(duration for duration, _ in health), 3),
        "plain": len(requests),
        "plain_not_200": sum(status != 200 for _, status in requests),
        "health_not_200": sum(status != 200 for _, status in health),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--only", default="", help="run only attacks whose name contains this")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    figures = []
    for name, (serving, attacks, health, path, body) in SERVICES.items():
        for attack_name, attack in attacks.items():
            if args.only not in attack_name:
                continue
            with serving() as (url, _):
                process = next(
                    child for child in psutil.Process().children(recursive=True) if urlsplit(url).port in _ports(child)
                )
                time_request(url, "POST", path, body)
                before = process.memory_info().rss
                figure = measure_under_attack(url, attack, (health, "POST", path, body), args.seconds)
                grown = round((process.memory_info().rss - before) / 2**20) if process.is_running() else None
            figures.append({"server": name, "attack": attack_name, **figure, "grown_mb": grown})
            print(json.dumps(figures[-1]), flush=True)
    if not args.only:
        command = "python -m benchmarks.server.bench_hostile"
        save("server_hostile.json", command, seconds=args.seconds, figures=figures)


def _ports(process: psutil.Process) -> set[int]:
    return {conn.laddr.port for conn in process.net_connections("inet") if conn.status == psutil.CONN_LISTEN}


if __name__ == "__main__":
    main()
