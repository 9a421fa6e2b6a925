"""Encode the formats of other programs block by block in scalar NumPy, from their published layouts alone."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

import mlx_tq.codec.formats.compared

F = np.float32
TINY = 2.0**-110  # a smaller scale is stored with codes of zero: its inverse would overflow
SIGNS = "+-++--+-++-+-+--+--++-+--+++--+-"
POSITIVE = {3: [0.2451, 0.7560, 1.3439, 2.1519], 4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326]}
TBQ_LEVELS = {bits: [-v for v in reversed(levels)] + levels for bits, levels in POSITIVE.items()}
TQ3_LEVELS = [-2.1573, -1.3336, -0.7434, -0.2428, 0.2428, 0.7434, 1.3336, 2.1573]
TBQ_MATRIX = np.load(Path(mlx_tq.codec.formats.compared.__file__).parent / "rotation_128.npy")


def half(x: float) -> bytes:
    return np.float16(min(x, 65504.0)).tobytes()


def inverse(scale: np.float32) -> np.float32:
    return F(1) / scale if scale > TINY else F(0)


def q8_0(block: np.ndarray) -> bytes:
    """Take the codes from GGML's own implementation, whose scale overflows beyond fp16."""
    return half(np.abs(block).max() / F(127)) + quantize(block, GGMLQuantizationType.Q8_0).tobytes()[2:]


def tq3_0(block: np.ndarray) -> bytes:
    y = [v if sign == "+" else -v for v, sign in zip(block, SIGNS, strict=True)]
    stride = 1
    while stride < 32:
        for i in range(32):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
        stride *= 2
    y = [v * F(1 / math.sqrt(32)) for v in y]
    d = max(abs(v) for v in y) / F(2.1573)
    factor = inverse(d)
    qs, qr = [0] * 8, [0] * 4
    for j, v in enumerate(y):
        t = v * factor
        index = sum(F(boundary) <= t for boundary in (-1.7455, -1.0385, -0.4931, 0, 0.4931, 1.0385, 1.7455))
        qs[j // 4] |= (index & 3) << 2 * (j % 4)
        qr[j // 8] |= (index >> 2) << j % 8
    return bytes(qs) + bytes(qr) + half(d)


def decode_tq3_0(data: bytes) -> list[float]:
    qs, qr, d = data[:8], data[8:12], float(np.frombuffer(data[12:], np.float16)[0])
    index = [(qs[j // 4] >> 2 * (j % 4)) & 3 | ((qr[j // 8] >> j % 8) & 1) << 2 for j in range(32)]
    return [TQ3_LEVELS[i] * d for i in index]


def tbq(block: np.ndarray, bits: int) -> bytes:
    block = np.clip(block, F(-65504), F(65504))
    squares = block * block
    while len(squares) > 1:  # neighbors in pairs
        squares = squares[::2] + squares[1::2]
    norm = np.sqrt(squares[0])
    scaled = TBQ_MATRIX * F(math.sqrt(128))
    y = block[0] * scaled[:, 0]
    for j in range(1, 128):  # left to right
        y = y + block[j] * scaled[:, j]
    stream = 0
    for i, v in enumerate(y * inverse(norm)):
        index = int(sum(v > F((low + high) / 2) for low, high in pairwise(TBQ_LEVELS[bits])))
        stream |= index << bits * i
    return stream.to_bytes(16 * bits, "little") + half(norm)


def e4m3(code: int) -> float:
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def fp8(block: np.ndarray) -> bytes:
    """Round to the nearest finite number; halfway, to the one with an even last bit."""
    data = []
    for v in block:
        size = min(abs(float(v)), 448.0)
        code = min(range(127), key=lambda c: (abs(e4m3(c) - size), c & 1))
        data.append(code | (128 if math.copysign(1, v) < 0 else 0))
    return bytes(data)


BLOCKS = {
    "q8_0": (32, q8_0),
    "fp8": (1, fp8),
    "tq3_0": (32, tq3_0),
    "tbq4_0": (128, lambda block: tbq(block, 4)),
    "tbq3_0": (128, lambda block: tbq(block, 3)),
}


def encode(name: str, x: np.ndarray) -> bytes:
    size, block = BLOCKS[name]
    with np.errstate(under="ignore", over="ignore"):
        return b"".join(block(x[i : i + size]) for i in range(0, len(x), size))


DECODERS = {
    "q8_0": (34, lambda data: dequantize(np.frombuffer(data, np.uint8), GGMLQuantizationType.Q8_0)),
    "fp8": (1, lambda data: [e4m3(data[0])]),
    "tq3_0": (14, decode_tq3_0),
}


def decode(name: str, data: bytes) -> list[float]:
    size, block = DECODERS[name]
    return [value for i in range(0, len(data), size) for value in block(data[i : i + size])]
