"""The cost of attention on the simulator: bytes and lane operations per packed token and KV head.

docs/measurements/speed.md has these numbers.
"""

import json
from itertools import product

import pytest

from benchmarks.kernels.count_attention import DIMS, FILE, GROUPS, LENGTHS, Cost, count_shape
from benchmarks.reports import RESULTS
from kernels.cases import HEADS, make_problem, random_mask, read_as_latents
from kernels.metal.simulated import simulated
from metal_sim.run import Counters
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.kernels import attend_gpu, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.thresholds import KernelThresholds

FEW, MANY = 96, 224
COUNTED = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["rows"]
CASE = {"dims": (128, 128), "key": "tq4", "value": "tq4", "batch": 1, "length": 1, "sink_tokens": 0, "recent": 0}


def count(groups: int, packed: int, **changes) -> Counters:
    problem = make_problem(**CASE | changes, groups=groups, packed=packed)
    with simulated() as counters:
        problem.solve(attend)
    return counters[0]


def operations_per_token(few: Counters, many: Counters, heads: int) -> float:
    """Return the operations of a token from two contexts, and print them by kind for the docs."""
    kinds = {
        name: (many.operations[name] - few.operations[name]) / (MANY - FEW) / heads
        for name in many.operations
        if many.operations[name]
    }
    print({name: round(number) for name, number in kinds.items()})
    return sum(kinds.values())


def attend_operations(groups: int, level_tables: int = 2, **changes) -> float:
    with thresholds.using(KernelThresholds(min_block=1024, short_tokens=0, level_tables=level_tables)):
        return operations_per_token(*(count(groups, packed, **changes) for packed in (FEW, MANY)), HEADS)


@pytest.mark.parametrize(("groups", "length"), [(1, 1), (2, 1), (4, 1), (5, 1), (8, 1), (9, 1), (2, 7), (2, 8), (8, 5)])
def test_packed_bytes_are_fetched_once_for_the_query_rows_of_a_tile(groups, length):
    with thresholds.using(KernelThresholds(short_tokens=0)):
        costs = [count(groups, packed, length=length) for packed in (FEW, MANY)]
    few, many = (cost.fetched["packed_rows_0"] for cost in costs)
    rows = groups * length
    tiles = -(-rows // (attend_gpu.QUERIES if rows < KernelThresholds().matrix_queries else 64))
    assert (many - few) / (MANY - FEW) / HEADS == tiles * make_problem(**CASE).layout.nbytes


def count_latents(groups: int, packed: int) -> Counters:
    mask = random_mask("additive", (1, HEADS * groups, 1, packed + 1), "float16")
    case = CASE | {"dims": (512, 64), "value": "q8", "mask": mask}
    with simulated() as counters:
        read_as_latents(make_problem(**case, groups=groups, packed=packed)).solve(attend)
    return counters[0]


def test_rotated_parts_of_latents_are_not_fetched_and_codes_once():
    """Of a row of 324 bytes, the codes of 256 and their scale, though they are keys and values."""
    with thresholds.using(KernelThresholds(short_tokens=0, min_block=1024)):
        few, many = (count_latents(2, packed) for packed in (FEW, MANY))
    assert (many.fetched["packed_rows_0"] - few.fetched["packed_rows_0"]) / (MANY - FEW) / HEADS == 258
    assert operations_per_token(few, many, HEADS) == pytest.approx(3725, rel=0.01)


def test_a_code_is_decoded_once_for_the_query_rows_of_a_tile(monkeypatch):
    shared = attend_operations(4, level_tables=0)
    monkeypatch.setattr(attend_gpu, "QUERIES", 1)
    per_head = attend_operations(4, level_tables=0)
    print(f"shared {shared:.0f}, per query head {per_head:.0f}")
    assert shared <= 0.45 * per_head


# A few shapes, and all of the table; with g++ and 128 query rows of 512 numbers, that takes a quarter of an hour.
SHAPES = [(64, 8, 1), (128, 4, 1), (256, 6, 1), (256, 2, 4), (512, 8, 1), (128, 16, 4)]
OTHERS = [shape for shape in product(DIMS, GROUPS, LENGTHS) if shape not in SHAPES]


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.full) for shape in OTHERS)])
def test_lane_operations(shape):
    """The table of the docs has these counts. Data decide how often a maximum grows, and so a few operations."""
    (recorded,) = (row for row in COUNTED if (row["dim"], row["groups"], row["length"]) == shape)
    counted = count_shape(*shape)
    assert counted["kernels"] == recorded["kernels"]
    assert counted["costs"].keys() == recorded["costs"].keys()
    for name, cost in counted["costs"].items():
        now, then = Cost(**cost), Cost(**recorded["costs"][name])
        print(f"{name}: {now.plain:.0f}, weighted {now.weighted:.0f}, {now.fetched:.0f} bytes")
        assert now.plain == pytest.approx(then.plain, rel=0.002), "run: python -m benchmarks.kernels.count_attention"
        assert (now.loaded, now.fetched) == (then.loaded, then.fetched)


# Of the operations of mlx's kernel, plain and weighted, at one query and at least four query heads per KV head.
MOST = (0.9, 0.7)


@pytest.mark.parametrize("formats", ["q8/tq4", "stcq4/tq4"])
def test_attend_takes_few_operations_next_to_the_kernel_of_mlx(formats):
    """`test_lane_operations` counts what is compared here."""
    shapes = {(row["dim"], row["groups"]): row for row in COUNTED if row["length"] == 1 and row["groups"] >= 4}
    for shape, row in shapes.items():
        cost, (plain, weighted) = Cost(**row["costs"][formats]), MOST
        for kernel in {name for names in row["kernels"].values() for name in names if name}:
            other = Cost(**row["costs"][kernel])
            assert cost.plain <= plain * other.plain, (shape, kernel)
            assert cost.weighted <= weighted * other.weighted, (shape, kernel)


@pytest.mark.parametrize(("key", "most", "most_besides_products"), [("tq4", 0.5, 0.15), ("q8", 0.6, 0.15)])
def test_a_verify_pass_multiplies_matrices(key, most, most_besides_products):
    """Five drafted tokens and eight query heads of 256, next to one decode for four query rows and no tables.

    An 8x8x8 product counts 512 operations; the products of q8/tq4 are .42 of what it is compared with.
    """
    before = {"tq4": 61838, "q8": 48694}[key]
    with thresholds.using(KernelThresholds(min_block=1024, short_tokens=0)):
        case = {"dims": (256, 256), "key": key, "length": 5}
        few, many = (count(8, packed, **case) for packed in (FEW, MANY))
    total = operations_per_token(few, many, HEADS)
    products = (many.operations["matrix"] - few.operations["matrix"]) / (MANY - FEW) / HEADS
    assert total <= most * before
    assert total - products <= most_besides_products * before


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_trellis_codes_cost_less_than_polynomials(bits):
    """A level is loaded, not computed; bank conflicts of these loads are not counted."""
    formats = ({"key": f"{kind}{bits}", "value": f"{kind}{bits}"} for kind in ("tq", "tcq"))
    polynomial, trellis = (attend_operations(4, level_tables=0, **pair) for pair in formats)
    print(f"tq{bits} {polynomial:.0f}, tcq{bits} {trellis:.0f}")
    assert trellis <= 0.8 * polynomial


@pytest.mark.parametrize("bits", [*(pytest.param(bits, marks=pytest.mark.full) for bits in (2, 3)), 4])
@pytest.mark.parametrize(("dim", "groups"), [(64, 4), (128, 4), (128, 8)])
def test_keys_of_sorted_dims_cost_at_most_15_percent(bits, dim, groups):
    """Of the keys of as many bits whose levels are looked up by the byte."""
    plain, sorted_keys = (attend_operations(groups, dims=(dim, dim), key=f"{kind}{bits}") for kind in ("tq", "stcq"))
    print(f"tq{bits} {plain:.0f}, stcq{bits} {sorted_keys:.0f}")
    assert sorted_keys <= 1.15 * plain


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_normalized_keys_cost_at_most_5_percent(groups, dim):
    """Before an eviction; the two contexts differ by as many tokens as share a mean."""
    assert MANY - FEW == MEAN_TOKENS
    plain, normalized = (attend_operations(groups, dims=(dim, dim), normalized=kind) for kind in (None, "blocks"))
    print(f"plain {plain:.0f}, normalized {normalized:.0f}")
    assert normalized <= 1.05 * plain
