"""Rows of a batch in one call: each gets what it gets alone, whatever the lengths of the others are."""

import mlx.core as mx
import pytest

from kernels.cases import Problem, add_spare, check_attention, make_problem
from kernels.metal.checks import PEAK
from kernels.metal.simulated import captured, launching, reference, simulated, zeros
from kernels.shared_caches import check as check_shared
from kernels.shared_caches import shared_batch, solve
from metal_sim.translate import parameters
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend, attend_batch
from mlx_tq.kernels.attend_gpu import METAL_ARRAYS
from mlx_tq.kernels.regions import SharedRows
from mlx_tq.kernels.thresholds import KernelThresholds

CASE = {"batch": 1, "groups": 3, "length": 2, "mask": "causal"}
LENGTHS = ((97, 6), (0, 3), (1, 70), (200, 0), (33, 6))  # packed and recent tokens of each row
SHARED = [
    pytest.param({}, marks=pytest.mark.full),
    {"key": "tq4", "normalized": "gaps"},
    {"dtype": "float32", "normalized": "blocks", "length": 1},
]
either_form = pytest.mark.parametrize("short_tokens", [0, 4096], ids=["two", "one"])


def problems(lengths=LENGTHS, normalized=None, **changes) -> list[Problem]:
    """Make one problem per row, with different spare capacity and one layout, except where formats learn.

    Some keys of "mixed" are normalized.
    """
    rows = []
    kinds = ["gaps", None, "blocks", "blocks"] if normalized == "mixed" else [normalized]
    for seed, (packed, recent) in enumerate(lengths):
        case = {**CASE, **changes, "packed": packed, "recent": recent, "normalized": kinds[seed % len(kinds)]}
        problem = make_problem(**case, seed=seed)
        changed = {name: add_spare(problem.arguments[name], 1 + seed) for name in ("full_keys", "full_values")}
        if packed == 0:
            changed["packed_rows"] = None
        if not problem.layout.learned_bytes:
            changed["layout"] = (rows or [problem])[0].layout
        rows.append(problem.replace(**changed))
    return rows


def attend_rows(rows: list[Problem]) -> mx.array:
    queries = mx.concatenate([row.arguments["queries"] for row in rows])
    options = {name: rows[0].arguments[name] for name in ("scale", "mask", "sinks")}
    return attend_batch(queries, [row.regions() for row in rows], **options)


def attend_together(rows: list[Problem], short_tokens=0, **simulation) -> mx.array:
    with simulated(**simulation), thresholds.using(KernelThresholds(short_tokens=short_tokens)):
        return attend_rows(rows)


def check(rows: list[Problem], result: mx.array, peak: float = PEAK) -> None:
    for i, row in enumerate(rows):
        check_attention(row.replace(sinks=rows[0].arguments["sinks"]), result[i : i + 1], peak=peak)


@either_form
@pytest.mark.parametrize(
    "changes",
    [
        {"key": "tq4", "value": "tq4"},
        {"dtype": "float32", "length": 1},
        {"key": "fp16", "dims": (80, 112)},
        {"key": "tq4", "value": "tq4", "normalized": "mixed"},
        {"key": "stcq3", "value": "tq4", "normalized": "mixed", "dims": (96, 64)},
    ],
    ids=["tq4", "float32", "fp16", "mixed", "stcq3"],
)
def test_each_row_is_as_exact_as_alone(changes, short_tokens):
    rows = problems(sinks=True, **changes)
    check(rows, attend_together(rows, short_tokens=short_tokens))


def test_reference_gives_each_row_what_it_gets_alone():
    rows = problems()
    check(rows, reference(attend_rows, rows), peak=2.0)


@pytest.mark.parametrize(("normalized", "calls"), [(None, 2), ("blocks", 3)])
def test_one_dispatch_or_two_serve_eight_rows_or_four_with_normalized_keys(normalized, calls):
    many = problems((*LENGTHS, *LENGTHS), length=1, mask=None, normalized=normalized)
    check(many, attend_together(many, short_tokens=4096))
    rows, names = problems(((33, 1),) * 9, length=1, normalized=normalized), []

    def run(kernel, *, inputs, constants, **call):
        names.append(kernel.name)
        assert len(inputs) == len(kernel.input_names(constants))
        return zeros(**call)

    for short_tokens, kernels in ((4096, ["attend_short"]), (0, ["attend", "merge"])):
        names.clear()
        with launching(run), thresholds.using(KernelThresholds(short_tokens=short_tokens)):
            attend_rows(rows)
        assert names == kernels * calls


@pytest.mark.parametrize("changes", SHARED, ids=["q8", "gaps", "blocks"])
def test_rows_with_shared_prefixes_are_as_exact_as_alone(changes):
    problem = make_problem(**CASE | {"packed": 160, "sinks": True} | changes)
    with simulated() as calls, thresholds.using(KernelThresholds(short_tokens=4096)):
        check_shared(problem, *solve(problem, shared_batch(problem)))
        assert len(calls) == 11, "4 for two shared buffers, rows and merge; twice 3 for one buffer; 1 without"


@pytest.mark.parametrize(("normalized", "calls"), [(None, 2), pytest.param("blocks", 3, marks=pytest.mark.full)])
def test_a_prefix_is_read_once_for_more_rows_than_a_call_has_unless_it_is_short(normalized, calls):
    problem = make_problem(**CASE | {"packed": 64, "normalized": normalized})
    for short_tokens, dispatches in ((0, 1 + 2 * calls), (4096, calls)):
        with simulated() as counters, thresholds.using(KernelThresholds(short_tokens=short_tokens)):
            queries, result = solve(problem, [problem.regions()] * 9)
        assert len(counters) == dispatches
        for i in range(9):
            check_attention(problem.replace(queries=queries[i : i + 1]), result[i : i + 1], peak=PEAK)


@pytest.mark.parametrize("normalized", [None, "blocks", "gaps"])
def test_a_cache_whose_rows_are_in_several_buffers(normalized):
    problem = make_problem(**CASE, packed=160, normalized=normalized, sinks=True, dtype="float32")
    whole = problem.regions()
    pieces = [mx.contiguous(whole.packed_rows[:, :, a:b]) for a, b in ((0, 64), (64, 96), (96, 160))]
    shared = tuple(SharedRows(add_spare(rows), rows.shape[2]) for rows in pieces[:2])
    mask = mx.array([[True] * 90 + [False] * (whole.tokens - 90)] * 2)
    for masked in (problem, problem.replace(mask=mask)):
        with simulated():
            result = masked.solve(attend, packed_rows=pieces[2], shared=shared)
        check_attention(masked, result, peak=PEAK)


@either_form
@pytest.mark.parametrize("normalized", [None, "gaps"])
def test_a_call_uses_all_arrays_that_metal_passes(short_tokens, normalized):
    """What mlx adds for shapes and strides counts."""
    rows = problems(length=1, sinks=True, normalized=normalized)
    with captured() as kernels, thresholds.using(KernelThresholds(short_tokens=short_tokens)):
        attend_rows(rows)
    arrays = {name: sum(p.number is not None for p in parameters(k.text)) for name, k in kernels.items()}
    assert arrays.keys() == ({"attend_short"} if short_tokens else {"attend", "merge"})
    assert max(arrays.values()) == METAL_ARRAYS
