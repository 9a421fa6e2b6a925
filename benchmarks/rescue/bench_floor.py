"""Measure scores of relevant and of unrelated spans, by embedder and by how spans are cut.

    python -m benchmarks.rescue.bench_floor --data DIR     (DIR holds cranfield/ and qmsum/)

For every query: the best score of a relevant span, and the best of unrelated text. Planted facts: 60 texts of 2,000
tokens, cut to sentences as sessions do and to 64 tokens. QMSum: every seventh meeting. Cranfield: 60 questions, three
abstracts each. Unrelated text is 60 spans of WikiText-2, or the text around a fact. The embedder's floor follows.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rescue.public_collections import cranfield
from benchmarks.rescue.results import save
from mlx_tq import load
from mlx_tq.cli.haystack import build_scene, code_word
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.model_calibration import KINDS
from mlx_tq.session.transcript import make_spans
from rescue_svc.embed import load_embedder

FLOORS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
SEEDS, TOKENS, BLOCK, OTHERS = 10, 2000, 64, 60


class Question(NamedTuple):
    text: str
    good: list[str]
    other: list[str]


def planted(tokenizer: Any, blocks: bool) -> Iterator[Question]:
    for make in (code_word, *KINDS):
        for seed in range(SEEDS):
            rng = random.Random(seed)
            fact = make(rng)
            depth = rng.random()
            scene = build_scene(
                tokenizer, load_text(), [fact], [depth], rng, tokens=TOKENS, sinks=0, window=0, chat=False
            )
            ids = scene.ids
            ranges = [(start, start + BLOCK) for start in range(0, len(ids), BLOCK)]
            if not blocks:
                ranges = [(span.start, span.stop) for span in make_spans(range(len(ids)), ids, tokenizer.decode)]
            first, last = scene.needles[0]
            holds = [start < last and first < stop for start, stop in ranges]
            texts = [tokenizer.decode(ids[start:stop]) for start, stop in ranges]
            yield Question(
                fact.question,
                [text for text, held in zip(texts, holds, strict=True) if held],
                [text for text, held in zip(texts, holds, strict=True) if not held],
            )


def cutter(tokenizer: Any) -> Callable[[str], list[str]]:
    def cut(text: str) -> list[str]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [span.text for span in make_spans(range(len(ids)), ids, tokenizer.decode)]

    return cut


def meetings(folder: Path, cut: Callable[[str], list[str]], other: list[str]) -> Iterator[Question]:
    """Yield the questions of every seventh meeting; the answers are in the turns that the collection names."""
    for line in (folder / "ALL_val.jsonl").read_text().splitlines()[::7]:
        record = json.loads(line)
        turns = [cut(f"{turn['speaker']}: {turn['content']}") for turn in record["meeting_transcripts"]]
        for question in record["specific_query_list"]:
            good = {n for first, last in question["relevant_text_span"] for n in range(int(first), int(last) + 1)}
            spans = [span for n in sorted(good) if n < len(turns) for span in turns[n]]
            if spans:
                yield Question(question["query"], spans, other)


def abstracts(folder: Path, cut: Callable[[str], list[str]], other: list[str]) -> Iterator[Question]:
    (collection,) = cranfield(folder)
    for query, gains in random.Random(0).sample(list(zip(collection.queries, collection.relevant, strict=True)), 60):
        good = [document for document, gain in gains.items() if gain >= 3 and collection.documents[document].strip()]
        if good:
            spans = [span for document in good[:3] for span in cut(collection.documents[document])]
            yield Question(query, spans, other)


def measure(questions: list[Question], embed: Callable[[list[str]], np.ndarray]) -> dict[str, Any]:
    """Return how far apart the best scores are, and what each floor loses and lets pass."""
    vectors: dict[str, np.ndarray] = {}
    texts = {text for q in questions for text in (q.text, *q.good, *q.other)}
    for text in texts:
        vectors[text] = embed([text])[0]

    def best(question: Question, spans: list[str]) -> float:
        return max(float(vectors[question.text] @ vectors[span]) for span in spans)

    good = np.array([best(q, q.good) for q in questions])
    other = np.array([best(q, q.other) for q in questions])
    return {
        "questions": len(questions),
        "good": np.quantile(good, (0, 0.05, 0.5)).tolist(),  # least, 5 %, median
        "other": np.quantile(other, (0.5, 0.95, 1)).tolist(),
        "first": float((good > other).mean()),
        "lost": {str(floor): float((good < floor).mean()) for floor in FLOORS},
        "passed": {str(floor): float((other >= floor).mean()) for floor in FLOORS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cranfield/ and qmsum/")
    parser.add_argument("--embedders", nargs="*", default=["minilm", "hashing"])
    args = parser.parse_args()
    tokenizer = load()[1]
    cut = cutter(tokenizer)
    other = cut(load_text()[:20_000])[:OTHERS]
    collections = {
        "facts, sentences": list(planted(tokenizer, blocks=False)),
        "facts, 64 tokens": list(planted(tokenizer, blocks=True)),
        "qmsum": list(meetings(args.data / "qmsum", cut, other)),
        "cranfield": list(abstracts(args.data / "cranfield", cut, other)),
    }
    tables: dict[str, dict[str, Any]] = {}
    for name in args.embedders:
        embedder = load_embedder(name)
        for collection, questions in collections.items():
            row = tables.setdefault(collection, {})[name] = measure(questions, embedder.embed)
            print(f"{name:8} {collection:16} {json.dumps(row)}", flush=True)
    save("rescue_floor", tables)


if __name__ == "__main__":
    main()
