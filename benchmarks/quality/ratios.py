"""Compare records of divergence by blocks of tokens, whose errors a ratio of two records shares."""

import math
from collections.abc import Sequence

import numpy as np

from mlx_tq.evaluate.results import Record
from mlx_tq.evaluate.standard_error import CLUSTERS, standard_error


def compare(row: Record, other: Record) -> tuple[float, float]:
    """Return the ratio of two records' divergences, and its standard error over the blocks that they share."""
    shared = min(len(row["blocks"]), len(other["blocks"]))
    above, below = np.array(row["blocks"][:shared]), np.array(other["blocks"][:shared])
    ratio = above.mean() / below.mean()
    clusters = clusters_of_blocks(min(row["texts"], other["texts"]), shared)
    return float(ratio), standard_error(above - ratio * below, clusters) / float(below.mean())


def clusters_of_blocks(texts: int, blocks: int) -> np.ndarray:
    """Return the cluster of each block of texts of equal length: 16 parts in all, within which blocks are dependent."""
    parts = min(blocks, texts * max(1, CLUSTERS // texts))
    return np.arange(blocks) * parts // blocks


def interpolate(rows: Sequence[Record], bits: float) -> float:
    """Return the divergence at a number of bits, linear in its logarithm; beyond the rows, the nearest two go on."""
    rows = sorted(rows, key=lambda row: float(row["bits"]))
    if len(rows) == 1:
        return float(rows[0]["kld"]) * 4.0 ** (rows[0]["bits"] - bits)
    last = next((i for i in range(1, len(rows)) if rows[i]["bits"] >= bits), len(rows) - 1)
    low, high = rows[last - 1], rows[last]
    share = (bits - low["bits"]) / (high["bits"] - low["bits"])
    return math.exp((1 - share) * math.log(low["kld"]) + share * math.log(high["kld"]))
