"""Tensors of a GGUF file as mlx arrays: 4- and 8-bit blocks stay packed, other kinds become dense.

Q4_0, Q4_1 and Q8_0 are blocks of 32 values with an fp16 scale, and so are mlx's affine groups of 32: w = scale * code +
bias. The codes are the same bits in another order. Only scales and biases are rounded, to the model's type: in float16
and float32 that loses nothing, in bfloat16 at most 1/256 of each.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.models.gguf.file import GgufFile, Tensor

GROUP = 32
_F32, _F16, _BF16, _Q4_0, _Q4_1, _Q8_0 = 0, 1, 30, 2, 3, 8
_PLAIN: dict[int, tuple[type, mx.Dtype]] = {
    _F32: (np.float32, mx.float32),
    _F16: (np.float16, mx.float16),
    _BF16: (np.uint16, mx.bfloat16),
}
_BLOCKS = {
    _Q4_0: np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    _Q4_1: np.dtype([("scale", "<f2"), ("least", "<f2"), ("codes", "u1", 16)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("codes", "i1", GROUP)]),
}
_BITS = {_Q4_0: 4, _Q4_1: 4, _Q8_0: 8}


def packed_bits(tensor: Tensor) -> int | None:
    """The bits a value of a tensor that stays packed, or None where it becomes dense."""
    return _BITS.get(tensor.kind) if len(tensor.shape) == 2 else None


def plain_type(tensor: Tensor) -> mx.Dtype | None:
    """The type of a tensor that is stored as numbers, or None where it is quantised."""
    return _PLAIN[tensor.kind][1] if tensor.kind in _PLAIN else None


def read_tensor(file: GgufFile, tensor: Tensor, dtype: mx.Dtype, minus: float = 0.0) -> dict[str, mx.array]:
    """The arrays of a tensor: `weight`, and where it stays packed `scales` and `biases`, one a group of 32.

    Args:
        file: whose tensor it is.
        tensor: to read.
        dtype: of dense weights, scales and biases.
        minus: taken off a dense weight before it is rounded to `dtype`.

    Raises:
        ConfigError: the file is damaged, or the `gguf` package is needed and not there.
        UnsupportedModelError: a kind that the `gguf` package does not know.
    """
    if packed_bits(tensor) is not None:
        return _read_packed(file, tensor, dtype)
    dense = _read_plain(file, tensor) if tensor.kind in _PLAIN else _dequantise(file, tensor)
    return {"weight": (dense.astype(mx.float32) - minus if minus else dense).reshape(tensor.shape).astype(dtype)}


def by_halves(rows: mx.array, heads: int) -> mx.array:
    """Rows [heads, D / 2, 2] of a weight, its scales or biases as [heads, 2, D / 2], whatever the columns are."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _read_plain(file: GgufFile, tensor: Tensor) -> mx.array:
    stored, dtype = _PLAIN[tensor.kind]
    numbers = mx.array(file.rows(tensor, 1, np.dtype(stored).itemsize).view(stored))
    return numbers.view(dtype) if dtype == mx.bfloat16 else numbers


def _read_packed(file: GgufFile, tensor: Tensor, dtype: mx.Dtype) -> dict[str, mx.array]:
    blocks = file.rows(tensor, GROUP, _BLOCKS[tensor.kind].itemsize).view(_BLOCKS[tensor.kind])  # [rows, groups]
    scales = mx.array(blocks["scale"]).astype(dtype)
    if tensor.kind == _Q8_0:
        codes: NDArray[np.uint8] = blocks["codes"].view(np.uint8) ^ np.uint8(
            0x80
        )  # two's complement to the distance from -128
        biases = -128 * scales
    else:
        codes = _pair_neighbours(blocks["codes"])
        biases = mx.array(blocks["least"]).astype(dtype) if tensor.kind == _Q4_1 else -8 * scales
    words = np.ascontiguousarray(codes.reshape(len(blocks), -1)).view("<u4")
    return {"weight": mx.array(words), "scales": scales, "biases": biases}


def _pair_neighbours(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit codes [..., 16]: ggml keeps value i and i + 16 in a byte, mlx value 2i and 2i + 1."""
    values = np.concatenate([codes & 0xF, codes >> 4], axis=-1)
    paired: NDArray[np.uint8] = values[..., 0::2] | values[..., 1::2] << 4
    return paired


def _dequantise(file: GgufFile, tensor: Tensor) -> mx.array:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # an optional package
        from gguf.quants import dequantize  # the same
    except ImportError as error:
        raise ConfigError(
            f"{tensor.name} of {str(file.path)!r} is stored in a kind that needs the gguf package. "
            "Run: pip install 'mlx-tq[gguf]'."
        ) from error
    try:
        kind = GGMLQuantizationType(tensor.kind)
        rows = file.rows(tensor, *GGML_QUANT_SIZES[kind])
        return mx.array(dequantize(rows, kind).astype(np.float32, copy=False))
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{tensor.name} of {str(file.path)!r} cannot be dequantised by the gguf package: {error}. "
            "Take a file of a more common kind, such as Q4_K_M or Q8_0."
        ) from error
