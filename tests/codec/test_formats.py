"""One table of formats: bytes, errors, vectors that no healthy model makes, refusals; and formats by name."""

import copy
import math

import mlx.core as mx
import numpy as np
import pytest
from foreign import run_beside

from codec.reference import BITS, DIMS, FORMATS, RULES, gaussian, make_codec, roundtrip
from mlx_tq.codec import CodecOptions, RowLayout, codebook, format_names, get_format
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.packing import pack
from mlx_tq.errors import ConfigError

CORE = {"fp16": 256, "q8": 130, "tq4": 66, "tq3": 50, "tq2": 34, "tcq4": 66, "tcq3": 50, "tcq2": 34}
CORE |= {"stcq4": 66, "stcq3": 50, "stcq2": 34}
COMPARED = {"tq35": 64, "tq25": 44, "q8_0": 136, "fp8": 128, "tq3_0": 56, "tbq4_0": 66, "tbq3_0": 50}
SPECTRAL = {"spectral8": 18, "spectral10": 22, "spectral12": 26, "spectral14": 30, "spectral16": 34}
SPECTRAL |= {"spectral8_int8": 26, "spectral16_int8": 50, "spectral16_int16": 82}
BYTES_AT_128 = CORE | COMPARED | SPECTRAL
SCALED = (*FORMATS[1:], "tq1")
# Of the vectors of `test_clamped_and_broken_vectors`: a large norm, two large values, one of them beyond fp16.
CLAMPED = {"fp16": 0, "fp8": 3} | dict.fromkeys({*CORE, *COMPARED} - {"fp16", "fp8", "q8_0", "tq3_0"}, 2)
SLOW = ("tcq2", "tcq4", "stcq2", "stcq4")  # trellises, of which tcq3 and stcq3 are, too
every_format = pytest.mark.parametrize("name", BYTES_AT_128)


def stored_bytes(codec, x: mx.array) -> int:
    return sum(array.nbytes for array in codec.encode(x) if array is not None)


@every_format
def test_bytes(name):
    """Rows end on whole words."""
    codec, size, x = make_codec(name, 128), BYTES_AT_128[name], mx.array(gaussian((1, 2, 5, 128)))
    assert stored_bytes(codec, x) == 10 * size
    assert get_format(name).bytes_per_vector(128) == size
    for other in FORMATS:
        layout = RowLayout(codec, make_codec(other, 128))
        assert layout.encode(x, x).rows.nbytes == 10 * layout.nbytes == 10 * (-(-(size + BYTES_AT_128[other]) // 4) * 4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in BYTES_AT_128]
)
def test_a_format_states_its_measured_error(name):
    x = gaussian((2**12, 128), seed=5)
    error = ((roundtrip(make_codec(name, 128), x) - x) ** 2).sum() / (x**2).sum()
    assert error == pytest.approx(get_format(name).error, rel=0.02, abs=1e-7 if name == "fp16" else 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("t")])
def test_the_error_with_each_scale_rule(name, rule):
    x = gaussian((2**12, 128), seed=5)
    error = ((roundtrip(make_codec(name, 128, scale=rule), x) - x) ** 2).sum() / (x**2).sum()
    assert error == pytest.approx(get_format(name).error_with(rule), rel=0.02)


@every_format
def test_estimated_norms(name):
    """They equal the norms of the vectors up to a factor and the format's error."""
    x = gaussian((512, 128)) * np.exp(gaussian((512, 1), seed=1))
    codec = make_codec(name, 128)
    ratio = np.array(codec.estimate_norms(codec.encode(mx.array(x)))) / np.linalg.norm(x.astype(np.float64), axis=-1)
    assert np.abs(ratio / np.median(ratio) - 1).max() < 2 * max(get_format(name).error, 1e-6) ** 0.5


@every_format
def test_rotated_and_original_space_have_one_vector(name):
    """Attention reads the decoded vector, rotated; the rotation is a matrix, and its inverse the transpose."""
    codec = make_codec(name, 128)
    encoded = codec.encode(mx.array(gaussian((16, 128))))
    rotated, plain = codec.decode_rotated(encoded), codec.decode(encoded)
    if codec.rotation is None:
        assert mx.array_equal(rotated, plain)
        return
    matrix = np.array(codec.rotation.matrix, np.float64).reshape(128, 128)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(128), atol=1e-5)
    np.testing.assert_allclose(np.array(plain) @ matrix.T, np.array(rotated), atol=2e-5)
    np.testing.assert_allclose(np.array(codec.rotation.forward(plain)) / math.sqrt(128), np.array(rotated), atol=2e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_at_other_sizes(name, dim):
    """fp32 scales change no code and take two bytes more."""
    codec, wide = make_codec(name, dim), make_codec(name, dim, fp32_scales=True)
    x = mx.array(gaussian((6, dim)))
    encoded, other = codec.encode(x), wide.encode(x)
    assert encoded.codes.shape == (6, codec.words)
    assert stored_bytes(codec, x) == 6 * get_format(name).bytes_per_vector(dim)
    assert mx.array_equal(encoded.codes, other.codes)
    if name != "fp16":
        assert stored_bytes(wide, x) == stored_bytes(codec, x) + 6 * 2
        assert (encoded.scale.dtype, other.scale.dtype) == (mx.float16, mx.float32)
        assert mx.array_equal(encoded.scale, other.scale.astype(mx.float16))


def test_full_format_keeps_the_models_own_type():
    x = mx.array(gaussian((6, 64)))
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        codec, typed = make_codec("fp16", 64, dtype), x.astype(dtype)
        layout = RowLayout(codec, codec)
        assert layout.nbytes == 2 * 64 * dtype.size
        rows = layout.encode(typed, 2 * typed).rows
        assert mx.array_equal(codec.decode(layout.keys(rows)), typed.astype(mx.float32))
        assert mx.array_equal(codec.decode(layout.values(rows)), 2 * typed.astype(mx.float32))


@pytest.mark.parametrize("name", BITS)
def test_decoded_levels_are_within_2_ulp_of_the_table(name):
    bits = BITS[name]
    codes = np.arange(64, dtype=np.uint16) % 2**bits
    decoded = np.array(mx.concatenate(make_codec(name, 64).decode_planes(pack(mx.array(codes), bits)), axis=-1))
    table = codebook.levels(bits)[codes]
    assert decoded.dtype == np.float32
    assert (np.abs(decoded - table) <= 2 * np.spacing(np.abs(table))).all()


# Vectors that no healthy model makes: zero, huge, tiny, not finite


@pytest.mark.parametrize(
    "dtype", [mx.bfloat16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (mx.float16, mx.float32))]
)
@every_format
def test_clamped_and_broken_vectors(name, dtype):
    """Vectors beyond fp16 are clamped and counted on both sides, those that are not finite are counted.

    fp16 clamps nothing, and the largest vector that fits is not clamped. Zero decodes to zero.
    """
    codec = make_codec(name, 128, mx.float32 if name == "fp16" else mx.float16)
    layout = RowLayout(codec, make_codec("tq4", 128, scale="ls"))
    ones, x, fits = mx.ones((6, 128)), mx.ones((6, 128)), mx.zeros((6, 128))
    fits[:, 0] = FP16_MAX - 224 if name != "fp8" else 448  # bfloat16 holds it
    x[0], x[1], x[2, 7], x[3, 7] = 0, 60000.0, 500.0, 6e4 if dtype == mx.float16 else 1e9

    def health(*sides):
        return layout.encode(*(side.astype(dtype) for side in sides)).health.tolist()

    assert health(ones, ones) == health(fits, ones) == [0, 0]
    if dtype != mx.float16:
        assert health(x, ones) == [CLAMPED.get(name, 1), 0]
        assert health(ones, x) == [2, 0]
    for bad in (math.nan, math.inf, -math.inf):
        broken = mx.array(ones)
        broken[1, 3] = broken[5, 0] = bad
        assert [health(*sides)[1] for sides in ((broken, ones), (ones, broken), (broken, broken))] == [2, 2, 4]
    decoded = np.array(codec.decode(codec.encode(x.astype(dtype))))
    assert not decoded[0].any()
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCALED)
def test_zero_and_huge_vectors_of_every_scale_rule(name, rule, wide):
    """Zero stays zero; a norm or values beyond fp16 are clamped to it and decode to something finite."""
    codec = make_codec(name, 64, scale=rule, fp32_scales=wide)
    x = gaussian((5, 64))
    x[1], x[2], x[3] = 0, 60000, 1e30 * x[3]
    for dtype in (mx.float32, mx.bfloat16):
        encoded = codec.encode(mx.array(x).astype(dtype))
        scale, decoded = np.array(encoded.scale), np.array(codec.decode(encoded))
        assert np.isfinite(scale).all()
        assert scale.max() <= FP16_MAX
        if name != "q8":  # its scale is the largest coordinate, not the norm
            assert scale[2] == FP16_MAX
        assert np.isfinite(decoded).all()
        assert np.array_equal(decoded[1], np.zeros(64))
        assert np.abs(decoded[[0, 4]]).max() > 0.5
    if name in BITS:  # codes of zero are those of a zero coordinate: the middle boundary, which goes down
        levels = mx.concatenate(codec.decode_planes(codec.encode(mx.zeros(64)).codes), axis=-1)
        assert mx.allclose(levels, mx.full(64, float(codebook.levels(BITS[name])[2 ** BITS[name] // 2 - 1])), 1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "exponent", [pytest.param(n, marks=[] if n in (-38, -23, -8) else pytest.mark.full) for n in range(-38, -2, 3)]
)
@pytest.mark.parametrize("name", SCALED)
def test_tiny_norms_lose_no_more_than_in_fp16(name, exponent, rule):
    """The stored scale is off by at most half of fp16's smallest step, and never NaN or infinite."""
    x = gaussian((8, 64)) * np.float32(10.0**exponent)
    decoded = roundtrip(make_codec(name, 64, scale=rule), x)
    assert np.isfinite(decoded).all()
    step = 2.0**-25 * (8 if name == "q8" else 2)  # of the scale, times the largest decoded norm for scale 1
    # An unbiased vector is off by sqrt(1 / cos^2 - 1) of its norm, less than all of it while cos^2 > 1/2.
    quantization = 0.01 if name == "q8" else 1.0 if rule == "unbiased" else 0.7
    bound = quantization * np.linalg.norm(x.astype(np.float64), axis=-1) + step
    assert (np.linalg.norm(decoded - x, axis=-1) <= bound).all()


# Names and refusals

REFUSED = [
    (FORMATS, (-64, 0, 72, 100), "; .* Use fp16"),
    (("tq35", "tq25"), (0, -64, 72), "; .* Use fp16"),
    (("tq35", "tq25"), (48, 80, 96, 112), ", .* valid are 64, 128, 256 and"),
    (("q8_0", "tq3_0"), (0, -128, 16, 48), "; valid are multiples of 32"),
    (("tbq4_0", "tbq3_0"), (0, -128, 64, 144), "; valid are multiples of 128"),
    (("spectral8",), (0, 72, 528), ""),
    (("spectral16",), (16,), ""),
]


@pytest.mark.parametrize(("names", "dims", "reason"), REFUSED)
def test_refused_sizes(names, dims, reason):
    for name in names:
        for dim in dims:
            with pytest.raises(ConfigError, match=f"head_dim {dim} cannot be stored as {name}{reason}"):
                make_codec(name, dim)


def test_other_refusals():
    for name in FORMATS[1:]:
        with pytest.raises(ConfigError, match="Use rotation='haar'"):
            make_codec(name, 144)
        assert make_codec(name, 144, rotation="haar").head_dim == 144
        assert get_format(name).bytes_per_vector(144) == 2 + 18 * get_format(name).bits
    with pytest.raises(ConfigError, match="scale rule 'max' is unknown; valid are raw, matched, ls, unbiased"):
        CodecOptions(scale="max")
    with pytest.raises(ConfigError, match="learns nothing"):
        make_codec("tq3", 128).restore(mx.zeros(1))
    with pytest.raises(ConfigError, match=r"format 'q5' is unknown; valid are fp16, q8, .*tq4, .*tcq2, tq2\. docs"):
        get_format("q5")


def test_names_are_sorted_by_bits():
    names = format_names()
    assert set(BYTES_AT_128) <= set(names)
    assert format_names(compared=False) == [name for name in names if name in CORE]
    bits = [get_format(name).bits for name in names]
    assert bits == sorted(bits, reverse=True)


def test_copies_of_codecs_and_layouts_are_themselves():
    codecs = [make_codec(name, 64) for name in FORMATS]
    originals = [*codecs, RowLayout(codecs[0], codecs[1])]
    assert [*map(id, copy.deepcopy({"cache": originals})["cache"])] == [*map(id, originals)]


FOREIGN_FORMAT = """
from mlx_tq.codec import Format, get_format

FOREIGN = Format("foreign", bits=15.5, error=0.0, make_codec=get_format("fp16").make_codec)
"""


def test_formats_of_other_code_are_found(tmp_path):
    """They come by an entry point of another package, or by a call in this process."""
    code = (
        "from mlx_tq.codec import Format, format_names, get_format, register_format\n"
        "register_format(Format('mine', 15.2, 0.0, get_format('q8').make_codec))\n"
        "print(*format_names()[:3], *(get_format(name).bytes_per_vector(64) for name in ('foreign', 'mine')))"
    )
    words = run_beside(tmp_path, "mlx_tq.formats", "foreign:FOREIGN", FOREIGN_FORMAT, code).split()
    assert words == ["fp16", "foreign", "mine", "128", "66"]
