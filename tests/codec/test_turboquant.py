"""The quantizer on its own: any leading dims, errors, and its check of theory."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian

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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda bits=bits: TurboQuant(64, bits), "valid are 1, 2, 3, 4") for bits in (0, 5, 8, -1, "4", None, 2.5)),
        *(
            (lambda dim=dim: TurboQuant(dim, 4), "cannot be packed; valid are multiples of 16")
            for dim in (0, -16, 8, 100)
        ),
        (lambda: TurboQuant(144, 4), "Use rotation='haar'"),
        (lambda: TurboQuant(64, 4, rotation="dct"), "is unknown; valid are"),
        (lambda: TurboQuant(64, 4, scale="max"), "is unknown; valid are"),
        *(
            (lambda shape=shape: TurboQuant(64, 4).encode(mx.zeros(shape)), "the last axis must be head_dim 64")
            for shape in ((), (63,), (64, 3), (2, 128))
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(("dim", "rotation"), [(64, "wht"), (144, "haar")])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_validate(bits, dim, rotation):
    quantizer = TurboQuant(dim, bits, rotation=rotation)
    found = quantizer.validate(samples=2**18 // dim)
    assert found == quantizer.validate(samples=2**18 // dim)
    assert found != quantizer.validate(samples=2**18 // dim, seed=1)
    assert found.theory == theoretical_mse(bits, dim)
    assert found.mse == pytest.approx(found.theory * (1 + found.deviation))
    assert abs(found.deviation) < 0.02
    assert found.bound == 4.0**-bits
    assert found.bound < found.mse < 2.8 * found.bound  # within the sqrt(3) pi / 2 of TurboQuant's theorem 1
