"""Study how much of a needle any policy could keep: TriAttention's score and variants compared with oracles.

    python -m benchmarks.studies.eviction_oracle [--seeds 8] [--length 800] [--json FILE]

A text with four access codes is prefilled without eviction, in fp16. For each score and retention, copies of the caches
evict in one round, and the four questions are asked with their right answers appended: an answer is found if each of
its tokens is the most likely one. Oracles know the attention of these very questions and answers.
"""

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.reports import save
from benchmarks.studies.eviction_scores import (
    Queries,
    as_maximum,
    as_paper,
    attention_of,
    by_head,
    by_policy,
    calibrators,
    record,
    recorded,
    statistics,
)
from benchmarks.studies.needle_kinds import plant
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.evaluate.asking import prefill_caches
from mlx_tq.models import load
from mlx_tq.policies import ExpectedAttention, Published, TriAttention
from mlx_tq.policies.calibration import SKIP
from mlx_tq.policies.selection import PositionRange, select
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.layer_group import compressed_caches

PREFIX, WINDOW, WARMUP, STEP = 32, 64, 256, 128
RETENTIONS = (90, 75, 50, 25)
CONFIG = KVConfig(
    key="fp16",
    value="fp16",
    sinks=PREFIX,
    window=WINDOW,
    evict=EvictConfig("triattention:calibration=text:granularity=1", "100%", "off"),
)


def answered(model: Any, caches: list[Any], ids: list[int], answer: int) -> tuple[bool, float]:
    """Return whether the last `answer` of `ids` are each the most likely token, and their mean log-likelihood."""
    logits = model(mx.array(ids[:-1])[None], cache=caches)[0, -answer:].astype(mx.float32)
    wanted = mx.array(ids[-answer:])
    logs = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), wanted[:, None], axis=-1)
    return bool(mx.all(logits.argmax(axis=-1) == wanted).item()), float(logs.mean())


class Scene:
    """A text with facts, which the model has prefilled once."""

    def __init__(self, model: Any, tokenizer: Any, kind: str, length: int, seed: int) -> None:
        planted = plant(kind, tokenizer, load_text(), 0.5, seed, tokens=length, sinks=PREFIX, window=WINDOW)
        self.model, self.scene, self.seed = model, planted.scene, seed
        answers = [tokenizer.encode(planted.facts[i].answer, add_special_tokens=False) for i in planted.asked]
        pairs = zip(self.scene.questions, answers, strict=True)
        self.asks = [(question + answer, len(answer)) for question, answer in pairs]
        self.caches = compressed_caches(make_prompt_cache(model, CONFIG))
        record(self.caches)
        prefill_caches(model, self.caches, self.scene.ids, STEP)
        self.text = recorded(self.caches)
        self.asked, self.known = self._ask_all()

    def _ask_all(self) -> tuple[list[Queries], list[bool]]:
        """Return the queries of each question with its answer, and whether the full cache answers it."""
        queries, known = [], []
        for ids, answer in self.asks:
            twins = copy.deepcopy(self.caches)
            record(twins)
            with compressed_attention(self.model):
                known.append(answered(self.model, twins, ids, answer)[0])
            queries.append(recorded(twins))
        return queries, known

    def scores(self, same: Queries, other: Queries) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each way to score; `same` are queries of such questions of other texts, `other` of other questions."""
        caches, policy = self.caches, Published(aggregation="paper")
        heads = self.model.args.num_key_value_heads
        samples = {
            "first 256 tokens": [x[:, SKIP : SKIP + WARMUP] for x in self.text],
            "whole text": [x[:, SKIP:] for x in self.text],
            "questions of another kind": other,
            "the same questions of other texts": same,
        }
        for name, queries in samples.items():
            yield f"triattention, {name}", by_policy(caches, statistics(caches, queries, policy), policy)
        yield (
            "triattention highest, first 256 tokens",
            -by_policy(caches, statistics(caches, samples["first 256 tokens"], policy), policy),
        )
        expected = ExpectedAttention()
        for name in ("first 256 tokens", "questions of another kind"):
            stats = statistics(caches, samples[name], policy)
            full = statistics(caches, samples[name], expected)
            yield f"expected_attention, {name}", by_policy(caches, full, expected)
            yield f"aggregation v3, {name}", by_policy(caches, stats, Published(aggregation="v3"))
            yield f"aggregation maximum, {name}", as_maximum(by_head(caches, stats))
            yield f"virtual query alone, {name}", as_paper(by_head(caches, stats, norm=0), heads)
            yield f"norm term alone, {name}", as_paper(by_head(caches, stats, trig=0), heads)
        yield "random", np.random.default_rng(self.seed).random(len(caches[0].packed_positions))
        seen = attention_of(caches, [x[:, -WINDOW:] for x in self.text], len(self.scene.ids) - WINDOW)
        yield "attention of the last 64 tokens", seen.mean(axis=2).max(axis=1).mean(axis=0)
        future = [attention_of(caches, asked, len(self.scene.ids)) for asked in self.asked]
        yield "oracle: sum of the questions' attention", sum(x.sum(axis=(0, 1, 2)) for x in future)
        yield "oracle: its maximum", np.max([x.max(axis=(0, 1, 2)) for x in future], axis=0)

    def measure(self, scores: np.ndarray, retention: float) -> dict[str, Any]:
        """Evict what a score says, and ask."""
        caches, policy = self.caches, TriAttention()
        positions, offset = caches[0].packed_positions, caches[0].offset
        count = offset - int(retention / 100 * offset)
        gone = select(scores, positions, count, PositionRange(PREFIX, offset - WINDOW), policy)
        kept = np.delete(np.arange(len(positions)), gone)
        left = set(positions[gone].tolist())
        alive = [1 - len(left & set(range(*span))) / (span[1] - span[0]) for span in self.scene.needles]
        found, logs = [], []
        for (ids, answer), known in zip(self.asks, self.known, strict=True):
            if not known:
                continue
            twins = copy.deepcopy(caches)
            calibrators(twins).clear()
            for twin in twins:
                twin.compact(kept, positions[kept])
            with compressed_attention(self.model):
                passed, log = answered(self.model, twins, ids, answer)
            found.append(passed)
            logs.append(log)
        return {"alive": alive, "found": found, "logs": logs}


def joined(queries: list[Queries]) -> Queries:
    return [mx.concatenate(parts, axis=1) for parts in zip(*queries, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--length", type=int, default=800)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load()
    scenes = [Scene(model, tokenizer, "multi", args.length, seed) for seed in range(args.seeds)]
    other = joined([q for seed in range(6) for q in Scene(model, tokenizer, "single", 512, 100 + seed).asked])
    cells: dict[str, list[dict[str, Any]]] = {}
    for number, scene in enumerate(scenes):
        same = joined([q for each, s in enumerate(scenes) if each != number for q in s.asked][:12])
        for name, scores in scene.scores(same, other):
            for retention in RETENTIONS:
                cells.setdefault(f"{name} | {retention}", []).append(scene.measure(scores, retention))
        rows = [summary(key, found) for key, found in cells.items()]
        if args.json:
            command = f"python -m benchmarks.studies.eviction_oracle --seeds {args.seeds} --length {args.length}"
            save(args.json.resolve(), command, rows=rows, scenes=number + 1)
        print(f"scene {number + 1} of {len(scenes)}", flush=True)
    for row in rows:
        print(
            f"{row['score']:58} {row['retention']:3} alive {row['alive']:5.1f} whole {row['whole']:3}/{row['needles']}"
            f" found {row['found']}/{row['asked']} log {row['log']:.2f}"
        )


def summary(key: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    name, retention = key.split(" | ")
    alive = [x for scene in found for x in scene["alive"]]
    passed = [x for scene in found for x in scene["found"]]
    return {
        "score": name,
        "retention": int(retention),
        "alive": 100 * mean(alive),
        "whole": alive.count(1.0),
        "needles": len(alive),
        "found": sum(passed),
        "asked": len(passed),
        "log": mean([x for scene in found for x in scene["logs"]]),
    }


if __name__ == "__main__":
    main()
