"""Where the kernels' text comes from, what it must agree with, and what happens where it cannot run."""

import re
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from cases import DIMS

from mlx_tq.codec.codebook import POLYNOMIALS, boundaries
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import build, source
from mlx_tq.kernels.constants import can_rotate, flips
from mlx_tq.kernels.wht import _wht_gpu

NAMES = sorted(file.name.removesuffix(".metal") for file in source.folder().iterdir() if file.name.endswith(".metal"))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_whole_and_short(name, normalized):
    header, body = source.text(name, normalized=normalized)
    assert "TQ_NORMALIZED" not in header + body
    assert "#include" not in header + body
    assert "//" not in header + body, "mlx looks for names in comments too"
    assert header.count("#define TQ_FN") == 1
    assert "CUDA" not in header
    assert len(header + body) < (24_000 if normalized else 22_000), (
        "mlx copies the text at every call: 20 kB take 0.5 us"
    )


def test_text_is_found_in_a_wheel_and_missing_text_is_an_error(tmp_path):
    (tmp_path / "wheel" / "metal").mkdir(parents=True)
    (tmp_path / "wheel" / "metal" / "tq_compat.h").touch()
    with mock.patch.object(source, "files", return_value=tmp_path / "wheel"):
        assert source.folder() == tmp_path / "wheel" / "metal"
    with (
        mock.patch.object(source, "files", return_value=tmp_path),
        mock.patch.object(source, "__file__", str(tmp_path / "a" / "b" / "c")),
        pytest.raises(KernelUnavailableError, match="install mlx_tq again"),
    ):
        source.folder()


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d[\d.e-]*(?=f)", re.search(pattern, text, re.S).group(0))]


def test_constants_are_the_codecs():
    header = source.text("encode").header
    expected = [*boundaries(2), *boundaries(3), *boundaries(4)]
    assert np.array_equal(np.float32(numbers(r"tq_boundaries\[25\].*?;", header)), expected)
    for i, name in enumerate(("first", "third", "fifth")):
        by_bits = [POLYNOMIALS[bits][i] if i < len(POLYNOMIALS[bits]) else 0.0 for bits in (2, 3, 4)]
        assert np.array_equal(np.float32(numbers(rf"float tq_{name}\(\) .*?;", header)), np.float32(by_bits))
    assert numbers(r"#define TQ_FP16_MAX [^\n]*", header) == [FP16_MAX]


@pytest.mark.parametrize("dim", DIMS)
def test_flips_are_the_rotation(dim):
    rotation = get_rotation("wht", dim, 3)
    words = np.array(flips(rotation))
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    count = -(-dim // 32)
    assert np.array_equal(1.0 - 2 * bits[:count].ravel()[:dim], np.array(rotation.signs))
    assert words.dtype == np.uint32
    assert len(words) >= 8


def test_no_gpu_is_an_error():
    assert not can_rotate(None)
    for name, dim in (("haar", 64), ("wht", 1024), ("wht", 12 * 64)):
        assert not can_rotate(get_rotation(name, dim, 0))
    no_gpu = mock.patch.object(build, "backend", return_value=None)
    with no_gpu, pytest.raises(KernelUnavailableError, match=r"kernel 'wht' needs a GPU.*Device\(.*own operations"):
        _wht_gpu(mx.zeros((2, 64)), get_rotation("wht", 64, 0))


def test_first_call_waits_and_later_ones_do_not():
    x, rotation = mx.ones((2, 64)), get_rotation("wht", 64, 0)
    with (
        mock.patch.object(build, "backend", return_value="metal"),
        mock.patch.object(build, "built", return_value=lambda **call: [mx.zeros((2, 64))]),
        mock.patch.object(build, "_proven", set()),
        mock.patch.object(mx, "eval") as evaluate,
    ):
        for _ in range(3):
            _wht_gpu(x, rotation)
    assert evaluate.call_count == 1
