"""The machine itself: positions, collectives, barriers, number types and counters, on small kernels."""

import mlx.core as mx
import numpy as np
import pytest

from metal_sim.run import run_text, simulate
from metal_sim.tests.small import TOTAL, small

ORDERS = (0, 1, 7)


@pytest.mark.parametrize("order", ORDERS)
def test_positions(order):
    source = """
        uint3 t = thread_position_in_grid;
        uint index = (t.z * threads_per_grid.y + t.y) * threads_per_grid.x + t.x;
        result[index * 3] = threadgroup_position_in_grid.x;
        result[index * 3 + 1] = thread_index_in_threadgroup;
        result[index * 3 + 2] = thread_position_in_threadgroup.x + 100 * simdgroup_index_in_threadgroup;
    """
    call = small(source, [], [((2, 3, 10, 3), mx.uint32)], grid=(10, 3, 2), threadgroup=(4, 3, 2))
    results = np.array(simulate(**call, order=order).outputs[0])
    z, y, x = np.meshgrid(range(2), range(3), range(10), indexing="ij")
    width = np.where(x < 8, 4, 2)  # the last threadgroup is smaller
    assert np.array_equal(results[..., 0], x // 4)
    assert np.array_equal(results[..., 1], (z * 3 + y) * width + x % 4)
    assert np.array_equal(results[..., 2], x % 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("simd_sum(v)", lambda x: np.full(32, x.sum())),
        ("simd_max(v)", lambda x: np.full(32, x.max())),
        ("simd_min(v)", lambda x: np.full(32, x.min())),
        ("simd_shuffle_xor(v, 5)", lambda x: x[np.arange(32) ^ 5]),
        ("simd_shuffle(v, ushort((lane * 7) & 31))", lambda x: x[np.arange(32) * 7 % 32]),
        ("simd_broadcast(v, 3)", lambda x: np.full(32, x[3])),
        ("simd_shuffle_down(v, 2)", lambda x: np.append(x[2:], [np.nan, np.nan])),
        ("simd_shuffle_up(v, 2)", lambda x: np.append([np.nan, np.nan], x[:-2])),
    ],
)
def test_collectives(call, expected):
    values = np.random.default_rng(0).integers(-50, 50, 96).astype(np.float32)
    source = f"""
        uint lane = thread_index_in_simdgroup, i = thread_position_in_grid.x;
        float v = values[i];
        result[i] = {call};
    """
    launch = small(source, [mx.array(values)], [((96,), mx.float32)], grid=(96, 1, 1), threadgroup=(96, 1, 1))
    for order in ORDERS:
        results = np.array(simulate(**launch, order=order).outputs[0])
        assert np.array_equal(results, np.concatenate([expected(row) for row in values.reshape(3, 32)]), equal_nan=True)


@pytest.mark.parametrize("sanitize", [False, True])
def test_threadgroup_memory(sanitize):
    for order in ORDERS:
        result = simulate(**TOTAL, order=order, sanitize=sanitize)
        assert result.outputs[0].tolist() == [sum(range(start, start + 64)) for start in (0, 64)]
        assert result.counters.loaded["values"] == result.counters.stored["result"] * 64 == 128 * 4
        assert result.counters.operations["barrier"] == 128 * 7


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_number_types_round_like_mlx(dtype):
    values = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    x = mx.array(values * np.logspace(-9, 6, 512, dtype=np.float32)).astype(dtype)
    source = """
        uint i = thread_position_in_grid.x;
        wide[i] = static_cast<float>(values[i]) / 3.0f;
        result[i] = static_cast<T>(static_cast<float>(values[i]) / 3.0f);
        product[i] = values[i] * values[i];
    """
    shapes = [((512,), mx.float32), ((512,), dtype), ((512,), dtype)]
    call = small(source, [x], shapes, names=["wide", "result", "product"], template=[("T", dtype)])
    wide, result, product = simulate(**call, grid=(512, 1, 1), threadgroup=(64, 1, 1)).outputs
    assert mx.array_equal(wide, x.astype(mx.float32) / 3)
    assert mx.array_equal(result, (x.astype(mx.float32) / 3).astype(dtype))
    assert mx.array_equal(product, x * x)


@pytest.mark.parametrize("transpose", [False, True])
def test_matrices(transpose):
    """A product of 8x8 matrices in fp16, summed in fp32; it counts its 512 multiplications."""
    source = """
    int lane = int(thread_index_in_simdgroup);
    threadgroup half shared[64];
    for (int i = lane; i < 64; i += 32) shared[i] = values[64 + i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 left, right;
    simdgroup_load(left, values, 8);
    simdgroup_load(right, shared, 8, ulong2(0, 0), TRANSPOSE);
    simdgroup_float8x8 sum;
    for (int e = 0; e < 2; e++) sum.thread_elements()[e] = 1.0f;
    simdgroup_multiply_accumulate(sum, left, right, sum);
    int row = (lane >> 2 & 4) | (lane >> 1 & 3), column = (lane & 8) >> 1 | (lane & 1) << 1;
    for (int e = 0; e < 2; e++) result[8 * row + column + e] = sum.thread_elements()[e];
    """.replace("TRANSPOSE", str(transpose).lower())
    a, b = (np.random.default_rng(seed).standard_normal((8, 8)).astype(np.float16) for seed in (0, 1))
    both = mx.array(np.stack([a, b]))
    done = simulate(**small(source, [both], [((8, 8), mx.float32)], grid=(32, 1, 1), threadgroup=(32, 1, 1)))
    expected = 1 + a.astype(np.float64) @ (b.T if transpose else b).astype(np.float64)
    assert np.allclose(np.array(done.outputs[0]), expected, rtol=0, atol=1e-5)
    assert (done.counters.operations["matrix"], done.counters.operations["collective"]) == (512, 32)  # a barrier


def test_strides_of_a_view():
    x = mx.arange(60).reshape(5, 12)
    for view in (x[:, 3:7], x.T, x[::2], x[::-1], mx.broadcast_to(x[:1], (4, 12))):
        source = """
            uint2 at = {thread_position_in_grid.x, thread_position_in_grid.y};
            result[at.y * values_shape[1] + at.x] = values[at.y * values_strides[0] + at.x * values_strides[1]];
        """
        rows, columns = view.shape
        call = small(source, [view], [(view.shape, mx.int32)], grid=(columns, rows, 1), threadgroup=(columns, rows, 1))
        assert mx.array_equal(simulate(**call).outputs[0], view)


def test_arithmetic_is_counted():
    source = "float x = values[0]; result[0] = metal::fma(x, x, x) + x * x - metal::exp2(x) / x;"
    call = small(source, [mx.ones(8)], [((1,), mx.float32)], grid=(32, 1, 1), threadgroup=(32, 1, 1))
    operations = {name: number // 32 for name, number in simulate(**call).counters.operations.items() if number}
    assert operations == {"add": 2, "multiply": 1, "fma": 1, "divide": 1, "transcendental": 1}


def test_bytes_are_fetched_once_for_all_lanes_of_a_threadgroup():
    """Lane 0 of the second simdgroup loads a word of which others load a half, and all load the last one."""
    source = """
        uint i = thread_index_in_threadgroup;
        auto halves = reinterpret_cast<const device ushort*>(values);
        result[thread_position_in_grid.x] = values[15] + (i == 32 ? values[0] : i < 2 ? float(halves[i]) : 0.0f);
    """
    call = small(source, [mx.zeros(16)], [((128,), mx.float32)], grid=(128, 1, 1), threadgroup=(64, 1, 1))
    for sanitize in (False, True):
        counters = simulate(**call, sanitize=sanitize).counters
        assert counters.loaded["values"] == 2 * (64 * 4 + 4 + 2 * 2)
        assert counters.fetched["values"] == 2 * (4 + 4)


def test_threadgroup_memory_is_counted_by_16_bytes():
    source = """
        struct eight { float4 low, high; };
        threadgroup float one[32];
        threadgroup float4 four[32];
        threadgroup eight wide[32];
        uint lane = thread_index_in_simdgroup;
        one[lane] = 1.0f;
        four[lane] = float4();
        wide[lane] = eight();
        result[lane] = one[lane];
    """
    call = small(source, [], [((32,), mx.float32)], grid=(32, 1, 1), threadgroup=(32, 1, 1))
    assert simulate(**call).counters.operations["shared"] == 32 * (2 + 1 + 2)


@pytest.mark.parametrize("sanitize", [False, True])
def test_local_pointers_elements_as_operands_and_a_number_that_no_buffer_has(sanitize):
    text = """[[kernel]] void largest(
    const device float* values [[buffer(0)]],
    device float* result [[buffer(2)]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[32];
  const device float* value = values + lane;
  device float* largest = result + lane;
  shared[lane] = value[0];
  largest[0] = max(shared[lane], value[32]) + simd_sum(shared[lane]);
}
"""
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    arrays = {"values": values, "result": np.zeros(32, np.float32)}
    counters = run_text(text, arrays, grid=(32, 1, 1), threadgroup=(32, 1, 1), sanitize=sanitize)
    assert np.allclose(arrays["result"], np.maximum(values[:32], values[32:]) + values[:32].sum(), atol=1e-5)
    assert (counters.loaded, counters.stored["result"]) == ({"values": 256, "result": 0}, 128)
    assert counters.operations["compare"] == 32
