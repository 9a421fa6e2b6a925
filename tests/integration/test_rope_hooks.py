"""Queries before RoPE are found by the identity of what came out of it, in the thread that asked."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from zoo import build

from mlx_tq.integration.rope_hooks import find, forget, hooked, outputs, remembering

X = mx.ones((1, 1, 3, 64))


def rope_of(model):
    return model.layers[0].self_attn.rope


def test_the_call_that_returned_this_very_array():
    """Not the order of calls tells, and not the values."""
    model = build("llama")
    dims = rope_of(model).dims
    with hooked(lambda tokens, cache=None: tokens), hooked(model), remembering():
        assert rope_of(model).dims == dims  # a hook looks like what it stands for
        with pytest.raises(AttributeError):
            _ = rope_of(model).nothing
        keys, queries = X + 1, X + 2
        turned = [rope_of(model)(x, offset=5) for x in (keys, queries)]
        assert [find(out).source for out in turned] == [keys, queries]
        assert find(turned[0]).module is rope_of(model).module
        assert [call.output for call in outputs()] == turned
        assert find(mx.array(turned[0])) is None
        forget()
        assert find(turned[0]) is None


def test_a_few_calls_are_remembered_by_each_thread_and_none_afterwards():
    model, found = build("llama"), []
    with hooked(model):
        with remembering():
            rope_of(model)(X)
            thread = threading.Thread(target=lambda: found.append((rope_of(model)(X), outputs())))
            thread.start()
            thread.join()
            assert len(outputs()) == 1
        assert found[0][1] == []
        with remembering():
            turned = [rope_of(model)(X) for _ in range(6)]
            assert [call.output for call in outputs()] == turned[2:]
        assert not outputs()
        rope_of(model)(X)
        assert not outputs()


def test_ropes_are_given_back_when_the_last_context_ends():
    model = build("llama")
    before = [(layer.self_attn, dict(layer.self_attn), dict(vars(layer.self_attn))) for layer in model.layers]
    with pytest.raises(ValueError, match="broken"), hooked(model):
        nested_and_broken(model)
    for attention, items, attributes in before:
        assert dict(attention) == items
        assert vars(attention) == attributes


def nested_and_broken(model):
    with hooked(model):
        assert all(not isinstance(layer.self_attn.rope, nn.RoPE) for layer in model.layers)
    assert not isinstance(rope_of(model), nn.RoPE)
    raise ValueError("broken")
