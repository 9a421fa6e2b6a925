"""What each kernel is measured on: a call of it, and the bytes that it must move at least."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.compact import compact
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

DIM, GROUP = 128, 4


class Case(NamedTuple):
    """nbytes: of its inputs and outputs, each once."""

    kernel: str
    call: Callable[[], list[mx.array]]
    nbytes: int


def cases(tokens: int, heads: int) -> list[Case]:
    """Every kernel on a layer of `heads` KV heads, tq4 keys and values, fp16."""
    layout = RowLayout(*(get_format("tq4").codec(DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
    keys, values = (_random(heads, tokens) for _ in range(2))
    rows = encode(keys, values, layout).rows
    queries, virtual = _random(heads * GROUP, 1), _random(heads, GROUP)[0].astype(mx.float32)
    few = keys[:, :, :64], values[:, :, :64]
    weights, pairs = mx.abs(virtual[..., : DIM // 2]), mx.arange(DIM, dtype=mx.int32).reshape(2, -1)
    kept = mx.arange(0, tokens, 2, dtype=mx.int32)
    mx.eval(rows, queries, weights, pairs, kept)
    options = {"prefix": 32, "scale": DIM**-0.5}
    rotation = get_rotation("wht", DIM, 0)
    return [
        Case("encode", lambda: [encode(keys, values, layout).rows], 2 * keys.nbytes + rows.nbytes),
        Case("dequantize", lambda: list(dequantize(rows, layout, mx.float16)), 2 * keys.nbytes + rows.nbytes),
        Case("attend", lambda: [attend(queries, rows, tokens, layout, *few, **options)], rows.nbytes),
        Case("wht", lambda: [wht(keys, rotation)], 2 * keys.nbytes),
        Case("score", lambda: [score(rows, tokens, layout, virtual, weights, pairs)], rows.nbytes // 2),
        Case("compact", lambda: [compact(rows, kept, kept.size)], rows.nbytes),
    ]


def _random(heads: int, tokens: int) -> mx.array:
    return mx.random.normal((1, heads, tokens, DIM)).astype(mx.float16)
