"""Mistakes that Metal leaves undefined, and how the simulator reports each."""

import mlx.core as mx
import pytest

from metal_sim.build import CompileError
from metal_sim.run import SimulationError, simulate
from metal_sim.tests.small import TOTAL, small

WAIT = "threadgroup_barrier(mem_flags::mem_threadgroup);"
NEXT = f"{WAIT}\n    for"

# Name -> what is replaced in TOTAL, by what, and the report.
MUTANTS = {
    "missing barrier": (NEXT, "for", "uninitialized|race: loads"),
    "barrier that orders nothing": (NEXT, "threadgroup_barrier(mem_flags::mem_none); for", "race|uninit"),
    "barrier of a simdgroup alone": (NEXT, "simdgroup_barrier(mem_flags::mem_threadgroup); for", "race|un"),
    "missing barrier in a loop": (f"{WAIT}\n    }}", "}", "race: (loads|stores)"),
    "barrier in a divergent branch": (NEXT, f"if (i < 40) {WAIT} for", "divergent threadgroup_barrier"),
    "return before a barrier": (NEXT, f"if (i == 9) return; {WAIT} for", "returned|returns while"),
    "element that nobody stores": ("part[i] = values", "if (i != 5) part[i] = values", "uninitialized: loads part.5."),
    "load past threadgroup memory": ("[i + width]", "[i + 2 * width]", "out of bounds: load of part|race: loads"),
    "threadgroup memory too small": ("part[64]", "part[60]", "out of bounds: store of part"),
    "load past a buffer": ("values[thread", "values[1 + thread", "out of bounds: load at byte 512 of buffer 0"),
    "load before a buffer": ("values[", "values[-4 + (int)", "out of bounds: load at byte -[0-9]+ of buffer 0"),
    "store past a buffer": ("result[thread", "result[1 + thread", "out of bounds: store at byte 8 of buffer 1"),
}
in_all_orders = pytest.mark.parametrize("order", [0, 1, 7])


@in_all_orders
@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_reported(name, order):
    old, new, report = MUTANTS[name]

    def edit(text):
        assert old in text
        return text.replace(old, new)

    with pytest.raises(SimulationError, match=report):
        simulate(**TOTAL, order=order, edit=edit)


def test_a_cast_that_is_not_aligned_is_reported():
    source = "auto words = reinterpret_cast<const device float*>(values + %d); result[0] = words[0];"
    values = mx.array([0, 0x3F80, 0, 0x4000], mx.uint16)
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    results = [simulate(**small(source % at, [mx.tile(values, 4)], [((1,), mx.float32)], **call)) for at in (0, 2)]
    assert [result.outputs[0].item() for result in results] == [1.0, 2.0]
    with pytest.raises(SimulationError, match="misaligned: a cast at byte 2 of buffer 0"):
        simulate(**small(source % 1, [mx.tile(values, 4)], [((1,), mx.float32)], **call))


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
        ("if (lane < 9) threadgroup_barrier(mem_flags::mem_none); else v = simd_sum(v);", "deadlock: every thread"),
    ],
)
@in_all_orders
def test_divergence_is_reported(source, report, order):
    with pytest.raises(SimulationError, match=report):
        simulate(**lanes(source), order=order)


@in_all_orders
def test_store_after_a_load_is_a_race(order):
    source = f"threadgroup float x[32]; x[lane] = v; simdgroup_{WAIT[12:]} x[lane] = x[lane ^ 1];"
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
        ("float x[4]; for (uint i = 0; i < 4 + lane; i++) x[i] = v; result[lane] = x[3];", "stack-buffer|insufficient"),
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
