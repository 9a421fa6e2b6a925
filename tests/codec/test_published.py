"""The formats of other programs, byte for byte: blocks worked out by hand, golden files, a scalar implementation."""

import json
import math

import mlx.core as mx
import numpy as np
import published_reference as reference
import pytest
from codec_reference import gaussian
from published_reference import BLOCKS, GOLDEN

from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.codec.codebook import beta_density, mse
from mlx_tq.codec.rotation import get_rotation


def codec_of(name: str, dim: int = 128):
    return get_format(name).codec(dim, CodecOptions())


def encoded(name: str, x: np.ndarray) -> list[str]:
    """The bytes of vectors [n, D]."""
    codes = codec_of(name, x.shape[-1]).encode(mx.array(x)).codes
    return [row.tobytes().hex() for row in np.array(codes)]


# By hand.


def test_q8_0_by_hand():
    """amax 127, so d is 1 (3C00) and a code is the value, halves away from zero."""
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, -127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49]
    assert encoded("q8_0", x) == ["003c" + "7f81" + "01ff" + "0203" + "fd00" + 24 * "00"]


def test_tq3_0_by_hand():
    """A value at 0 reaches all coordinates alike; one at 1, whose sign is -, alternates."""
    full = math.sqrt(32) * 2.1573
    x = np.zeros((3, 32), np.float32)
    x[0, 0] = full  # all codes 7, d = 1
    x[1, 1] = full  # codes 0 7 0 7: low bits 00 11 00 11, high bits 0 1 0 1
    x[2, 0], x[2, 1] = full * (1 + 0.2428 / 2.1573) / 2, -full * (1 - 0.2428 / 2.1573) / 2  # codes 7 4 7 4
    assert encoded("tq3_0", x) == [
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
    assert encoded(name, (rotated @ reference.tbq_matrix())[None].astype(np.float32)) == [data]


def test_fp8_by_hand():
    """1 is 0 0111 000; 1.0625 lies halfway to 1.125 and goes to the even one; 449 and more stay 448."""
    x = np.array([[0, 1, -1, 1.0625, 1.1875, 448, 449, -1e9, 2**-9, 2**-10, 2**-6, 3.3, 0, 0, 0, 0]], np.float32)
    assert encoded("fp8", x) == ["0038b8383a7e7efe0100" + "0845" + "00000000"]


# Against the scalar implementation and what it said once.


@pytest.mark.parametrize("name", BLOCKS)
def test_golden_files(name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert set(golden) == set(reference.inputs())
    x = np.stack([np.frombuffer(bytes.fromhex(case["x"]), np.float32) for case in golden.values()])
    assert encoded(name, x) == [case["bytes"] for case in golden.values()]
    assert [reference.encode(name, row).hex() for row in x] == [case["bytes"] for case in golden.values()]


SIZES = [(name, dim) for name, (block, _) in BLOCKS.items() for dim in (32, 96, 128, 256) if dim % block == 0]


@pytest.mark.parametrize(("name", "dim"), SIZES)
def test_equal_to_the_scalar_encoder(name, dim):
    x = gaussian((24, dim), seed=dim) * np.float32(2.3)
    x[12:] = np.rint(x[12:] * 2) / 2  # many ties
    assert encoded(name, x) == [reference.encode(name, row).hex() for row in x]


# What comes back.


def test_q8_0_decodes_to_steps():
    x = gaussian((50, 128))
    codec = codec_of("q8_0")
    decoded = np.array(codec.decode(codec.encode(mx.array(x))))
    step = np.abs(x.reshape(50, 4, 32)).max(axis=-1, keepdims=True) / 127
    assert (np.abs(decoded - x).reshape(50, 4, 32) <= step * (0.5 + 127 * 2**-11 + 1e-3)).all()


def test_fp8_decodes_every_byte():
    codes = np.array([code for code in range(256) if code & 127 != 127] + [0, 0], np.uint8)
    decoded = codec_of("fp8", 256).planes(mx.array(codes).view(mx.uint16))[0]
    assert np.array(decoded).tolist() == [reference.e4m3(int(code)) for code in codes]


def test_tq3_0_decodes_as_published():
    codec = codec_of("tq3_0")
    codes = codec.encode(mx.array(gaussian((20, 128)))).codes
    found = np.array(codec.planes(codes)[0])
    for row, data in zip(found, np.array(codes).view(np.uint8), strict=True):
        expected = [v for i in range(0, 56, 14) for v in reference.tq3_0_values(data[i : i + 14].tobytes())]
        np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_the_stored_rotation_is_a_haar_rotation():
    np.testing.assert_allclose(np.array(get_rotation("haar", 128, 42).matrix), reference.tbq_matrix(), atol=1e-5)


# What the constructions predict of N(0, 1).


def tbq_theory(bits: int) -> float:
    table = np.array([-v for v in reversed(reference.TBQ_LEVELS[bits])] + reference.TBQ_LEVELS[bits])
    return mse(table, beta_density(128), limit=math.sqrt(128))


def q8_0_theory() -> float:
    """step^2 / 12 in all values of a block but the largest, plus nothing for it."""
    step = np.abs(np.random.default_rng(0).standard_normal((2**16, 32))).max(axis=-1) / 127
    return (31 / 32 * step**2 / 12).mean()


def tq3_0_theory() -> float:
    """The levels scaled to a block's largest coordinate, which is exact."""
    blocks = np.random.default_rng(0).standard_normal((2**15, 32))
    t = blocks / np.abs(blocks).max(axis=-1, keepdims=True) * 2.1573
    levels = np.array([-2.1573, -1.3336, -0.7434, -0.2428, 0.2428, 0.7434, 1.3336, 2.1573])
    index = np.searchsorted([-1.7455, -1.0385, -0.4931, 0, 0.4931, 1.0385, 1.7455], t, side="right")
    return ((levels[index] - t) ** 2 * (blocks / t) ** 2).mean()


def fp8_theory() -> float:
    """Between two neighbours the error is uniform: gap^2 / 12."""
    values = np.array([reference.e4m3(code) for code in range(127)])
    edges = np.concatenate([[0], (values[1:] + values[:-1]) / 2])
    grid = np.linspace(0, 8, 400_001)
    nearest = values[np.searchsorted(edges, grid, side="right") - 1]
    return 2 * np.trapezoid((grid - nearest) ** 2 * np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi), grid)


THEORY = {
    "tbq4_0": lambda: tbq_theory(4),
    "tbq3_0": lambda: tbq_theory(3),
    "q8_0": q8_0_theory,
    "tq3_0": tq3_0_theory,
    "fp8": fp8_theory,
}


@pytest.mark.parametrize("name", THEORY)
def test_the_error_that_a_format_names_is_theorys(name):
    assert get_format(name).error == pytest.approx(THEORY[name](), rel=0.02)
