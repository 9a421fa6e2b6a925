"""A layer whose heads keep different tokens is one call, whose work falls with the rows of each head."""

from random import Random
from typing import Any

import mlx.core as mx
import pytest

from kernels.cases import HEADS, check_attention, make_problem
from kernels.metal.checks import PEAK
from kernels.metal.simulated import launching, simulated, zeros
from kernels.test_by_head import divide, options, random_problem
from mlx_tq.kernels import by_head, thresholds
from mlx_tq.kernels.by_head import attend_batch_by_head, attend_by_head
from mlx_tq.kernels.thresholds import KernelThresholds

CASE = {"batch": 1, "length": 1, "mask": "causal", "sink_tokens": 5, "recent": 6}
SHORT = 8  # queries of a decode step or of a verify pass


def check_counts(counts: tuple[int, ...], short_tokens: int = 0, **simulation: Any) -> None:
    """Attend to so many of the packed rows in each head; the simulator gets the other arguments."""
    changes = {name: simulation.pop(name) for name in ("key", "value", "normalized") if name in simulation}
    problem = make_problem(**{**CASE, **changes}, packed=max(counts), groups=3)
    masked, regions = divide(problem, [(head,) for head in range(HEADS)], counts)
    with simulated(**simulation), thresholds.using(KernelThresholds(short_tokens=short_tokens, min_block=32)):
        out = attend_by_head(masked.arguments["queries"], regions, **options(masked))
    check_attention(masked, out, peak=PEAK)


@pytest.mark.parametrize("seed", range(16))
def test_random_rows_of_each_head(seed):
    """Packed rows that a head shares with other caches are not copied; heads that share none are one call."""
    problem, regions = random_problem(seed)
    queries = problem.arguments["queries"]
    length = min(SHORT, queries.shape[2])
    mask = problem.arguments["mask"][:, :, -length:]
    problem = problem.replace(queries=queries[:, :, -length:], mask=mask)
    short_tokens = Random(seed).choice((0, 4096))
    with simulated(), thresholds.using(KernelThresholds(short_tokens=short_tokens)):
        out = attend_by_head(problem.arguments["queries"], regions, **options(problem))
    check_attention(problem, out, peak=PEAK)


@pytest.mark.parametrize("short_tokens", [0, 4096], ids=["two", "one"])
@pytest.mark.parametrize("counts", [(80, 33), (0, 97), (40, 40)])
def test_rows_of_each_head(counts, short_tokens):
    check_counts(counts, short_tokens)


def test_sorted_dims_of_each_head():
    check_counts((80, 33), key="stcq2", normalized="gaps")


@pytest.mark.parametrize(("normalized", "most"), [(None, 8), ("gaps", 4)])
def test_calls(normalized, most, monkeypatch):
    """Two groups of heads are two sources of a call; a cache with more groups than a call takes needs several."""
    names: list[str] = []

    def run(kernel, *, inputs, constants, **call):
        names.append(kernel.name)
        assert len(inputs) == len(kernel.input_names(constants))
        return zeros(**call)

    def calls(caches: int) -> int:
        problem = make_problem(**CASE, packed=60, normalized=normalized)
        masked, regions = divide(problem, [(0,), (1,)], (60, 7))
        queries = mx.repeat(masked.arguments["queries"], caches, axis=0)
        names.clear()
        with launching(run), thresholds.using(KernelThresholds(short_tokens=4096)):
            attend_batch_by_head(queries, [regions] * caches, **options(masked))
        return len(names)

    assert [calls(count) for count in (1, most // 2, most // 2 + 1)] == [1, 1, 2]
    monkeypatch.setattr(by_head, "most_sources", lambda *_, **__: 1)
    assert calls(1) == 2


def test_more_groups_than_a_call_takes(monkeypatch):
    """Each call gets some heads, here one, with their attention-sink logits."""
    monkeypatch.setattr(by_head, "most_sources", lambda *_, **__: 1)
    problem = make_problem(**CASE, packed=97, groups=2, sinks=True, normalized="blocks")
    masked, regions = divide(problem, [(1,), (0,)], (97, 40))
    with simulated(), thresholds.using(KernelThresholds(short_tokens=0)):
        out = attend_by_head(masked.arguments["queries"], regions, **options(masked))
    check_attention(masked, out, peak=PEAK)


def test_a_verify_pass_is_multiplied_as_matrices():
    problem = make_problem(**{**CASE, "length": 8, "sinks": True}, packed=200, groups=4, normalized="gaps")
    masked, regions = divide(problem, [(0,), (1,)], (200, 33))
    with simulated() as calls, thresholds.using(KernelThresholds(short_tokens=0, matrix_queries=16)):
        out = attend_by_head(masked.arguments["queries"], regions, **options(masked))
    assert len(calls) == 2
    check_attention(masked, out, peak=PEAK)


@pytest.mark.parametrize("counts", [(256, 256), (256, 64), (64, 0)])
def test_each_head_s_rows_are_read_once(counts):
    problem = make_problem(**CASE, packed=256, groups=4)
    masked, regions = divide(problem, [(0,), (1,)], counts)
    with simulated() as calls, thresholds.using(KernelThresholds(short_tokens=0)):
        attend_by_head(masked.arguments["queries"], regions, **options(masked))
    fetched = sum(nbytes for name, nbytes in calls[0].fetched.items() if name.startswith("packed_rows"))
    assert fetched == sum(counts) * problem.layout.nbytes
