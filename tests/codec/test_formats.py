"""Formats by name: sizes, refusals, levels, and formats of other packages."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import BITS, DIMS, FORMATS, gaussian, make_codec
from foreign import run_beside

from mlx_tq.codec import Codec, CodecOptions, codebook, format_names, get_format
from mlx_tq.codec.packing import pack
from mlx_tq.errors import ConfigError

BYTES_AT_128 = {"fp16": 256, "q8": 130, "tq4": 66, "tq3": 50, "tq2": 34}


def stored_bytes(codec: Codec, x: mx.array) -> int:
    return sum(array.nbytes for array in codec.encode(x) if array is not None)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_at_128(name):
    assert get_format(name).bytes_per_vector(128) == BYTES_AT_128[name]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_arrays(name, dim):
    codec = make_codec(name, dim)
    assert stored_bytes(codec, mx.array(gaussian((6, dim)))) == 6 * get_format(name).bytes_per_vector(dim)
    assert codec.encode(mx.array(gaussian((6, dim)))).codes.shape == (6, codec.words)


@pytest.mark.parametrize("name", FORMATS[1:])
def test_wide_scale_takes_two_bytes_more(name):
    x = mx.array(gaussian((6, 64)))
    narrow, wide = make_codec(name, 64), make_codec(name, 64, wide_scale=True)
    assert stored_bytes(wide, x) == stored_bytes(narrow, x) + 6 * 2
    assert (narrow.scale_dtype, wide.scale_dtype) == (mx.float16, mx.float32)
    assert mx.array_equal(narrow.encode(x).codes, wide.encode(x).codes)
    assert mx.array_equal(narrow.encode(x).scale, wide.encode(x).scale.astype(mx.float16))
    assert wide.encode(x).scale.dtype == mx.float32


def test_full_format_keeps_the_models_own_type():
    x = mx.array(gaussian((6, 64)))
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        codec = get_format("fp16").codec(64, CodecOptions(), dtype)
        assert stored_bytes(codec, x) == 6 * 64 * dtype.size
        assert mx.array_equal(codec.decode(codec.encode(x.astype(dtype))), x.astype(dtype).astype(mx.float32))


@pytest.mark.parametrize("name", BITS)
def test_decoded_levels_are_within_2_ulp_of_the_table(name):
    bits = BITS[name]
    codes = np.arange(64, dtype=np.uint16) % 2**bits
    planes = make_codec(name, 64).planes(pack(mx.array(codes), bits))
    decoded = np.array(mx.concatenate(planes, axis=-1))
    table = codebook.levels(bits)[codes]
    assert decoded.dtype == np.float32
    assert (np.abs(decoded - table) <= 2 * np.spacing(np.abs(table))).all()


@pytest.mark.parametrize("dim", [48, 64, 80, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_the_planes_turned(name, dim):
    codec = make_codec(name, dim)
    codes = codec.encode(mx.array(gaussian((2, 3, 7, dim)))).codes
    expected = np.array(mx.concatenate(codec.planes(codes), axis=-1)).swapaxes(-1, -2)
    turned = np.full((2, 3, dim, 7), np.nan, np.float32)
    for dims, column in codec.columns(codes):
        assert np.isnan(turned[..., dims, :]).all(), "a dim comes twice"
        turned[..., dims, :] = np.array(column)
    assert np.array_equal(turned, expected)


def test_names_are_sorted_by_bits():
    names = format_names()
    assert set(FORMATS) <= set(names)
    bits = [get_format(name).bits for name in names]
    assert bits == sorted(bits, reverse=True)


def test_unknown_format_lists_the_names():
    with pytest.raises(ConfigError, match=r"format 'q5' is unknown; valid are fp16, .*tq4, .*tq2, .*spectral8\."):
        get_format("q5")


@pytest.mark.parametrize("dim", [-64, 0, 72, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_size_that_cannot_be_stored(name, dim):
    with pytest.raises(ConfigError, match=rf"head_dim {dim} cannot be stored as {name}; .* Use fp16"):
        make_codec(name, dim)


@pytest.mark.parametrize("name", FORMATS[1:])
def test_size_that_the_rotation_cannot_take(name):
    with pytest.raises(ConfigError, match="Use rotation='haar'"):
        make_codec(name, 144)
    assert make_codec(name, 144, rotation="haar").head_dim == 144


def test_unknown_scale_rule():
    with pytest.raises(ConfigError, match="scale rule 'max' is unknown; valid are raw, matched, ls, unbiased"):
        CodecOptions(scale="max")


@pytest.mark.parametrize("name", FORMATS)
def test_copies_of_a_codec_are_the_codec(name):
    codec = make_codec(name, 64)
    assert copy.deepcopy([codec])[0] is codec


FOREIGN_FORMAT = """
from mlx_tq.codec.formats.full import Full

class Foreign(Full):
    name = "foreign"
    bits = 15.5
"""


def test_format_of_another_package_is_found(tmp_path):
    code = (
        "from mlx_tq.codec import format_names, get_format\n"
        "print(*format_names(), get_format('foreign').bytes_per_vector(64))"
    )
    found = run_beside(tmp_path, "mlx_tq.formats", "foreign:Foreign", FOREIGN_FORMAT, code).split()
    assert found[:2] == ["fp16", "foreign"]
    assert found[-1] == "128"
