"""Measures of a ranking: recall, reciprocal rank, and nDCG (Jarvelin and Kekalainen, 2002)."""

import math
from statistics import mean


def measure(rankings: list[list[int]], relevant: list[dict[int, int]]) -> dict[str, float]:
    """Return R@5, R@10, R@20, MRR and nDCG@10, each the mean over the queries."""
    pairs = list(zip(rankings, relevant, strict=True))
    recalls = {f"R@{k}": mean(len(set(r[:k]) & gains.keys()) / len(gains) for r, gains in pairs) for k in (5, 10, 20)}
    mrr = mean(next((1 / place for place, d in enumerate(r, 1) if d in gains), 0.0) for r, gains in pairs)
    return recalls | {"MRR": mrr, "nDCG@10": mean(_ndcg(r[:10], gains) for r, gains in pairs)}


def _ndcg(ranking: list[int], gains: dict[int, int]) -> float:
    ideal = sorted(gains.values(), reverse=True)[:10]
    return _dcg([gains.get(d, 0) for d in ranking]) / _dcg(ideal)


def _dcg(gains: list[int]) -> float:
    return sum(gain / math.log2(place + 1) for place, gain in enumerate(gains, 1))
