"""32 clients for a bounded time from another process: latency, errors, and whether memory stays.

    python -m benchmarks.rescue.bench_load [--seconds 20]

Writes benchmarks/results/rescue_load.json. Every fifth call writes, the others ask; each client has its own session.
"""

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.rescue.filled import text
from benchmarks.rescue.process import percentiles, service
from benchmarks.rescue.results import save

CLIENTS = 32
WRITE_EVERY = 5


async def client(http: httpx.AsyncClient, number: int, deadline: float, calls: list[tuple[str, int, float]]) -> None:
    """Call until the deadline; note what was called, the status (0: no answer) and the seconds."""
    rng = random.Random(number)
    session, position = f"client-{number}", 0
    while time.perf_counter() < deadline:
        writes = position % WRITE_EVERY == 0
        path = "/evict/write" if writes else "/evict/retrieve"
        chunk = {"text": text(rng), "token_range": [position * 10, position * 10 + 9]}
        what = {"chunks": [chunk]} if writes else {"query": text(rng, 8)}
        began = time.perf_counter()
        try:
            status = (await http.post(path, json={"session_id": session, **what})).status_code
        except httpx.TransportError:
            status = 0
        calls.append((path, status, time.perf_counter() - began))
        position += 1


async def load(url: str, seconds: float) -> list[tuple[str, int, float]]:
    """Run all clients and return every call."""
    calls: list[tuple[str, int, float]] = []
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http:
        deadline = time.perf_counter() + seconds
        await asyncio.gather(*(client(http, number, deadline, calls) for number in range(CLIENTS)))
    return calls


def main() -> None:
    """Warm up, load, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--embedder", default="hashing")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        with service(folder / "data", arguments.embedder) as running:
            running.wait_until_hybrid()
            asyncio.run(load(running.url, arguments.seconds / 4))
            before = running.rss_mb()
            calls = asyncio.run(load(running.url, arguments.seconds))
            after = running.rss_mb()
            spans = running.client.get("/readyz").json()["spans"]
    finally:
        shutil.rmtree(folder)
    statuses = Counter(status for _, status, _ in calls)
    results = {
        "clients": CLIENTS,
        "seconds": arguments.seconds,
        "calls_a_second": round(len(calls) / arguments.seconds),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "errors_other_than_429_503": sum(n for s, n in statuses.items() if s not in (200, 201, 429, 503)),
        "write": percentiles([s for path, _, s in calls if path == "/evict/write"]),
        "retrieve": percentiles([s for path, _, s in calls if path == "/evict/retrieve"]),
        "rss_before_mb": round(before, 1),
        "rss_after_minus_before_mb": round(after - before, 1),
        "spans_at_the_end": spans,
    }
    for name, value in results.items():
        print(f"{name:<28} {value}")
    save("rescue_load", results)


if __name__ == "__main__":
    main()
