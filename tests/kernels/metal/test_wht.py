"""wht.metal on the simulator: bit for bit mlx's own operations."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import DIMS, DTYPES, random, same_bits
from simulated import ORDERS, simulated

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.wht import _wht_gpu, wht, wht_ref


def check(x: mx.array, *, inverse: bool, **how) -> None:
    rotation = get_rotation("wht", x.shape[-1], 7)
    with simulated(**how) as counters:
        found = _wht_gpu(x, rotation, inverse=inverse)
    assert same_bits(found, wht_ref(x, rotation, inverse=inverse))
    assert counters[0].loaded["vectors"] == counters[0].stored["rotated"] == x.nbytes


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dim", [16, *DIMS, 448])
def test_equals_the_codecs_rotation(dim, inverse):
    dtype = DTYPES[DIMS.index(dim) % 3] if dim in DIMS else "float32"
    for order in ORDERS:
        check(random((3, 11, dim), dtype), inverse=inverse, order=order)


@pytest.mark.full
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, *DIMS, 320, 384, 448])
def test_all_types(dim, dtype, inverse):
    for number, tokens in enumerate((1, 31, 32, 33, 97)):
        check(random((2, 2, tokens, dim), dtype), inverse=inverse, order=ORDERS[number % 3])


@pytest.mark.parametrize("dim", [80, 256])
def test_under_sanitizers(dim):
    check(random((5, dim), "float16"), inverse=False, sanitize=True)


@pytest.mark.parametrize("dim", [112])
def test_any_strides_and_ranks(dim):
    x = random((2, 3, 4, 5, dim), "float16")
    for view in (x, x[0].swapaxes(0, 1), x[0, :, ::2, 1:3], x[0, 0, 0], x[0, 0, 0, 0], x[:, :, :, ::-1]):
        check(mx.array(view), inverse=True)


@pytest.mark.parametrize("dim", [48, 512])
def test_inverse_undoes_it(dim):
    x, rotation = random((4, dim), "float32"), get_rotation("wht", dim, 7)
    with simulated():
        back = _wht_gpu(_wht_gpu(x, rotation), rotation, inverse=True)
    assert np.allclose(np.array(back), np.array(x), atol=2e-6)


def test_dense_rotations_have_no_kernel():
    x, rotation = random((4, 64), "float32"), get_rotation("haar", 64, 7)
    with simulated() as counters, pytest.raises(KernelUnavailableError, match="cannot rotate by Haar"):
        wht(x, rotation)
    assert counters == []
