"""Measure the retrieval quality of plain BM25, the service's BM25, dense search, and ways to fuse them.

    python -m benchmarks.rescue.bench_retrieval --data DIR     (DIR holds cranfield/ and qmsum/)

The service's defaults follow from the results.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.rescue.public_collections import Collection, PlainBM25, cranfield, measure, qmsum
from benchmarks.rescue.results import save
from rescue_svc.embed import load_embedder
from rescue_svc.schemas import RetrieveRequest
from rescue_svc.service.rank import fuse
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, SqliteStore, fts

DEPTH = 100
DEFAULT_ALPHA = RetrieveRequest.model_fields["hybrid_alpha"].default
Scores = dict[int, float]
Rank = Callable[[Scores, Scores], list[int]]


def fused(alpha: float) -> Rank:
    """Rank by the service's own fusion: each score from 0 at its worst candidate to 1 at its best, then weighted."""
    return lambda dense, bm25: [scored.id for scored in fuse(dense, bm25, alpha)]


def over_best(alpha: float) -> Rank:
    """Rank by each score divided by its best, then weighted."""

    def rank(dense: Scores, bm25: Scores) -> list[int]:
        top_dense, top_bm25 = max(dense.values(), default=1), max(bm25.values(), default=1)
        total = {d: alpha * dense.get(d, 0) / top_dense + (1 - alpha) * bm25.get(d, 0) / top_bm25 for d in dense | bm25}
        return sorted(total, key=lambda d: -total[d])

    return rank


def reciprocal(alpha: float, k: int = 60) -> Rank:
    """Rank by weighted reciprocal rank fusion (Cormack et al., 2009)."""

    def rank(dense: Scores, bm25: Scores) -> list[int]:
        total: Scores = {}
        for weight, scores in ((alpha, dense), (1 - alpha, bm25)):
            for place, d in enumerate(sorted(scores, key=lambda d: -scores[d]), 1):
                total[d] = total.get(d, 0) + weight / (k + place)
        return sorted(total, key=lambda d: -total[d])

    return rank


ALPHAS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
FLOORS = (0.0, 0.1, 0.2, 0.3, 0.4)
TOP_K = 8
FUSIONS: dict[str, Rank] = {
    "dense": fused(1.0),
    **{f"fused {alpha}": fused(alpha) for alpha in ALPHAS},
    **{f"over best {alpha}": over_best(alpha) for alpha in (0.3, 0.5, 0.7)},
    **{f"RRF {alpha}": reciprocal(alpha) for alpha in (0.3, 0.5, 0.7)},
}


def with_store(collection: Collection, tokenizer: str) -> list[Scores]:
    chosen, fts.TOKENIZER = fts.TOKENIZER, tokenizer
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder), Caps(10**6, 10**6, 10))
        numbers = list(collection.documents)
        spans = [NewSpan(n, n + 1, -1, 0.0, collection.documents[n]) for n in numbers]
        store.write("bench", spans)
        session = store.session("bench")
        document = {span.id: span.start for span in store.spans(session)}
        hits = [store.bm25(session, query, DEPTH, set()) for query in collection.queries]
        store.close()
    fts.TOKENIZER = chosen
    return [{document[span]: score for span, score in found.items()} for found in hits]


def dense_scores(
    collection: Collection, embed: Callable[[list[str]], np.ndarray], by_words: list[Scores]
) -> list[Scores]:
    """Return, for each query, the cosines of the nearest documents and of those that BM25 found."""
    place = {number: i for i, number in enumerate(collection.documents)}
    numbers = list(collection.documents)
    similarity = embed(collection.queries) @ embed(list(collection.documents.values())).T
    nearest = np.argsort(-similarity, axis=1)[:, :DEPTH]
    return [
        {numbers[i]: float(row[i]) for i in {*near.tolist(), *(place[d] for d in words_found)}}
        for row, near, words_found in zip(similarity, nearest, by_words, strict=True)
    ]


def floors(dense: list[Scores], bm25: list[Scores], relevant: list[dict[int, int]]) -> dict[str, dict[str, float]]:
    """Return, for each score floor, the recall of the eight best that pass it and how many pass."""
    table = {}
    for floor in FLOORS:
        kept = [
            [s.id for s in fuse(d, b, DEFAULT_ALPHA) if s.similarity >= floor][:TOP_K]
            for d, b in zip(dense, bm25, strict=True)
        ]
        recall = mean(len(set(ids) & gains.keys()) / len(gains) for ids, gains in zip(kept, relevant, strict=True))
        table[f"floor {floor}"] = {"R@8": recall, "chunks": mean(map(len, kept))}
    return table


def bench(collections: list[Collection], embedders: list[str]) -> dict[str, dict[str, float]]:
    rankings: dict[str, list[list[int]]] = {}
    relevant = [gains for collection in collections for gains in collection.relevant]

    def add(arm: str, ranked: list[list[int]]) -> None:
        rankings.setdefault(arm, []).extend(ranked)

    meanings: dict[str, list[Scores]] = {}
    all_words: list[Scores] = []
    loaded = {name: load_embedder(name) for name in embedders}
    for collection in collections:
        plain = PlainBM25(collection.documents)
        add("plain BM25", [plain.rank(query, DEPTH) for query in collection.queries])
        for tokenizer in ("unicode61 remove_diacritics 2", fts.TOKENIZER):
            by_words = with_store(collection, tokenizer)
            add(f"BM25 {tokenizer.split()[0]}", [list(found) for found in by_words])
        for name, embedder in loaded.items():
            by_meaning = dense_scores(collection, embedder.embed, by_words)
            meanings.setdefault(name, []).extend(by_meaning)
            for arm, rank in FUSIONS.items():
                add(f"{name} {arm}", [rank(d, b) for d, b in zip(by_meaning, by_words, strict=True)])
        all_words += by_words
    tables = {arm: measure(ranked, relevant) for arm, ranked in rankings.items()}
    for name, by_meaning in meanings.items():
        tables |= {f"{name} {arm}": row for arm, row in floors(by_meaning, all_words, relevant).items()}
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cranfield/ and qmsum/")
    parser.add_argument("--embedders", nargs="*", default=["minilm", "hashing"])
    arguments = parser.parse_args()
    tables = {}
    for name, load in (("cranfield", cranfield), ("qmsum", qmsum)):
        tables[name] = bench(load(arguments.data / name), arguments.embedders)
        print(f"\n{name}")
        for arm, row in tables[name].items():
            print(f"{arm:<24}" + "".join(f"{measure:>8} {value:.3f}" for measure, value in row.items()))
    save("rescue_retrieval", tables)


if __name__ == "__main__":
    main()
