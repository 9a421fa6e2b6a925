"""The door to a model's forward pass: whoever needs the whole cache list is called before the pass begins.

A model is called as `model(tokens, cache=caches)`, and Python looks `__call__` up in the class. So the class gets ours
while a door of one of its models is open; models whose doors are closed pass through.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from mlx_tq.integration import rope_hooks

# Told the cache list of a pass and how many tokens the pass has; returns whether somebody has to see its queries.
Before = Callable[[list[Any], int], bool]


@dataclass
class _Doors:
    """Which models' doors are open, and what the classes had for `__call__`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: dict[int, list[Before]] = field(default_factory=dict)  # by id of the model, one for each context
    users: dict[type, int] = field(default_factory=dict)
    own: dict[type, Any] = field(default_factory=dict)  # `__call__` of the class itself, None where it inherits one

    def enter(self, model: Any, before: Before) -> None:
        kind = type(model)
        with self.lock:
            self.open.setdefault(id(model), []).append(before)
            self.users[kind] = self.users.get(kind, 0) + 1
            if self.users[kind] == 1:
                self.own[kind] = vars(kind).get("__call__")
                kind.__call__ = self._guarded(kind.__call__)

    def leave(self, model: Any, before: Before) -> None:
        kind = type(model)
        with self.lock:
            self.open[id(model)].remove(before)
            if not self.open[id(model)]:
                del self.open[id(model)]
            self.users[kind] -= 1
            if not self.users[kind]:
                del self.users[kind]
                own = self.own.pop(kind)
                if own is None:
                    del kind.__call__
                else:
                    kind.__call__ = own

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(call)

        @wraps(call)
        def guarded(model: Any, *args: Any, **kwargs: Any) -> Any:
            waiting = self.open.get(id(model))
            if not waiting:
                return call(model, *args, **kwargs)
            given = signature.bind(model, *args, **kwargs).arguments
            caches, tokens = given.get("cache"), list(given.values())[1]
            watched = caches is not None and waiting[-1](caches, tokens.shape[1])
            with rope_hooks.remembering() if watched else nullcontext():
                return call(model, *args, **kwargs)

        return guarded


_doors = _Doors()


@contextmanager
def door(model: Any, before: Before) -> Iterator[None]:
    """Call `before` ahead of every forward pass of `model` that has caches, until the context ends.

    Contexts nest, also across threads; the newest serves.
    """
    _doors.enter(model, before)
    try:
        yield
    finally:
        _doors.leave(model, before)
