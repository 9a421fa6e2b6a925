"""The rescue ramp: a fact in a text that outgrows the budget, asked for a turn later, in four arms.

    python -m benchmarks.rescue.bench_ramp [--model M] [--rungs 1000,2000,3000] [--seeds 3] [--budgets 50%,90%]

Writes benchmarks/results/rescue_ramp.json after each cell and goes on where it stopped. `--table` only prints what is
there. Real processes: the service is `mlx-tq-rescue serve` with FAISS. Needles and questions as in `mlx_tq.evaluate`.

    none        the cache keeps every token
    evict       TriAttention V3 alone
    rescue      the same, with rescue
    retrieval   every token stays, and the service is asked all the same: what the quotation does by itself
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.rescue.process import Service, service
from mlx_tq import EvictConfig, KVConfig, Session, load
from mlx_tq.config import RescueConfig
from mlx_tq.environment import environment
from mlx_tq.evaluate.asking import whereabouts
from mlx_tq.haystack import QUESTION, build_case, load_text, verdict

RESULTS = Path(__file__).parents[1] / "results" / "rescue_ramp.json"
ARMS = ("none", "evict", "rescue", "retrieval")
WHOLE = ("none", "retrieval")  # arms that evict nothing, so they are the same for every budget
DEPTHS = (0.0, 0.5, 1.0)
PREFIX, WARMUP, WINDOW = 32, 256, 128  # as published


class Everything(Session):
    """Asks for what is live, too."""

    def _live(self) -> range:
        return range(0)


def configuration(arm: str, budget: str) -> KVConfig:
    """The cache of an arm."""
    plain = KVConfig(prefix=PREFIX, window=WINDOW)
    if arm in WHOLE:
        return plain
    return replace(plain, evict=EvictConfig(budget=budget, warmup=WARMUP, granularity=64, trigger=64))


def find(ids: list[int], part: list[int]) -> tuple[int, int]:
    """Where `part` stands in `ids`."""
    starts = [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]
    return starts[0], starts[0] + len(part)


def measure(model: Any, tokenizer: Any, arm: str, cell: dict[str, Any], running: Service) -> dict[str, Any]:
    """Turn 1: a text with a fact in it. Turn 2: the question."""
    margins = {"prefix": PREFIX, "window": WINDOW + 64}
    case = build_case(
        tokenizer, load_text(), tokens=cell["rung"], depth=cell["depth"], seed=cell["seed"], **margins, chat=False
    )
    text = tokenizer.decode(case.ids[: case.question])
    kind = Everything if arm == "retrieval" else Session
    where = RescueConfig(running.url if arm in ("rescue", "retrieval") else "off")
    warnings: list[str] = []
    with kind(model, tokenizer, configuration(arm, cell["budget"]), rescue=where, warn=warnings.append) as session:
        began = time.perf_counter()
        "".join(session.respond(text, max_tokens=8))
        first_s = time.perf_counter() - began
        if arm == "retrieval":
            session._memory.rewrite(())
            assert session.client is not None
            session.client.flush(30)
        needle = find(session.ids, case.ids[case.needle[0] : case.needle[1]])
        live, _ = whereabouts(session.cache, needle)
        before = session.stats
        began = time.perf_counter()
        answer = "".join(session.respond(QUESTION, max_tokens=24))
        second_s = time.perf_counter() - began
        turn, stats = session.turns[-1], session.stats
        if session.client is not None:
            session.client.flush(30)
        stored = running.client.get("/sessions").json()["sessions"]
        eviction = getattr(session.cache[0], "eviction", None)
        return {
            **cell,
            "arm": arm,
            "needle": needle,
            "live": live,
            "verdict": verdict(answer, case.answer).value,
            "answer": answer,
            "expected": case.answer,
            "quoted": turn.rehydration.ranges,
            "injected": len(turn.rehydration.ids),
            "brought": sum(p in range(*needle) for span in turn.rehydration.ranges for p in range(*span)),
            "rescue_s": turn.rescue_seconds,
            "first_s": first_s,
            "second_s": second_s,
            "rounds": eviction.rounds if eviction else 0,
            "tokens": before.tokens,
            "evicted": before.evicted if arm != "retrieval" else 0,
            "kv_bytes": before.nbytes,
            "fp16_bytes": before.fp16_nbytes,
            "stored_bytes": sum(s["text_bytes"] for s in stored if s["session_id"] == session.session_id),
            "rescue": asdict(stats.rescue) if stats.rescue else None,
            "warnings": warnings,
        }


def outcome(cell: dict[str, Any], cells: dict[str, dict[str, Any]]) -> str:
    """A hit is native if any of the needle was live; a rescue hit only if none was and the same case fails without."""
    if cells[key("none", cell)]["verdict"] != "PASS":
        return "void"
    if cell["verdict"] != "PASS":
        return "miss"
    if cell["arm"] in WHOLE or cell["live"]:
        return "native"
    return "rescue" if cell["arm"] == "rescue" and cells[key("evict", cell)]["verdict"] != "PASS" else "luck"


def key(arm: str, cell: dict[str, Any]) -> str:
    """Names a cell."""
    budget = [] if arm in WHOLE else [cell["budget"]]
    return " ".join([arm, *budget, str(cell["rung"]), f"{cell['depth']:g}", str(cell["seed"])])


def cells_of(arm: str, budget: str, rung: int, cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of an arm where all four arms were measured."""
    some = [c for c in cells.values() if c["arm"] == arm and c["rung"] == rung and c["budget"] in (budget, None)]
    return [c for c in some if all(key(a, {**c, "budget": budget}) in cells for a in ARMS)]


def table(cells: dict[str, dict[str, Any]]) -> str:
    """The cells of each budget, rung and arm in Markdown."""
    head = (
        "budget",
        "rung",
        "arm",
        "native",
        "rescue",
        "missed",
        "void",
        "live",
        "evicted",
        "injected",
        "turn 1",
        "turn 2",
    )
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    groups = sorted({(c["budget"], c["rung"]) for c in cells.values() if c["budget"]})
    for (budget, rung), arm in product(groups, ARMS):
        whole = cells_of(arm, budget, rung, cells)
        if not whole:
            continue
        kinds = [outcome(c, cells) for c in whole]
        mean = {
            name: sum(c[name] for c in whole) / len(whole) for name in ("evicted", "injected", "first_s", "second_s")
        }
        lines.append(
            f"{budget} | {rung:,} | {arm} | {kinds.count('native')} | {kinds.count('rescue')} | "
            f"{kinds.count('miss') + kinds.count('luck')} | {kinds.count('void')} | "
            f"{sum(c['live'] > 0 for c in whole)} of {len(whole)} | {mean['evicted']:.0f} | {mean['injected']:.0f} | "
            f"{mean['first_s']:.1f} s | {mean['second_s']:.1f} s"
        )
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--rungs", default="1000,2000,3000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", default="50%,90%")
    parser.add_argument("--embedder", default="hashing")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    if args.table:
        print(table(done["cells"]))
        return
    done["environment"] = environment()
    done["command"] = "python -m benchmarks.rescue.bench_ramp"
    model, tokenizer = load(args.model)
    grid = product(range(args.seeds), map(int, args.rungs.split(",")), DEPTHS, ARMS, args.budgets.split(","))
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), args.embedder) as running:
        for seed, rung, depth, arm, budget in grid:
            cell = {"budget": None if arm in WHOLE else budget, "rung": rung, "depth": depth, "seed": seed}
            if key(arm, cell) in done["cells"]:
                continue
            found = measure(model, tokenizer, arm, cell, running)
            done["cells"][key(arm, cell)] = {**found, "load_average": os.getloadavg()[0]}
            RESULTS.write_text(json.dumps(done, indent=1) + "\n")
            print(key(arm, cell), found["verdict"], f"live {found['live']}", f"brought {found['brought']}", flush=True)
    print(table(done["cells"]))


if __name__ == "__main__":
    main()
