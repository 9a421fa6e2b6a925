"""Checks of a layer's saved state, whose file anybody may have written, before its numbers are relied on.

Kernels read as many rows as the numbers say, and buffers are as long, so what the arrays contradict is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.region_map import SCALE_TOKENS, RegionMap
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.errors import CacheFormatError

State = Mapping[str, Any]
_MAX_TOKENS = 2**26  # the positions of evicted ones take 8 bytes each
_MAX_DIM = 2048  # of a head
_MAX_SPARE, _SPARE_SHARE = 2**26, 64  # bytes that a buffer may take beyond this many times those in the file


def read_spec(text: str) -> CacheSpec:
    spec = CacheSpec.from_dict(json.loads(text))
    _check(all(type(flag) is bool for flag in (spec.normalize, spec.shared)), "a flag of its storage")
    for name in ("sinks", "window", "recent", "head_sinks", "head_window"):
        read_count({name: getattr(spec, name)}, name)
    _check(spec.window > 0, "its window")
    heads = spec.retrieval_heads
    _check(all(type(head) is int for head in heads) and sorted({*heads}) == [*heads], "its retrieval heads")
    for name in filter(None, (spec.key, spec.value, spec.cold)):
        get_format(name)
    for options in (spec.key_options, spec.value_options):
        _check(type(options.seed) is int and type(options.fp32_scales) is bool, "an option of its codecs")
    return spec


def read_count(state: State, name: str) -> int:
    """Return a number of tokens or a position."""
    count = state[name]
    _check(type(count) is int and 0 <= count <= _MAX_TOKENS, f"{name} = {count!r:.40}")
    return int(count)


def read_regions(state: State, spec: CacheSpec) -> RegionMap:
    """Return where the tokens are, if all numbers agree with one another."""
    length, originals, evicted, floor = (
        read_count(state, name) for name in ("length", "originals", "evicted", "floor")
    )
    _check(spec.sinks <= originals <= max(spec.sinks, length), f"originals = {originals} of {length} tokens")
    if not evicted:
        return RegionMap(spec, length, originals)
    retained = read_positions(state, "retained", spec.sinks, floor)
    _check(floor <= originals and evicted == floor - spec.sinks - len(retained), f"evicted = {evicted} before {floor}")
    return RegionMap(spec, length, originals, evicted, floor, retained)


def read_positions(state: State, name: str, start: int, stop: int) -> np.ndarray:
    """Return ascending positions of [start, stop)."""
    positions = np.array(state[name], np.int64).reshape(-1)
    _check(bool((np.diff(np.concatenate([[start - 1], positions, [stop]])) > 0).all()), name)
    return positions


def check_arrays(state: State, regions: RegionMap, spec: CacheSpec, packed: int) -> None:
    """Check the shapes of a layer whose tokens before position `packed` are packed, but for its rows."""
    _check_array(state, "health", mx.int32, (2,))
    if "keys" not in state:
        _check(regions.length == 0 and not {"values", "rows", "normalizer"} & state.keys(), "keys are missing")
        return
    keys, values = state["keys"], state["values"]
    _check(keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3], "keys and values of other shapes")
    _check(all(mx.issubdtype(x.dtype, mx.floating) for x in (keys, values)), "keys and values of other types")
    batch, heads, count, key_dim = keys.shape
    value_dim = values.shape[3]
    _check(batch > 0 and heads > 0 and max(key_dim, value_dim) <= _MAX_DIM, f"keys of the shape {keys.shape}")
    expected = min(spec.sinks, regions.length) + max(0, regions.length - regions.originals)
    _check(count == expected, f"{count} tokens in full precision, not {expected}")
    spare = spec.full_capacity(packed, regions.length) * batch * heads * (key_dim + value_dim) * keys.dtype.size
    _check(spare <= max(_MAX_SPARE, _SPARE_SHARE * (keys.nbytes + values.nbytes)), f"window = {spec.window}")
    if (pairs := spec.key_options.pairs) is not None:
        dims = [dim for pair in pairs for dim in pair]
        _check(len(dims) == len({*dims} & {*range(key_dim)}), "its RoPE pairs")
    normalizer = state.get("normalizer", {})
    _check(spec.normalize or not normalizer, "a normalizer of keys that are not normalized")
    if spec.normalize:
        means = len(regions.mean_blocks(packed))
        _check(means == 0 or {"scale", "means"} <= normalizer.keys(), "no scale or means of its keys")
        if "queries" in normalizer:
            seen = normalizer["queries"].shape[2]
            _check_array(normalizer, "queries", mx.float32, (batch, heads, min(seen, SCALE_TOKENS), key_dim))
        if "scale" in normalizer:
            _check_array(normalizer, "scale", mx.float32, (batch, heads, key_dim))
        if "means" in normalizer:
            _check_array(normalizer, "means", mx.float16, (batch, heads, means, key_dim))


def check_rows(state: State, name: str, shape: tuple[int, ...]) -> None:
    """Check packed rows, in one array or in several, which may be missing if there are none."""
    rows = state.get(name)
    if rows is None:
        _check(shape[2] == 0, f"no {name}")
        return
    parts = rows if isinstance(rows, list) else [rows]
    _check(sum(part.shape[2] for part in parts) == shape[2], f"{name} for other than {shape[2]} tokens")
    for part in parts:
        _check_array({name: part}, name, mx.uint32, (*shape[:2], part.shape[2], shape[3]))


def _check_array(state: State, name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    array = state[name]
    _check(array.dtype == dtype and array.shape == shape, f"{name} {array.dtype} {array.shape}, not {dtype} {shape}")


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise CacheFormatError(f"a layer's state contradicts itself: {what}")
