"""Mistakes that Metal leaves undefined, and how the simulator reports each."""

import mlx.core as mx
import pytest

from metal_sim.build import CompileError
from metal_sim.run import SimulationError, simulate
from metal_sim.small import TOTAL, small

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# Name -> what is replaced in TOTAL, by what, and the report.
MUTANTS = {
    "missing barrier": (f"{BARRIER}\n    for", "for", "uninitialised|race: loads"),
    "barrier that orders nothing": (
        f"{BARRIER}\n    for",
        "threadgroup_barrier(mem_flags::mem_none); for",
        "race|uninit",
    ),
    "barrier of a simdgroup alone": (
        f"{BARRIER}\n    for",
        "simdgroup_barrier(mem_flags::mem_threadgroup); for",
        "race|un",
    ),
    "missing barrier in a loop": (f"{BARRIER}\n    }}", "}", "race: (loads|stores)"),
    "barrier in a divergent branch": (
        f"{BARRIER}\n    for",
        f"if (i < 40) {BARRIER} for",
        "divergent threadgroup_barrier",
    ),
    "return before a barrier": (f"{BARRIER}\n    for", f"if (i == 9) return; {BARRIER} for", "returned|returns while"),
    "element that nobody stores": ("part[i] = values", "if (i != 5) part[i] = values", "uninitialised: loads part.5."),
    "load past threadgroup memory": (
        "part[i + width]",
        "part[i + 2 * width]",
        "out of bounds: load of part|race: loads",
    ),
    "threadgroup memory too small": ("part[64]", "part[60]", "out of bounds: store of part"),
    "load past a buffer": ("values[thread", "values[1 + thread", "out of bounds: load at byte 512 of buffer 0"),
    "load before a buffer": (
        "values[thread",
        "values[-4 + (int)thread",
        "out of bounds: load at byte -[0-9]+ of buffer 0",
    ),
    "store past a buffer": (
        "result[threadgroup",
        "result[1 + threadgroup",
        "out of bounds: store at byte 8 of buffer 1",
    ),
}


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_reported(name, order):
    old, new, report, *more = MUTANTS[name]

    def edit(text):
        changed = text.replace(old, new)
        assert changed != text
        return changed.replace(*more) if more else changed

    with pytest.raises(SimulationError, match=report):
        simulate(**TOTAL, order=order, edit=edit)


def lanes(source: str, threads: int = 32):
    lane = "uint lane = thread_index_in_simdgroup; float v = float(lane);"
    return small(lane + source, [], [((64,), mx.float32)], grid=(threads, 1, 1), threadgroup=(threads, 1, 1))


@pytest.mark.parametrize(
    ("source", "report"),
    [
        ("if (lane != 5) v = simd_sum(v);", "returned|returns while its simdgroup waits at simd_sum, line"),
        ("if (lane < 9) v = simd_sum(v);\nelse v = simd_sum(v);", "divergent simd_sum at line"),
        ("v = lane < 9 ? simd_sum(v) : simd_max(v);", "divergent simd_(max|sum)"),
        ("v = simd_shuffle_xor(v, lane < 9 ? 1 : 2);", r"divergent simd_shuffle_xor at line \d+ \(operand [12]\)"),
        ("if (lane == 3) return; v = simd_sum(v);", "have returned|returns while"),
        ("if (lane == 3) return; threadgroup_barrier(mem_flags::mem_none);", "have returned|returns while"),
        (
            "if (lane < 9) threadgroup_barrier(mem_flags::mem_none); else v = simd_sum(v);",
            "deadlock: every thread waits",
        ),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 7])
def test_divergence_is_reported(source, report, order):
    with pytest.raises(SimulationError, match=report):
        simulate(**lanes(source), order=order)


@pytest.mark.parametrize("order", [0, 1, 7])
def test_store_after_a_load_is_a_race(order):
    source = (
        "threadgroup float x[32]; x[lane] = v; simdgroup_barrier(mem_flags::mem_threadgroup); x[lane] = x[lane ^ 1];"
    )
    with pytest.raises(SimulationError, match=r"race: (stores|loads) x"):
        simulate(**lanes(source), order=order)


def test_a_report_names_threads_and_quotes_the_line():
    with pytest.raises(SimulationError) as report:
        simulate(**lanes("if (lane != 5) v = simd_sum(v); result[lane] = v;"))
    assert "thread 5: simdgroup 0, lane 5, of threadgroup 0,0,0" in str(report.value)
    assert "5 threads wait at simd_sum, line 5; the first is thread 0" in str(report.value)
    assert "if (lane != 5) v = simd_sum(v)" in str(report.value)


def test_value_of_a_lane_that_does_not_exist_is_poison():
    result = simulate(**lanes("result[lane] = simd_shuffle(v, 31);", threads=16)).outputs[0]
    assert mx.isnan(result[:16]).all()


def test_dependence_on_the_order_of_threads_shows():
    """A race in device memory is not tracked; it shows when the order changes."""
    call = lanes("result[0] = v;", threads=64)
    assert len({simulate(**call, order=order).outputs[0][0].item() for order in (0, 1, 7)}) > 1


@pytest.mark.parametrize(
    ("source", "report"),
    [
        (
            "float x[4]; for (uint i = 0; i < 4 + lane; i++) x[i] = v; result[lane] = x[lane & 3];",
            "stack-buffer-overflow|insufficient space",
        ),
        ("int x = 1; result[lane] = float(x << (32 + lane));", "shift exponent 32 is too large"),
        ("int x = 2147483647; x += int(lane); result[lane] = float(x);", "signed integer overflow"),
    ],
)
def test_sanitizers_report(source, report):
    with pytest.raises(SimulationError, match=report):
        simulate(**lanes(source), sanitize=True)


def test_variable_without_a_value_is_no_zero():
    result = simulate(**lanes("float x[2]; result[lane] = x[lane & 1];")).outputs[0]
    assert not (result[:32] == 0).any()


def test_text_that_does_not_compile():
    with pytest.raises(CompileError, match="undeclared_name"):
        simulate(**lanes("result[lane] = undeclared_name;"))
