"""Mistakes put into the kernels' text on purpose: each is caught, by a report or by a difference."""

import mlx.core as mx
import pytest
from kernel_cases import make_layout, random
from metal_sim.run import SimulationError
from simulated import ORDERS, simulated

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels.attend_packed import _attend_packed_gpu, attend_packed_ref
from mlx_tq.kernels.dequantize import _dequantize_gpu, dequantize_ref
from mlx_tq.kernels.encode import _encode_gpu, encode_ref
from mlx_tq.kernels.wht import _wht_gpu, wht_ref

CASE = {"key_dim": 80, "value_dim": 128, "key": "tq3", "value": "tq4", "dtype": "float16", "rule": "matched"}


def encodes(case: dict, tokens: int, **how) -> bool:
    layout = make_layout(case)
    keys, values = random((1, 2, tokens, 80), "float16"), random((1, 2, tokens, 128), "float16", seed=1)
    keys[0, 0, 0] = 0
    expected = encode_ref(keys, values, layout)
    with simulated(**how):
        found = _encode_gpu(keys, values, layout)
    return mx.array_equal(found.rows, expected.rows).item() and found.health.tolist() == expected.health.tolist()


def encoded(**how) -> bool:
    return encodes(CASE, 5, **how)


def encoded_wide(**how) -> bool:
    return encodes({**CASE, "wide": True}, 25, **how)


def encoded_q8(**how) -> bool:
    return encodes({**CASE, "key": "q8", "value": "q8", "wide": True}, 25, **how)


def decoded(**how) -> bool:
    layout = make_layout(CASE)
    rows = encode_ref(random((1, 2, 9, 80), "float16"), random((1, 2, 9, 128), "float16", seed=1), layout).rows
    rows = rows[:, :, :5]
    with simulated(**how):
        found = _dequantize_gpu(rows, layout, mx.float16)
    return all(
        mx.array_equal(a, b).item() for a, b in zip(found, dequantize_ref(rows, layout, mx.float16), strict=True)
    )


def rotated(**how) -> bool:
    x, rotation = random((5, 80), "float32"), get_rotation("wht", 80, 7)
    with simulated(**how):
        found = _wht_gpu(x, rotation, inverse=True)
    return mx.array_equal(found, wht_ref(x, rotation, inverse=True)).item()


def attended(**how) -> bool:
    """5 queries on 290 tokens, a part of a longer buffer: two tiles, two blocks, a last tile of 2 tokens."""
    layout = make_layout({**CASE, "value": "tq3"})
    keys, values = random((2, 1, 300, 80), "float16"), random((2, 1, 300, 128), "float16", seed=1)
    rows = encode_ref(keys, values, layout).rows
    queries = random((2, 1, 5, 80), "float32", seed=2) * 0.5
    with simulated(**how):
        found = _attend_packed_gpu(queries, rows, 290, layout)
    expected = attend_packed_ref(queries, rows, 290, layout)
    return all(mx.allclose(a, b, rtol=1e-4, atol=1e-5).item() for a, b in zip(found, expected, strict=True))


BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

# What is wrong -> the kernel, the text, what it becomes.
MUTANTS = {
    "missing barrier": (encoded, BARRIER, ""),
    "barrier that orders nothing": (encoded, BARRIER, "simdgroup_barrier(mem_flags::mem_none);"),
    "barrier under a divergent branch": (encoded, BARRIER, f"if (lane < 31) {BARRIER}"),
    "scratch shared by two vectors": (encoded, "codes + simdgroup *", "codes + 0 * simdgroup *"),
    "scratch of one vector only": (encoded, "codes[SIMDGROUPS *", "codes[1 *"),
    "no guard past the last row": (encoded, "if (row < rows)", "if (true)"),
    "guard off by one": (encoded, "if (row < rows)", "if (row < rows - 1)"),
    "guard inside a simdgroup": (encoded, "if (row < rows)", "if (row < rows && lane < 30)"),
    "no guard past the last dim": (encoded, "dim < D ? static_cast<float>(vector", "true ? static_cast<float>(vector"),
    "strides of another array": (encoded, "head * values_strides[1]", "head * keys_strides[1]"),
    "value codes where keys are": (encoded, "out + int(ROW::VALUES)", "out + int(ROW::KEYS)"),
    "padding left unwritten": (encoded, "if (lane == 0 && int(ROW::WORDS)", "if (lane == 99 && int(ROW::WORDS)"),
    "flags of keys over those of values": (encoded, "health_flags + rows + row", "health_flags + row"),
    "boundary belongs above": (encoded, "value > tq_boundaries", "value >= tq_boundaries"),
    "division instead of a product": (
        encoded,
        "tq_code<BITS>(tq_mul(y[j], factor))",
        "tq_code<BITS>(tq_div(y[j], norm))",
    ),
    "sum in another order": (encoded_wide, "tq_element<P>(x, row, 0)", "tq_element<P>(x, M - row, 0)"),
    "scale rule of keys for values": (encoded, "VALUE_BITS, VALUE_RULE", "VALUE_BITS, 0"),
    "bit 15 lost": (encoded, "& 1u) << 15", "& 1u) << 14"),
    "words past a vector's codes": (encoded, "word < D * BITS / 16", "word < D * BITS / 16 + 1"),
    "padding lanes in the peak": (encoded_q8, "+ lane < uint(D) ? sum[j] : 0.0f", "+ lane < 512u ? sum[j] : 0.0f"),
    "half a wide scale": (encoded_q8, "if (WIDE) scale_words[1]", "if (false) scale_words[1]"),
    "truncation for rounding": (encoded_q8, "tq_rint(tq_mul(y[j], factor))", "tq_mul(y[j], factor)"),
    "transform without its last stage": (rotated, "stride < P && stride < 32", "stride < P / 2 && stride < 32"),
    "odd minus even": (rotated, "tq_sub(other, x[j])", "tq_sub(x[j], other)"),
    "matrix for its transpose": (rotated, "INVERSE ? N + ORDER : N", "INVERSE ? N : N"),
    "signs forgotten": (rotated, "if (INVERSE) tq_flip_signs", "if (false) tq_flip_signs"),
    "shuffle mask that differs": (
        rotated,
        "other = simd_shuffle_xor(x[j], ushort(stride))",
        "other = simd_shuffle_xor(x[j], ushort(lane & 1))",
    ),
    "rows packed without strides": (decoded, "head * packed_rows_strides[1]", "head * tokens * uint(ROW::WORDS)"),
    "wrong unit count": (decoded, "units = key ? KEY_UNITS", "units = key ? VALUE_UNITS"),
    "planes interleaved": (decoded, "i * COUNT + unit", "i + VALUES * unit"),
    "key's scale for the value": (decoded, "words + int(ROW::VALUE_SCALE)", "words + int(ROW::KEY_SCALE)"),
    "weights before they are whole": (attended, f"  {BARRIER}\n  int tokens", "int tokens"),
    "weights of the next tile": (
        attended,
        f"  {BARRIER}\n  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {{",
        "  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {",
    ),
    "queries before they are loaded": (attended, f"{BARRIER}\n\nfloat maximum", "float maximum"),
    "tail of a block unmasked": (attended, "there ? tq_exp2", "true ? tq_exp2"),
    "maximum of each lane alone": (attended, "tq_simd_max(there", "(there"),
    "old sums not rescaled": (attended, "sum[q] = tq_mul(sum[q], factor)", "sum[q] = sum[q]"),
    "old outputs not rescaled": (attended, "output[q * VALUES + i], factor)", "output[q * VALUES + i], 1.0f)"),
    "block off by one": (attended, "start = first + block * size", "start = first + block * size + 1"),
    "blocks overlap": (attended, "start + size < last ? start + size", "start + size < last ? start + size + 1"),
    "another head's rows": (attended, "batch * packed_rows_strides[0]", "head * packed_rows_strides[0]"),
    "slots not added": (attended, "slot < SLOTS; slot++", "slot < SLOTS - 1; slot++"),
    "tokens past the tile": (attended, "token < tokens; token", "token < 32; token"),
    "key's gain for the value": (attended, "(row + int(ROW::VALUE_SCALE)", "(row + int(ROW::KEY_SCALE)"),
    "grid's spare threads write": (decoded, "if (row < packed_rows_shape", "if (row < 1 + packed_rows_shape"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    run, old, new = MUTANTS[name]

    def edit(text: str) -> str:
        assert old in text, "the text has changed; so must the mutant"
        return text.replace(old, new)

    try:
        right = all(run(order=order, edit=edit) for order in ORDERS)
    except SimulationError:
        right = False
    assert not right


@pytest.mark.parametrize("run", [encoded, encoded_wide, encoded_q8, decoded, rotated, attended])
def test_unchanged_kernel_passes(run):
    assert all(run(order=order) for order in ORDERS)
