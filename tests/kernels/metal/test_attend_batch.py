"""Rows of a batch in one call: each gets what it gets alone, whatever its neighbours' lengths are."""

from dataclasses import replace
from unittest import mock

import mlx.core as mx
import pytest
from cases import Problem, check_attention, make_problem, random, spared
from checks import PEAK
from simulated import captured, simulated

from metal_sim.translate import parameters
from mlx_tq.kernels import backend, build, thresholds
from mlx_tq.kernels.attend import attend, attend_batch
from mlx_tq.kernels.attend_kernels import ATTEND, ATTEND_SHORT, MERGE
from mlx_tq.kernels.regions import SharedRows
from mlx_tq.kernels.thresholds import KernelThresholds

METAL_BUFFERS = 31
CASE = {"batch": 1, "groups": 3, "length": 2, "mask": "causal"}
LENGTHS = ((97, 6), (0, 3), (1, 70), (200, 0), (33, 6))  # packed tokens, and recent ones, of each row


def problems(lengths=LENGTHS, **changes) -> list[Problem]:
    """One for each row, with spare capacity of its own; caches of one kind share the layout.

    Of "mixed" ones some keys are normalized.
    """
    found, kinds = [], [changes.pop("normalized", None)]
    if kinds == ["mixed"]:
        kinds = ["gaps", None, "blocks", "blocks"]
    for seed, (body, recent) in enumerate(lengths):
        changes["normalized"] = kinds[seed % len(kinds)]
        problem = make_problem(**{**CASE, **changes}, body=body, recent=recent, seed=seed)
        problem.arguments["layout"] = (found or [problem])[0].layout
        for name in ("keys", "values"):
            problem.arguments[name] = spared(problem.arguments[name], 1 + seed)
        if body == 0:
            problem.arguments["rows"] = None
        found.append(problem)
    return found


def together(rows: list[Problem], short=0, **how) -> mx.array:
    with simulated(**how), thresholds.using(replace(KernelThresholds(), short=short)):
        return asked(rows)


def asked(rows: list[Problem]) -> mx.array:
    first = rows[0].arguments
    queries = mx.concatenate([row.arguments["queries"] for row in rows])
    options = {name: first[name] for name in ("scale", "mask", "sinks")}
    return attend_batch(queries, [row.regions() for row in rows], **options)


def check(rows: list[Problem], found: mx.array, peak: float = PEAK) -> None:
    """Each row against mlx's own attention of it alone."""
    for i, row in enumerate(rows):
        check_attention(row.asked(sinks=rows[0].arguments["sinks"]), found[i : i + 1], peak=peak)


@pytest.mark.parametrize("short", [0, 4096], ids=["two", "one"])
@pytest.mark.parametrize(
    "changes",
    [
        {"key": "tq4", "value": "tq4"},
        {"dtype": "float32", "length": 1},
        {"key": "fp16", "dims": (80, 112)},
        {"key": "tq4", "value": "tq4", "normalized": "mixed"},
    ],
    ids=["tq4", "float32", "fp16", "mixed"],
)
def test_each_row_is_as_good_as_alone(changes, short):
    rows = problems(sinks=True, **changes)
    check(rows, together(rows, short=short))


@pytest.mark.parametrize(("normalized", "calls"), [(None, 2), ("blocks", 3)])
def test_dispatches(normalized, calls):
    """One, or two, for each eight rows, or for four whose keys are normalized."""
    many = problems((*LENGTHS, *LENGTHS), length=1, mask=None, normalized=normalized)
    check(many, together(many, short=4096))
    rows = problems(((33, 1),) * 9, length=1, normalized=normalized)
    called = []

    def run(kernel, *, inputs, constants, output_shapes, output_dtypes, **call):
        called.append(kernel.name)
        assert len(inputs) == len(kernel.names(dict(constants).get("SOURCES", 1)))
        return [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

    for short, names in ((4096, ["attend_short"]), (0, ["attend", "merge"])):
        called.clear()
        with simulated(), mock.patch.object(build, "run", run), thresholds.using(KernelThresholds(short=short)):
            asked(rows)
        assert called == names * calls


@pytest.mark.parametrize("normalized", [None, "blocks", "gaps"])
def test_rows_that_several_share_are_read_once(normalized):
    """Five share two buffers, one shares the first alone, and one nothing: each gets what it gets of rows in one."""
    first = make_problem(**CASE, body=160, normalized=normalized, sinks=True, dtype="float32")
    whole = first.regions()
    shared = [SharedRows(spared(whole.rows[:, :, a:b], 3), b - a) for a, b in ((0, 64), (64, 96))]
    own = [(body, shared[:count]) for body, count in ((160, 2), (97, 2), (96, 2), (130, 2), (101, 2), (70, 1), (40, 0))]
    regions = []
    for body, parts in own:
        start = sum(part.tokens for part in parts)
        rows = None if body == start else mx.contiguous(whole.rows[:, :, start:])
        regions.append(replace(whole, rows=rows, body=body, shared=tuple(parts)))
    queries = random((len(own), *first.arguments["queries"].shape[1:]), "float32", seed=4)
    options = {name: first.arguments[name] for name in ("scale", "mask", "sinks")}
    with backend.using("reference"):
        expected = attend_batch(queries, [replace(whole, body=body) for body, _ in own], **options)
        assert mx.array_equal(attend_batch(queries, regions, **options), expected)
        masked = {**options, "mask": mx.array([[True] * 90 + [False] * (whole.tokens - 90)] * 2)}
        seen = attend(queries[:1], whole, **masked)
    with simulated() as calls, thresholds.using(KernelThresholds(short=4096)):
        found = attend_batch(queries, regions, **options)
        assert len(calls) == (8 if normalized is None else 12), "of five, or four and one: two buffers, own rows, merge"
        alone = attend_batch(queries[:1], regions[:1], **options)
        half = attend(queries[:1], regions[0], **masked)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert mx.allclose(alone, expected[:1], rtol=1e-4, atol=1e-5)
    assert mx.allclose(half, seen, rtol=1e-4, atol=1e-5)


def test_the_twin_gives_each_row_what_it_gets_alone():
    rows = problems()
    with backend.using("reference"):
        check(rows, asked(rows), peak=2.0)


@pytest.mark.parametrize("normalized", [None, "gaps"])
@pytest.mark.parametrize("short", [0, 4096], ids=["two", "one"])
def test_metal_can_pass_all_arrays(short, normalized):
    """A function takes 31 buffers; what mlx adds for shapes and strides counts."""
    rows = problems(length=1, sinks=True, normalized=normalized)
    with simulated(), captured() as texts, thresholds.using(KernelThresholds(short=short)):
        asked(rows)
    counted = {name: sum(p.number is not None for p in parameters(text)) for name, text in texts.items()}
    assert counted.keys() == ({ATTEND_SHORT.name} if short else {ATTEND.name, MERGE.name})
    assert max(counted.values()) == METAL_BUFFERS
