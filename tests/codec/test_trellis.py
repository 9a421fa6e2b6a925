"""Trellis codes: the search against all paths, the codec against a scalar one, and its error."""

import hashlib
import math
from importlib.resources import files
from itertools import accumulate, product

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import RULES, SEED, fixed_sum, gaussian, make_codec, relative_errors, rotate
from mlx_tq.codec.formats import trellis

LEVELS = np.random.default_rng(1).standard_normal(16).astype(np.float32)  # of windows of 4 bits
SHIPPED = files("mlx_tq") / "assets" / "trellis" / "levels.safetensors"
# Mean square errors of Gaussian vectors of 128, measured with 512 states, and 256 at 4 bits.
ERRORS = {4: 0.0066, 3: 0.0216, 2: 0.0783}


@pytest.mark.parametrize("bits", [1, 2])
def test_the_search_finds_the_best_of_all_paths(bits):
    """Both free ends, and a ring: all but the first bits of the last state are given, and the first follows it."""
    vectors = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
    paths = product(range(16), *[range(1 << bits)] * 5)  # a state, and the codes of those after it
    every = [[*accumulate(path, lambda state, code: (state << bits | code) & 15)][1:] for path in paths]
    groups = 16 >> bits
    ends = np.array([3, 0, 1, 2])
    for given in (None, ends):
        given = given if given is None else mx.array(given)
        paths = np.array(trellis.search_path(mx.array(vectors), mx.array(LEVELS), bits, given))
        for i, x in enumerate(vectors):
            ring = [path for path in every if path[0] >> bits == path[-1] % groups == ends[i]]
            allowed = every if given is None else ring
            errors = np.square(LEVELS[np.array(allowed)] - x).sum(axis=-1)
            assert paths[i].tolist() == allowed[errors.argmin()]


def viterbi(x, levels, bits, start=None):
    """Find the states of a vector in fp32, state by state; costs carry a predecessor's number in their lowest bits."""
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


def words_of(path, bits):
    """Return the words of a ring: its bits in order, unit by unit, word n of each in run n."""
    per_unit = bits // math.gcd(16, bits)
    ring = "".join(f"{state & ((1 << bits) - 1):0{bits}b}" for state in path)
    words = [int(ring[i : i + 16], 2) for i in range(0, len(ring), 16)]
    return [words[i] for n in range(per_unit) for i in range(n, len(words), per_unit)]


@pytest.mark.parametrize(("bits", "dim"), [(2, 64), (3, 48), (4, 80)])
def test_equals_a_scalar_encoder(bits, dim):
    """Rotation, normalization, the state at the cut, the ring, and its words: bit for bit."""
    x = gaussian((2, dim), seed=dim) * np.float32(3.7)
    norm = np.sqrt(fixed_sum(x.T * x.T))
    y = rotate(x.T, SEED) * (np.float32(1) / norm)
    per_unit = 16 if bits == 3 else 16 // bits
    table = np.array(mx.load(str(SHIPPED))[str(bits)].astype(mx.float32))
    codec = make_codec(f"tcq{bits}", dim, seed=SEED)
    encoded = codec.encode(mx.array(x))
    levels = np.array(mx.concatenate(codec.decode_planes(encoded.codes), axis=-1))
    for i in range(len(x)):
        along = y[:, i].reshape(per_unit, -1).T.ravel()
        at_cut = viterbi(np.concatenate([along[-16:], along[:16]]), table, bits)[15]
        path = viterbi(along, table, bits, at_cut)
        assert path[0] >> bits == path[-1] % (256 >> bits)
        assert np.array(encoded.codes[i]).tolist() == words_of(path, bits)
        assert np.array_equal(levels[i], table[path].reshape(-1, per_unit).T.ravel())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_any_bits_are_a_ring(bits):
    """States overlap with those before them, and packing the states of any words returns the words."""
    dim, rng = 96, np.random.default_rng(bits)
    words = rng.integers(0, 1 << 16, (5, dim * bits // 16)).astype(np.uint16)
    planes = trellis.unpack_states(list(mx.split(mx.array(words), bits if bits in (3, 5) else 1, axis=-1)), bits)
    states = mx.concatenate(planes, axis=-1)
    per_unit = len(planes)
    along = np.array(states).reshape(5, per_unit, -1).swapaxes(-1, -2).reshape(5, dim).astype(int)
    assert ((np.roll(along, 1, axis=-1) << bits & 255) == along & ~((1 << bits) - 1)).all()
    assert [words_of(path, bits) for path in along.tolist()] == words.tolist()
    assert mx.array_equal(trellis.pack_states(states, bits), mx.array(words))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", ERRORS)
def test_distortion(bits, dim):
    x = gaussian((400, dim), seed=dim)
    ring, nearest = (relative_errors(make_codec(f"{name}{bits}", dim, scale="ls"), x) for name in ("tcq", "tq"))
    assert ring.mean() < 1.03 * ERRORS[bits]
    assert ring.mean() < 0.7 * nearest.mean()


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("rule", RULES)
def test_vectors_that_are_not_gaussian(bits, rule):
    """One coordinate has all energy, half of them have, all are equal, or tiny; lengths grow 1.3 times at most."""
    codec = make_codec(f"tcq{bits}", 128, scale=rule, fp32_scales=True)
    rotated = np.zeros((6, 128), np.float32)
    rotated[0, 7], rotated[1, 7], rotated[2, :64], rotated[3], rotated[4, ::2] = 1000, -6e4, 1, 1e-30, -1e-38
    x = codec.rotation.inverse(mx.array(rotated)) * 128**0.5
    decoded = codec.decode(codec.encode(x))
    assert mx.isfinite(decoded).all()
    assert (mx.linalg.norm(decoded, axis=-1) <= 1.31 * mx.linalg.norm(x, axis=-1)).all()
    assert not decoded[5].any()


def test_levels_never_change():
    """Files written with these levels cannot be read with others."""
    digest = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert digest == "b57e527832bbd8afa9ef16c6ead5a40a72b68161989759c173f4cfff70b97b0b"
    assert trellis.all_levels().shape == (7, trellis.STATES)


def test_any_number_of_vectors():
    """An empty array, and more vectors than are searched at once."""
    codec = make_codec("tcq2", 16)
    x = mx.array(gaussian((2, 700, 16)))
    whole, parts = codec.encode(x), [codec.encode(part) for part in mx.split(x, [3, 515], axis=1)]
    assert mx.array_equal(whole.codes, mx.concatenate([part.codes for part in parts], axis=1))
    assert codec.encode(x[:, :0]).codes.shape == (2, 0, 2)
