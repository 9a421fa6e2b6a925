"""Spectral keys: layout, scores from coefficients, and pairs that RoPE does not change."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian, make_codec

BITS = {"spectral8": 4, "spectral12": 4, "spectral10_int8": 8, "spectral16_int8": 8, "spectral14_int16": 16}


HALF_PAIRS = tuple((i, i + 64) for i in range(64))
ADJACENT_PAIRS = tuple((2 * i, 2 * i + 1) for i in range(64))


def encode_scalar(x: np.ndarray, count: int, bits: int, pairs: tuple[tuple[int, int], ...]) -> bytes:
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
@pytest.mark.parametrize("name", BITS)
def test_equals_a_scalar_encoder(name, pairs):
    x = gaussian((40, 128), seed=1) * np.float32(3)
    x[30:] = np.rint(x[30:])
    x[35] = 0
    x[36, 1:] = 0
    codec = make_codec(name, 128, pairs=pairs)
    x = x[[i for i in range(40) if not 30 <= i < 35]]  # whole numbers have ties of energy
    for row, vector in zip(np.array(codec.encode(mx.array(x)).codes), x, strict=True):
        data, expected = row.tobytes(), encode_scalar(vector, codec.count, BITS[name], pairs)
        assert data[codec.count :] == expected[codec.count :] if vector[5] == 0 else data == expected


def test_a_block_by_hand():
    """Eight pairs of 64; the largest is 7, so a step is 1: c 7 s -1 is F7, c -3 s 2 is 2D."""
    x = np.zeros((1, 128), np.float32)
    pairs = {3: (7, -1), 9: (-3, 2), 20: (1, 1), 21: (2, -2), 40: (0, 5), 41: (-5, 0), 50: (4, 4), 63: (-7, -7)}
    for i, (c, s) in pairs.items():
        x[0, i], x[0, i + 64] = c, s
    data = np.array(make_codec("spectral8", 128).encode(mx.array(x)).codes).tobytes()
    assert data.hex() == "030914152829323f" + "f72d11e2500b4499" + "0047"


@pytest.mark.parametrize("name", BITS)
def test_scores_come_from_coefficients(name):
    """<q, k_hat> without k_hat, for queries of several heads and batches."""
    codec = make_codec(name, 128)
    keys, queries = mx.array(gaussian((2, 3, 50, 128))), mx.array(gaussian((2, 3, 7, 128), seed=2))
    encoded = codec.encode(keys)
    exact = np.array(queries, np.float64) @ np.array(codec.decode(encoded), np.float64).swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(codec.scores(queries, encoded)), exact, atol=2e-4)


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
