"""The patches that let models run on compressed caches: attention, RoPE, forward pass and cache factory.

Each `patch_...` is a context. Contexts nest, and may end in any order and on any thread; after the last one every
binding is as it was.
"""

import inspect
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.cache.view import Handle
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.module_families import MLX_LM, ModuleFamily, family_of, loaded_families
from mlx_tq.kernels import backend
from mlx_tq.kernels.mlx_attention import attend_in_full_precision, attention
from mlx_tq.kernels.regions import Mask

Undo = Callable[[], None]


class Patched:
    """Patches a target while contexts on it are open, and restores it when the last of them ends.

    Each context may have a value; the newest open context's counts. `apply` patches the target and returns what
    restores it.
    """

    def __init__(self, apply: Callable[[Any], Undo]) -> None:
        self._apply = apply
        self._lock = threading.Lock()
        # By the id of a target, which its contexts keep alive. A list of one makes equal values distinct contexts.
        self._contexts: dict[int, tuple[list[Any], ...]] = {}
        self._undo: dict[int, Undo] = {}

    @contextmanager
    def open(self, target: Any, value: Any = None) -> Iterator[None]:
        key, context = id(target), [value]
        with self._lock:
            if key not in self._contexts:
                self._undo[key] = self._apply(target)
            self._contexts[key] = (*self._contexts.get(key, ()), context)
        try:
            yield
        finally:
            with self._lock:
                self._contexts[key] = tuple(other for other in self._contexts[key] if other is not context)
                if not self._contexts[key]:
                    del self._contexts[key]
                    self._undo.pop(key)()

    def newest(self, target: Any) -> Any:
        """Return the value of the newest open context on `target`, or None."""
        contexts = self._contexts.get(id(target))
        return contexts[-1][0] if contexts else None


def _replace_attribute(owner: Any, name: str, value: Any) -> Undo:
    was_set, previous = name in vars(owner), vars(owner).get(name)  # or a class inherits it
    setattr(owner, name, value)

    def restore() -> None:
        if was_set:
            setattr(owner, name, previous)
        elif name in vars(owner):  # the caller may have deleted it
            delattr(owner, name)

    return restore


def replace_function(
    original: Callable[..., Any], replacement: Callable[..., Any], _: Any, package: str = MLX_LM.package
) -> Undo:
    """Replace a function in all modules of a package, which import functions by name."""

    def rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
        # A copy is made in one step; while a list of items grows, the garbage collector may run code that imports.
        for name, module in sys.modules.copy().items():
            if name.partition(".")[0] == package and vars(module).get(old.__name__) is old:
                setattr(module, old.__name__, new)

    rebind(original, replacement)
    return lambda: rebind(replacement, original)  # modules that were imported meanwhile included


_in_compressed_pass = ContextVar("in_compressed_pass", default=False)  # by thread


def _make_attention(family: ModuleFamily, original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Mask, sinks: mx.array | None = None
    ) -> mx.array:
        """Run the family's attention, where keys and values may be handles of a compressed cache."""
        if isinstance(keys, mx.array):
            if isinstance(cache, LatentKVCache):
                keys, values, mask = cache.capture_queries(queries, keys, values, scale, mask)
            if _in_compressed_pass.get() or (family is MLX_LM and backend.is_chosen("cpu")):
                return attend_in_full_precision(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            if family is MLX_LM:
                return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if not isinstance(keys, Handle):  # of a quantized cache, or of a vision tower
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)  # type: ignore[no-any-return]
        view = keys.view
        if not isinstance(values, Handle) or values.view is not view:  # or the trial of MLA would accept other models
            raise UnsupportedModelError("the model attends to other values than its cache returned with the keys")
        if view.wants_queries:
            call = find_call(queries)
            if call is None:
                raise UnsupportedModelError(
                    "eviction is calibrated on queries before RoPE, and those of this layer came from no RoPE module "
                    "that could be followed. Use another policy, such as knorm."
                )
            view = view.notify_before_rope(call.source, call.module)
        return view.attend(queries, scale, mask, sinks)

    return scaled_dot_product_attention


class _FamilyFunction:
    """Replaces a function of a family while contexts are open."""

    def __init__(self, family: ModuleFamily, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        self.replacement = replacement
        self.patched = Patched(partial(replace_function, original, replacement, package=family.package))


@cache
def _attention_of(family: ModuleFamily) -> _FamilyFunction:
    original = family.base.scaled_dot_product_attention
    return _FamilyFunction(family, original, _make_attention(family, original))


scaled_dot_product_attention = _attention_of(MLX_LM).replacement


_mlx_take_along_axis = mx.take_along_axis


def take_along_axis(a: Any, indices: mx.array, axis: int | None = None, **options: Any) -> mx.array:
    """Run mlx's `take_along_axis`, where the array may be a handle of latents whose tokens an indexer selects.

    Indices [B, 1, k, R] of a handle select whole tokens: they are assumed to be equal along the last axis.
    """
    if isinstance(a, Handle) and axis in (2, -2):
        return a.take(indices[..., 0])
    return _mlx_take_along_axis(a, indices, axis, **options)


_take = Patched(lambda _: _replace_attribute(mx, "take_along_axis", take_along_axis))


@contextmanager
def patch_attention() -> Iterator[None]:
    """Let the attention of all loaded families read compressed caches, and indexers select among their latents."""
    with ExitStack() as stack:
        stack.enter_context(_take.open(mx))
        for family in loaded_families():
            stack.enter_context(_attention_of(family).patched.open(family.base))
        yield


# Queries before RoPE: RoPE modules record what goes in, and it is found by the identity of what comes out. The order of
# calls would not tell queries from keys: gemma4 rotates keys first.

_ROPE_NAMES = {"rope", "rotary_emb", "rotary_embedding", "rotary"}
_ROPE_CLASS = re.compile("rope|rotary", re.IGNORECASE)


class RopeCall(NamedTuple):
    output: mx.array
    source: mx.array
    module: Any


_recorded: ContextVar[deque[RopeCall] | None] = ContextVar("recorded", default=None)  # by thread


@contextmanager
def capture_queries() -> Iterator[None]:
    """Record the last RoPE calls of this thread."""
    token = _recorded.set(deque(maxlen=4))  # a layer makes two, of queries and of keys
    try:
        yield
    finally:
        _recorded.reset(token)


def find_call(output: mx.array) -> RopeCall | None:
    """Return the recorded call that returned this very array."""
    return next((call for call in reversed(recorded_calls()) if call.output is output), None)


def recorded_calls() -> deque[RopeCall]:
    """Return the recorded calls, oldest first; the caller may clear them."""
    return _recorded.get() or deque()


class _RecordingRope:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self.module(x, *args, **kwargs)
        if isinstance(output, mx.array) and (calls := _recorded.get()) is not None:  # some return cosines and sines
            calls.append(RopeCall(output, x, self.module))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _find_ropes(model: Any) -> list[tuple[Any, str, Any]]:
    """Return all RoPE modules with the modules and attributes that they belong to."""
    list_modules: Callable[[], list[Any]] = getattr(model, "modules", list)
    return [
        (owner, name, value)
        for owner in list_modules()
        for name, value in {**owner, **vars(owner)}.items()
        if callable(value) and (name in _ROPE_NAMES or _ROPE_CLASS.search(type(value).__name__))
    ]


def rope_modules(model: Any) -> list[Any]:
    """Return all RoPE modules of a model, whether they are called or not."""
    return [value.module if isinstance(value, _RecordingRope) else value for _, _, value in _find_ropes(model)]


def _wrap_ropes(model: Any) -> Undo:
    for owner, name, value in _find_ropes(model):
        setattr(owner, name, _RecordingRope(value))

    def restore() -> None:
        list_modules: Callable[[], list[Any]] = getattr(model, "modules", list)
        for owner in list_modules():  # again, as layers may have been replaced meanwhile
            for name, value in list(vars(owner).items()):
                if isinstance(value, _RecordingRope):
                    setattr(owner, name, value.module)

    return restore


patch_rope = Patched(_wrap_ropes).open


@contextmanager
def patch_forward(model: Any, before: Callable[[list[Any], int], bool]) -> Iterator[None]:
    """Call `before(caches, tokens)` ahead of each forward pass with caches; it returns whether to capture queries."""
    with _wrapped_classes.open(type(model)), _before_forward.open(model, before):
        yield


def _wrap_call(model_class: Any) -> Undo:
    """Wrap `__call__`, which Python looks up in the class; models without an open context pass through."""
    call = model_class.__call__
    signature = inspect.signature(call)

    @wraps(call)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        before = _before_forward.newest(model)
        if before is None:
            return call(model, *args, **kwargs)
        bound = signature.bind(model, *args, **kwargs)
        caches = (bound.arguments | bound.kwargs).get("cache")  # also where a wrapper has only **kwargs
        wants_queries = caches is not None and before(caches, _count_tokens(bound))
        token = _in_compressed_pass.set(_has_compressed(caches))
        try:
            with capture_queries() if wants_queries else nullcontext():
                return call(model, *args, **kwargs)
        except TypeError as error:
            _refuse_other_attention(model, error)
            raise
        finally:
            _in_compressed_pass.reset(token)

    return _replace_attribute(model_class, "__call__", wrapper)


def _count_tokens(bound: inspect.BoundArguments) -> int:
    """Return the tokens of a pass; where there are embeddings, an image may have many for one token."""
    embeddings = (bound.arguments | bound.kwargs).get("inputs_embeds")
    tokens = (*bound.args[1:], *bound.kwargs.values())[0]
    return int((tokens if embeddings is None else embeddings).shape[1])


def _refuse_other_attention(model: Any, error: TypeError) -> None:
    """Raise UnsupportedModelError if another function than ours got the keys of a compressed cache."""
    if Handle.__name__ not in str(error):
        return
    family = family_of(model)
    attend = _attention_of(family).replacement
    for module in (sys.modules.get(type(model).__module__, family.base), family.base):
        function = vars(module).get(attend.__name__, attend)
        if function is not attend:
            raise UnsupportedModelError(
                f"{function.__module__} has replaced {module.__name__}.{attend.__name__}, and cannot read a "
                "compressed cache. Load it before `mlx_tq.compressed(model)`, or do without one of them."
            ) from error


def _has_compressed(caches: list[Any] | None) -> bool:
    return any(isinstance(part, CompressedKVCache | BatchCompressedKVCache) for part in cache_parts(caches or ()))


_wrapped_classes = Patched(_wrap_call)
_before_forward = Patched(lambda model: lambda: None)  # patches nothing, only holds the values


@contextmanager
def patch_make_cache(model: Any, make_cache: Callable[[], list[Any]]) -> Iterator[None]:
    """Let the model's family get its caches for `model` from `make_cache`."""
    family = family_of(model)
    with _cache_factory_of(family).patched.open(family.cache), _make_cache.open(model, make_cache):
        yield


@cache
def _cache_factory_of(family: ModuleFamily) -> _FamilyFunction:
    original = family.cache.make_prompt_cache

    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        """Make caches as the family does, but refuse a size that it would ignore for compressed caches."""
        if max_kv_size is not None and _make_cache.newest(model) is not None:
            raise ConfigError(
                f"max_kv_size is {max_kv_size}, and compressed caches have no such limit. Drop it, or evict tokens "
                f"with KVConfig(evict=EvictConfig(budget={max_kv_size}))."
            )
        return original(model, max_kv_size)  # type: ignore[no-any-return]

    return _FamilyFunction(family, original, make_prompt_cache)


_make_cache: Patched = Patched(
    lambda model: _replace_attribute(model, "make_cache", lambda: _make_cache.newest(model)())
)
