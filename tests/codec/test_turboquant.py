"""The quantizer on its own: any leading dims, a model's own vectors, errors, and its check of theory."""

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import levels, rotation_matrix
from mlx_tq.cli.inputs import load_text
from mlx_tq.codec import TurboQuant
from mlx_tq.codec.codebook import theoretical_mse
from mlx_tq.codec.packing import unpack
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.recording import record_attention


@pytest.mark.parametrize("side", ["keys", "values"])
def test_codes_of_a_model_are_those_of_float64(embedded, side):
    """The model's own keys and values get the codes of float64 mathematics without a fixed order of sums."""
    model, tokenizer = embedded
    shares = []
    for layer in record_attention(model, tokenizer.encode(load_text()[:1000], add_special_tokens=False)[:96], 1):
        x = getattr(layer, side).astype(mx.float32)
        codes = np.array(mx.concatenate(unpack([TurboQuant(128, 4).encode(x).codes], 4), axis=-1))
        exact = np.array(x, np.float64)
        t = exact @ rotation_matrix(128, 42).T * np.sqrt(128) / np.linalg.norm(exact, axis=-1, keepdims=True)
        nearest = np.abs(t[..., None] - levels(4).astype(np.float64)).argmin(axis=-1)
        assert np.abs(codes.astype(int) - nearest).max() <= 1  # a neighbor, where fp32 rounds across a boundary
        shares.append((codes == nearest).mean())
    assert len(shares) == 6
    assert min(shares) > 0.9999


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"bits": bits}, "are 1, 2, 3, 4") for bits in (0, 5, 8, -1, "4", None, 2.5)),
        *(({"head_dim": dim}, "valid are multiples of 16") for dim in (0, -16, 8, 100)),
        ({"head_dim": 144}, "Use rotation='haar'"),
        ({"rotation": "dct"}, "is unknown; valid are"),
        ({"scale": "max"}, "is unknown; valid are"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        TurboQuant(**{"head_dim": 64, "bits": 4, **options})


def test_refused_shapes():
    for shape in ((), (63,), (64, 3), (2, 128)):
        with pytest.raises(ConfigError, match="the last axis must be head_dim 64"):
            TurboQuant(64, 4).encode(mx.zeros(shape))


@pytest.mark.parametrize(("dim", "rotation"), [(64, "wht"), (144, "haar")])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_validate(bits, dim, rotation):
    quantizer = TurboQuant(dim, bits, rotation=rotation)
    result = quantizer.validate(samples=2**18 // dim)
    assert result == quantizer.validate(samples=2**18 // dim)
    assert result != quantizer.validate(samples=2**18 // dim, seed=1)
    assert result.theory == theoretical_mse(bits, dim)
    assert result.mse == pytest.approx(result.theory * (1 + result.deviation))
    assert abs(result.deviation) < 0.02
    assert result.bound == 4.0**-bits
    assert result.bound < result.mse < 2.8 * result.bound  # within the sqrt(3) pi / 2 of TurboQuant's theorem 1
