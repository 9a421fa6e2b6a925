"""Queries before RoPE: a hook on a model's RoPE modules that remembers what went in, by the identity of what came out.

Matching by identity, not by the order of calls, tells queries from keys in every model (gemma4 rotates keys first). The
memory is that of a thread, holds a few arrays, and works only where a forward pass asked for it.
"""

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

_ATTRIBUTES = {"rope", "rotary_emb", "rotary_embedding", "rotary"}
_CLASS = re.compile("rope|rotary", re.IGNORECASE)
_CALLS = 4  # a layer makes two, of queries and of keys


class RopeCall(NamedTuple):
    """One call of a RoPE module."""

    output: mx.array
    source: mx.array
    module: Any


class _Memory(threading.local):
    def __init__(self) -> None:
        self.armed = False
        self.calls: deque[RopeCall] = deque(maxlen=_CALLS)


_memory = _Memory()


@contextmanager
def remembering() -> Iterator[None]:
    """Remember, in this thread, until the context ends."""
    _memory.armed = True
    try:
        yield
    finally:
        _memory.armed = False
        forget()


def forget() -> None:
    """Drop what this thread remembers."""
    _memory.calls.clear()


def find(output: mx.array) -> RopeCall | None:
    """The call that returned this very array, or None."""
    return next((call for call in reversed(_memory.calls) if call.output is output), None)


def outputs() -> list[RopeCall]:
    """The last calls of this thread, oldest first."""
    return list(_memory.calls)


class _Hook:
    """In the place of a RoPE module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self.module(x, *args, **kwargs)
        if _memory.armed:
            _memory.calls.append(RopeCall(output, x, self.module))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Hooks:
    """The hooks of the models whose contexts are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}

    def open(self, model: Any) -> None:
        with self._lock:
            users = self._users[id(model)] = self._users.get(id(model), 0) + 1
            if users == 1:
                for owner, name, module in list(_ropes(model)):
                    setattr(owner, name, _Hook(module))

    def close(self, model: Any) -> None:
        with self._lock:
            self._users[id(model)] -= 1
            if not self._users[id(model)]:
                del self._users[id(model)]
                for owner in _modules(model):
                    for name, hook in list(vars(owner).items()):
                        if isinstance(hook, _Hook):
                            setattr(owner, name, hook.module)


def _modules(model: Any) -> list[Any]:
    return list(model.modules()) if isinstance(model, nn.Module) else []  # type: ignore[attr-defined]


def _ropes(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each RoPE module of a model: its owner, its name there, and itself."""
    for owner in _modules(model):
        for name, value in {**owner, **vars(owner)}.items():
            known = name in _ATTRIBUTES or _CLASS.search(type(value).__name__)
            if known and callable(value):
                yield owner, name, value


_hooks = _Hooks()


@contextmanager
def hooked(model: Any) -> Iterator[None]:
    """Let the RoPE modules of `model` be hooked until the context ends; contexts nest, also across threads."""
    _hooks.open(model)
    try:
        yield
    finally:
        _hooks.close(model)
