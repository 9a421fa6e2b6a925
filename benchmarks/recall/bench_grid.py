"""Measure recall in a grid of questions, lengths, budgets and arms.

    python -m benchmarks.recall.bench_grid --model smollm2 --tokens 1000 --kind plain --texts 0-5 --json cell.json

Each text is prefilled once in full and once at each budget; every question is asked of copies, in every arm. A row is
one question at one budget. Results are written after each text, and an interrupted run resumes.
"""

import argparse
import copy
import random
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.recall.arms import (
    Asked,
    Recalls,
    answer,
    inside,
    is_cut,
    likeness,
    named,
    places,
    quoted,
    recalls,
    words_order,
)
from benchmarks.recall.needles import KINDS, Needle
from benchmarks.recall.parts import ARMS, Part
from benchmarks.recall.scenes import Frame, Scene, config, encode, frame, plant_needles, read
from mlx_tq import compressed_attention, load, make_prompt_cache
from mlx_tq.cli.loading import calibrate_model
from mlx_tq.evaluate.inspection import reseed_random
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.session.transcript import sentence_at
from rescue_svc.embed.registry import embedder_class

LONGEST_TEXTS = 4096  # texts of blocks are kept for other embedders up to so many tokens


def asked_of(tokenizer: Any, around: Frame, needle: Needle, before: str = "", *, free: bool = True) -> Asked:
    """Return a needle's question after a quotation; without `free`, only the log-probability is judged."""
    opening = encode(tokenizer, around.opening) if around.opening else []
    space = " " if opening or not around.after else ""
    answers = encode(tokenizer, space + " and ".join(needle.answers))
    ids = encode(tokenizer, f"\n\n{before}{needle.question}{around.after}")
    return Asked(ids, opening, answers, needle.answers, (12 + len(answers)) * free)


class Cell:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.arms = ARMS if args.arms == "all" else tuple(args.arms.split(","))
        self.free = self.arms if args.answers == "all" else tuple(args.answers.split(","))
        self.model, self.tokenizer = load(args.model, dtype="float32", dequantize=args.model is not None)
        self.policies = args.policies.split(",") if args.policies else [None]
        for policy in filter(None, self.policies):
            calibrate_model(self.model, self.tokenizer, config(args.key, args.value, [], "50%", policy))
        self.frame = frame(self.tokenizer, args.opening)
        self.embedder = embedder_class("minilm")(None) if {"meaning", "both"} & set(self.arms) else None

    def rows(self, seed: int) -> list[dict[str, Any]]:
        args, rng = self.args, random.Random(seed)
        made = plant_needles(self.tokenizer, self.frame.head, args.kind, args.tokens, args.needles, rng)
        spans = [span for each in made.evidence() for span in each]
        losses = [*([(None, None)] if "full" in self.arms else []), *product(self.policies, args.budgets.split(","))]
        caches = {
            (policy, budget): make_prompt_cache(self.model, config(args.key, args.value, spans, budget, policy))
            for policy, budget in losses
        }
        for each in caches.values():
            reseed_random(each, seed)
            read(self.model, each, made.ids)
        asked = [asked_of(self.tokenizer, self.frame, each, free="full" in self.free) for each in made.hidden.needles]
        full = [self.judged(caches[None, None], each) for each in asked if "full" in self.arms]
        rows = []
        for (policy, budget), each in caches.items():
            if budget is None:
                continue
            for number in range(len(made.hidden.needles)):
                began = time.perf_counter()
                row = {"kind": args.kind, "asked": args.tokens, "tokens": len(made.ids), "text": seed}
                row |= {"budget": budget, "needle": number, **self.row(made, number, each, rng)}
                if policy is not None:
                    row["policy"] = policy
                if full:
                    row["arms"]["full"] = full[number]
                rows.append({**row, "seconds": time.perf_counter() - began})
        return rows

    def row(self, made: Scene, number: int, caches: list[Any], rng: random.Random) -> dict[str, Any]:
        tokenizer, needle, spans = self.tokenizer, made.hidden.needles[number], made.evidence()[number]
        texts: list[str] = []

        def search(blocks: list[ArchivedBlock]) -> dict[str, list[ArchivedBlock]]:
            texts[:] = [tokenizer.decode([made.ids[p] for p in block.positions]) for block in blocks]
            orders = {"words": [blocks[i] for i in words_order(texts, needle.question, rng)]}
            if self.embedder is not None:
                alike = likeness(self.embedder, needle.question, texts)
                orders["meaning"] = [blocks[i] for i in (-alike).argsort(kind="stable")]
            return orders

        def name(blocks: list[ArchivedBlock]) -> list[ArchivedBlock]:
            return named(self.embedder, needle.question, made.ids, blocks, tokenizer.decode)

        asked = asked_of(tokenizer, self.frame, needle)
        sentences = partial(sentence_at, ids=made.ids, decode=tokenizer.decode)
        more = name if "both" in self.arms else None
        found = recalls(self.model, caches, asked.ids, spans, sentences, search, rng, more)
        live = set(compressed_caches(found.caches)[0].positions.tolist())
        blocks = sorted(found.orders["queries"], key=lambda block: int(block.positions[0]))
        row = {
            "live": [sum(p in live for p in range(*span)) / (span[1] - span[0]) for span in spans],
            "cut": [is_cut(span) for span in spans],
            "ranks": {arm: places(order, spans) for arm, order in found.orders.items()},
            "back": {arm: found.back(arm, spans) for arm in found.found},
            "archived": sum(len(block.positions) for block in blocks),
            "blocks": len(blocks),
            "recalled": sum(len(block.positions) for block in found.found["queries"]),
            "recall_seconds": found.seconds,
            "deciding": found.deciding_layers,
            "arms": {arm: self.arm(arm, made, needle, found) for arm in self.arms if arm != "full"},
        }
        if len(made.ids) <= LONGEST_TEXTS and not self.args.policies:
            holds = [[inside(block.positions, span) for span in spans] for block in blocks]
            row["search"] = {"question": needle.question, "texts": texts, "holds": holds}
        return row

    def arm(self, arm: str, made: Scene, needle: Needle, found: Recalls) -> dict[str, Any]:
        before = quoted(self.tokenizer, made.ids, found.found["words"]) if arm == "quoted" else ""
        asked = asked_of(self.tokenizer, self.frame, needle, before, free=arm in self.free)
        return self.judged(found.with_rows(arm), asked)

    def judged(self, caches: list[Any], asked: Asked) -> dict[str, Any]:
        right, likely = answer(self.model, self.tokenizer, copy.deepcopy(caches), asked)
        return {"right": right, "log": round(likely, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="by default the embedded one")
    parser.add_argument("--name", help="of the model in the tables; by default as given")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--budgets", default="50%,25%,10%")
    parser.add_argument("--needles", type=int, default=4, help="questions a text")
    parser.add_argument("--texts", default="0-5", help="numbers of texts, first to last")
    parser.add_argument("--policies", help="of eviction, joined by commas; by default what is asked for leaves first")
    parser.add_argument("--arms", default="all", help="names, joined by commas")
    parser.add_argument("--answers", default="all", help="of these arms, those that answer freely, which takes long")
    parser.add_argument("--opening", default="The answer is", help="of an answer whose log-probability is taken")
    parser.add_argument("--key", default="q8")
    parser.add_argument("--value", default="tq4")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    first, _, last = args.texts.partition("-")
    settings = {
        name: getattr(args, name) for name in ("kind", "tokens", "budgets", "needles", "policies", "arms", "opening")
    }
    model = args.name or args.model or "embedded"
    about = {"model": model, "key": args.key, "value": args.value, "settings": settings}
    part = Part(args.json, about)
    texts = [seed for seed in range(int(first), int(last or first) + 1) if seed not in part.done]
    if texts:
        cell = Cell(args)
        with compressed_attention(cell.model):
            for seed in texts:
                part.add(seed, cell.rows(seed))


if __name__ == "__main__":
    main()
