"""Caches of a batch whose packed rows are in the same buffers, for the tests of all backends."""

from dataclasses import replace

import mlx.core as mx
import numpy as np

from kernels.cases import Problem, check_attention, random
from mlx_tq.kernels.attend import attend_batch
from mlx_tq.kernels.regions import Regions, SharedRows

# The packed tokens of each cache, and those in buffers that others may share: A or C, then B. Caches that share most
# are not neighbors; some have all their rows in such buffers, or all that a buffer has.
CACHES = (
    (160, "A64 B32"), (97, "A64 B32"), (160, ""), (130, "A48"), (70, "C40"),
    (96, "A64 B32"), (60, "A60"), (0, ""), (44, "C44"),
)  # fmt: skip
PREFIXES = [((0, 1, 5), 96), ((3, 6), 48), ((4, 8), 40)]


def shared_batch(problem: Problem) -> list[Regions]:
    """Return `CACHES`, whose rows are the first ones of a problem's, times a factor."""
    whole, buffers = problem.regions(), {}
    batch, factor = [], problem.arguments["packed_tokens"] // 160
    for packed, text in CACHES:
        parts, start = [], 0
        for word in text.split():
            name, count = word[0], factor * int(word[1:])
            if name not in buffers:
                buffers[name] = mx.contiguous(whole.packed_rows[:, :, start : start + 64 * factor])
            parts.append((buffers[name], count))
            start += count
        rows, packed = None, factor * packed
        if packed > start:
            rows = mx.contiguous(whole.packed_rows[:, :, start:])
        elif parts:  # the last one may be written to, so it is no shared one yet
            rows, _ = parts.pop()
        shared = tuple(SharedRows(*part) for part in parts)
        batch.append(replace(whole, packed_rows=rows, packed_tokens=packed, shared=shared))
    return batch


def solve(problem: Problem, batch: list[Regions]) -> tuple[mx.array, mx.array]:
    """Return queries for each cache, and what they attend to."""
    queries = random((len(batch), *problem.arguments["queries"].shape[1:]), "float16", seed=4)
    queries = queries.astype(problem.arguments["queries"].dtype)
    options = {name: problem.arguments[name] for name in ("scale", "mask", "sinks")}
    return queries, attend_batch(queries, batch, **options)


def cut(problem: Problem, packed: int, queries: mx.array) -> Problem:
    """Return the problem of a cache with the first `packed` tokens alone."""
    sinks = problem.arguments["sink_tokens"]
    stop = sinks + problem.arguments["packed_tokens"]

    def select(array, concatenate):
        return concatenate([array[:, :, : sinks + packed], array[:, :, stop:]], axis=2)

    decoded = tuple(select(array, np.concatenate) for array in problem.decoded)
    plain = tuple(select(array, mx.concatenate) for array in problem.plain)
    return problem._replace(decoded=decoded, plain=plain).replace(packed_tokens=packed, queries=queries)


def check(problem: Problem, queries: mx.array, result: mx.array, peak: float = 2.5) -> None:
    factor = problem.arguments["packed_tokens"] // 160
    for i, (packed, _) in enumerate(CACHES):
        check_attention(cut(problem, factor * packed, queries[i : i + 1]), result[i : i + 1], peak=peak)
