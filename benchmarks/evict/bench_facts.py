"""Measure what eviction loses of everyday facts: the log-probability of right answers, and answers while decoding.

    python -m benchmarks.evict.bench_facts --models smollm2,embedded --tokens 950 --share 40
    python -m benchmarks.evict.bench_facts --models smollm2 --tokens 2000 --task topics --data LONGEVAL

A text with facts of two kinds is prefilled; then a copy of its caches gets each question. The policies do not know the
questions when they evict. All arms have the same formats, sinks and window. An answer is right if each of its tokens is
the most likely one, decoded one by one. Standard errors are over texts. `--task` asks about texts of public collections
instead: LongEval's lines and topics (conversations of many turns), and QMSum's meetings.
"""

import argparse
import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evict.everyday_facts import KINDS, Question, Scene, plant_facts
from benchmarks.evict.public_tasks import TASKS
from benchmarks.reports import ALL_NAMES, named_model, save
from mlx_tq.cli.inputs import read_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, planner
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.measurements import log_probabilities
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.session.compaction import compact_prompt_cache
from mlx_tq.session.restore import prefill, recall_rows

STEP = 512
EACH = 4  # facts of each kind in a text
PLAIN = KVConfig(key="q8", value="q8", sinks=4, window=32)


@dataclass(frozen=True)
class Arm:
    name: str
    config: KVConfig
    compacted: float | None = None  # share of the rows

    @property
    def recalls(self) -> bool:
        return self.config.evict is not None and self.config.evict.recalls


def make_arms(shares: Iterable[float], tokens: int, policies: Iterable[str]) -> list[Arm]:
    """Return the full cache, then each policy without recall and with it; `shares` are percentages."""
    arms = [Arm("full", PLAIN)]
    for policy, share in product(policies, shares):
        if policy == "compact":
            arms.append(Arm(policy, PLAIN, share / 100))
            continue
        budget = f"{share:g}%@{tokens}" if policy.startswith("heads") else f"{share:g}%"
        for recall in ("off", "auto"):
            config = replace(PLAIN, evict=EvictConfig(policy, budget, recall))
            arms.append(Arm(policy + (" with recall" if recall == "auto" else ""), config))
    return arms


def scenes(tokenizer: Any, tokens: int, count: int, path: str | None) -> list[Scene]:
    text = list(tokenizer.encode(read_text(path), add_special_tokens=False, verbose=False))
    names = [*KINDS]
    pairs = [[names[i % len(names)], names[(i + 1 + i // len(names)) % len(names)]] for i in range(count)]
    return [plant_facts(tokenizer, text, tokens, pair, EACH, seed) for seed, pair in enumerate(pairs)]


def held_share(caches: list[Any]) -> float:
    """Return the share of the rows of all heads that the caches hold."""
    held = seen = 0
    for layer in compressed_caches(caches):
        heads = layer.keys_and_values()[0].shape[1]
        by_head = layer.positions if isinstance(layer.positions, list) else [layer.positions] * heads
        held += sum(map(len, by_head))
        seen += heads * layer.offset
    return held / seen


def answer(model: Any, caches: list[Any], question: Question) -> tuple[float, bool]:
    """Return the log-probability of the answer, and whether it is decoded."""
    total, is_right = 0.0, True
    with compressed_attention(model):
        for read, token in zip([question.ids, *([token] for token in question.answer)], question.answer, strict=False):
            scores = log_probabilities(model, read, caches)[-1]
            total += float(scores[token])
            is_right &= int(scores.argmax()) == token
    return total, is_right


def ask(model: Any, tokenizer: Any, plan: Plan, arm: Arm, scene: Scene) -> dict[str, Any]:
    caches = build_caches(plan)
    with compressed_attention(model):
        prefill(model, caches, scene.ids, STEP)
    if arm.compacted is not None:
        caches = compact_prompt_cache(model, tokenizer, caches, scene.ids, arm.compacted)
    found = []
    for question in scene.questions:
        twins = copy.deepcopy(caches)
        recalled = recall_rows(model, twins, question.ids, STEP) if arm.recalls else None
        found.append((*answer(model, twins, question), 0 if recalled is None else len(recalled.positions)))
    with compressed_attention(model):  # the round that a question's pass begins with
        prefill(model, caches, [0], 1)
    scores, right, recalled_tokens = zip(*found, strict=True)
    return {"scores": scores, "right": right, "recalled": float(np.mean(recalled_tokens)), "held": held_share(caches)}


def compare(arm: Arm, rows: list[dict[str, Any]], full: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [np.mean(row["scores"]) - np.mean(base["scores"]) for row, base in zip(rows, full, strict=True)]
    return {
        "arm": arm.name,
        "questions": sum(len(row["scores"]) for row in rows),
        "held": float(np.mean([row["held"] for row in rows])),
        "difference": float(np.mean(losses)),
        "error": float(np.std(losses, ddof=1) / len(losses) ** 0.5),
        "right": int(sum(sum(row["right"]) for row in rows)),
        "right_full": int(sum(sum(row["right"]) for row in full)),
        "recalled": float(np.mean([row["recalled"] for row in rows])),
    }


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = named_model(name)
    shares = [float(share) for share in args.share.split(",")]
    plan, full, rows = planner(model), [], []
    if args.task == "facts":
        asked = scenes(tokenizer, args.tokens, args.texts, args.text)
    else:
        asked = list(islice(TASKS[args.task](tokenizer, Path(args.data), args.tokens), args.texts))
    for arm in make_arms(shares, args.tokens, args.policies.split(",")):
        began = time.perf_counter()
        planned = plan(arm.config)
        results = [ask(model, tokenizer, planned, arm, scene) for scene in asked]
        full = full or results
        rows.append({"model": ALL_NAMES[name], "tokens": args.tokens, **compare(arm, results, full)})
        print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2,embedded", help="of benchmarks.reports, joined by commas")
    parser.add_argument("--tokens", type=int, default=950)
    parser.add_argument("--share", default="40", help="percentages of the rows to keep, separated by commas")
    parser.add_argument("--texts", type=int, default=16, help="texts, with eight questions each")
    parser.add_argument("--text", help="file in which the facts are planted, in place of WikiText-2")
    parser.add_argument("--task", choices=["facts", *TASKS], default="facts")
    parser.add_argument("--data", help="folder of the task's files")
    parser.add_argument(
        "--policies", default="triattention,heads,compact", help="joined by commas; compact reads each text twice"
    )
    parser.add_argument("--json", default="evict_facts.json")
    args = parser.parse_args()
    if (args.task != "facts") != bool(args.data):
        parser.error("--data names the files of a --task other than facts, and both are needed")
    rows = []
    for name in args.models.split(","):
        rows += measure(name, args)
    command = f"python -m benchmarks.evict.bench_facts --models {args.models} --tokens {args.tokens}"
    command += f" --share {args.share} --texts {args.texts} --policies {args.policies}"
    command += f" --text {args.text}" if args.text else ""
    command += f" --task {args.task} --data DIR" if args.task != "facts" else ""
    save(args.json, command, rows=rows)


if __name__ == "__main__":
    main()
