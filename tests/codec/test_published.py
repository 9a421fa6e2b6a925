"""Formats of other programs, byte for byte: blocks worked out by hand, and a scalar implementation."""

import math

import mlx.core as mx
import numpy as np
import published_reference as reference
import pytest
from codec_reference import gaussian, make_codec
from published_reference import BLOCKS

from mlx_tq.codec.rotation import get_rotation


def encode(name: str, x: np.ndarray) -> list[str]:
    """Return the bytes of vectors [n, D]."""
    codes = make_codec(name, x.shape[-1]).encode(mx.array(x)).codes
    return [row.tobytes().hex() for row in np.array(codes)]


def test_q8_0_by_hand():
    """amax 127, so d is 1 (3C00) and a code is the value, halves away from zero."""
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, -127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49]
    assert encode("q8_0", x) == ["003c" + "7f81" + "01ff" + "0203" + "fd00" + 24 * "00"]


def test_tq3_0_by_hand():
    """A value at 0 reaches all coordinates alike; one at 1, whose sign is -, alternates."""
    full = math.sqrt(32) * 2.1573
    x = np.zeros((3, 32), np.float32)
    x[0, 0] = full  # all codes 7, d = 1
    x[1, 1] = full  # codes 0 7 0 7: low bits 00 11 00 11, high bits 0 1 0 1
    x[2, 0], x[2, 1] = full * (1 + 0.2428 / 2.1573) / 2, -full * (1 - 0.2428 / 2.1573) / 2  # codes 7 4 7 4
    assert encode("tq3_0", x) == [
        8 * "ff" + 4 * "ff" + "003c",
        8 * "cc" + 4 * "aa" + "003c",
        8 * "33" + 4 * "ff" + "003c",
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tbq4_0", 64 * "4b" + "a849"),  # 1 is nearest to .9423, code 11; -1 to code 4, in the high nibble
        ("tbq3_0", 48 * "55" + "a849"),  # 1 is nearest to .7560, code 5 = 101; -1 to code 2 = 010
    ],
)
def test_tbq_by_hand(name, data):
    """A vector whose rotated coordinates are 1, -1, 1, -1 ...; its norm is sqrt(128) = 49A8."""
    rotated = 1.0 - 2 * (np.arange(128) % 2)
    assert encode(name, (rotated @ reference.tbq_matrix())[None].astype(np.float32)) == [data]


def test_fp8_by_hand():
    """1 is 0 0111 000; 1.0625 lies halfway to 1.125 and goes to the even one; 449 and more stay 448."""
    x = np.array([[0, 1, -1, 1.0625, 1.1875, 448, 449, -1e9, 2**-9, 2**-10, 2**-6, 3.3, 0, 0, 0, 0]], np.float32)
    assert encode("fp8", x) == ["0038b8383a7e7efe0100" + "0845" + "00000000"]


SIZES = [(name, dim) for name, (block, _) in BLOCKS.items() for dim in (32, 96, 128, 256) if dim % block == 0]


@pytest.mark.parametrize(("name", "dim"), SIZES)
def test_equal_to_the_scalar_encoder(name, dim):
    x = gaussian((24, dim), seed=dim) * np.float32(2.3)
    x[12:] = np.rint(x[12:] * 2) / 2  # many ties
    x = np.concatenate([x, *(np.tile(vector, 2)[None, :dim] for vector in reference.INPUTS.values())])
    assert encode(name, x) == [reference.encode(name, row).hex() for row in x]


def test_q8_0_decodes_to_steps():
    x = gaussian((50, 128))
    codec = make_codec("q8_0", 128)
    decoded = np.array(codec.decode(codec.encode(mx.array(x))))
    step = np.abs(x.reshape(50, 4, 32)).max(axis=-1, keepdims=True) / 127
    assert (np.abs(decoded - x).reshape(50, 4, 32) <= step * (0.5 + 127 * 2**-11 + 1e-3)).all()


def test_fp8_decodes_every_byte():
    codes = np.array([code for code in range(256) if code & 127 != 127] + [0, 0], np.uint8)
    decoded = make_codec("fp8", 256).decode_planes(mx.array(codes).view(mx.uint16))[0]
    assert np.array(decoded).tolist() == [reference.e4m3(int(code)) for code in codes]


def test_tq3_0_decodes_as_published():
    codec = make_codec("tq3_0", 128)
    codes = codec.encode(mx.array(gaussian((20, 128)))).codes
    decoded = np.array(codec.decode_planes(codes)[0])
    for row, data in zip(decoded, np.array(codes).view(np.uint8), strict=True):
        expected = [v for i in range(0, 56, 14) for v in reference.tq3_0_values(data[i : i + 14].tobytes())]
        np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_the_stored_rotation_is_a_haar_rotation():
    np.testing.assert_allclose(np.array(get_rotation("haar", 128, 42).matrix), reference.tbq_matrix(), atol=1e-5)
