"""Rows: where words lie, what they cost, and that every pair of formats comes back."""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import FORMATS, gaussian, make_codec

from mlx_tq.codec import CodecOptions, RowLayout, get_format

PAIRS = list(itertools.product(FORMATS, repeat=2))
SIZES = ((128, 128), (192, 128), (48, 112), (80, 48))


def layout_of(key: str, value: str, dims: tuple[int, int], **options) -> RowLayout:
    return RowLayout(make_codec(key, dims[0], **options), make_codec(value, dims[1], **(options | {"seed": 43})))


def vectors(dims: tuple[int, int], lead: tuple[int, ...] = (2, 3, 5)) -> tuple[mx.array, mx.array]:
    return tuple(mx.array(gaussian((*lead, dim), seed=dim)).astype(mx.float16) for dim in dims)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("tq4", "tq4", 132),
        ("q8", "tq4", 196),
        ("q8", "q8", 260),
        ("tq3", "tq3", 100),
        ("tq2", "tq2", 68),
        ("tq4", "tq2", 100),
        ("q8", "tq3", 180),
        ("fp16", "fp16", 512),
        ("fp16", "tq4", 324),
    ],
)
def test_bytes_at_128(key, value, expected):
    layout = layout_of(key, value, (128, 128))
    rows = layout.encode(*vectors((128, 128))).rows
    assert layout.nbytes == expected
    assert rows.nbytes == 2 * 3 * 5 * expected


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_every_pair_comes_back(key, value, dims, wide):
    layout = layout_of(key, value, dims, wide_scale=wide)
    keys, values = vectors(dims)
    rows, health = layout.encode(keys, values)
    assert rows.dtype == mx.uint32
    assert rows.shape == (2, 3, 5, layout.words)
    assert health.tolist() == [0, 0]
    for codec, x, part in ((layout.key, keys, layout.keys(rows)), (layout.value, values, layout.values(rows))):
        encoded = codec.encode(x)
        assert mx.array_equal(part.codes, encoded.codes)
        assert part.codes.dtype == mx.uint16
        if encoded.scale is None:
            assert part.scale is None
        else:
            assert part.scale.dtype == encoded.scale.dtype
            assert mx.array_equal(part.scale, encoded.scale)
        assert mx.array_equal(codec.decode(part), codec.decode(encoded))


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_words_lie_where_documented(key, value, dims):
    """Key codes, value codes, key scale, value scale, then zeros up to 4 bytes."""
    layout = layout_of(key, value, dims)
    keys, values = vectors(dims, lead=(4,))
    rows = np.array(layout.encode(keys, values).rows)
    encoded = [layout.key.encode(keys), layout.value.encode(values)]
    parts = [np.array(part.codes) for part in encoded]
    parts += [np.array(part.scale).view(np.uint16)[:, None] for part in encoded if part.scale is not None]
    words = np.concatenate(parts, axis=-1)
    payload = get_format(key).bytes_per_vector(dims[0]) + get_format(value).bytes_per_vector(dims[1])
    assert words.shape[-1] * 2 == payload
    stored = rows.view(np.uint16)
    assert np.array_equal(stored[:, : payload // 2], words)
    assert not stored[:, payload // 2 :].any()
    assert layout.nbytes == -(-payload // 4) * 4 == rows.shape[-1] * 4


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_full_rows_in_other_types(dtype):
    codec = get_format("fp16").codec(64, CodecOptions(), dtype)
    layout = RowLayout(codec, codec)
    keys, values = (x.astype(dtype) for x in vectors((64, 64)))
    rows = layout.encode(keys, values).rows
    assert layout.nbytes == 2 * 64 * dtype.size
    assert mx.array_equal(layout.key.decode(layout.keys(rows)), keys.astype(mx.float32))
    assert mx.array_equal(layout.value.decode(layout.values(rows)), values.astype(mx.float32))


@pytest.mark.parametrize("lead", [(), (1,), (3, 2), (2, 0, 3)])
def test_any_leading_dims(lead):
    layout = layout_of("tq3", "tq4", (48, 48))  # an odd number of words
    keys, values = vectors((48, 48), lead)
    rows, health = layout.encode(keys, values)
    assert rows.shape == (*lead, layout.words)
    assert layout.keys(rows).codes.shape == (*lead, 9)
    assert health.tolist() == [0, 0]


def test_rows_of_a_slice_are_a_slice_of_rows():
    """Rows are read out of a larger buffer, which is not contiguous."""
    layout = layout_of("tq3", "q8", (48, 80))
    keys, values = vectors((48, 80), lead=(2, 3, 9))
    rows = layout.encode(keys, values).rows
    part = rows[:, :, 2:6]
    assert mx.array_equal(part, layout.encode(keys[:, :, 2:6], values[:, :, 2:6]).rows)
    assert mx.array_equal(layout.keys(part).codes, layout.keys(rows).codes[:, :, 2:6])
    assert mx.array_equal(layout.values(part).scale, layout.values(rows).scale[:, :, 2:6])


def test_copies_of_a_layout_are_the_layout():
    layout = layout_of("q8", "tq4", (64, 64))
    copied = copy.deepcopy({"cache": [layout, layout.key, layout.value]})["cache"]
    assert [*map(id, copied)] == [*map(id, (layout, layout.key, layout.value))]
