"""Measure the latency of retrieval at 20k and 100k spans, of a start, an index rebuild and an embedder's restart.

    python -m benchmarks.rescue.bench_latency

The hashing embedder takes 0.1 ms for a vector and 0.5 ms with its pipe; figures include both, and the client's time.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.rescue.filled import fill, text
from benchmarks.rescue.process import Service, percentiles, service
from benchmarks.rescue.results import save
from rescue_svc.embed import choose_embedder
from rescue_svc.store.files import INDEXES

SIZES = (20_000, 100_000)
QUESTIONS = 300
WARM_UP = 50


def questions(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [text(rng, 8) for _ in range(QUESTIONS)]


def ask(connection: HTTPConnection, query: str) -> float:
    body = json.dumps({"session_id": "bench", "query": query})
    began = time.perf_counter()
    connection.request("POST", "/evict/retrieve", body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    seconds = time.perf_counter() - began
    assert json.loads(answer)["mode"] == "hybrid", answer
    return seconds


def ask_all(running: Service) -> list[float]:
    connection = HTTPConnection(running.address)
    for query in questions(0)[:WARM_UP]:
        ask(connection, query)
    return [ask(connection, query) for query in questions(1)]


def at_size(spans: int) -> dict[str, object]:
    folder = Path(tempfile.mkdtemp())
    try:
        fill(folder / "data", "bench", spans)
        shutil.rmtree(folder / "data" / INDEXES)
        with service(folder / "data", "hashing") as running:
            running.wait_until_hybrid()
            began = time.perf_counter()
            vectors = running.client.post("/sessions/bench/resume").json()["vectors"]
            rebuilt = time.perf_counter() - began
            assert vectors == spans
            cpu = running.cpu_s()
            retrieve = percentiles(ask_all(running))
            cpu = (running.cpu_s() - cpu) / (QUESTIONS + WARM_UP)
            running.embedder().kill()
            time.sleep(0.3)
            back = running.wait_until_hybrid() + 0.3
            cold = running.start_s
        with service(folder / "data", "none") as running:
            start = running.start_s
        return {
            "retrieve": retrieve,
            "cpu_ms_a_question": round(cpu * 1000, 2),  # what a busy machine does not change
            "index_rebuilt_s": round(rebuilt, 2),
            "start_s": round(cold, 2),
            "start_without_embedder_s": round(start, 2),
            "hashing_embedder_back_s": round(back, 2),
        }
    finally:
        shutil.rmtree(folder)


def with_minilm() -> dict[str, object]:
    folder = Path(tempfile.mkdtemp())
    try:
        with service(folder / "data", "minilm") as running:
            loaded = running.wait_until_hybrid()
            rng = random.Random(5)
            chunks = [{"text": text(rng, 20), "token_range": [n, n + 1]} for n in range(200)]
            running.client.post("/evict/write", json={"session_id": "bench", "chunks": chunks})
            while running.client.get("/readyz").json()["embedder"]["pending"]:
                time.sleep(0.1)
            retrieve = percentiles(ask_all(running))
            running.embedder().kill()
            time.sleep(0.3)
            back = running.wait_until_hybrid() + 0.3
        return {"end_to_end": retrieve, "loaded_s": round(loaded, 2), "back_after_kill_s": round(back, 2)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    results: dict[str, object] = {}
    for spans in SIZES:
        results[f"{spans} spans"] = at_size(spans)
        print(spans, "spans", results[f"{spans} spans"], flush=True)
    if choose_embedder("auto", None)[0]:
        results["MiniLM"] = with_minilm()
        print("MiniLM", results["MiniLM"])
    save("rescue_latency", results)


if __name__ == "__main__":
    main()
