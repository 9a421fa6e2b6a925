"""Compare the rescue service on PostgreSQL with SQLite: retrieval quality, latency and bytes.

    python -m benchmarks.rescue.bench_postgres words --data DIR       (DIR holds cranfield/)
    python -m benchmarks.rescue.bench_postgres size 20000 | 100000 | 300000
    python -m benchmarks.rescue.bench_postgres load

Each part writes only its own figures. `size` continues the session of a smaller size in --folder; spans have words by
Zipf's law and random vectors. Both services answer the same queries in turn. The server is that of
tests/postgres_server.py with 1 GB of shared buffers.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rescue.bench_latency import WARM_UP, ask, questions
from benchmarks.rescue.bench_load import load, report
from benchmarks.rescue.filled import CAPS, grow
from benchmarks.rescue.process import percentiles, service
from benchmarks.rescue.public_collections import cranfield, measure
from benchmarks.rescue.results import FOLDER, save
from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.index.engines import FLAT_LIMIT
from rescue_svc.postgres import Connections, PostgresIndex, PostgresStore, vectors
from rescue_svc.store import NewSpan, SqliteStore, Store

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from postgres_server import PostgresServer

NAME, DEPTH, K, QUERIES = "rescue_postgres", 100, 10, 100
CLIENTS, SECONDS = 64, 20.0
SIZES = (0, 20_000, 100_000, 300_000)


@contextmanager
def server(folder: Path | None) -> Iterator[PostgresServer]:
    running = PostgresServer(folder, log_mb=16, shared_buffers="1GB", max_wal_size="4GB", wal_recycle="on")
    try:
        if not running.sql("SELECT 1 FROM pg_database WHERE datname = 'bench'"):
            running.sql("CREATE DATABASE bench")
        yield running
    finally:
        running.stop(keep=folder is not None)


def rankings(store: Store, documents: dict[int, str], queries: list[str]) -> list[list[int]]:
    store.write("cranfield", [NewSpan(n, n + 1, -1, 0.0, text) for n, text in documents.items()])
    session = store.session("cranfield")
    assert session is not None
    document = {span.id: span.start for span in store.spans(session)}
    found = [[document[i] for i in store.bm25(session, query, DEPTH, set())] for query in queries]
    store.close()
    return found


def words(data: Path, folder: Path) -> dict[str, Any]:
    (collection,) = cranfield(data / "cranfield")
    with server(None) as running:
        stores: dict[str, Store] = {
            "SQLite": SqliteStore(folder / "words", CAPS),
            "PostgreSQL": PostgresStore(Connections(running.url("bench")), CAPS, hnsw=False),
        }
        return {
            name: measure(rankings(store, collection.documents, collection.queries), collection.relevant)
            for name, store in stores.items()
        }


def size(spans: int, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Grow the session to a size, unless an interrupted run has done so, and measure there."""
    place, results = folder / "postgres", dict(before)
    place.mkdir(parents=True, exist_ok=True)
    with server(place) as running:
        connections = Connections(running.url("bench"))
        store = PostgresStore(connections, CAPS, hnsw=False)
        held = store.session("bench")
        if held is None or held.spans < spans or store.count_pending(HashingEmbedder.model):
            if held:
                running.sql(f"DROP INDEX IF EXISTS mlx_tq_rescue.nearest_{held.id}", running.url("bench"))
            began = time.perf_counter()
            grow(store, "bench", held.spans if held else 0, spans)
            results |= {"grown_from": held.spans if held else 0, "grown_s": round(time.perf_counter() - began, 1)}
        session = store.session("bench")
        assert session is not None
        assert session.spans == spans
        with connections.take() as connection:
            connection.execute("SET statement_timeout = 0")
            if connection.execute("SELECT to_regclass(%s)", [f"nearest_{session.id}"]).fetchone() == (None,):
                began = time.perf_counter()
                vectors.build(connection, session.id)
                results["hnsw_built_s"] = round(time.perf_counter() - began, 1)
                for table in ("spans", "vectors"):
                    connection.execute(f"VACUUM (ANALYZE) {table}_{session.id}")
            results["bytes"] = sizes(connection, session.id)
        if "recall" not in results:
            results["recall"] = recall(connections, session.id)
        store.close()
        results["retrieve"] = latencies(running.url("bench"), folder, spans)
    return results


def sizes(connection: Any, session: int) -> dict[str, int]:
    parts = {
        "spans and words": f"pg_table_size('spans_{session}')",
        "index of words": f"pg_relation_size('spans_{session}_words_idx')",
        "vectors": f"pg_table_size('vectors_{session}')",
        "index by HNSW": f"pg_relation_size('nearest_{session}')",
        "all": f"pg_total_relation_size('spans_{session}') + pg_total_relation_size('vectors_{session}')",
    }
    return {name: connection.execute(f"SELECT {part}").fetchone()[0] for name, part in parts.items()}


def recall(connections: Connections, session: int) -> dict[str, float]:
    """Return the share of the ten nearest that HNSW finds, for random questions and for stored vectors with noise."""
    indexes = [PostgresIndex(connections, HashingEmbedder.model, n) for n in ("exact", "hnsw")]
    rng = np.random.default_rng(7)
    with connections.take() as connection:
        rows = connection.execute(
            f"SELECT vector::real[] FROM vectors_{session} ORDER BY span LIMIT {QUERIES}"
        ).fetchall()
    stored = np.array([row[0] for row in rows], np.float32)
    noise = rng.standard_normal(stored.shape).astype(np.float32)
    asked = {"random": noise, "near a stored one": stored + 0.5 * noise / np.linalg.norm(noise, axis=1, keepdims=True)}
    found = {}
    for name, queries in asked.items():
        units = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        exact, hnsw = ([set(list(i.current(session).search(q, DEPTH, set()))[:K]) for q in units] for i in indexes)
        found[name] = sum(len(a & b) for a, b in zip(exact, hnsw, strict=True)) / (K * QUERIES)
    return found


def latencies(url: str, folder: Path, spans: int) -> dict[str, Any]:
    """Return the times of the same questions to services on PostgreSQL, and on SQLite up to 100,000 spans, in turn."""
    of_arm = {
        "PostgreSQL, HNSW": {"RESCUE_STORE": url},
        "PostgreSQL, exact": {"RESCUE_STORE": url, "RESCUE_INDEX": "exact"},
    }
    sqlite = folder / f"sqlite-{spans}"
    if spans <= FLAT_LIMIT:
        of_arm = {"SQLite": {}, **of_arm}
        if not sqlite.exists():
            filling = sqlite.with_suffix(f".{time.time_ns()}")
            store = SqliteStore(filling, CAPS)
            for first, last in itertools.pairwise(size for size in SIZES if size <= spans):
                grow(store, "bench", first, last)
            store.close()
            filling.rename(sqlite)
    with ExitStack() as stack:
        arms = {name: stack.enter_context(service(sqlite, "hashing", **further)) for name, further in of_arm.items()}
        open_to: dict[str, HTTPConnection] = {}
        for name, arm in arms.items():
            arm.wait_until_hybrid()
            assert arm.client.post("/sessions/bench/resume").json()["vectors"] == spans
            open_to[name] = HTTPConnection(arm.address)
        for query in questions(0)[:WARM_UP]:
            for connection in open_to.values():
                ask(connection, query)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for query in questions(1):
            for name, connection in open_to.items():
                seconds[name].append(ask(connection, query))
        memory = {name: round(arm.rss_mb()) for name, arm in arms.items()}
        return {name: percentiles(times) | {"rss_mb": memory[name]} for name, times in seconds.items()}


def many(folder: Path) -> dict[str, Any]:
    found = {}
    with server(None) as running:
        store = {"RESCUE_STORE": running.url("bench")}
        with service(folder, "hashing", **store) as one, service(folder, "hashing", **store) as two:
            for each in (one, two):
                each.wait_until_hybrid()
            found["two services, PostgreSQL"] = under_load([one.address, two.address])
    with service(folder / f"load-{time.time_ns()}", "hashing") as alone:
        alone.wait_until_hybrid()
        found["one service, SQLite"] = under_load([alone.address])
    return found


def under_load(addresses: list[str]) -> dict[str, Any]:
    load(addresses, SECONDS / 4, CLIENTS)
    return {"clients": CLIENTS, **report(load(addresses, SECONDS, CLIENTS), SECONDS)}


def measured() -> dict[str, Any]:
    file = FOLDER / f"{NAME}.json"
    return json.loads(file.read_text())["results"] if file.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["words", "size", "load"])
    parser.add_argument("spans", type=int, nargs="?", choices=SIZES[1:], help="of `size`")
    parser.add_argument("--data", type=Path, help="folder that holds cranfield/")
    kept = Path(tempfile.gettempdir()) / "bench-postgres"
    parser.add_argument("--folder", type=Path, default=kept, help="what `size` fills and goes on with")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True, parents=True)
    part = f"{arguments.spans} spans" if arguments.part == "size" else arguments.part
    match arguments.part:
        case "words":
            found = words(arguments.data, arguments.folder)
        case "size":
            found = size(arguments.spans, arguments.folder, measured().get(part, {}))
        case "load":
            found = many(arguments.folder)
    results = measured() | {part: found}
    print(json.dumps(results, indent=1))
    save(NAME, results)


if __name__ == "__main__":
    main()
