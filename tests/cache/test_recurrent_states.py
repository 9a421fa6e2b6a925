"""States at 8 bits: errors of half a step at most, the same codes again, and what does not fit together is refused."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from mlx_tq.cache.recurrent_states import (
    EXACT,
    Q8,
    PackedState,
    StateStorage,
    has_states,
    is_state,
    pack_state,
    pack_states,
    unpack_state,
    unpack_states,
)
from mlx_tq.errors import CacheFormatError, ConfigError

SMALLEST = 2.0**-100  # far from where bfloat16 has no scale any more
STATES = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=4, max_dims=4, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > SMALLEST),
)


def decoded(state):
    return np.array(unpack_state(pack_state(mx.array(state)), mx.float32))


@given(STATES)
def test_an_error_is_at_most_half_a_step_of_its_channel(state):
    scales = np.array(pack_state(mx.array(state)).scales.astype(mx.float32))
    once = decoded(state)
    assert (np.abs(once - state) <= 0.5001 * scales).all()
    assert (decoded(once) == once).all(), "states that are restored and stored again do not change"
    steps = np.abs(state).max(axis=-1, keepdims=True) / 127
    assert (np.abs(scales - steps) <= steps / 256).all(), "a scale is that of its own channel"


@given(STATES, st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_non_finite_values_spoil_only_their_channel(state, value, data):
    place = tuple(data.draw(st.integers(0, side - 1)) for side in state.shape)
    expected = decoded(state)
    state[place] = value
    result, channel = decoded(state), place[:3]
    assert not np.isfinite(result[channel]).any()
    result[channel] = expected[channel] = 0
    assert (result == expected).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_largest_numbers_of_a_type_stay_finite(dtype):
    most = mx.finfo(dtype).max
    state = mx.array([most, -most, 0, mx.inf]).astype(dtype).reshape(1, 1, 4, 1) * mx.ones((1, 1, 1, 2), dtype)
    result = unpack_state(pack_state(state), dtype).astype(mx.float32)
    assert mx.allclose(result[..., :3, :], state[..., :3, :].astype(mx.float32), rtol=1 / 256)
    assert not mx.isfinite(result[..., 3, :]).any(), "a row that is not finite decodes to none that is"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_unpacked_caches_keep_types_and_exact_convolution_inputs(dtype):
    layer, inner = ArraysCache(2), ArraysCache(2)
    for cache in (layer, inner):
        cache[0], cache[1] = (mx.random.normal(shape).astype(dtype) for shape in ((1, 3, 24), (1, 4, 16, 32)))
    plain = KVCache()
    caches = [layer, CacheList(inner, plain), plain]
    packed = copy.deepcopy(pack_states(caches, Q8))
    assert packed[0].nbytes == 4 * 16 * 32 + 4 * 16 * 2 + layer[0].nbytes
    restored = unpack_states(packed)
    for before, after in ((layer, restored[0]), (inner, restored[1].caches[0])):
        assert mx.array_equal(before[0], after[0])
        assert (after[1].dtype, after[1].shape) == (dtype, before[1].shape)
        assert mx.allclose(before[1].astype(mx.float32), after[1].astype(mx.float32), atol=0.03)
    assert pack_states(caches, EXACT) == caches


def test_states_are_distinguished_from_convolution_inputs():
    assert is_state(mx.zeros((1, 4, 16, 32)))
    others = [None, mx.zeros((1, 3, 24)), mx.zeros((1, 2, 1, 64)), mx.zeros((1, 1), mx.int64)]
    assert not any(map(is_state, others))
    assert has_states([CacheList(ArraysCache(1), KVCache())])
    assert not has_states([KVCache()])


def test_codes_and_scales_that_do_not_fit_are_refused():
    codes, scales = pack_state(mx.ones((1, 2, 3, 4)))
    wrong = [(codes[0], scales), (codes, scales[:, :1]), (codes, scales.astype(mx.float16)), (codes[:, :, :2], scales)]
    for pair in wrong:
        with pytest.raises(CacheFormatError, match="do not fit"):
            unpack_state(PackedState(*pair), mx.float32)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="state format 'q4' is unknown; valid are exact, q8"):
        StateStorage("q4")
    with pytest.raises(ConfigError, match="state step is 31; it must be 32 tokens or more"):
        StateStorage(step=31)
    steps = [2000, 4000, 6000, 8000]
    assert [StateStorage().is_due(tokens, before) for before, tokens in zip([0, *steps], steps, strict=False)] == [
        *(False, True, True, True)
    ], "a grid that prefill steps do not meet is not thinned out"
