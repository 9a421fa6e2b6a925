"""Train the levels of trellis states: Lloyd's iteration over paths, on standard normal values.

    python -m benchmarks.studies.trellis_train FILE

This is how `mlx_tq/assets/trellis/levels.safetensors` was made: fp16 [256] for each of 1 to 7 bits. Stored caches
depend on the shipped file, so it is never replaced. Another kind of processor may round otherwise.
"""

import math
import sys
from statistics import NormalDist

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats.trellis import STATES, WINDOW, search_path

VECTORS, VALUES, ROUNDS = 8192, 128, 96
SORTED_FROM = 6  # bits; with fewer, training ends with a smaller error from random levels


def refine(levels: np.ndarray, x: np.ndarray, bits: int, parts: int = 1) -> tuple[np.ndarray, float]:
    """Return the means of the values [N, D] on the best paths over levels fp32 [S], and the error of these levels."""
    path = np.concatenate(
        [np.array(search_path(mx.array(part), mx.array(levels), bits)) for part in np.split(x, parts)]
    )
    times = np.bincount(path.ravel(), minlength=len(levels))
    mean = np.bincount(path.ravel(), x.ravel(), minlength=len(levels)) / np.maximum(times, 1)
    return np.where(times > 0, mean, levels).astype(np.float32), float(np.square(x - levels[path]).mean())


def first_levels(bits: int, states: int, rng: np.random.Generator) -> np.ndarray:
    """Return random levels; from SORTED_FROM bits on, levels in order, of which neighbors are in different groups."""
    if bits < SORTED_FROM:
        return rng.permutation(np.sort(rng.standard_normal(states))).astype(np.float32)
    # Levels are best as dense as the cube root of the values' density, which for normal values is normal and wider.
    in_order = [math.sqrt(3) * NormalDist().inv_cdf((i + 0.5) / states) for i in range(states)]
    return np.array(in_order, np.float32).reshape(1 << bits, -1).T.ravel()


def trained(bits: int, window: int = WINDOW, vectors: int = VECTORS, rounds: int = ROUNDS) -> np.ndarray:
    """Return fp32 [2^window]: the level of a state is the mean of the values that pass through it."""
    rng = np.random.default_rng(0)
    states = 1 << window
    levels = first_levels(bits, states, rng)
    for number in range(rounds):
        x = rng.standard_normal((vectors, VALUES)).astype(np.float32)
        levels, error = refine(levels, x, bits, parts=16)
        print(f"{bits} bits, {states} states, round {number}: {error:.5f}", flush=True)
    return levels


if __name__ == "__main__":
    found = {str(bits): mx.array(trained(bits)).astype(mx.float16) for bits in range(1, 8)}
    assert all(each.size == STATES for each in found.values())
    mx.save_safetensors(sys.argv[1], found)
