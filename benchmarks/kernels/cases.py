"""The calls that each kernel is measured with, and the smallest number of bytes that each moves."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.prefill import dequantize
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

DIM, GROUP = 128, 4
QUESTION = 32  # tokens of a question to an archive


class Case(NamedTuple):
    kernel: str
    call: Callable[[], list[mx.array]]
    nbytes: int  # of its inputs and outputs


def make_cases(tokens: int, heads: int, question_tokens: int = QUESTION) -> list[Case]:
    """Make a case of every kernel, tq4 keys and values in fp16, and of those that normalized keys change.

    Archived tokens are in blocks of BLOCK, so `tokens` must be a multiple of it. "With gaps" is a packed region of
    which an eviction kept one token in four.
    """
    layout = RowLayout(*(get_format("tq4").codec(DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
    keys, values = (_random(heads, tokens) for _ in range(2))
    queries, virtual = _random(heads * GROUP, 1), _random(heads, GROUP)[0].astype(mx.float32)
    weights, pairs = mx.abs(virtual[..., : DIM // 2]), mx.arange(DIM, dtype=mx.int32).reshape(2, -1)
    question = mx.random.normal((1, heads * GROUP, question_tokens, DIM), key=mx.random.key(0)) / DIM**0.5
    blocks = [BLOCK] * (tokens // BLOCK)
    kept = mx.arange(0, tokens, 2, dtype=mx.int32)

    mx.eval(queries, weights, pairs, kept)
    rotation = get_rotation("wht", DIM, 0)

    def key_cases(name: str, means: KeyNormalization | None) -> list[Case]:
        rows = encode(keys, values, layout, means).rows
        regions = Regions(rows, tokens, layout, keys[:, :, :64], values[:, :, :64], 32, 64, means)
        mx.eval(rows)
        packed = replace(regions, sink_tokens=0, full_tokens=0)
        both, key_bytes = 2 * keys.nbytes + rows.nbytes, rows.nbytes // 2
        return [
            Case("encode" + name, lambda: [encode(keys, values, layout, means).rows], both),
            Case("dequantize" + name, lambda: list(dequantize(packed)), both),
            Case("attend" + name, lambda: [attend(queries, regions, scale=DIM**-0.5)], rows.nbytes),
            Case(
                "score" + name,
                lambda: [score(rows, tokens, layout, virtual, weights, pairs, means)],
                key_bytes,
            ),
            Case(
                "recall_score" + name,
                lambda: list(
                    recall_score(
                        group_queries(question, heads, layout, means), layout.keys(rows), layout, means, blocks
                    )
                ),
                key_bytes,
            ),
        ]

    rows = encode(keys, values, layout).rows
    scale = mx.ones((1, heads, DIM))
    means = _random(heads, -(-4 * tokens // MEAN_TOKENS))
    gaps = KeyNormalization(scale, means, mx.arange(tokens, dtype=mx.int32) * 4 // MEAN_TOKENS)
    mx.eval(rows, gaps.scale, gaps.means, gaps.index)
    return [
        *key_cases("", None),
        Case("wht", lambda: [wht(keys, rotation)], 2 * keys.nbytes),
        Case("compact", lambda: [compact(rows, kept, kept.size)], rows.nbytes),
        *key_cases(", normalized", KeyNormalization(scale, means)),
        *(case for case in key_cases(", normalized, with gaps", gaps) if "attend" in case.kernel),
    ]


def _random(heads: int, tokens: int) -> mx.array:
    return mx.random.normal((1, heads, tokens, DIM)).astype(mx.float16)
