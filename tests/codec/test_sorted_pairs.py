"""Sorted keys: groups against their definition, the codec against a scalar one, and how little scores lose."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import RULES, SEED, fixed_sum, gaussian, make_codec, rotate
from codec.test_trellis import SHIPPED, viterbi, words_of
from mlx_tq.codec.formats.sorted_pairs import ERRORS, Groups
from mlx_tq.codec.formats.trellis import encode_rings
from mlx_tq.codec.rotation import rotate as rotate_queries
from mlx_tq.errors import CacheFormatError, ConfigError

BITS = {"stcq4": 4, "stcq3": 3, "stcq2": 2}
each_format = pytest.mark.parametrize("name", BITS)


def uneven_keys(shape: tuple[int, ...], seed: int = 0, spread: float = 0.8) -> np.ndarray:
    """Gaussian keys [B, H, S, D] whose RoPE pairs (f, f + D / 2) have energies of their own in each head."""
    batch, heads, _, dim = shape
    energies = np.exp(spread * gaussian((batch, heads, 1, dim // 2), seed=seed + 1))
    return gaussian(shape, seed=seed) * np.concatenate([energies, energies], axis=-1).astype(np.float32)


@each_format
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_groups_follow_from_the_first_keys(name, dim):
    """Dims fall by the energy of their pair, and no other widths of the same mean lose less."""
    keys = uneven_keys((2, 3, 100, dim))
    codec = make_codec(name, dim).fit(mx.array(keys))
    groups, bits = codec.groups, BITS[name]
    for place in np.ndindex(2, 3):
        energy = (keys[place].astype(np.float64) ** 2).mean(axis=0)
        energy = np.tile((energy[: dim // 2] + energy[dim // 2 :]) / 2, 2)
        energy /= energy.mean()
        order = groups.order[place].astype(int)
        assert sorted(order) == list(range(dim))
        assert (np.diff(energy[order]) <= 1e-6).all()
        squares = energy[order].reshape(-1, 32).mean(axis=1)
        np.testing.assert_allclose(groups.sizes[place], np.sqrt(squares), rtol=2**-11)

        every = np.array([w for w in itertools.product(range(8), repeat=dim // 32) if sum(w) == bits * dim // 32])
        missing = (energy[order].reshape(-1, 32) ** 2).mean(axis=1)  # of groups that are not stored
        losses, chosen = (
            np.where(widths, np.array(ERRORS)[widths] * squares**2, missing).sum(axis=-1)
            for widths in (every, groups.widths[place])
        )
        assert chosen == pytest.approx(losses.min(), rel=1e-3)


@pytest.mark.parametrize("width", range(1, 8))
def test_stated_errors_of_widths(width):
    x = gaussian((2**12, 32), seed=width)
    error = float(mx.square(mx.array(x) - encode_rings(mx.array(x), width)[1]).mean())
    assert error == pytest.approx(ERRORS[width], rel=0.02)


@pytest.mark.parametrize(
    ("name", "dim", "spread", "widths"),
    [
        ("stcq2", 64, 0.3, {3, 1}),
        ("stcq3", 96, 1.6, {7, 6, 3, 2, 0}),
        pytest.param("stcq4", 128, 0.8, {7, 5, 4, 3, 2, 1}, marks=pytest.mark.full),
    ],
)
def test_equals_a_scalar_encoder(name, dim, spread, widths):
    """Sizes, the norm in the order of dims, and each group's rotation and ring: bit for bit."""
    first = uneven_keys((1, 2, 64, dim), spread=spread)
    codec = make_codec(name, dim, seed=SEED).fit(mx.array(first))
    assert {*codec.groups.widths.ravel().tolist()} == widths
    x = uneven_keys((1, 2, 3, dim), seed=7, spread=spread)
    codes = np.array(codec.encode(mx.array(x)).codes)
    groups, table = codec.groups, mx.load(str(SHIPPED))
    for head in range(2):
        order = groups.order[0, head].astype(int)
        factor = np.empty(dim, np.float32)
        factor[order] = np.repeat(np.float32(1) / groups.sizes[0, head], 32)
        divided = (x[0, head] * factor).T
        norm = np.sqrt(fixed_sum(divided * divided))
        for vector in range(3):
            words = []
            for group, width in enumerate(groups.widths[0, head].tolist()):
                y = rotate(divided[order[32 * group : 32 * group + 32]], SEED)[:, vector] * np.float32(
                    math.sqrt(dim // 32)
                )
                if width:
                    per_unit = 16 // math.gcd(16, width)
                    along = (y * (np.float32(1) / norm[vector])).reshape(per_unit, -1).T.ravel()
                    levels = np.array(table[str(width)].astype(mx.float32))
                    at_cut = viterbi(np.concatenate([along[-16:], along[:16]]), levels, width)[15]
                    words += words_of(viterbi(along, levels, width, at_cut), width)
            assert codes[0, head, vector].tolist() == words


@each_format
@pytest.mark.parametrize("rule", RULES)
def test_what_queries_read_of_groups_gives_the_scale(name, rule):
    """Least squares lose least, "unbiased" keeps <decoded, key>, and "matched" the length, all by weighted groups."""
    codec = make_codec(name, 128, scale=rule, fp32_scales=True).fit(mx.array(uneven_keys((1, 1, 200, 128), spread=0.5)))
    encoded = codec.encode(mx.array(uneven_keys((1, 1, 50, 128), seed=5, spread=0.5)))
    groups, x = codec.groups, uneven_keys((1, 1, 50, 128), seed=5, spread=0.5)[0, 0].astype(np.float64)
    factor, order = groups.factors[0, 0], groups.order[0, 0].astype(int)
    turned = (x * factor)[:, order].reshape(50, 4, 32) @ np.array(codec.rotation.parts[0].matrix, np.float64).T
    decoded = np.array(codec.decode_rotated(encoded), np.float64)[0, 0].reshape(50, 4, 32)
    decoded = decoded / groups.sizes[0, 0][:, None]
    weights = np.where(groups.widths[0, 0] > 0, groups.sizes[0, 0].astype(np.float64) ** 4, 0)[:, None]
    square, product, energy = (
        (weights * a * b).sum(axis=(1, 2)) for a, b in ((turned, turned), (turned, decoded), (decoded, decoded))
    )
    if rule == "raw":
        norms = np.linalg.norm((x * factor), axis=-1)
        np.testing.assert_allclose(np.array(encoded.scale)[0, 0], norms, rtol=1e-5)
    else:
        ratio = {"matched": square / energy, "ls": product / energy, "unbiased": square / product}[rule]
        np.testing.assert_allclose(ratio, 1, rtol=1e-4)


@each_format
def test_scores_lose_less_than_with_equal_groups(name):
    """Queries have the energies of the normalized keys, so few dims matter; 5 bits of these are little more than 4."""
    first, keys = uneven_keys((1, 3, 128, 128)), uneven_keys((1, 3, 400, 128), seed=0)[:, :, 128:]
    queries = uneven_keys((1, 3, 500, 128), seed=0)[:, :, 400:]
    exact = queries @ keys.swapaxes(-1, -2)

    def loss(codec):
        encoded = codec.encode(mx.array(keys))
        scores = codec.scores(rotate_queries(mx.array(queries), codec.rotation), encoded)
        decoded = np.array(codec.decode(encoded))
        np.testing.assert_allclose(
            np.array(scores), queries @ decoded.swapaxes(-1, -2), atol=1e-3 * np.abs(exact).max()
        )
        return np.square(np.array(scores) - exact).mean()

    bound = {4: 0.95, 3: 0.35, 2: 0.17}[BITS[name]]
    assert loss(make_codec(name, 128).fit(mx.array(first))) < bound * loss(make_codec(name[1:], 128))


@each_format
def test_heads_and_what_was_learned_go_separate_ways(name):
    keys = uneven_keys((2, 3, 40, 64))
    codec = make_codec(name, 64).fit(mx.array(keys))
    encoded = codec.encode(mx.array(keys))
    again = make_codec(name, 64).restore(codec.learned).encode(mx.array(keys))
    assert mx.array_equal(again.codes, encoded.codes)
    assert mx.array_equal(again.scale, encoded.scale)
    assert codec.learned[0, 0].nbytes == codec.learned_bytes
    part = codec.select_heads(lambda array: array[:, 1:])
    alone = part.encode(mx.array(keys[:, 1:]))
    assert mx.array_equal(alone.codes, encoded.codes[:, 1:])
    assert mx.array_equal(part.decode(alone), codec.decode(encoded)[:, 1:])


def damaged(learned: np.ndarray, what: str) -> np.ndarray:
    """Return learned groups of two groups of 32 dims [B, H, 64 + 2 + 2] that no keys lead to."""
    array = learned.copy()
    if what == "order":
        array[0, 0, 0] = array[0, 0, 1]
    elif what == "sum of widths":
        array[0, 1, 67] += 1
    elif what == "rising widths":
        array[0, 0, 66:] = 0, 4
    elif what == "width":
        array[0, 0, 66:] = 6, 65534
    elif what == "size":
        array[0, 0, 64] = 0x7E00  # NaN
    elif what == "zero":
        array[0, 0, 65] = 0
    elif what == "type":
        return array.astype(np.int32)
    else:
        return array[..., :-1]
    return array


@pytest.mark.parametrize("what", ["order", "sum of widths", "rising widths", "width", "size", "zero", "type", "shape"])
def test_damaged_groups_are_refused(what):
    """Kernels read as many words as widths say, and the dims that orders name."""
    codec = make_codec("stcq2", 64)
    learned = np.array(codec.fit(mx.array(uneven_keys((1, 2, 40, 64)))).learned)
    with pytest.raises(CacheFormatError, match="the file is damaged"):
        codec.restore(mx.array(damaged(learned, what)))


def test_keys_that_do_not_vary():
    """Zeros, one dim alone, the same energy everywhere, and NaN still give groups; what these store is finite."""
    constant = np.ones((1, 4, 20, 64), np.float32)
    constant[0, 0], constant[0, 1, :, 1:], constant[0, 3, 5, 5] = 0, 0, np.nan
    codec = make_codec("stcq2", 64).fit(mx.array(constant))
    assert (codec.groups.widths.sum(axis=-1) == 4).all()
    assert codec.groups.widths[0, 2:].tolist() == [[2, 2], [2, 2]]
    far = 1e4 * gaussian((1, 4, 20, 64))
    assert mx.isfinite(codec.decode(codec.encode(mx.array(far)))).all()


def test_sizes_and_sides_that_are_refused():
    for dim in (0, 48, 80, 112):
        with pytest.raises(ConfigError, match=f"head_dim {dim} cannot be stored as stcq2; valid are multiples of 32"):
            make_codec("stcq2", dim)


def test_groups_are_equal_without_keys():
    assert Groups.equal(96, 3).widths.tolist() == [[[3, 3, 3]]]
    x = gaussian((5, 2, 96))
    codec = make_codec("stcq3", 96)
    by_row = [codec.encode(mx.array(row)).codes for row in x]
    assert mx.array_equal(codec.encode(mx.array(x)).codes, mx.stack(by_row))
