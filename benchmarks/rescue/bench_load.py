"""Load a rescue service with 32 clients, and measure latency, errors and memory.

    python -m benchmarks.rescue.bench_load [--seconds 20]

Every fifth call writes, the others retrieve; each client has its own session.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rescue.filled import text
from benchmarks.rescue.process import percentiles, service
from benchmarks.rescue.results import save

CLIENTS = 32
WRITE_EVERY = 5
NO_ANSWER = 0


class Call(NamedTuple):
    path: str
    status: int
    seconds: float


def client(addresses: Sequence[str], number: int, deadline: float) -> list[Call]:
    rng = random.Random(number)
    session, position, calls = f"client-{number}", 0, []
    connections = [HTTPConnection(address, timeout=30) for address in addresses]
    while time.perf_counter() < deadline:
        writes = position % WRITE_EVERY == 0
        path = "/evict/write" if writes else "/evict/retrieve"
        chunk = {"text": text(rng), "token_range": [position * 10, position * 10 + 9]}
        body = json.dumps({"session_id": session, **({"chunks": [chunk]} if writes else {"query": text(rng, 8)})})
        connection = connections[position % len(connections)]
        began = time.perf_counter()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, HTTPException):
            status = NO_ANSWER
            connection.close()
        calls.append(Call(path, status, time.perf_counter() - began))
        position += 1
    for connection in connections:
        connection.close()
    return calls


def load(addresses: Sequence[str], seconds: float, clients: int = CLIENTS) -> list[Call]:
    deadline = time.perf_counter() + seconds
    with ThreadPoolExecutor(clients) as pool:
        done = [pool.submit(client, addresses, number, deadline) for number in range(clients)]
        return [call for calls in done for call in calls.result()]


def report(calls: list[Call], seconds: float) -> dict[str, Any]:
    statuses = Counter(call.status for call in calls)
    return {
        "seconds": seconds,
        "calls_a_second": round(len(calls) / seconds),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "errors_other_than_429_503": sum(n for s, n in statuses.items() if s not in (200, 201, 429, 503)),
        "write": percentiles([call.seconds for call in calls if call.path == "/evict/write"]),
        "retrieve": percentiles([call.seconds for call in calls if call.path == "/evict/retrieve"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--embedder", default="hashing")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        with service(folder / "data", arguments.embedder) as running:
            running.wait_until_hybrid()
            load([running.address], arguments.seconds / 4)
            before = running.rss_mb()
            calls = load([running.address], arguments.seconds)
            after = running.rss_mb()
            spans = running.client.get("/readyz").json()["spans"]
    finally:
        shutil.rmtree(folder)
    results = {
        "clients": CLIENTS,
        **report(calls, arguments.seconds),
        "rss_before_mb": round(before, 1),
        "rss_after_minus_before_mb": round(after - before, 1),
        "spans_at_the_end": spans,
    }
    for name, value in results.items():
        print(f"{name:<28} {value}")
    save("rescue_load", results)


if __name__ == "__main__":
    main()
