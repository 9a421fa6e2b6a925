"""Formats for comparison: those of other programs byte for byte, the QJL hybrids tq35 and tq25, and spectral keys."""

import math

import mlx.core as mx
import numpy as np
import pytest

from codec import published
from codec.published import BLOCKS
from codec.reference import SEED, gaussian, levels, make_codec, pack, quantize, relative_errors, rotation_matrix
from codec.reference import roundtrip as decode
from mlx_tq.codec import get_format
from mlx_tq.codec.rotation import get_rotation


def stored_bytes(name: str, x: np.ndarray, **options) -> list[bytes]:
    """Return the bytes of vectors [n, D]."""
    codes = make_codec(name, x.shape[-1], **options).encode(mx.array(x)).codes
    return [row.tobytes() for row in np.array(codes)]


# Formats of other programs

SIZES = [(name, dim) for name, (block, _) in BLOCKS.items() for dim in (32, 96, 128, 256) if dim % block == 0]
GAUSSIAN = gaussian((128,), seed=7)
INPUTS = {
    "heavy tails": GAUSSIAN**3,
    "zero": 0 * GAUSSIAN,
    "constant": np.full(128, 1.75),
    "large": GAUSSIAN * 9000,
    "beyond fp16": GAUSSIAN * 1e7,
    "tiny": GAUSSIAN * 1e-6,
    "below fp16": GAUSSIAN * 1e-20,
    "one hot": -3.25 * (np.arange(128) == 37),
    "halves": (np.arange(128) % 9 - 4) * 0.5 + 127 * (np.arange(128) % 32 == 0),
}


@pytest.mark.parametrize(("name", "dim"), SIZES)
def test_other_programs_formats_equal_a_scalar_encoder(name, dim):
    x = gaussian((24, dim), seed=dim) * np.float32(2.3)
    x[12:] = np.rint(x[12:] * 2) / 2  # many ties
    x = np.concatenate([x, *(np.tile(vector, 2)[None, :dim] for vector in INPUTS.values())]).astype(np.float32)
    assert stored_bytes(name, x) == [published.encode(name, row) for row in x]


@pytest.mark.parametrize("name", published.DECODERS)
def test_other_programs_formats_decode_as_published(name):
    codes = make_codec(name, 128).encode(mx.array(gaussian((50, 128)))).codes
    if name == "fp8":  # every byte but those of NaN
        codes = mx.array([[c for c in range(256) if c & 127 != 127] + [0, 0]], mx.uint8).reshape(2, 128).view(mx.uint16)
    decoded = np.array(make_codec(name, 128).decode_planes(codes)[0])
    expected = [published.decode(name, row.tobytes()) for row in np.array(codes)]
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)


def test_the_stored_rotation_is_a_haar_rotation():
    np.testing.assert_allclose(np.array(get_rotation("haar", 128, 42).matrix), published.TBQ_MATRIX, atol=1e-5)


# QJL hybrids

GROUPS = {"tq35": ((64, 3), (64, 2)), "tq25": ((32, 2), (96, 1))}  # dims and bits
each_hybrid = pytest.mark.parametrize("name", GROUPS)


def uneven(shape: tuple[int, ...]) -> np.ndarray:
    """Return vectors [B, H, n, D] whose dims have different energies in each head."""
    return gaussian(shape) * np.exp(0.8 * gaussian((*shape[:2], 1, shape[3]), 1))


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def encode_hybrid(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return words [n, W] without the norms, and the decoded vectors, in float64 except for the codes."""
    words, decoded, start = [], [], 0
    for dim, bits in GROUPS[name]:
        part = x[:, start : start + dim]
        start += dim
        codes, norm = quantize(part.T.copy(), bits, SEED)
        level = levels(bits)[codes].T.astype(np.float64) / math.sqrt(dim)
        rotation = rotation_matrix(dim, SEED)
        sketch = np.array(get_rotation("haar", dim, SEED + 500).matrix, np.float64) * math.sqrt(dim)
        stored = half(norm)
        residual = part.astype(np.float64) @ rotation.T - level * stored[:, None]
        projected = residual @ sketch.T
        signs = np.where(projected >= 0, 1, -1)
        norm = (residual**2).sum(axis=1) * dim / (math.sqrt(math.pi / 2) * np.abs(projected).sum(axis=1))
        estimate = math.sqrt(math.pi / 2) / dim * half(norm)[:, None] * (signs @ sketch)
        sign_bits = ((signs + 1) // 2).tolist()
        words.append([pack(c, bits) + pack(s, 1) for c, s in zip(codes.T.tolist(), sign_bits, strict=True)])
        decoded.append((level * stored[:, None] + estimate) @ rotation)
    return np.concatenate(words, axis=1), np.concatenate(decoded, axis=1)


@each_hybrid
def test_hybrids_equal_another_implementation(name):
    x = gaussian((32, 128), seed=3) * np.float32(2.5)
    codec = make_codec(name, 128, seed=SEED)
    words, decoded = encode_hybrid(name, x)
    assert np.array_equal(np.array(codec.encode(mx.array(x)).codes)[:, :-4], words)
    np.testing.assert_allclose(decode(codec, x), decoded, atol=2e-3 * np.abs(x).max())


@pytest.mark.full
@pytest.mark.parametrize("name", ["tq35", pytest.param("tq25", marks=pytest.mark.full)])
def test_inner_products_of_hybrids_are_unbiased(name):
    """|bias| < 0.01 standard deviations over 65,536 pairs whose inner product is not 0; without QJL it is above 1."""
    x = gaussian((2**16, 128), seed=9)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries = x + 0.5 / math.sqrt(128) * gaussian(x.shape, seed=10)
    error, biased = (
        ((decode(codec, x) - x) * queries).sum(axis=1)
        for codec in (make_codec(name, 128, seed=SEED), make_codec("tq2", 128))
    )
    assert abs(error.mean()) < 0.01 * error.std()
    assert abs(biased.mean()) > biased.std()


@each_hybrid
def test_dims_of_high_energy_come_first(name):
    x = uneven((2, 3, 160, 128))
    x[:, :, 0] *= 1000  # a sink token does not decide alone
    codec = make_codec(name, 128, seed=SEED)
    fitted = codec.fit(mx.array(x))
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    energy = np.take_along_axis((unit**2).sum(axis=2), np.array(fitted.learned).astype(int), axis=-1)
    assert (np.diff(energy, axis=-1) <= 1e-6 * energy[..., :1]).all()
    later = uneven((2, 3, 400, 128))[:, :, 160:]
    error, fitted_error, restored_error = (
        ((decode(c, later) - later) ** 2).sum() for c in (codec, fitted, codec.restore(fitted.learned))
    )
    assert fitted_error < 0.8 * error
    assert restored_error == fitted_error
    assert fitted.learned[0, 0].nbytes == codec.learned_bytes


@each_hybrid
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_hybrids_of_other_sizes(name, dim):
    x = gaussian((64, dim))
    codec, codec_format = make_codec(name, dim, seed=SEED), get_format(name)
    assert codec.encode(mx.array(x)).codes.nbytes == 64 * codec_format.bytes_per_vector(dim)
    assert relative_errors(codec, x).mean() == pytest.approx(codec_format.error, rel=0.1)


# Spectral keys

SPECTRAL_BITS = {"spectral8": 4, "spectral12": 4, "spectral10_int8": 8, "spectral16_int8": 8, "spectral14_int16": 16}
HALF_PAIRS = tuple((i, i + 64) for i in range(64))
ADJACENT_PAIRS = tuple((2 * i, 2 * i + 1) for i in range(64))


def encode_spectral(x: np.ndarray, count: int, bits: int, pairs: tuple[tuple[int, int], ...]) -> bytes:
    energy = [x[a] * x[a] + x[b] * x[b] for a, b in pairs]
    chosen = sorted(sorted(range(len(pairs)), key=lambda i: -energy[i])[:count])
    values = [x[pairs[i][0]] for i in chosen] + [x[pairs[i][1]] for i in chosen]
    peak = np.float16(max(abs(v) for v in values))
    limit = 2 ** (bits - 1) - 1
    step = np.float32(peak) / np.float32(limit)
    factor = np.float32(1) / step if step > 0 else np.float32(0)
    codes = [int(np.clip(np.rint(v * factor), -limit, limit)) for v in values]
    if bits == 4:
        data = bytes((c & 15) | (s & 15) << 4 for c, s in zip(codes[:count], codes[count:], strict=True))
    else:
        data = b"".join(code.to_bytes(bits // 8, "little", signed=True) for code in codes)
    return bytes(chosen) + data + peak.tobytes()


@pytest.mark.parametrize("pairs", [HALF_PAIRS, ADJACENT_PAIRS])
@pytest.mark.parametrize("name", SPECTRAL_BITS)
def test_spectral_equals_a_scalar_encoder(name, pairs):
    x = gaussian((35, 128), seed=1) * np.float32(3)
    x[30:] = np.rint(x[30:])
    x[30] = 0
    x[31, 1:] = 0
    count = make_codec(name, 128, pairs=pairs).count
    for vector, data in zip(x, stored_bytes(name, x, pairs=pairs), strict=True):
        expected = encode_spectral(vector, count, SPECTRAL_BITS[name], pairs)
        # Pairs of equal energy may be chosen in another order where only zeros are left.
        assert data[count:] == expected[count:] if vector[5] == 0 else data == expected


def test_strongest_pairs_are_the_same_at_every_position():
    codec = make_codec("spectral8", 128, pairs=tuple((i, i + 16) for i in range(16)))
    dims = [np.array(codec.first), np.array(codec.second)]  # dims without RoPE pair with one another
    assert sorted(np.concatenate(dims).tolist()) == list(range(128))
    assert (dims[0][16], dims[1][16]) == (32, 80)
    codec = make_codec("spectral8", 128)
    x = mx.array(gaussian((1, 1, 30, 128)))
    for offset in (0, 5000):
        rotated = mx.fast.rope(x, 128, traditional=False, base=10000.0, scale=1.0, offset=offset)
        index, _, _ = codec.coefficients(codec.encode(rotated).codes)
        energy = np.array(x[..., :64] ** 2 + x[..., 64:] ** 2)
        assert np.array_equal(np.array(index), np.sort(np.argsort(-energy, axis=-1)[..., :8], axis=-1))
