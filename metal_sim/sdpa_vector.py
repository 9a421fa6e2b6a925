"""Runs mlx's attention kernels for few queries, from the installed wheel, on the simulator."""

import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_sim.run import Counters, run_text

FILE = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"
ONE_PASS, TWO_PASS, GQA = "sdpa_vector", "sdpa_vector_2pass_1", "sdpa_vector_2pass_1_gqa"
# Query heads per simdgroup of the GQA kernel, by head size and group.
GQA_HEADS = {(64, 8): 8, (128, 8): 4, (128, 12): 4, (128, 16): 2}
# Definitions of mlx's other headers, and function constants: no array mask, no sinks, queries in rows.
PRELUDE = """
template <class T> struct Limits { static constexpr float finite_min = -3.4028234e38f; };
constexpr bool has_mask = false, query_transposed = false, bool_mask = false, float_mask = false, has_sinks = false;
using T = half;
"""
# Metal's compiler contracts sums of products; the simulator rounds each operation, and would count two for one. The
# first two replace a constant and a choice.
CONTRACTED = (
    (r"U score = 0;", "U score = 0.0f;"),
    (r"query_transposed \? .*? : o_offset", "o_offset"),
    (r"score \+= (q.*?\]) \* (.*?);", r"score = fma(\1, static_cast<U>(\2), score);"),
    (r"(o\S*\]) \* factor \+ exp_score \* (.*?);", r"fma(exp_score, static_cast<U>(\2), \1 * factor);"),
    (r"(sum_exp_score\S*) \* factor \+ exp_score;", r"fma(\1, factor, exp_score);"),
)


def choose_kernel(
    dim: int,
    groups: int,
    length: int,
    tokens: int,
    *,
    large_chip: bool = False,
    masked: bool = False,
    sinks: bool = False,
) -> str | None:
    """Return the name of the vector kernel that mlx 0.32.4 runs on a Mac, or None where it runs none.

    The rules are `has_fused_kernel`, `use_fallback`, `eval_gpu` and `sdpa_vector_2pass` of
    mlx/backend/metal/scaled_dot_product_attention.cpp in ml-explore/mlx (commit 00703ea6), with the GQA kernels of its
    pull request 4380. The wheel for Linux has the kernels' text, but not this file.

    Args:
        dim: head size of keys and values.
        groups: query heads per KV head.
        length: queries per head; more than one are causal.
        tokens: keys.
        large_chip: Max or Ultra, whose `mx.device_info()["architecture"]` ends in s or d; else base or Pro.
        masked: with an array as mask.
        sinks: with attention sinks.
    """
    if dim not in (64, 96, 128, 256, 512) or length > min(8, tokens) or length * groups > 32:
        return None
    if dim == 512 and (length > 1 or groups != 8 or masked or tokens < 1024):
        return None
    if not (large_chip and tokens >= 1024) and not (groups > 1 and tokens >= 4096):
        return ONE_PASS
    shared = (dim, groups) in GQA_HEADS and length == 1 and tokens >= 8192
    return GQA if shared and not masked and not sinks else TWO_PASS


@cache
def kernel_text(name: str, constants: str) -> str:
    """Return the text of one of the wheel's kernels, after the constants that its template and mlx set."""
    match = re.search(rf"\[\[kernel\]\] void {name}\(.*?\n}}\n", FILE.read_text(), re.S)
    assert match
    text = re.sub(r",\s+function_constant\(\w+\)", "", match.group(0))
    text = re.sub(r"(?<=\w)\s+\[\[", " [[", text)
    if name != "sdpa_vector_2pass_2":
        for written, contracted in CONTRACTED:
            text, count = re.subn(written, contracted, text, flags=re.S)
            assert count or (name == GQA and "query_transposed" in written), f"no {written!r} in {name}"
    return f"{PRELUDE}constexpr {constants};\n{text}"


def run_kernel(
    name: str, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, *, blocks: int = 32
) -> tuple[np.ndarray, Counters]:
    """Attend with queries fp16 [Hq, L, D] to keys and values fp16 [H, S, D] at scale 1, causally.

    Two passes cut the tokens into `blocks`, a multiple of 32, which mlx chooses by chip; no count per token depends on
    it. Return the result [Hq, L, D] and the cost without that of the second pass, which does not grow with the tokens.
    """
    (query_heads, length, dim), (heads, tokens, _) = queries.shape, keys.shape
    groups, out = query_heads // heads, np.empty_like(queries)
    numbers = {"gqa_factor": groups, "N": tokens, "num_q_heads": query_heads}
    arrays = {"queries": queries, "keys": keys, "values": values, "out": out, "scale": np.array(1.0, np.float32)}
    arrays |= {name: np.array(number, np.int32) for name, number in numbers.items()}
    for part in "kv":
        arrays[f"{part}_head_stride"] = np.array(tokens * dim, np.uint64)
        arrays[f"{part}_seq_stride"] = np.array(dim, np.uint64)
    unused = ("bmask", "fmask", "sinks", "mask_kv_seq_stride", "mask_q_seq_stride", "mask_head_stride")
    arrays |= {name: np.zeros(1, np.int32) for name in unused}
    constants = f"int D = {dim}, V = {dim}, TK = 4, blocks = {blocks}, do_causal = {int(length > 1)}"
    if name == GQA:
        constants += f", G = {groups}, HPT = {GQA_HEADS[dim, groups]}"
    text = kernel_text(name, constants)
    merged = (1024 * query_heads, length, 1)
    if name == ONE_PASS:
        return out, run_text(text, arrays, grid=merged, threadgroup=(1024, 1, 1))
    arrays["out"] = partials = np.empty((*queries.shape[:2], blocks, dim), np.float16)
    arrays |= {part: np.empty(partials.shape[:3], np.float32) for part in ("sums", "maxs")}
    grid = (32 * heads, groups, length * blocks)
    counters = run_text(text, arrays, grid=grid, threadgroup=(32, groups, length))
    arrays |= {"partials": partials, "out": out, "blocks": np.array(blocks, np.int32)}
    run_text(kernel_text("sdpa_vector_2pass_2", f"int D = {dim}"), arrays, grid=merged, threadgroup=(1024, 1, 1))
    return out, counters
