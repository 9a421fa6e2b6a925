"""Mistakes put into the kernels' text on purpose: each is caught, by a report or by a difference."""

import mlx.core as mx
import pytest
from kernel_cases import make_layout, random
from metal_sim.run import SimulationError
from simulated import ORDERS, simulated

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import phases
from mlx_tq.kernels.attend import _attend_gpu, attend_ref
from mlx_tq.kernels.compact import _compact_gpu, compact_ref
from mlx_tq.kernels.dequantize import _dequantize_gpu, dequantize_ref
from mlx_tq.kernels.encode import _encode_gpu, encode_ref
from mlx_tq.kernels.phases import Phases
from mlx_tq.kernels.score import _score_gpu, score_ref
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
    following = tuple(random((1, 3, 6, dim), "float16", seed=dim)[:, 1:, :3] for dim in (80, 128))
    arguments = rows[:, :, :5], layout, mx.float16, following
    with simulated(**how):
        found = _dequantize_gpu(*arguments)
    return all(mx.array_equal(a, b).item() for a, b in zip(found, dequantize_ref(*arguments), strict=True))


def rotated(**how) -> bool:
    x, rotation = random((5, 80), "float32"), get_rotation("wht", 80, 7)
    with simulated(**how):
        found = _wht_gpu(x, rotation, inverse=True)
    return mx.array_equal(found, wht_ref(x, rotation, inverse=True)).item()


def attends(tokens: int, key: str = "tq3", value_dim: int = 112, short: int = 0, **how) -> bool:
    """5 queries; the first batch row does not see the last token, the second one only a window."""
    layout = make_layout({**CASE, "key": key, "value": "tq3", "value_dim": value_dim})
    shapes = [(2, 1, tokens, dim) for dim in (80, value_dim)]
    keys, values = (random(shape, "float16", seed) for seed, shape in enumerate(shapes))
    rows = encode_ref(keys, values, layout).rows
    arguments = {
        "queries": random((2, 5, 1, 80), "float32", seed=2),
        "rows": rows,
        "body": tokens - 10,
        "layout": layout,
        "keys": keys[:, :, 2:41],
        "values": values[:, :, 3:42],
        "prefix": 34,
        "scale": 0.2,
        "sinks": mx.arange(5) / 5,
        "visible": mx.array([[[0, tokens + 28]], [[33, 111]]]),
    }
    with simulated(**how), phases.using(Phases(short=short)):
        found = _attend_gpu(**arguments)
    return mx.allclose(found, attend_ref(**arguments), rtol=1e-4, atol=1e-5).item()


def attended(**how) -> bool:
    """Two tiles of queries; blocks of 64 tokens, the last one of 36, and one of 39."""
    return attends(110, **how)


def attended_at_once(**how) -> bool:
    """The same in one kernel: of eight simdgroups, four attend to packed tokens, two to others, and two to none."""
    return attends(110, key="tq4", value_dim=192, short=1000, **how)


def scored(**how) -> bool:
    """7 keys of a longer buffer in two threadgroups; 20 pairs of dims, two query heads."""
    layout = make_layout(CASE)
    rows = encode_ref(random((2, 2, 9, 80), "float16"), random((2, 2, 9, 128), "float16", seed=1), layout).rows
    pairs = mx.arange(40, dtype=mx.int32).reshape(20, 2).T
    rest = random((2, 2, 80), "float32", seed=2), mx.abs(random((2, 2, 20), "float32", seed=3)), pairs
    with simulated(**how):
        found = _score_gpu(rows, 7, layout, *rest)
    return mx.allclose(found, score_ref(rows, 7, layout, *rest), rtol=1e-4, atol=1e-4).item()


def compacted(**how) -> bool:
    rows, kept = mx.arange(2 * 3 * 20 * 33, dtype=mx.uint32).reshape(2, 3, 20, 33), mx.array([0, 3, *range(6, 19)])
    with simulated(**how):
        found = _compact_gpu(rows, kept, 24)
    return mx.array_equal(found[:, :, :15], compact_ref(rows, kept, 24)[:, :, :15]).item()


BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
WAIT = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# The kernel -> what is wrong with it: the text, and what it becomes.
MUTANTS = {
    encoded: {
        "missing barrier": (BARRIER, ""),
        "barrier that orders nothing": (BARRIER, "simdgroup_barrier(mem_flags::mem_none);"),
        "barrier under a divergent branch": (BARRIER, f"if (lane < 31) {BARRIER}"),
        "scratch shared by two vectors": ("codes + simdgroup *", "codes + 0 * simdgroup *"),
        "scratch of one vector only": ("codes[SIMDGROUPS *", "codes[1 *"),
        "no guard past the last row": ("if (row < rows)", "if (true)"),
        "guard off by one": ("if (row < rows)", "if (row < rows - 1)"),
        "guard inside a simdgroup": ("if (row < rows)", "if (row < rows && lane < 30)"),
        "no guard past the last dim": ("dim < D ? static_cast<float>(vector", "true ? static_cast<float>(vector"),
        "strides of another array": ("head * values_strides[1]", "head * keys_strides[1]"),
        "value codes where keys are": ("out + int(ROW::VALUES)", "out + int(ROW::KEYS)"),
        "padding left unwritten": ("if (lane == 0 && int(ROW::WORDS)", "if (lane == 99 && int(ROW::WORDS)"),
        "flags of keys over those of values": ("health_flags + rows + row", "health_flags + row"),
        "boundary belongs above": ("value > tq_boundaries", "value >= tq_boundaries"),
        "division instead of a product": ("tq_code<BITS>(tq_mul(y[j], factor))", "tq_code<BITS>(tq_div(y[j], norm))"),
        "scale rule of keys for values": ("VALUE_BITS, VALUE_RULE", "VALUE_BITS, 0"),
        "bit 15 lost": ("& 1u) << 15", "& 1u) << 14"),
        "words past a vector's codes": ("word < D * BITS / 16", "word < D * BITS / 16 + 1"),
    },
    encoded_wide: {
        "sum in another order": ("tq_element<P>(x, row, 0)", "tq_element<P>(x, M - row, 0)"),
    },
    encoded_q8: {
        "padding lanes in the peak": ("+ lane < uint(D) ? sum[j] : 0.0f", "+ lane < 512u ? sum[j] : 0.0f"),
        "half a wide scale": ("if (WIDE) scale_words[1]", "if (false) scale_words[1]"),
        "truncation for rounding": ("tq_rint(tq_mul(y[j], factor))", "tq_mul(y[j], factor)"),
    },
    rotated: {
        "transform without its last stage": ("stride < P && stride < 32", "stride < P / 2 && stride < 32"),
        "odd minus even": ("tq_sub(other, x[j])", "tq_sub(x[j], other)"),
        "matrix for its transpose": ("INVERSE ? N + M : N", "INVERSE ? N : N"),
        "signs forgotten": ("if (INVERSE) tq_flip_signs", "if (false) tq_flip_signs"),
        "shuffle mask that differs": (
            "other = simd_shuffle_xor(x[j], ushort(stride))",
            "other = simd_shuffle_xor(x[j], ushort(lane & 1))",
        ),
    },
    decoded: {
        "rows packed without strides": ("head * packed_rows_strides[1]", "head * tokens * uint(ROW::WORDS)"),
        "wrong unit count": ("units = key ? KEY_UNITS", "units = key ? VALUE_UNITS"),
        "planes interleaved": ("i * COUNT + unit", "i + VALUES * unit"),
        "key's scale for the value": ("words + int(ROW::VALUE_SCALE)", "words + int(ROW::KEY_SCALE)"),
        "grid's spare threads write": (
            "if (row < packed_rows_shape[0] * heads * tokens)",
            "if (row < 1 + packed_rows_shape[0] * heads * tokens)",
        ),
        "room for nothing that follows": ("* all + token;", "* tokens + token;"),
        "what follows over the past": ("* all + tokens + token", "* all + token"),
        "a vector past the last that follows": ("if (row < packed_rows_shape[0] * heads * following)", "if (true)"),
        "what follows with the flips of values": ("key_flips, keys_out", "value_flips, keys_out"),
        "what follows not rotated": ("if (ROTATED)", "if (false)"),
        "strides of another array for what follows": ("head * full_values_strides[1]", "head * full_keys_strides[1]"),
        "threads that decode rotate too": (".x - decoding) / 32u", ".x) / 32u"),
    },
    attended: {
        "weights before they are whole": (f"{BARRIER}\nint tokens", "int tokens"),
        "weights of the next tile": (f"{BARRIER}\nweight[lane]", "weight[lane]"),
        "queries before they are whole": (f"{WAIT}\ntq_sums", "tq_sums"),
        "tail of a block unmasked": ("there && place >= first[q]", "place >= first[q]"),
        "window's first token unseen": ("place >= first[q]", "place > first[q]"),
        "token past the window seen": ("place < last[q]", "place <= last[q]"),
        "window ignored where it cuts blocks": (
            "to = last[q] > to ? last[q] : to",
            "to = last[q] > to ? last[q] - 1 : to",
        ),
        "prefix taken for the tail": ("token < block.fold ? token", "token < 0 ? token"),
        "packed tokens before the prefix": ("tokens.shift = prefix", "tokens.shift = 0"),
        "maximum of each lane alone": ("tq_simd_max(seen", "(seen"),
        "old sums not rescaled": ("sums.sum[q] = tq_mul(sums.sum[q], factor)", "sums.sum[q] = sums.sum[q]"),
        "old outputs not rescaled": ("sums.output[q * VALUES + i], factor)", "sums.output[q * VALUES + i], 1.0f)"),
        "block off by one": ("tokens.start = start + block * size", "tokens.start = start + block * size + 1"),
        "blocks overlap": ("? tokens.start + size : stop", "? tokens.start + size + 1 : stop"),
        "another head's rows": ("batch * packed_rows_strides[0]", "head * packed_rows_strides[0]"),
        "strides of keys for values": ("batch * full_values_strides[0]", "batch * full_keys_strides[0]"),
        "strides of a whole array": ("values, full_values_strides[2]", "values, VALUE_DIM * 2"),
        "slots not added": ("slot < int(SHARE::SLOTS); slot++", "slot < int(SHARE::SLOTS) - 1; slot++"),
        "tokens past the tile": ("slot < tokens; slot", "slot < 32; slot"),
        "key's gain for the value": (
            "int(ROW::VALUE_SCALE) - int(ROW::VALUES)",
            "int(ROW::KEY_SCALE) - int(ROW::VALUES)",
        ),
        "rows of the last tile past the end": ("q < count", "true"),
        "queries of the tail rotated": ("KEY_ROTATED && packed", "KEY_ROTATED"),
        "blocks merged unweighted": ("tq_fma(factor, outputs", "tq_fma(1.0f, outputs"),
        "sums merged unweighted": (
            "tq_fma(sums[block], tq_exp2(tq_sub(maxima[block], maximum)), total)",
            "tq_add(sums[block], total)",
        ),
        "last block not merged": ("side == 0 ? packed_blocks : blocks", "side == 0 ? packed_blocks : blocks - 1"),
        "block of the tail rotated back": (
            "first + side * packed_blocks",
            "first + side * (packed_blocks - 1)",
        ),
        "sink of another head": ("/ length % heads", "/ length % (heads - 1)"),
        "sink left out of the sum": ("if (SINKS) total", "if (false) total"),
        "parts before they are whole": (f"{WAIT}\nif (simdgroup", "if (simdgroup"),
        "parts of two simdgroups in one place": ("(simdgroup * 2 * N + i) * 32", "(simdgroup * N + i) * 32"),
        "a simdgroup's part forgotten": ("other = 1; other", "other = 2; other"),
        "values rotated forth, not back": ("flips + (N + M)", "flips + N"),
    },
    attended_at_once: {
        "queries before the other simdgroup has them": (f"{WAIT}\ntq_sums", "tq_sums"),
        "queries of one kind for both": ("? 0 : KEY_DIM", "? 0 : 0"),
        "queries of others rotated": ("KEY_ROTATED && packed", "KEY_ROTATED"),
        "nobody loads the queries of others": ("block == 0 || int(block) == attend_sizes[2]", "block == 0"),
        "leader off by one": ("int(block) == attend_sizes[2]", "int(block) == attend_sizes[2] - 1"),
        "weights of two simdgroups in one place": ("weights + 32 * int(block)", "weights + 0 * int(block)"),
        "barrier that orders nothing": (f"{WAIT}\nint q", "threadgroup_barrier(mem_flags::mem_none);\nint q"),
        "parts before they are whole": (f"{WAIT}\nint q", "int q"),
        "barrier of a simdgroup alone": (f"{WAIT}\nint q", f"{BARRIER}\nint q"),
        "parts of the round before, still read": (f"if (start > 0) {WAIT}", ""),
        "parts of the round before": (
            "tq_store<PACKED_VALUES>(int(lane), start + i",
            "if (start == 0) tq_store<PACKED_VALUES>(int(lane), start + i",
        ),
        "a query's parts where another's are": ("uint(i * SIMDGROUPS) + block", "uint(i) + block"),
        "query of the round before": ("int q = start + int(block)", "int q = int(block)"),
        "last simdgroup not merged": ("packed_blocks, SIMDGROUPS, sink", "packed_blocks, SIMDGROUPS - 1, sink"),
        "first simdgroup not merged": (
            "tq_merge<VALUE_DIM, SINKS>(int(lane), 0, 1",
            "tq_merge<VALUE_DIM, SINKS>(int(lane), 1, 1",
        ),
        "every other simdgroup merged": (
            "tq_merge<VALUE_DIM, SINKS>(int(lane), 0, 1",
            "tq_merge<VALUE_DIM, SINKS>(int(lane), 0, 2",
        ),
        "merged by another row's maxima": ("maxima + place, totals", "maxima, totals"),
        "rows of the last tile past the end": ("ROUND && q < count", "ROUND"),
        "sink of another query": (
            "sink_logits[head * group + (row + uint(q)) / length]",
            "sink_logits[head * group + row / length]",
        ),
        "room for one row": ("outputs[ROUND *", "outputs[1 *"),
        "lower words of pairs twice": ("words[n] >>= 16", "words[n] >>= 0"),
        "halves of a pair for one unit": ("unit + 1, decoded", "unit, decoded"),
        "pairs without their stride": ("pairs + token * pair_stride", "pairs + token * 2 * K::COUNT"),
        "pairs of another head": ("batch * row_pairs_strides[0]", "head * row_pairs_strides[0]"),
    },
    scored: {
        "key rotated before it is whole": (f"{BARRIER}\nfloat x[N];", "float x[N];"),
        "pairs before the key is rotated": (f"{BARRIER}\n}}\nfloat length", "}\nfloat length"),
        "pairs of the rotated key": ("if (dim < KEY_DIM) key[dim] = x[j];", ""),
        "key turned forth, not back": ("key_flips + (N + KEY_ORDER)", "key_flips + N"),
        "signs of the key forgotten": ("tq_flip_signs<KEY_DIM>(x, key_flips, lane);\nfloat factor", "float factor"),
        "keys past the last": ("if (token < tokens)", "if (token <= tokens)"),
        "weights of another query head": ("pair_weights + (row + g)", "pair_weights + (row + 0)"),
        "queries of another KV head": ("uint row = head * group", "uint row = batch * group"),
        "second dims of the pairs": ("rope_pairs[pairs + pair]", "rope_pairs[pair + 1]"),
        "norm without its second dim": ("tq_fma(a, a, tq_mul(b, b))", "tq_mul(a, a)"),
        "length of another pair": ("weight[pair], length[k]", "weight[pair], length[0 * k + PAIRS - 1]"),
    },
    compacted: {
        "row that is not the kept one": ("kept_rows[row] *", "row *"),
        "rows of another head": ("head * packed_rows_strides[1]", "batch * packed_rows_strides[1]"),
        "rows past the kept": ("if (row < uint(compact_sizes[0]))", "if (true)"),
        "words past a simdgroup": ("word < words; word += 32", "word < 32; word += 32"),
        "rows of the result packed": ("* uint(compact_sizes[1])", "* uint(compact_sizes[0])"),
    },
}


CASES = [(kernel, wrong) for kernel, mutants in MUTANTS.items() for wrong in mutants]


@pytest.mark.parametrize(("kernel", "wrong"), CASES, ids=[wrong for _, wrong in CASES])
def test_mutant_is_caught(kernel, wrong):
    old, new = MUTANTS[kernel][wrong]
    texts = []

    def edit(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    try:
        right = all(kernel(order=order, edit=edit) for order in ORDERS)
    except SimulationError:
        right = False
    assert any(old in text for text in texts), "the text has changed; so must the mutant"
    assert not right


@pytest.mark.parametrize("kernel", MUTANTS)
def test_unchanged_kernel_passes(kernel):
    assert all(kernel(order=order) for order in ORDERS)
