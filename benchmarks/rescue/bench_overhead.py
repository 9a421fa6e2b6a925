"""Measure the overhead of rescue: the same turns with the service and without it, in alternating order.

    python -m benchmarks.rescue.bench_overhead [--tokens 1000,2000] [--budget 50%] [--rounds 5]

Turn 1 prefills a text with a fact, turn 2 asks for it. With rescue, evicted text is sent to `mlx-tq-rescue serve`
(FAISS, hashing embedder) and quoted. Without it, a session gets the same quotation for free. Figures of each length:

    share       upper bound: waits for the service, and CPU seconds of client, service and embedder, of the whole time
    cpu         CPU seconds of the session over those without a service, less 1, by pairs
    reading     share of the time for the prefill of the quotation
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.reports import save
from benchmarks.rescue.bench_ramp import PREFIX, WINDOW, configuration
from benchmarks.rescue.process import Service, service
from mlx_tq import Session, load
from mlx_tq.cli.haystack import QUESTION, build_case
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import RescueConfig
from mlx_tq.rescue import client as rescue_client
from mlx_tq.rescue.locator import run_in_thread
from mlx_tq.session import Quotation

ANSWER = 24  # tokens


class Given(Session):
    """A session without a service that has the quotation already."""

    given: Quotation

    def quote(self, query: str) -> Quotation:
        return self.given if query == QUESTION else super().quote(query)


calls_s = [0.0]  # processor seconds of the client's calls so far; its worker thread only waits for them


def timed_in_thread(function: Callable[[], Any]) -> Future[Any]:
    def call() -> Any:
        try:
            return function()
        finally:
            calls_s[0] += time.thread_time()

    return run_in_thread(call)


rescue_client.run_in_thread = timed_in_thread


def service_s(running: Service) -> float:
    process = psutil.Process(running.process.pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(session: Session, text: str) -> dict[str, Any]:
    memory, writing = session._transcript, [0.0]
    send = memory.send_evicted

    def clocked(positions: np.ndarray) -> None:
        started = time.perf_counter()
        send(positions)
        writing[0] += time.perf_counter() - started

    memory.send_evicted = clocked  # type: ignore[method-assign]
    began, cpu = time.perf_counter(), time.process_time()
    "".join(session.respond(text, max_tokens=ANSWER))
    "".join(session.respond(QUESTION, max_tokens=ANSWER))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    turn = session.turns[-1]
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "asking_s": turn.rescue_seconds,
        "writing_s": writing[0],
        "prompt_tps": turn.prompt_tps,
        "quoted_tokens": len(turn.quotation.ids),
        "evicted": session.stats.evicted,
        "said": sum(each.generation_tokens for each in session.turns),
    }


def compare(model: Any, tokenizer: Any, tokens: int, budget: str, rounds: int, running: Service) -> dict[str, Any]:
    """Measure pairs at one length in alternating order; the first one warms up."""
    margins = {"sinks": PREFIX, "window": WINDOW + 64}
    case = build_case(tokenizer, load_text(), tokens=tokens, depth=0.5, seed=0, **margins, chat=False)
    text, config = tokenizer.decode(case.ids[: case.question]), configuration("rescue", budget)
    quotation: Quotation | None = None
    pairs = []

    def rescued() -> dict[str, Any]:
        nonlocal quotation
        with Session(model, tokenizer, config, rescue=RescueConfig(running.url)) as session:
            client = session.client
            assert client is not None
            client.ready(30)
            before_s, service_before_s = calls_s[0], service_s(running)
            found = measure(session, text)
            client.flush(30)
            quotation = session.turns[-1].quotation
            return {**found, "thread_s": calls_s[0] - before_s, "service_s": service_s(running) - service_before_s}

    def given() -> dict[str, Any]:
        assert quotation is not None
        with Given(model, tokenizer, config, warn=lambda _: None) as session:
            session.given = quotation
            return measure(session, text)

    for number in range(rounds + 1):
        arms = {"rescue": rescued, "given": given}
        order = reversed(arms) if number % 2 else list(arms)
        pairs.append({name: arms[name]() for name in order})
        print(json.dumps(pairs[-1]), flush=True)
    pairs = pairs[1:]
    cpu = [pair["rescue"]["cpu_s"] / pair["given"]["cpu_s"] - 1 for pair in pairs]
    names = ("asking_s", "writing_s", "thread_s", "service_s")
    share = [sum(pair["rescue"][name] for name in names) / pair["rescue"]["seconds"] for pair in pairs]
    reading = [p["given"]["quoted_tokens"] / p["given"]["prompt_tps"] / p["given"]["seconds"] for p in pairs]
    return {
        "share": median(share),
        "share_most": max(share),
        "cpu": median(cpu),
        "cpu_of_each_pair": cpu,
        "reading": median(reading),
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1000,2000")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load()
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), "hashing") as running:
        running.wait_until_hybrid()
        lengths = {
            tokens: compare(model, tokenizer, int(tokens), args.budget, args.rounds, running)
            for tokens in args.tokens.split(",")
        }
    command = f"python -m benchmarks.rescue.bench_overhead --tokens {args.tokens} --budget {args.budget}"
    command += f" --rounds {args.rounds}"
    save("rescue_overhead.json", command, load_average=os.getloadavg()[0], lengths=lengths)
    for tokens, found in lengths.items():
        print(f"{tokens} tokens: share {found['share']:.2%}, cpu {found['cpu']:+.2%}, reading {found['reading']:.1%}")


if __name__ == "__main__":
    main()
