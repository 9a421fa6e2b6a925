"""Time of a retrieval at 20k and 100k spans, of a start, of a rebuilt index, and of an embedder that comes back.

    python -m benchmarks.rescue.bench_latency

Writes benchmarks/results/rescue_latency.json. The embedder left out means: the hashing one, whose vector takes 0.1 ms.
"""

import random
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.rescue.filled import fill, text
from benchmarks.rescue.process import Service, percentiles, service
from benchmarks.rescue.results import save
from rescue_svc.embed import choose_embedder
from rescue_svc.store.files import INDEXES

SIZES = (20_000, 100_000)
QUESTIONS = 300


def questions(seed: int) -> list[str]:
    """Return questions of eight words, some of which stand in nearly every span."""
    rng = random.Random(seed)
    return [text(rng, 8) for _ in range(QUESTIONS)]


def ask(running: Service, query: str) -> float:
    """Return the seconds that a question takes over HTTP."""
    began = time.perf_counter()
    answer = running.client.post("/evict/retrieve", json={"session_id": "bench", "query": query})
    assert answer.json()["mode"] == "hybrid", answer.text
    return time.perf_counter() - began


def warm_up(running: Service) -> None:
    """Ask questions of no account."""
    for query in questions(0)[:20]:
        running.client.post("/evict/retrieve", json={"session_id": "bench", "query": query})


def at_size(spans: int) -> dict[str, object]:
    """Measure one size in a fresh directory."""
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
            warm_up(running)
            cpu = running.cpu_s()
            retrieve = percentiles([ask(running, query) for query in questions(1)])
            cpu = (running.cpu_s() - cpu) / QUESTIONS
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
    """Measure a question end to end with the real model, warm, and its way back after a kill."""
    folder = Path(tempfile.mkdtemp())
    try:
        with service(folder / "data", "minilm") as running:
            loaded = running.wait_until_hybrid()
            rng = random.Random(5)
            chunks = [{"text": text(rng, 20), "token_range": [n, n + 1]} for n in range(200)]
            running.client.post("/evict/write", json={"session_id": "bench", "chunks": chunks})
            while running.client.get("/readyz").json()["embedder"]["pending"]:
                time.sleep(0.1)
            warm_up(running)
            retrieve = percentiles([ask(running, query) for query in questions(1)])
            running.embedder().kill()
            time.sleep(0.3)
            back = running.wait_until_hybrid() + 0.3
        return {"end_to_end": retrieve, "loaded_s": round(loaded, 2), "back_after_kill_s": round(back, 2)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure all and print it."""
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
