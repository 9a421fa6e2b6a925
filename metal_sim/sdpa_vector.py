"""Runs mlx's attention kernel for one query, from the installed wheel, on the simulator."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_sim.run import Counters, run_text

FILE = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"
# Definitions of mlx's other headers and function constants: no mask, no sinks, queries in rows.
PRELUDE = """
template <class T> struct Limits { static constexpr float finite_min = -3.4028234e38f; };
constexpr bool has_mask = false, query_transposed = false, do_causal = false;
constexpr bool bool_mask = false, float_mask = false, has_sinks = false;
"""
# Metal's compiler contracts sums of products; the simulator rounds each operation, and would count two for one. The
# first two replace a constant and a choice.
CONTRACTED = {
    "U score = 0;": "U score = 0.0f;",
    "query_transposed ? tpg.x * q_seq_idx + q_batch_head_idx : o_offset": "o_offset",
    "score += q[j] * k[j]": "score = fma(q[j], static_cast<U>(k[j]), score)",
    "o[j] = o[j] * factor + exp_score * values[j]": "o[j] = fma(exp_score, static_cast<U>(values[j]), o[j] * factor)",
    "sum_exp_score * factor + exp_score": "fma(sum_exp_score, factor, exp_score)",
}


def kernel_text(dim: int) -> str:
    match = re.search(r"\[\[kernel\]\] void sdpa_vector\(.*?\n}\n", FILE.read_text(), re.S)
    assert match
    text = re.sub(r", function_constant\(\w+\)", "", match.group(0))
    text = re.sub(r"(?<=\w)\s+\[\[", " [[", text)
    for written, contracted in CONTRACTED.items():
        assert written in text
        text = text.replace(written, contracted)
    return f"{PRELUDE}using T = half;\nconstexpr int D = {dim}, V = {dim};\n{text}"


def sdpa_vector(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, Counters]:
    """Attend with queries fp16 [Hq, D] to keys and values fp16 [H, S, D] at scale 1; return [Hq, D] and the cost."""
    (query_heads, dim), (heads, tokens, _) = queries.shape, keys.shape
    out = np.empty_like(queries)
    numbers = {"gqa_factor": query_heads // heads, "N": tokens, "num_q_heads": query_heads}
    strides = {f"{part}_head_stride": tokens * dim for part in "kv"} | {f"{part}_seq_stride": dim for part in "kv"}
    arrays = {"queries": queries, "keys": keys, "values": values, "out": out, "scale": np.array(1.0, np.float32)}
    arrays |= {name: np.array(number, np.int32) for name, number in numbers.items()}
    arrays |= {name: np.array(stride, np.uint64) for name, stride in strides.items()}
    unused = ("bmask", "fmask", "sinks", "mask_kv_seq_stride", "mask_q_seq_stride", "mask_head_stride")
    arrays |= {name: np.zeros(1, np.int32) for name in unused}
    counters = run_text(kernel_text(dim), arrays, grid=(1024 * query_heads, 1, 1), threadgroup=(1024, 1, 1))
    return out, counters
