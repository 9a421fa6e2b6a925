"""The quantizer on its own: any leading dims, errors, and its check of theory."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import DIMS, gaussian

import mlx_tq
from mlx_tq.codec import TurboQuant
from mlx_tq.codec.codebook import theoretical_mse
from mlx_tq.errors import ConfigError


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3, 2), (0,), (2, 0)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_any_leading_dims(bits, lead):
    quantizer = TurboQuant(64, bits)
    x = gaussian((*lead, 64))
    encoded = quantizer.encode(mx.array(x))
    assert encoded.codes.shape == (*lead, 4 * bits)
    assert encoded.codes.dtype == mx.uint16
    assert encoded.scale.shape == lead
    assert encoded.scale.dtype == mx.float16
    decoded = quantizer.decode(encoded)
    assert decoded.shape == (*lead, 64)
    assert decoded.dtype == mx.float32
    assert np.linalg.norm(np.array(decoded) - x) <= {1: 0.75, 2: 0.5, 3: 0.3, 4: 0.2}[bits] * np.linalg.norm(x)


@pytest.mark.parametrize("bits", [0, 5, 8, -1, "4", None, 2.5])
def test_bits_that_do_not_exist(bits):
    with pytest.raises(ConfigError, match="is not available; valid are 1, 2, 3, 4"):
        TurboQuant(64, bits)


@pytest.mark.parametrize("dim", [0, -16, 8, 100])
def test_size_that_cannot_be_packed(dim):
    with pytest.raises(ConfigError, match=f"head_dim {dim} cannot be packed; valid are multiples of 16"):
        TurboQuant(dim, 4)


def test_size_that_the_rotation_cannot_take():
    with pytest.raises(ConfigError, match="Use rotation='haar'"):
        TurboQuant(144, 4)
    assert abs(TurboQuant(144, 4, rotation="haar").validate().deviation) < 0.01


@pytest.mark.parametrize("option", [{"rotation": "dct"}, {"scale": "max"}])
def test_unknown_option(option):
    with pytest.raises(ConfigError, match="is unknown; valid are"):
        TurboQuant(64, 4, **option)


@pytest.mark.parametrize("shape", [(), (63,), (64, 3), (2, 128)])
def test_vectors_of_another_size(shape):
    with pytest.raises(ConfigError, match="the last axis must be head_dim 64"):
        TurboQuant(64, 4).encode(mx.zeros(shape))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_validate(bits, dim):
    found = TurboQuant(dim, bits).validate(samples=max(4096, 2**20 // dim))
    assert found.theory == theoretical_mse(bits, dim)
    assert found.mse == pytest.approx(found.theory * (1 + found.deviation))
    assert abs(found.deviation) < 0.01
    assert found.bound == 4.0**-bits
    assert found.bound < found.mse < 2.8 * found.bound  # within the sqrt(3) pi / 2 of TurboQuant's theorem 1


def test_validate_repeats():
    quantizer = TurboQuant(64, 2)
    assert quantizer.validate(256) == quantizer.validate(256)
    assert quantizer.validate(256, seed=1) != quantizer.validate(256)


def test_public_name():
    assert mlx_tq.TurboQuant is TurboQuant
