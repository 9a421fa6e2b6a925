"""Spectral keys: layout, distortion, and scores from coefficients, also as seen before RoPE."""

import math

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian

from mlx_tq.codec import CodecOptions, RowLayout, get_format
from mlx_tq.errors import ConfigError

BYTES_AT_128 = {
    "spectral8": 18,
    "spectral10": 22,
    "spectral12": 26,
    "spectral14": 30,
    "spectral16": 34,
    "spectral8_int8": 26,
    "spectral16_int8": 50,
    "spectral16_int16": 82,
}
BITS = {"spectral8": 4, "spectral12": 4, "spectral10_int8": 8, "spectral16_int8": 8, "spectral14_int16": 16}


def half_pairs(dim: int) -> list[tuple[int, int]]:
    return [(i, i + dim // 2) for i in range(dim // 2)]


def adjacent_pairs(dim: int) -> list[tuple[int, int]]:
    return [(2 * i, 2 * i + 1) for i in range(dim // 2)]


def codec_of(name: str, dim: int = 128, pairs=None):
    return get_format(name).codec(dim, CodecOptions(pairs=pairs))


def scalar(x: np.ndarray, count: int, bits: int, pairs: list[tuple[int, int]]) -> bytes:
    """One vector in scalar NumPy."""
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


@pytest.mark.parametrize("pairing", [half_pairs, adjacent_pairs])
@pytest.mark.parametrize("name", BITS)
def test_bytes_are_those_of_a_scalar_encoder(name, pairing):
    x = gaussian((40, 128), seed=1) * np.float32(3)
    x[30:] = np.rint(x[30:])
    x[35] = 0
    x[36, 1:] = 0
    codec = codec_of(name, pairs=tuple(pairing(128)))
    x = x[[i for i in range(40) if not 30 <= i < 35]]  # whole numbers have ties of energy
    found = [row.tobytes() for row in np.array(codec.encode(mx.array(x)).codes)]
    for data, vector in zip(found, x, strict=True):
        wanted = scalar(vector, codec.count, BITS[name], pairing(128))
        assert data[codec.count :] == wanted[codec.count :] if vector[5] == 0 else data == wanted


def test_a_block_by_hand():
    """Eight pairs of 64; the largest is 7, so a step is 1: c 7 s -1 is F7, c -3 s 2 is 2D."""
    x = np.zeros((1, 128), np.float32)
    pairs = {3: (7, -1), 9: (-3, 2), 20: (1, 1), 21: (2, -2), 40: (0, 5), 41: (-5, 0), 50: (4, 4), 63: (-7, -7)}
    for i, (c, s) in pairs.items():
        x[0, i], x[0, i + 64] = c, s
    data = np.array(codec_of("spectral8").encode(mx.array(x)).codes).tobytes()
    assert data.hex() == "030914152829323f" + "f72d11e2500b4499" + "0047"


@pytest.mark.parametrize(("name", "size"), BYTES_AT_128.items())
def test_payload_and_stored_bytes(name, size):
    x = mx.array(gaussian((1, 2, 5, 128)))
    assert codec_of(name).encode(x).codes.nbytes == 10 * size
    assert get_format(name).bytes_per_vector(128) == size
    layout = RowLayout(codec_of(name), get_format("tq3").codec(128, CodecOptions()))
    assert layout.encode(x, x).rows.nbytes == 10 * layout.nbytes == 10 * (-(-(size + 50) // 4) * 4)


@pytest.mark.parametrize("name", [*BYTES_AT_128])
def test_distortion_is_within_2_percent_of_theory(name):
    """The energy of the weakest pairs, for the others' rounding is below 1 % of it."""
    x = mx.array(gaussian((2**13, 128), seed=5))
    codec = codec_of(name)
    error = mx.square(codec.decode(codec.encode(x)) - x).sum(axis=-1) / mx.square(x).sum(axis=-1)
    assert float(error.mean()) == pytest.approx(get_format(name).error, rel=0.02)


@pytest.mark.parametrize("name", BITS)
def test_scores_come_from_coefficients(name):
    """<q, k_hat> without k_hat, for queries of several heads and batches."""
    codec = codec_of(name)
    keys, queries = mx.array(gaussian((2, 3, 50, 128))), mx.array(gaussian((2, 3, 7, 128), seed=2))
    encoded = codec.encode(keys)
    exact = np.array(queries, np.float64) @ np.array(codec.decode(encoded), np.float64).swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(codec.scores(queries, encoded)), exact, atol=2e-4)


@pytest.mark.parametrize(("traditional", "turned"), [(False, 128), (True, 128), (False, 32), (True, 32)])
def test_scores_are_those_seen_before_rope(traditional, turned):
    """The same pairs, un-turned: |q_f| |k_f| cos(angle + (t - p) w_f), summed over the stored pairs of each key."""
    pairs = [(2 * i, 2 * i + 1) if traditional else (i, i + turned // 2) for i in range(turned // 2)]
    codec = codec_of("spectral16_int16", pairs=tuple(pairs))
    plain_keys, plain_query = gaussian((1, 1, 40, 128)), gaussian((1, 1, 1, 128), seed=4)

    def turn(x, offset):
        return mx.fast.rope(mx.array(x), turned, traditional=traditional, base=10000.0, scale=1.0, offset=offset)

    encoded = codec.encode(turn(plain_keys, 0))
    found = np.array(codec.scores(turn(plain_query, 60), encoded))[0, 0, 0]
    index, _, _ = codec.coefficients(encoded.codes)
    firsts, seconds = np.array(codec.first), np.array(codec.second)
    frequencies = [10000.0 ** (-2 * f / turned) for f in range(turned // 2)] + [0.0] * (64 - turned // 2)
    for position, chosen in enumerate(np.array(index)[0, 0]):
        total = 0.0
        for f in chosen:
            q, k = (
                complex(v[0, 0, at, firsts[f]], v[0, 0, at, seconds[f]])
                for v, at in ((plain_query, 0), (plain_keys, position))
            )
            total += (q * k.conjugate() * np.exp(1j * (60 - position) * frequencies[f])).real
        assert found[position] == pytest.approx(total, abs=5e-3)


def test_strongest_pairs_are_the_same_at_every_position():
    codec = codec_of("spectral8")
    x = mx.array(gaussian((1, 1, 30, 128)))
    for offset in (0, 5000):
        turned = mx.fast.rope(x, 128, traditional=False, base=10000.0, scale=1.0, offset=offset)
        index, _, _ = codec.coefficients(codec.encode(turned).codes)
        energy = np.array(x[..., :64] ** 2 + x[..., 64:] ** 2)
        assert np.array_equal(np.array(index), np.sort(np.argsort(-energy, axis=-1)[..., :8], axis=-1))


def test_dims_without_rope_pair_with_one_another():
    codec = codec_of("spectral8", pairs=tuple((i, i + 16) for i in range(16)))
    assert sorted(np.concatenate([np.array(codec.first), np.array(codec.second)]).tolist()) == list(range(128))
    assert (np.array(codec.first)[16], np.array(codec.second)[16]) == (32, 80)


def test_zero_huge_and_broken_vectors():
    codec = codec_of("spectral8")
    x = np.zeros((3, 128), np.float32)
    x[1], x[2] = 1e9, 1
    encoded = codec.encode(mx.array(x))
    decoded = np.array(codec.decode(encoded))
    assert not decoded[0].any()
    assert np.isfinite(decoded).all()
    ones = mx.ones((3, 128))
    layout = RowLayout(codec, get_format("q8").codec(128, CodecOptions()))
    assert layout.encode(mx.array(x), ones).health.tolist() == [1, 0]
    assert layout.encode(mx.array(x) * math.inf, ones).health.tolist()[1] == 3


@pytest.mark.parametrize(("name", "dim"), [("spectral16", 16), ("spectral8", 0), ("spectral8", 72), ("spectral8", 528)])
def test_sizes_that_cannot_be_stored(name, dim):
    with pytest.raises(ConfigError, match=f"head_dim {dim} cannot be stored as {name}"):
        codec_of(name, dim)
