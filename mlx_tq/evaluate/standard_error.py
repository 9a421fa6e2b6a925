"""Standard errors of means over tokens, of which those of one part of a text depend on each other."""

import math
from collections.abc import Sequence

import numpy as np

CLUSTERS = 16  # fewer give no reliable standard error
MIN_CLUSTER = 32  # tokens of a part of a chunk


def cut_clusters(counts: Sequence[int]) -> np.ndarray:
    """Return the cluster of each token, for chunks that have these counts of scored tokens.

    A cluster is a chunk. Fewer chunks than CLUSTERS are cut into equal parts of MIN_CLUSTER tokens or more.
    """
    clusters: list[np.ndarray] = []
    first, most_parts, least_parts = 0, -(-CLUSTERS // len(counts)), -(-2 // len(counts))
    for count in counts:
        parts = max(least_parts, min(most_parts, count // MIN_CLUSTER))
        clusters.append(first + np.arange(count) * parts // count)
        first += parts
    return np.concatenate(clusters)


def standard_error(values: np.ndarray, clusters: np.ndarray | None = None) -> float:
    """Return the standard error of the mean of values [N], of which those of one cluster depend on each other.

    The sandwich estimator with its correction for few clusters; without clusters, values are independent.
    """
    numbers = np.arange(len(values)) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    count = int(numbers.max()) + 1
    if count < 2:
        return math.inf
    sums = np.bincount(numbers, weights=values - values.mean())
    return float(math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values))


def count_clusters(clusters: np.ndarray) -> int:
    return len(np.unique(clusters))
