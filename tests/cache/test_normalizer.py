"""What a layer learns of its first tokens: weights by the formula, from these tokens alone, whatever came and went."""

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import (
    DIM,
    HEADS,
    PAIRS,
    contents,
    feed,
    filled,
    listen,
    make_spec,
    queries_at,
    random_pair,
    same_bits,
    uneven,
)
from mlx_tq.cache.gaps import Gaps

KEYS, VALUES = uneven(260)
WRONG = random_pair(100, seed=9)  # tokens that are trimmed again
SPEC = make_spec("tq4", normalize=True)


def test_the_block_that_is_being_packed_keeps_its_mean():
    """Although all of its tokens left: the next ones are packed less the same."""
    gaps = Gaps(evicted=140, floor=160, kept=np.arange(20))
    assert gaps.blocks(0, 160).tolist() == [0, 1]
    assert gaps.blocks(0, 300).tolist() == [0, 1, 2]


def test_weights_are_those_of_the_formula():
    """w = sqrt(rms q / rms k) of tokens 4 to 128, keys less their mean, dims of a pair together, query heads too."""
    queries, keys = (np.array(x[0, :, 4:128], np.float64) for x in (queries_at(0, 128), KEYS))
    keys = keys - keys.mean(axis=1, keepdims=True)
    ratio = []
    for x in (queries.reshape(HEADS, -1, DIM), keys):
        squares = (x**2).mean(axis=1)
        for first, second in PAIRS:
            squares[:, [first, second]] = squares[:, [first, second]].mean(axis=1, keepdims=True)
        ratio.append(np.maximum(squares, 1e-4 * squares.mean(axis=1, keepdims=True)))
    wanted = (ratio[0] / ratio[1]) ** 0.25
    for chunks in ([200], [100, 40], [1] * 140):
        found = np.array(filled(SPEC, KEYS, VALUES, chunks).state[-1][1])[0]
        assert np.allclose(found, wanted, rtol=1e-5)
    assert wanted.std() > 0.3  # or any weights would do


# Weights are known at 136 tokens; blocks leave the tail at 152 and 184.
@pytest.mark.parametrize("length", [120, 127, 135, 136, 151, 152, 167, 168, 184])
def test_up_to_32_trimmed_tokens_taught_nothing(length):
    never = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
    for count, chunk in ((1, 1), (32, 8), (31, 31)):
        cache = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
        for start in range(0, count, chunk):
            keys, values = (x[:, :, start : min(start + chunk, count)] for x in WRONG)
            listen(cache.append(keys, values), start, keys.shape[2])
        assert cache.trim(count) == count
        assert all(mx.array_equal(*pair) for pair in zip(contents(cache), contents(never), strict=True))
        for each in (cache, again := never.fork()):
            feed(each, KEYS, VALUES, [5, 40, 25])
        assert same_bits(cache.state, again.state)
        assert cache.nbytes == again.nbytes


def test_where_attention_never_asked_weights_are_one():
    """A cache that is told so packs at once; else the next tokens show that nobody will ask."""
    told, found = (filled(SPEC, KEYS[:, :, :100], VALUES[:, :, :100]) for _ in range(2))
    for cache in (told, found):
        cache.append(KEYS[:, :, 100:200], VALUES[:, :, 100:200])
        assert cache.body_tokens == 0
    told.settle()
    assert told.body_tokens == 160 - 4
    told.append(KEYS[:, :, 200:201], VALUES[:, :, 200:201])
    found.append(KEYS[:, :, 200:201], VALUES[:, :, 200:201])
    assert same_bits(told.state, found.state)
    assert (told.state[-1][1] == 1).all()
