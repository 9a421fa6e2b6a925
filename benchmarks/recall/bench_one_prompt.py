"""A document and its question in one prompt, and whether the evidence is among what comes back.

The last paragraph of the prompt is its question, as `mlx_tq.generate` finds it; the rest is read first, and loses the
blocks of the evidence. The data's folder holds longeval/200_lines.jsonl and qmsum/ALL_val.jsonl, as published.

python -m benchmarks.recall.bench_one_prompt --model smollm2 --data DIR --collection longeval --cases 0-24 --json a.json
"""

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.recall.arms import inside, places, recalls, words_order
from benchmarks.recall.documents import COLLECTIONS, Document, chosen
from benchmarks.recall.parts import Part
from benchmarks.recall.scenes import config, encode, frame, read
from mlx_tq import compressed, load, make_prompt_cache
from mlx_tq.prompt_cache.archive import Extent
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.session.restore import split_question


def best(ranks: list[int | None]) -> int | None:
    """Return the best rank of any part of the evidence; None if all of it is live."""
    return min((rank for rank in ranks if rank is not None), default=None)


def row(model: Any, tokenizer: Any, args: argparse.Namespace, case: Document, number: int) -> dict[str, Any]:
    around = frame(tokenizer, "")
    ids, spans = list(around.head), [(0, 0)]
    for place, piece in enumerate(case.pieces):
        start = len(ids)
        ids += encode(tokenizer, piece)
        if place in case.evidence:  # neighbors are one span
            since = spans.pop()[0] if spans[-1][1] == start else start
            spans.append((since, len(ids)))
    spans = spans[1:]
    ids += encode(tokenizer, f"\n{case.question}{around.after}")
    document, question = split_question(tokenizer, ids)
    caches = make_prompt_cache(model, config(args.key, args.value, spans, args.budget))
    read(model, caches, document)
    rng, texts = random.Random(number), []

    def search(blocks: list[Extent]) -> dict[str, list[Extent]]:
        texts.extend(tokenizer.decode([ids[p] for p in block.positions]) for block in blocks)
        return {"words": [blocks[i] for i in words_order(texts, case.question, rng)]}

    found = recalls(model, caches, question, spans, search, rng)
    live = set(compressed_caches(found.caches)[0].positions.tolist())
    blocks = sorted(found.orders["queries"], key=lambda extent: int(extent.positions[0]))
    total = sum(stop - start for start, stop in spans)
    back = {
        arm: sum(inside(e.positions, each) for e in extents for each in spans) for arm, extents in found.found.items()
    }
    return {
        "collection": args.collection,
        "case": number,
        "tokens": len(ids),
        "budget": args.budget,
        "evidence": total,
        "live": sum(p in live for each in spans for p in range(*each)),
        "ranks": {arm: best(places(order, spans)) for arm, order in found.orders.items()},
        "back": back,
        "blocks": len(blocks),
        "recalled": sum(len(extent.positions) for extent in found.found["queries"]),
        "recall_seconds": found.seconds,
        "most": found.tokens,
        "search": {
            "question": case.question,
            "texts": texts,
            "holds": [[inside(block.positions, each) for each in spans] for block in blocks],
            "places": [(int(block.positions[0]), len(block.positions)) for block in blocks],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="by default the embedded one")
    parser.add_argument("--name", help="of the model in the tables; by default as given")
    parser.add_argument("--data", type=Path, required=True, help="folder of the collections")
    parser.add_argument("--collection", choices=COLLECTIONS, required=True)
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt, at most")
    parser.add_argument("--cases", default="0-24", help="first to last")
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--key", default="q8")
    parser.add_argument("--value", default="tq4")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    first, _, last = args.cases.partition("-")
    settings = {name: getattr(args, name) for name in ("collection", "tokens", "budget")}
    model_name = args.name or args.model or "embedded"
    about = {"model": model_name, "key": args.key, "value": args.value, "settings": settings}
    part = Part(args.json, about)
    model, tokenizer = load(args.model, dtype="float32", dequantize=args.model is not None)
    cases = chosen(args.collection, args.data, args.tokens - 100, tokenizer)
    with compressed(model):
        for number in range(int(first), min(int(last or first) + 1, len(cases))):
            if number not in part.done:
                part.add(number, [row(model, tokenizer, args, cases[number], number)])


if __name__ == "__main__":
    main()
