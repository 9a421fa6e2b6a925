"""Probes a model: a short run on caches that return handles shows what can be compressed, or that the model cannot.

Lists of model names would go stale.
"""

import threading
import traceback
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache

from mlx_tq.cache.view import Handle, make_handles
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.module_families import (
    MLX_LM,
    ModuleFamily,
    family_of,
    model_arguments,
    preserved_attributes,
    run_for_logits,
)
from mlx_tq.integration.patches import (
    capture_queries,
    find_call,
    patch_attention,
    patch_rope,
    recorded_calls,
    rope_modules,
)
from mlx_tq.kernels.gpu import gpu_backend
from mlx_tq.kernels.mlx_attention import probe_vector_queries
from mlx_tq.kernels.regions import Mask
from mlx_tq.models import config_value, context_length, is_outline, loaded_name, ranks_of, recorded_length
from mlx_tq.policies.rope import Rope, find_pairs

_TOKENS = 64
_STRIDE = 7919  # a prime, so that the tokens are spread over any vocabulary

_NO_ROPE = "its attention has no RoPE"
_UNKNOWN_ROPE = "its attention calls no RoPE, and one inside a kernel is found only when the model is loaded"
_ROPE_TOLERANCE = 0.02  # relative to a key's norm: bfloat16 rounds by .25 %, a wrong RoPE changes most of the key

Place = tuple[int, int | None]  # of a cache: its index in the model's list, and its number inside a CacheList


@dataclass(frozen=True)
class SlotFacts:
    """One plain KV cache of a model: the only kind that is compressed."""

    index: int  # of the cache in the model's list
    part: int | None  # of the cache inside a CacheList
    heads: int  # KV heads
    key_dim: int
    value_dim: int
    dtype: str
    key_norm: float  # median norm of a key; 1 if the model is an outline
    shared: bool  # later layers read this cache too
    rope: Any = None  # the RoPE module that made the queries
    no_rope: str = ""  # why there is none
    is_rope_fused: bool = False  # the model applies RoPE inside a fused kernel and never calls the module
    query_heads: int = 0  # 0 if not known
    nearby_rope: Any = None  # the RoPE module of this or an earlier layer that rotates vectors of this size
    latent: bool = False  # keys are the latents of MLA, and values the part of keys that RoPE rotates
    expanded: int = 0  # key and value elements that the model computes from one latent in a pass of several tokens


@dataclass(frozen=True)
class UncompressedPart:
    """A plain KV cache inside a CacheList that stays mlx-lm's own, as the model does more with it than attend."""

    index: int  # of the CacheList in the model's list
    part: int
    reason: str
    token_nbytes: int  # of a token's keys and values


@dataclass(frozen=True)
class ModelFacts:
    """Result of probing a model."""

    model_type: str
    name: str  # as users know the model
    classes: list[str]  # class name of each cache in the model's list
    slots: list[SlotFacts]
    counts_keys: bool = False  # the model reads how many keys it fetched
    positions: int | None = None  # that the model allows, if its configuration says
    ranks: Ranks = ALONE  # each has its own heads
    activations: int = 0  # numbers that a token's pass through one layer keeps at once, as far as the model says
    uncompressed: tuple[UncompressedPart, ...] = ()


# By id of a model: the model, the shapes and types of its weights at the time, and its facts.
_probed: dict[int, tuple["weakref.ref[Any]", Any, ModelFacts]] = {}
_lock = threading.Lock()


def model_facts(model: Any) -> ModelFacts:
    """Return the facts of a model, which is probed once, and again if the shapes or types of its weights changed."""
    weights: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    shapes = [(name, weight.shape, weight.dtype) for name, weight in weights]
    with _lock:
        for key in [key for key, (reference, *_) in _probed.items() if reference() is None]:
            del _probed[key]
        probed = _probed.get(id(model))
    if probed is None or probed[1] != shapes:
        probed = weakref.ref(model), shapes, _probe(model)
        with _lock:
            _probed[id(model)] = probed
    return probed[2]


def native_caches(model: Any) -> list[Any]:
    """Return new caches of the model's own, even if another `make_cache` is installed on the instance."""
    make, plain = getattr(type(model), "make_cache", None), family_of(model).cache.KVCache
    return list(make(model)) if make else [plain() for _ in model.layers]


def position_limit(model: Any) -> int | None:
    """Return how many tokens the model was made for, if its configuration says."""
    return recorded_length(model) or context_length(model_arguments(model))


def check_token_ids(model: Any, ids: Sequence[int]) -> None:
    """Raise ConfigError if the model has no embedding for a token, for which mlx would read memory behind the table."""
    vocabulary = config_value(model_arguments(model), "vocab_size")
    if vocabulary and (missing := max(ids, default=0)) >= vocabulary:
        raise ConfigError(
            f"the prompt has the token {missing:,}, but the model has embeddings only for tokens 0 to "
            f"{vocabulary - 1:,}. Use the tokenizer and the chat template that the model was made with."
        )


class _ProbeView:
    """Attends as mlx-lm does, and records how its keys and values are used."""

    wants_queries = False

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values
        self.is_attended = self.is_counted = False
        self.query_heads = 0
        self.rope: dict[str, Any] = {}  # fields of SlotFacts

    def key_shape(self) -> tuple[int, ...]:
        self.is_counted = True
        return self._keys.shape

    def value_shape(self) -> tuple[int, ...]:
        self.is_counted = True
        return self._values.shape

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "_ProbeView":
        return self

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        if not self.is_attended:
            self._find_rope(queries)
        self.is_attended, self.query_heads = True, queries.shape[1]
        return mx.fast.scaled_dot_product_attention(
            queries, self._keys, self._values, scale=scale, mask=mask, sinks=sinks
        )

    def _find_rope(self, queries: mx.array) -> None:
        call, calls = find_call(queries), list(recorded_calls())
        recorded_calls().clear()  # so that the next layer finds only its own
        nearby = next((near.module for near in calls if near.output.shape[-1] == queries.shape[-1]), None)
        reason = "queries are not what RoPE returned: they skip it, or are scaled, normed or cast afterwards"
        if not calls:
            reason = _NO_ROPE
        elif nearby is None:
            reason = "RoPE rotates only a part of each query, which is joined to the rest afterwards, as in MLA"
        module: dict[str, Any] = {"no_rope": reason} if call is None else {"rope": call.module}
        self.rope = {**module, "nearby_rope": nearby}

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self._keys, self._values


class _ProbeCache(KVCache):  # type: ignore[misc]
    """Returns handles of what a KVCache stores."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[_ProbeView] = []
        self._updates = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        self._updates += 1
        return super().update_and_fetch(keys, values)  # type: ignore[no-any-return]  # calls keys_and_values

    def keys_and_values(self) -> tuple[Handle, Handle]:
        keys, values = super().keys_and_values()
        view = _ProbeView(keys, values)
        self.views.append(view)
        return make_handles(view, keys.dtype)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        raise UnsupportedModelError("a layer reads the state of another layer's cache")

    def facts(self, index: int, part: int | None, model: Any) -> SlotFacts:
        keys, values = super().keys_and_values()
        norm = 1.0
        if not is_outline(model):
            norms = np.array(mx.linalg.norm(keys[0].astype(mx.float32), axis=-1))
            norm = float(np.median(ranks_of(model).gather(norms)))
        return SlotFacts(
            index,
            part,
            *_stored_shape(keys, values),
            key_norm=norm,
            shared=len(self.views) > self._updates,
            query_heads=max(view.query_heads for view in self.views),
            **self.views[0].rope,
        )


def _stored_shape(keys: mx.array, values: mx.array) -> tuple[int, int, int, str]:
    """Return the heads, the dims of keys and of values, and the type of what a cache stores."""
    return keys.shape[1], keys.shape[3], values.shape[3], dtype_name(keys.dtype)


class _LatentProbeView(_ProbeView):
    def take(self, index: mx.array) -> mx.array:
        self.is_attended = True
        return mx.take_along_axis(self._keys, index[..., None], axis=2)


class _LatentProbeCache(KVCache):  # type: ignore[misc]
    """Returns the latents of MLA, which it stores as keys, as a handle in passes of one token, else as arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[_ProbeView] = []
        self.is_index = False  # whether it stores keys without values of their own, for an indexer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if keys.shape[1] > 1:
            raise UnsupportedModelError(f"MLA caches latents of all heads as one, and these are {keys.shape[1]} heads")
        self.is_index = self.is_index or values is keys or not values.shape[3]
        latents, rotated = super().update_and_fetch(keys, values)
        if keys.shape[2] > 1 or self.is_index:
            return latents, rotated
        self.views.append(_LatentProbeView(latents, latents))
        return Handle(self.views[-1], latents.dtype, is_key=True), rotated

    def facts(self, index: int, part: int | None, model: Any) -> SlotFacts:
        latents, rotated = super().keys_and_values()
        args = getattr(model, "args", None)
        heads = max((view.query_heads for view in self.views), default=0) or config_value(args, "num_attention_heads")
        dims = [config_value(args, name) for name in ("qk_nope_head_dim", "v_head_dim")]
        return SlotFacts(
            index,
            part,
            *_stored_shape(latents, rotated),
            key_norm=1.0,  # a norm precedes every latent
            shared=False,
            no_rope="it caches MLA latents, which RoPE does not rotate",
            query_heads=heads or 0,
            latent=True,
            expanded=(heads or 0) * sum(dim for dim in dims if isinstance(dim, int)),
        )


def _run(model: Any, tokens: mx.array, caches: list[Any]) -> None:
    """Run a model; of an outline, whose shapes are known without it, nothing is evaluated."""
    with preserved_attributes(model):
        logits = run_for_logits(model, tokens, caches)
        if not is_outline(model):
            mx.eval(logits)


def architecture_name(model: Any) -> str:
    return getattr(model_arguments(model), "model_type", None) or type(model).__module__.rpartition(".")[2]


def spread_tokens(model: Any, count: int, start: int = 0) -> mx.array:
    """Return tokens [1, count] that are spread over the vocabulary."""
    vocabulary = int(config_value(model_arguments(model), "vocab_size") or _TOKENS)
    return mx.array([[(start + i) * _STRIDE % vocabulary for i in range(count)]])


def _probe(model: Any) -> ModelFacts:
    name, native = architecture_name(model), native_caches(model)
    classes = [type(cache).__name__ for cache in native]
    places = _plain_places(native, family_of(model))
    if not places:
        raise UnsupportedModelError(
            f"{name} keeps no plain KV cache (its caches are {', '.join(sorted(set(classes)))}), so there is nothing "
            "to compress. Use --kv-profile off."
        )
    trial = _Trial(model, places)
    reasons: dict[int, str] = {}  # why a part of every CacheList cannot be compressed
    if trial.refusal:
        reasons = _refused_parts(model, places)
        rest = [place for place in places if place[1] not in reasons]
        if len(rest) < len(places):
            trial = _Trial(model, rest)
    latents = _LatentTrial(model, places) if trial.refusal and family_of(model) is MLX_LM else None
    if latents is not None and not latents.refusal:
        trial, reasons = latents, latents.reasons
    if trial.refusal:
        raise UnsupportedModelError(
            f"{name} cannot run on a compressed cache: {trial.refusal}. Use --kv-profile off."
        ) from trial.error
    slots = _with_fused_ropes(model, [probe.facts(index, part, model) for (index, part), probe in trial.probes.items()])
    if gpu_backend() == "metal" and not is_outline(model):
        for dims in {(slot.key_dim, slot.value_dim, slot.query_heads // slot.heads, slot.dtype) for slot in slots}:
            probe_vector_queries(*dims[:3], dtype_of(dims[3]))
    uncompressed = tuple(
        UncompressedPart(index, part, reasons[part], _token_nbytes(trial.caches[index].caches[part]))
        for index, part in places
        if part in reasons
    )
    return ModelFacts(
        name,
        loaded_name(model),
        classes,
        slots,
        trial.counts_keys,
        position_limit(model),
        ranks_of(model),
        _count_activations(model),
        uncompressed,
    )


def _plain_places(caches: list[Any], family: ModuleFamily) -> list[Place]:
    """Return the places of plain KV caches."""
    return [
        (index, part)
        for index, cache in enumerate(caches)
        for part, inner in (enumerate(cache.caches) if type(cache) is CacheList else [(None, cache)])
        if type(inner) is family.cache.KVCache
    ]


def _refused_parts(model: Any, places: list[Place]) -> dict[int, str]:
    """Try to compress each part number of the CacheLists; return the numbers that fail, and why.

    Parts with the same number serve the same purpose in every layer.
    """
    numbers = sorted({part for _, part in places if part is not None})
    trials = {number: _Trial(model, [place for place in places if place[1] in (None, number)]) for number in numbers}
    reasons = {number: trial.part_reason for number, trial in trials.items() if trial.refusal}
    return reasons if len(reasons) < len(numbers) else {}


class _Trial:
    """A run of a model in which the plain KV caches at some places return handles."""

    def __init__(self, model: Any, places: Collection[Place], tokens: mx.array | None = None) -> None:
        self.probes: dict[Place, Any] = {place: self._make_probe() for place in places}
        self.caches = [self._replace(cache, index) for index, cache in enumerate(native_caches(model))]
        self.error: Exception | None = None
        self.family = family_of(model)
        tokens = spread_tokens(model, _TOKENS) if tokens is None else tokens
        try:
            with patch_attention(), patch_rope(model), capture_queries():
                self._run(model, tokens)
        except Exception as error:  # noqa: BLE001  of any operation in the model
            _run(model, tokens, native_caches(model))  # a model that fails on its own caches raises its own error
            self.error = error

    def _make_probe(self) -> Any:
        return _ProbeCache()

    def _run(self, model: Any, tokens: mx.array) -> None:
        _run(model, tokens, self.caches)

    def _replace(self, cache: Any, index: int) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self.probes.get((index, part), inner) for part, inner in enumerate(cache.caches)))
        return self.probes.get((index, None), cache)

    @property
    def refusal(self) -> str:
        """Why these caches cannot be compressed, or ""."""
        if self.error is not None:
            return (
                "it computes with the keys and values that it fetched, instead of handing them to "
                f"{self.family.title}'s scaled_dot_product_attention ({_find_line(self.error, self.family)})"
            )
        unattended = sorted(
            {index for (index, _), probe in self.probes.items() if not any(view.is_attended for view in probe.views)}
        )
        return f"its layers {unattended} fetch keys and values, but attention never sees them" if unattended else ""

    @property
    def part_reason(self) -> str:
        """Why one part of each CacheList cannot be compressed."""
        if self.error is None:
            return "attention never sees its keys"
        return f"the model computes with its keys ({_find_line(self.error, self.family)})"

    @property
    def counts_keys(self) -> bool:
        return any(view.is_counted for probe in self.probes.values() for view in probe.views)


class _LatentTrial(_Trial):
    """A run in which the plain KV caches hold the latents of MLA, to which only passes of one token attend."""

    def __init__(self, model: Any, places: Collection[Place]) -> None:
        super().__init__(model, places)
        indexers = [place for place, probe in self.probes.items() if probe.is_index]
        self.probes = {place: probe for place, probe in self.probes.items() if not probe.is_index}
        self.reasons = {part: "an indexer computes with its keys" for _, part in indexers if part is not None}

    @property
    def counts_keys(self) -> bool:
        return False  # indexers read the shape of latents, but take positions from the cache

    def _make_probe(self) -> Any:
        return _LatentProbeCache()

    def _run(self, model: Any, tokens: mx.array) -> None:
        _run(model, tokens, self.caches)
        _run(model, tokens[:, :1], self.caches)


def _with_fused_ropes(model: Any, slots: list[SlotFacts]) -> list[SlotFacts]:
    """Find RoPE by its effect where no module was called.

    In a prompt that repeats one token, attention returns the same for all positions, so keys differ by RoPE alone. The
    right RoPE, undone, makes them equal.
    """
    ropeless = {(slot.index, slot.part): slot for slot in slots if slot.no_rope == _NO_ROPE}
    if not ropeless or family_of(model) is not MLX_LM:  # mlx-vlm's may rotate by several positions
        return slots
    if is_outline(model):
        return [replace(slot, no_rope=_UNKNOWN_ROPE) if slot.no_rope == _NO_ROPE else slot for slot in slots]
    trial = _Trial(model, ropeless, mx.zeros((1, _TOKENS), mx.int32))
    ropes = {dim: _distinct_ropes(model, dim) for dim in {slot.key_dim for slot in ropeless.values()}}

    def find(slot: SlotFacts) -> SlotFacts:
        if (place := (slot.index, slot.part)) not in ropeless:
            return slot
        keys = trial.probes[place].keys[:, :, :_TOKENS].astype(mx.float32)
        if _is_equal_everywhere(model, keys):  # also zeros, which any RoPE leaves equal
            return slot
        for rope in ropes[slot.key_dim]:
            if _is_equal_everywhere(model, rope.unrotate(keys, 0)):
                return replace(slot, rope=rope.module, nearby_rope=rope.module, no_rope="", is_rope_fused=True)
        norms = mx.linalg.norm(keys, axis=-1, keepdims=True)
        is_rotated = _is_equal_everywhere(model, norms)
        return replace(slot, no_rope="its keys are rotated, but by no module") if is_rotated else slot

    return list(map(find, slots))


def _is_equal_everywhere(model: Any, vectors: mx.array) -> bool:
    """Return whether vectors [B, H, L, D] are the same at all positions, on all ranks."""
    norms = mx.linalg.norm(vectors - vectors[:, :, :1], axis=-1).max(), mx.linalg.norm(vectors, axis=-1).max()
    return not ranks_of(model).any([bool(norms[0] > _ROPE_TOLERANCE * norms[1])])[0]


def _distinct_ropes(model: Any, dim: int) -> list[Rope]:
    """Return the distinct RoPEs of a model that rotate vectors of `dim` dims."""
    ropes = {}  # by fingerprint
    for module in {id(module): module for module in rope_modules(model)}.values():
        with suppress(Exception):  # a module with another signature, or one that rotates no pairs
            rope = find_pairs(module, dim)
            ropes[np.array(rope.fingerprint()).tobytes()] = rope
    return list(ropes.values())


def _token_nbytes(cache: KVCache) -> int:
    arrays = [array for array in (cache.keys, cache.values) if array is not None]  # a part may never be written
    return sum(array.shape[1] * array.shape[3] * array.dtype.size for array in arrays)


def _find_line(error: Exception, family: ModuleFamily) -> str:
    """Return the innermost line of the family's model that raised an error, or else the error."""
    folder = Path(family.base.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if folder in Path(frame.filename).parents]
    if frames and frames[-1].line:
        return f"{Path(frames[-1].filename).name}: {frames[-1].line}"
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _count_activations(model: Any) -> int:
    """Count the residual stream, its norm and a layer's input and output, and gate, input and product of its MLP."""
    hidden, inner = (config_value(model_arguments(model), f"{name}_size") for name in ("hidden", "intermediate"))
    return 4 * (hidden if isinstance(hidden, int) else 0) + 3 * (inner if isinstance(inner, int) else 0)
