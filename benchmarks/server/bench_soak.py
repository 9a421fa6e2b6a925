"""Soak both services with 64 clients: measure errors, answers that differ from a sequential run, and memory growth.

    python -m benchmarks.server.bench_soak [--server-seconds 300] [--rescue-seconds 100]

Writes benchmarks/results/server_soak.json. The model server gets chats, streams, schemas, completions, several answers
and sessions, all greedy; the rescue service gets one write to four questions, with each of its
stores, and sessions are forgotten after 50 spans.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.reports import save
from benchmarks.rescue.filled import text
from benchmarks.rescue.process import service
from benchmarks.server.bench_streams import serving

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from postgres_server import PostgresServer

CLIENTS = 64
SPANS = 50  # of a rescue session before it is forgotten
FLAGS = ("--dtype", "float32", "--kv-profile", "small", "--kv-sinks", "16", "--kv-window", "32")
SCHEMA = {"type": "object", "properties": {"code": {"enum": [417295, 112358]}}, "required": ["code"]}


def requests() -> dict[str, tuple[str, dict[str, Any]]]:
    bodies: dict[str, tuple[str, dict[str, Any]]] = {}
    for n in range(16):
        facts = " ".join(f"Item {k} weighs {k * (37 + n) % 91} grams." for k in range(8 * (n % 4)))
        messages = [{"role": "user", "content": f"{facts} The access code is {417295 + n}. What is the access code?"}]
        chat: dict[str, Any] = {"messages": messages, "max_tokens": 16, "temperature": 0}
        bodies[f"chat {n}"] = "/v1/chat/completions", chat
        bodies[f"stream {n}"] = "/v1/chat/completions", {**chat, "stream": True}
        bodies[f"schema {n}"] = (
            "/v1/chat/completions",
            {
                **chat,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, "title": str(n)}}},
            },
        )
        bodies[f"two {n}"] = "/v1/chat/completions", {**chat, "n": 2}
        bodies[f"completion {n}"] = "/v1/completions", {"prompt": [facts + " The", "Item"], "max_tokens": 8}
        bodies[f"response {n}"] = "/v1/responses", {"input": messages[0]["content"], "max_output_tokens": 8}
    return bodies


def text_of(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"])
    body = answer.json()
    if "output" in body:
        return json.dumps([part["text"] for item in body["output"] for part in item["content"]])
    return json.dumps([choice.get("message", {}).get("content", choice.get("text")) for choice in body["choices"]])


@contextmanager
def sampled_memory(process: psutil.Process) -> Iterator[list[tuple[float, float]]]:
    samples: list[tuple[float, float]] = []
    began, ended = time.perf_counter(), threading.Event()

    def sample() -> None:
        while not ended.wait(0.5):
            samples.append((time.perf_counter() - began, process.memory_info().rss / 2**20))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def growth(samples: list[tuple[float, float]], after_s: float) -> dict[str, float]:
    warm = next(mb for second, mb in samples if second >= after_s)
    highest = max(mb for second, mb in samples if second >= after_s)
    return {
        "warm_mb": round(warm, 1),
        "max_mb": round(highest, 1),
        "growth_percent": round(100 * (highest / warm - 1), 1),
    }


def soak_server(seconds: float) -> dict[str, Any]:
    bodies = requests()
    statuses: Counter[int] = Counter()
    differing: Counter[str] = Counter()
    lock = threading.Lock()
    with serving(*FLAGS) as url:
        (process,) = (child for child in psutil.Process().children() if "server" in child.cmdline())
        with httpx.Client(base_url=url, timeout=300) as client:
            sequential = {name: text_of(client.post(path, json=body)) for name, (path, body) in bodies.items()}
        deadline = time.perf_counter() + seconds

        def work(number: int) -> None:
            names = list(bodies)[number:] + list(bodies)[:number]
            with httpx.Client(base_url=url, timeout=300) as client:
                for name in cycle(names):
                    if time.perf_counter() > deadline:
                        break
                    path, body = bodies[name]
                    in_session = name.startswith("chat") and number % 4 == 0
                    headers = {"X-MLX-TQ-Session": f"s{number}"} if in_session else {}
                    answer = client.post(path, json=body, headers=headers)
                    with lock:
                        statuses[answer.status_code] += 1
                        if answer.status_code == 200 and text_of(answer) != sequential[name]:
                            differing[name] += 1

        with sampled_memory(process) as samples, ThreadPoolExecutor(CLIENTS) as pool:
            for future in [pool.submit(work, number) for number in range(CLIENTS)]:
                future.result()
    return {
        "service": "mlx_tq.server",
        "seconds": seconds,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "answers_that_differ": dict(differing),
        **growth(samples, seconds / 5),
    }


def soak_rescue(name: str, seconds: float, **settings: str) -> dict[str, Any]:
    """Write to the rescue service, query it, and delete each session after 50 spans, so that memory is bounded."""
    statuses: Counter[int] = Counter()
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, service(Path(folder) / "data", "hashing", **settings) as running:
        running.wait_until_hybrid()
        deadline = time.perf_counter() + seconds

        def work(number: int) -> None:
            rng, session, spans = random.Random(number), f"client-{number}", 0
            with httpx.Client(base_url=running.url, timeout=60) as client:
                while time.perf_counter() < deadline:
                    chunk = {"text": text(rng), "token_range": [10 * spans, 10 * spans + 9]}
                    answers = [client.post("/evict/write", json={"session_id": session, "chunks": [chunk]})]
                    query = {"session_id": session, "query": text(rng, 8)}
                    answers += [client.post("/evict/retrieve", json=query) for _ in range(4)]
                    spans += 1
                    if spans == SPANS:
                        answers.append(client.delete(f"/sessions/{session}"))
                        spans = 0
                    with lock:
                        statuses.update(answer.status_code for answer in answers)

        with (
            sampled_memory(psutil.Process(running.process.pid)) as samples,
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            for future in [pool.submit(work, number) for number in range(CLIENTS)]:
                future.result()
    return {
        "service": f"rescue service, {name}",
        "seconds": seconds,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        **growth(samples, 0.3 * seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server-seconds", type=float, default=300)
    parser.add_argument("--rescue-seconds", type=float, default=100)
    args = parser.parse_args()
    postgres = PostgresServer(fsync="off")
    postgres.sql("CREATE DATABASE soak")
    try:
        soaks: list[Callable[[], dict[str, Any]]] = [
            lambda: soak_server(args.server_seconds),
            lambda: soak_rescue("SQLite", args.rescue_seconds),
            lambda: soak_rescue("PostgreSQL", args.rescue_seconds, RESCUE_STORE=postgres.url("soak")),
        ]
        figures = []
        for soak in soaks:
            figures.append(soak())
            print(json.dumps(figures[-1]), flush=True)
    finally:
        postgres.stop()
    save("server_soak.json", "python -m benchmarks.server.bench_soak", figures=figures)


if __name__ == "__main__":
    main()
