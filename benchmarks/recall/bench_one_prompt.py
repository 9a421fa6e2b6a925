"""Measure whether recall finds the evidence of a document and its question in one prompt.

    python -m benchmarks.recall.bench_one_prompt --model smollm2 --data DIR --collection longeval --cases 0-24 --json F

The question is the last paragraph, as `mlx_tq.generate` finds it; the blocks of the evidence are evicted from the rest.
DIR holds longeval/200_lines.jsonl and qmsum/ALL_val.jsonl, as published.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recall.arms import inside, places, recalls, words_order
from benchmarks.recall.parts import Part
from benchmarks.recall.scenes import config, encode, frame, read
from mlx_tq import compressed_attention, load, make_prompt_cache
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.session.restore import split_question
from mlx_tq.session.transcript import sentence_at

# Of a document's tokens, the evidence's at most.
_MOST_EVIDENCE = 0.25
# Where evidence begins and ends, as a share of the document: what stands at an edge may stay in the cache.
_FIRST, _LAST = 0.1, 0.85


@dataclass(frozen=True)
class Document:
    """A text in pieces, the numbers of those that are evidence, and the question behind the text."""

    pieces: list[str]
    evidence: list[int]
    question: str


Count = Callable[[str], int]


def lines(path: Path, tokens: int, count: Count) -> Iterator[Document]:
    """Yield LongEval's records of lines, one of which is asked for; of each record as many lines as fit."""
    for number, text in enumerate((path / "longeval" / "200_lines.jsonl").read_text(encoding="utf-8").splitlines()):
        case = json.loads(text)
        head, _, rest = case["prompt"].partition("\n\n")
        record, _, question = rest.rpartition("\n\n")
        pieces = [f"{line}\n" for line in record.splitlines()]
        asked = pieces.index(case["correct_line"].strip() + "\n")
        space = tokens - count(head) - count(question)
        found = _cut(pieces, [asked], space, count, random.Random(number))
        if found is not None:
            kept, evidence = found
            yield Document([head + "\n\n", *kept], [place + 1 for place in evidence], question.strip())


def meetings(path: Path, tokens: int, count: Count) -> Iterator[Document]:
    """Yield QMSum's questions, each with the part of the meeting around the turns that answer it."""
    for number, text in enumerate((path / "qmsum" / "ALL_val.jsonl").read_text(encoding="utf-8").splitlines()):
        meeting = json.loads(text)
        turns = [f"{turn['speaker']}: {turn['content']}\n" for turn in meeting["meeting_transcripts"]]
        for place, query in enumerate(meeting["specific_query_list"]):
            evidence = sorted({t for a, b in query["relevant_text_span"] for t in range(int(a), int(b) + 1)})
            evidence = [turn for turn in evidence if turn < len(turns)]
            space = tokens - count(query["query"])
            rng = random.Random(1000 * number + place)
            found = _cut(turns, evidence, space, count, rng) if evidence else None
            if found is not None and sum(count(found[0][i]) for i in found[1]) <= _MOST_EVIDENCE * tokens:
                yield Document(found[0], found[1], query["query"])


def _cut(
    pieces: list[str], evidence: list[int], space: int, count: Count, rng: random.Random
) -> tuple[list[str], list[int]] | None:
    """Return neighboring pieces of up to `space` tokens with all evidence well inside, or None."""
    first, last = evidence[0], evidence[-1]
    inside = sum(count(piece) for piece in pieces[first : last + 1])
    low, high = _FIRST * space, _LAST * space - inside
    if high < low:
        return None
    wanted, before, start = rng.uniform(low, high), 0, first
    while start and before + (size := count(pieces[start - 1])) <= wanted:
        start, before = start - 1, before + size
    used, stop = before + inside, last + 1
    while stop < len(pieces) and used + (size := count(pieces[stop])) <= space:
        stop, used = stop + 1, used + size
    if before < low or before + inside > _LAST * used:
        return None
    return pieces[start:stop], [place - start for place in evidence]


COLLECTIONS: dict[str, Callable[[Path, int, Count], Iterator[Document]]] = {"longeval": lines, "qmsum": meetings}


def chosen(name: str, path: Path, tokens: int, tokenizer: Any) -> list[Document]:
    return list(COLLECTIONS[name](path, tokens, lambda text: len(tokenizer.encode(text, add_special_tokens=False))))


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

    def search(blocks: list[ArchivedBlock]) -> dict[str, list[ArchivedBlock]]:
        texts.extend(tokenizer.decode([ids[p] for p in block.positions]) for block in blocks)
        return {"words": [blocks[i] for i in words_order(texts, case.question, rng)]}

    sentences = partial(sentence_at, ids=ids, decode=tokenizer.decode)
    found = recalls(model, caches, question, spans, sentences, search, rng)
    live = set(compressed_caches(found.caches)[0].positions.tolist())
    blocks = sorted(found.orders["queries"], key=lambda block: int(block.positions[0]))
    total = sum(stop - start for start, stop in spans)
    back = {
        arm: sum(inside(e.positions, each) for e in blocks for each in spans) for arm, blocks in found.found.items()
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
        "recalled": sum(len(block.positions) for block in found.found["queries"]),
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
    with compressed_attention(model):
        for number in range(int(first), min(int(last or first) + 1, len(cases))):
            if number not in part.done:
                part.add(number, [row(model, tokenizer, args, cases[number], number)])


if __name__ == "__main__":
    main()
