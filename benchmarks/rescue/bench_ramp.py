"""Measure the rescue ramp: a fact in a text longer than the budget, asked for one turn later, in four arms.

    python -m benchmarks.rescue.bench_ramp [--model M] [--rungs 1000,2000,3000] [--seeds 3] [--budgets 50%,90%]
                                           [--policy published:aggregation=paper] [--embedder hashing] [--json FILE]

    none        the cache keeps every token
    evict       tokens are evicted
    rescue      the same, with rescue
    retrieval   no eviction, but a quotation from the service: the effect of the quotation alone

It writes FILE (rescue_ramp.json) after each case and resumes. The service is `mlx-tq-rescue serve` with FAISS. The text
is prefilled once for an arm and its twin without rescue, which continues from the saved session.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rescue.process import Service, service
from benchmarks.rescue.ramp_cells import DEPTHS, WHOLE, key
from benchmarks.summarize import ramp
from mlx_tq import EvictConfig, KVConfig, Session, load
from mlx_tq.cli.diagnostics import environment
from mlx_tq.cli.haystack import QUESTION, build_case, judge_answer
from mlx_tq.cli.inputs import load_text
from mlx_tq.evaluate.inspection import count_needle_tokens
from mlx_tq.policies import parse_policy
from mlx_tq.prompt_cache.layer_group import layer_group_of

TWINS = {"rescue": "evict", "retrieval": "none"}  # each with the arm that has the same cache and no rescue
PREFIX, WARMUP, WINDOW = 32, 256, 128  # as published
POLICY = "published:aggregation=paper"


class Everything(Session):
    """Asks for live text, too."""

    def _live(self) -> range:
        return range(0)


def configuration(arm: str, budget: str, policy: str = POLICY) -> KVConfig:
    plain = KVConfig(sinks=PREFIX, window=WINDOW)
    if arm in WHOLE:
        return plain
    evict = EvictConfig(
        parse_policy(policy, calibration="text", warmup=WARMUP, granularity=64, trigger=64), budget, "off"
    )
    return replace(plain, evict=evict)


def find(ids: list[int], part: list[int]) -> tuple[int, int]:
    starts = [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]
    return starts[0], starts[0] + len(part)


def measure(
    model: Any, tokenizer: Any, arm: str, cell: dict[str, Any], running: Service, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the cells of an arm with rescue and of its twin. Turn 1: a text with a fact. Turn 2: the question."""
    margins = {"sinks": PREFIX, "window": WINDOW + 64}
    case = build_case(
        tokenizer, load_text(), tokens=cell["rung"], depth=cell["depth"], seed=cell["seed"], **margins, chat=False
    )
    config = configuration(arm, cell["budget"], cell["policy"])
    kind, file = Everything if arm == "retrieval" else Session, folder / "turn.safetensors"
    with (
        kind(model, tokenizer, config, rescue=running.url, warn=lambda _: None) as session,
        Session(model, tokenizer, config, warn=lambda _: None) as twin,
    ):
        began = time.perf_counter()
        "".join(session.respond(tokenizer.decode(case.ids[: case.question]), max_tokens=8))
        first_s = time.perf_counter() - began
        session.save(file)
        twin.load(file)
        if arm == "retrieval":
            session._transcript.send_evicted(np.arange(len(session.ids)))
            assert session.client is not None
            session.client.flush(30)
        needle = find(session.ids, case.ids[case.needle[0] : case.needle[1]])
        live, _ = count_needle_tokens(session.cache, needle)
        before = twin.stats
        sequence = layer_group_of(session.cache)
        shared = {
            **cell,
            "needle": needle,
            "live": live,
            "expected": case.answer,
            "first_s": first_s,
            "rounds": sequence.stats.rounds if sequence else 0,
            "tokens": before.tokens,
            "evicted": before.evicted,
            "kv_bytes": before.nbytes,
            "native_bytes": before.native_nbytes,
        }
        answers = {arm: ask(session, case.answer, needle), TWINS[arm]: ask(twin, case.answer, needle)}
        assert session.client is not None
        session.client.flush(30)
        stored = running.client.get("/sessions").json()["sessions"]
        answers[arm]["stored_bytes"] = sum(s["text_bytes"] for s in stored if s["session_id"] == session.session_id)
        session.client.forget(session.session_id, 30)
        return {name: {**shared, "arm": name, **answer} for name, answer in answers.items()}


def ask(session: Session, expected: str, needle: tuple[int, int]) -> dict[str, Any]:
    began = time.perf_counter()
    answer = "".join(session.respond(QUESTION, max_tokens=24))
    seconds = time.perf_counter() - began
    turn, client = session.turns[-1], session.client
    quoted = turn.quotation.ranges
    return {
        "verdict": judge_answer(answer, expected).value,
        "answer": answer,
        "quoted": quoted,
        "injected": len(turn.quotation.ids),
        "brought": sum(p in range(*needle) for span in quoted for p in range(*span)),
        "rescue_s": turn.rescue_seconds,
        "second_s": seconds,
        "rescue": asdict(client.stats) if client else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--rungs", default="1000,2000,3000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", default="50%,90%")
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--embedder", default="hashing")
    parser.add_argument("--json", type=Path, default=Path("rescue_ramp.json"))
    args = parser.parse_args()
    done = json.loads(args.json.read_text()) if args.json.exists() else {"commands": [], "cells": {}}
    cells = done["cells"]
    named = f"--model {args.model} " if args.model else ""
    command = (
        f"python -m benchmarks.rescue.bench_ramp {named}--rungs {args.rungs} --seeds {args.seeds} "
        f"--budgets {args.budgets} --policy {args.policy} --embedder {args.embedder}"
    )
    done["commands"] = sorted({*done["commands"], command})
    done["environment"] = environment()
    dense = {"dtype": "float32", "dequantize": True} if args.model else {}  # a CPU computes faster so
    model, tokenizer = load(args.model, **dense)
    grid = product(range(args.seeds), map(int, args.rungs.split(",")), DEPTHS, TWINS, args.budgets.split(","))
    with tempfile.TemporaryDirectory() as folder, service(Path(folder) / "service", args.embedder) as running:
        for seed, rung, depth, arm, budget in grid:
            setting = {"policy": None, "budget": None} if arm in WHOLE else {"policy": args.policy, "budget": budget}
            cell = {**setting, "rung": rung, "depth": depth, "seed": seed}
            if key(arm, cell) in cells:
                continue
            for name, found in measure(model, tokenizer, arm, cell, running, Path(folder)).items():
                cells[key(name, cell)] = found
                print(
                    key(name, cell),
                    found["verdict"],
                    f"live {found['live']}",
                    f"brought {found['brought']}",
                    flush=True,
                )
            args.json.write_text(json.dumps(done, indent=1) + "\n")
    for row in ramp(done):
        print(row)


if __name__ == "__main__":
    main()
