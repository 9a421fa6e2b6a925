"""Rows: the layout of their words, for every pair of formats."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import FORMATS, gaussian, make_codec
from mlx_tq.codec import Encoded, RowLayout


def layout_of(key: str, value: str, dims: tuple[int, int], **options) -> RowLayout:
    return RowLayout(make_codec(key, dims[0], **options), make_codec(value, dims[1], **(options | {"seed": 43})))


def vectors(dims: tuple[int, int], lead: tuple[int, ...] = (2, 3, 5)) -> tuple[mx.array, mx.array]:
    return tuple(mx.array(gaussian((*lead, dim), seed=dim)).astype(mx.float16) for dim in dims)


def assert_same(part: Encoded, expected: Encoded) -> None:
    assert part.codes.dtype == mx.uint16
    assert mx.array_equal(part.codes, expected.codes)
    assert (part.scale is None) == (expected.scale is None)
    if expected.scale is not None:
        assert part.scale.dtype == expected.scale.dtype
        assert mx.array_equal(part.scale, expected.scale)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (48, 112), (80, 48)])
@pytest.mark.parametrize(("key", "value"), list(itertools.product(FORMATS, repeat=2)))
def test_words_have_the_documented_order(key, value, dims, wide):
    """Key codes, value codes, key scale, value scale, then zeros up to 4 bytes."""
    layout = layout_of(key, value, dims, fp32_scales=wide)
    tokens = vectors(dims)
    rows, health = layout.encode(*tokens)
    assert (rows.dtype, rows.shape, health.tolist()) == (mx.uint32, (2, 3, 5, layout.words), [0, 0])
    encoded = [codec.encode(x) for codec, x in zip((layout.key, layout.value), tokens, strict=True)]
    parts = [np.array(part.codes) for part in encoded]
    parts += [np.array(part.scale[..., None].view(mx.uint16)) for part in encoded if part.scale is not None]
    words = np.concatenate(parts, axis=-1)
    stored = np.array(rows).view(np.uint16)
    assert np.array_equal(stored[..., : words.shape[-1]], words)
    assert not stored[..., words.shape[-1] :].any()
    assert layout.nbytes == -(-2 * words.shape[-1] // 4) * 4 == rows.shape[-1] * 4
    keys, values = layout.split(rows)
    assert (keys.shape[-1], values.shape[-1]) == layout.split_sizes
    assert mx.array_equal(layout.unsplit(keys, values), rows)
    assert_same(layout.keys(rows), encoded[0])
    assert_same(layout.values(rows), encoded[1])
    assert_same(layout.split_keys(keys), encoded[0])


def test_rows_of_a_slice_are_a_slice_of_rows():
    """Rows of a larger buffer, which are not contiguous, and rows of any leading dims."""
    odd = layout_of("tq3", "tq4", (48, 48))  # an odd number of words
    for lead in ((), (1,), (3, 2), (2, 0, 3)):
        encoded = odd.encode(*vectors((48, 48), lead))
        assert (encoded.rows.shape, encoded.health.tolist()) == ((*lead, odd.words), [0, 0])
        assert odd.keys(encoded.rows).codes.shape == (*lead, 9)
    layout = layout_of("tq3", "q8", (48, 80))
    keys, values = vectors((48, 80), lead=(2, 3, 9))
    rows = layout.encode(keys, values).rows
    part = rows[:, :, 2:6]
    assert mx.array_equal(part, layout.encode(keys[:, :, 2:6], values[:, :, 2:6]).rows)
    assert mx.array_equal(layout.keys(part).codes, layout.keys(rows).codes[:, :, 2:6])
    assert mx.array_equal(layout.values(part).scale, layout.values(rows).scale[:, :, 2:6])
