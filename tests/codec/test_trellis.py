"""The search that docs/measurements/trellis.md rests on, against all paths there are."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.trellis.coder import Trellis, search
from benchmarks.trellis.sketches import codes, order

LEVELS = np.random.default_rng(1).standard_normal(16).astype(np.float32)  # of windows of 4 bits


def states(path, start, bits):
    """Of a path of codes, from the state before it."""
    found = []
    for code in path:
        start = (start << bits | code) & 15
        found.append(start)
    return found


@pytest.mark.parametrize("bits", [1, 2])
def test_the_search_finds_the_best_of_all_paths(bits):
    """Free, and from a state back to it."""
    vectors = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
    every = [states(path, start, bits) for start in range(16) for path in product(range(1 << bits), repeat=5)]
    ends = np.array([3, 0, 9, 6])
    for given in (None, ends):
        found = np.array(search(mx.array(vectors), mx.array(LEVELS), bits, None if given is None else mx.array(ends)))
        for i, x in enumerate(vectors):
            allowed = every if given is None else _ring(every, ends[i], bits)
            errors = np.square(LEVELS[np.array(allowed)] - x).sum(axis=-1)
            assert found[i].tolist() == allowed[errors.argmin()]


def _ring(every, end, bits):
    first = [states([code], end, bits)[0] for code in range(1 << bits)]
    return [path for path in every if path[0] in first and path[-1] == end]


@pytest.mark.parametrize(("bits", "window"), [(2, 5), (3, 6), (4, 7)])
def test_a_path_is_a_ring_of_bits(bits, window):
    """Each state is the end of the state before and a code of its own, and codes alone give all states back."""
    x = mx.array(np.random.default_rng(3).standard_normal((3, 48)).astype(np.float32))
    trellis = Trellis(bits, window, "computed", around=8)
    path = np.array(trellis.encode(x)).astype(np.int64)
    mask = (1 << window) - 1
    assert ((np.roll(path, 1, axis=-1) << bits & mask) == (path & ~((1 << bits) - 1))).all()
    per_unit = 3 if bits == 3 else 1
    words = codes(path, bits)
    ring = words.reshape(3, per_unit, -1).swapaxes(-1, -2).reshape(3, -1)
    text = ["".join(f"{word:016b}" for word in row) for row in ring]
    read = [[int((row + row)[len(row) + bits * (i + 1) - window :][:window], 2) for i in range(48)] for row in text]
    assert (np.array(read) == path).all()
    assert sorted(order(48, bits)) == list(range(48))
