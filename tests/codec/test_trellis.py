"""Trellis codes: the search against all paths there are, the codec against a scalar one, and what both lose."""

import hashlib
from importlib.resources import files
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import fixed_sum, gaussian, make_codec, rotate

from mlx_tq.codec import Encoded, trellis

LEVELS = np.random.default_rng(1).standard_normal(16).astype(np.float32)  # of windows of 4 bits
SEED = 1042
SHIPPED = files("mlx_tq") / "assets" / "trellis" / "levels.safetensors"
# Mean square errors of Gaussian vectors of 128 that were measured before there was a format: 512 states, 256 at 4 bits.
ERRORS = {4: 0.0066, 3: 0.0216, 2: 0.0783}


def states(path, start, bits):
    """Of a path of codes, from the state before it."""
    found = []
    for code in path:
        start = (start << bits | code) & 15
        found.append(start)
    return found


@pytest.mark.parametrize("bits", [1, 2])
def test_the_search_finds_the_best_of_all_paths(bits):
    """Free, and one whose first state follows its last, of which all but the first bits are given."""
    vectors = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
    every = [states(path, start, bits) for start in range(16) for path in product(range(1 << bits), repeat=5)]
    groups = 16 >> bits
    ends = np.array([3, 0, 1, 2])
    for given in (None, ends):
        asked = None if given is None else mx.array(given)
        found = np.array(trellis.search(mx.array(vectors), mx.array(LEVELS), bits, asked))
        for i, x in enumerate(vectors):
            ring = [path for path in every if path[0] >> bits == path[-1] % groups == ends[i]]
            allowed = every if given is None else ring
            errors = np.square(LEVELS[np.array(allowed)] - x).sum(axis=-1)
            assert found[i].tolist() == allowed[errors.argmin()]


def viterbi(x, levels, bits, start=None):
    """The states of a vector, state by state in fp32; costs carry the number of a predecessor in their lowest bits."""
    groups, branches = len(levels) >> bits, 1 << bits
    cost = [np.float32(0 if start is None or start % groups == g else 1e9) for g in range(groups)]
    chosen = []
    for value in x:
        before, cost, row = cost, [], []
        for group in range(groups):
            tried = []
            for branch in range(branches):
                state = branch * groups + group
                off = value - levels[state]
                total = np.float32(off * off) + before[state >> bits]
                tried.append((total.view(np.uint32) & ~np.uint32(branches - 1)) | np.uint32(branch))
            best = min(tried)
            cost.append(best.view(np.float32))
            row.append(int(best) & (branches - 1))
        chosen.append(row)
    group = int(np.argmin(cost)) if start is None else start % groups
    path = []
    for row in reversed(chosen):
        path.append(row[group] * groups + group)
        group = path[-1] >> bits
    return path[::-1]


def written(path, bits):
    """The words of a ring: its bits in order, unit by unit, of which word n stands in run n."""
    per_unit = 3 if bits == 3 else 1
    ring = "".join(f"{state & ((1 << bits) - 1):0{bits}b}" for state in path)
    words = [int(ring[i : i + 16], 2) for i in range(0, len(ring), 16)]
    return [words[i] for n in range(per_unit) for i in range(n, len(words), per_unit)]


@pytest.mark.parametrize(("bits", "dim"), [(2, 64), (3, 48), (4, 80)])
def test_equals_a_scalar_encoder(bits, dim):
    """Rotation, normalisation, the state at the cut, the ring, and its words: bit for bit."""
    x = gaussian((2, dim), seed=dim) * np.float32(3.7)
    norm = np.sqrt(fixed_sum(x.T * x.T))
    y = rotate(x.T, SEED) * (np.float32(1) / norm)
    per_unit = 16 if bits == 3 else 16 // bits
    table = np.array(mx.load(str(SHIPPED))[str(bits)].astype(mx.float32))
    codec = make_codec(f"tcq{bits}", dim, seed=SEED)
    encoded = codec.encode(mx.array(x))
    levels = np.array(mx.concatenate(codec.planes(encoded.codes), axis=-1))
    for i in range(len(x)):
        along = y[:, i].reshape(per_unit, -1).T.ravel()
        at_cut = viterbi(np.concatenate([along[-16:], along[:16]]), table, bits)[15]
        path = viterbi(along, table, bits, at_cut)
        assert path[0] >> bits == path[-1] % (256 >> bits)
        assert np.array(encoded.codes[i]).tolist() == written(path, bits)
        assert np.array_equal(levels[i], table[path].reshape(-1, per_unit).T.ravel())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_any_bits_are_a_ring(bits):
    """What a state is says its own bits and those before it; what is read is written again."""
    dim, rng = 96, np.random.default_rng(bits)
    words = rng.integers(0, 1 << 16, (5, dim * bits // 16)).astype(np.uint16)
    planes = trellis.unpack(list(mx.split(mx.array(words), 3 if bits == 3 else 1, axis=-1)), bits)
    found = mx.concatenate(planes, axis=-1)
    per_unit = len(planes)
    along = np.array(found).reshape(5, per_unit, -1).swapaxes(-1, -2).reshape(5, dim).astype(int)
    assert ((np.roll(along, 1, axis=-1) << bits & 255) == along & ~((1 << bits) - 1)).all()
    assert [written(path, bits) for path in along.tolist()] == words.tolist()
    assert mx.array_equal(trellis.pack(found, bits), mx.array(words))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", ERRORS)
def test_distortion(bits, dim):
    x = mx.array(gaussian((400, dim), seed=dim))
    codec = make_codec(f"tcq{bits}", dim, scale="ls")
    errors = np.array(mx.square(codec.decode(codec.encode(x)) - x).sum(axis=-1) / mx.square(x).sum(axis=-1))
    assert errors.mean() < 1.03 * ERRORS[bits]
    plain = make_codec(f"tq{bits}", dim, scale="ls")
    nearest = np.array(mx.square(plain.decode(plain.encode(x)) - x).sum(axis=-1) / mx.square(x).sum(axis=-1))
    assert errors.mean() < 0.7 * nearest.mean()


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("rule", ["raw", "matched", "ls", "unbiased"])
def test_vectors_unlike_gaussian_ones(bits, rule):
    """One rotated coordinate holds all, or a half, or all are equal, or tiny: finite, and no longer than 1.3 times."""
    codec = make_codec(f"tcq{bits}", 128, scale=rule, fp32_scales=True)
    rotated = np.zeros((6, 128), np.float32)
    rotated[0, 7], rotated[1, 7], rotated[2, :64], rotated[3], rotated[4, ::2] = 1000, -6e4, 1, 1e-30, -1e-38
    x = codec.rotation.inverse(mx.array(rotated)) * 128**0.5
    decoded = codec.decode(codec.encode(x))
    assert mx.isfinite(decoded).all()
    assert (mx.linalg.norm(decoded, axis=-1) <= 1.31 * mx.linalg.norm(x, axis=-1)).all()
    assert not decoded[5].any()


def test_what_is_stored_is_read_with_the_same_levels():
    """A file that was written with these levels would be other text with others."""
    assert (
        hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
        == "26ebb666b6f4bcdd8f926646847fae82e3106068b28e0df27efb070e00de86a7"
    )
    assert trellis.all_levels().shape == (3, trellis.STATES)


def test_any_number_of_vectors():
    """None, and more than are searched at once."""
    codec = make_codec("tcq2", 16)
    x = mx.array(gaussian((2, 700, 16)))
    whole, parts = codec.encode(x), [codec.encode(part) for part in mx.split(x, [3, 515], axis=1)]
    assert mx.array_equal(whole.codes, mx.concatenate([part.codes for part in parts], axis=1))
    empty = codec.encode(x[:, :0])
    assert isinstance(empty, Encoded)
    assert empty.codes.shape == (2, 0, 2)
