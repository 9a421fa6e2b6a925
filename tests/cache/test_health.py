"""What a cache says about vectors that fp16 scales cannot hold, and about those that are no numbers at all."""

import mlx.core as mx
import pytest

from cache.tools import DIM, WINDOW, feed, filled, make_cache, make_spec, random_pair
from mlx_tq.errors import NonFiniteError

KEYS, VALUES = random_pair(200, dtype=mx.float32)


def spoiled(array, position, value):
    changed = mx.array(array)
    changed[0, 1, position, 3] = value
    return changed


@pytest.mark.parametrize(("which", "value"), [("key", float("nan")), ("value", float("inf")), ("key", -float("inf"))])
@pytest.mark.parametrize("formats", [("q8", "tq4"), ("fp16", "fp16")])
def test_what_is_not_finite_is_refused_at_the_next_packing(value, which, formats):
    keys, values = (spoiled(x, 40, value) if which == name else x for name, x in (("key", KEYS), ("value", VALUES)))
    cache = make_cache(*formats)
    feed(cache, keys, values, [1] * (63 + WINDOW))
    cache.check_health()  # the block of position 40 is in the tail
    feed(cache, keys, values, [1])
    with pytest.raises(NonFiniteError, match="1 key or value vectors before position 88 are NaN or infinite"):
        cache.check_health()
    feed(cache, keys, values, [1] * 31)
    with pytest.raises(NonFiniteError, match="Check the model's weights, or load it in bfloat16 or float32"):
        feed(cache, keys, values, [1])


def test_clamped_vectors_are_counted_and_stay_finite():
    keys = spoiled(spoiled(KEYS, 40, 1e5), 50, -1e30)
    keys = spoiled(keys, 70, 7e4)  # in a later block
    cache = filled(make_spec(), keys, VALUES, [90, 1])
    cache.append(*(mx.full((1, 2, 10, DIM), float("nan")) for _ in range(2)))
    cache.trim(10)  # what never reached the body is not looked at
    feed(cache, keys, VALUES, [1, 108])
    assert cache.clamped == 3
    cache.check_health()
    assert all(mx.isfinite(handle.materialize()).all() for handle in cache.keys_and_values())
    # A format without a scale keeps the value.
    exact = filled(make_spec("fp16", "fp16"), keys, VALUES)
    assert exact.clamped == 0
    assert mx.array_equal(exact.keys_and_values()[0].materialize(), keys)
