"""Probes whether a batch gives each sequence what it gets alone; what cannot be batched runs as `OneRow`s."""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.module_families import family_of, model_arguments, preserved_attributes, run_for_logits
from mlx_tq.integration.patches import patch_attention, patch_rope
from mlx_tq.integration.probe import architecture_name, model_facts, native_caches, spread_tokens
from mlx_tq.models import config_value, is_outline, ranks_of

_LENGTHS = (7, 40)  # tokens of the two prompts
_TOLERANCE = 0.1  # mean difference, of the mean deviation: rounding takes a hundredth, a wrong position most of it


@dataclass(frozen=True)
class BatchFacts:
    """Result of probing a model's batches."""

    refusal: str = ""  # why no sequences can run together, or ""
    padding_refusal: str = ""  # why prompts of different lengths cannot be prefilled together, or ""


# By id of a model and whether its caches are compressed: the model and its facts.
_probed: dict[tuple[int, bool], tuple["weakref.ref[Any]", BatchFacts]] = {}
_lock = threading.Lock()
_is_probing = ContextVar("is_probing", default=False)  # by thread


def batch_facts(model: Any, make_caches: Callable[[], list[Any]] | None = None) -> BatchFacts:
    """Return the facts of a model's batches on caches of `make_caches`, by default the model's own.

    A model is probed once for its own caches and once for compressed ones. An outline computes
    nothing and has no refusals.
    """
    key = id(model), make_caches is not None
    with _lock:
        reference, facts = _probed.get(key, (None, BatchFacts()))
    if reference is not None and reference() is model:
        return facts
    if is_outline(model):
        return BatchFacts()
    token = _is_probing.set(True)
    try:
        with preserved_attributes(model), patch_attention(), patch_rope(model):
            facts = _probe(model, make_caches or (lambda: native_caches(model)))
    finally:
        _is_probing.reset(token)
    with _lock:
        _probed[key] = weakref.ref(model), facts
    return facts


def check_batch(model: Any, caches: Sequence[Any], make_caches: Callable[[], list[Any]] | None) -> None:
    """Raise UnsupportedModelError if the rows of a batch would not get what they get alone."""
    if _is_probing.get():
        return
    facts = batch_facts(model, make_caches)
    refusal = facts.refusal or (facts.padding_refusal if any(map(_is_padded, cache_parts(caches))) else "")
    if refusal:
        raise UnsupportedModelError(
            f"{refusal}. Run the sequences one at a time, or use the server, which takes care of it."
        )


def count_rows(caches: Sequence[Any]) -> int:
    """Return how many sequences a batch of caches has; 1 for caches that are no batch."""
    for part in cache_parts(caches):
        rows = getattr(part, "rows", None) or getattr(part, "left_padding", None)
        if rows is not None:
            return len(rows)
        for array in getattr(part, "cache", None) or []:
            if array is not None:
                return int(array.shape[0])
    return 1


def _is_padded(part: Any) -> bool:
    """Return whether a prompt that is padded on the right was announced to a batch."""
    names = ("lengths", "_right_padding", "_lengths", "_remaining")
    return any(getattr(part, name, None) is not None for name in names)


def _probe(model: Any, make: Callable[[], list[Any]]) -> BatchFacts:
    name, title = architecture_name(model), family_of(model).title
    if _counts_keys(model):
        return BatchFacts(f"{title}'s {name} takes positions from the number of keys, which padding changes")
    if config_value(model_arguments(model), "index_block_size"):  # felt only beyond thousands of tokens
        return BatchFacts(f"{name} selects blocks of keys, and {title} moves their borders by the padding of a batch")
    if hasattr(model, "_rope_deltas"):  # of mlx-vlm
        return BatchFacts(f"{title}'s {name} keeps positions of its last prompt, so that batches cannot be probed")
    prompts = [spread_tokens(model, length, start=length) for length in _LENGTHS]
    step = mx.concatenate([spread_tokens(model, 1, start=length) for length in _LENGTHS])
    rows = [make() for _ in prompts]
    for prompt, caches in zip(prompts, rows, strict=True):
        mx.eval(run_for_logits(model, prompt, caches))
    if any(_numbers_latents(cache) for cache in rows[0]):
        return BatchFacts(f"{name}'s indexer counts the padding of a batch as tokens; packed latents have no padding")
    unmergeable = sorted({type(part).__name__ for part in cache_parts(rows[0]) if not hasattr(part, "merge")})
    if unmergeable:
        return BatchFacts(f"{title} cannot batch {name}: its {' and '.join(unmergeable)} has no merge")
    try:
        together = run_for_logits(model, step, merge_rows(rows))[:, -1]
        mx.eval(together)
    except Exception as error:  # noqa: BLE001  of any operation in the model
        return BatchFacts(f"{title}'s {name} cannot run a batch ({_first_line(error)})")
    alone_states = _states(rows[0])
    alone = mx.concatenate([run_for_logits(model, step[i : i + 1], caches)[:, -1] for i, caches in enumerate(rows)])
    if _differ(model, [together], [alone]):
        return BatchFacts(f"{title}'s {name} computes other logits in a batch than alone")
    try:
        states, logits = _run_padded(model, make, prompts, step)
    except Exception as error:  # noqa: BLE001
        return BatchFacts(padding_refusal=f"{title}'s {name} cannot run a padded batch ({_first_line(error)})")
    if _differ(model, [*states, logits], [*alone_states, alone]):
        return BatchFacts(
            padding_refusal=f"{title}'s {name} computes with the padding of a batch whose prompts differ in length"
        )
    return BatchFacts()


def _numbers_latents(cache: Any) -> bool:
    """Return whether a cache pairs packed latents with the keys of an indexer, which mlx-lm pads on the left."""
    parts = {type(part) for part in cache_parts([cache])}
    return LatentKVCache in parts and KVCache in parts


def _counts_keys(model: Any) -> bool:
    try:
        return model_facts(model).counts_keys
    except UnsupportedModelError:
        return False


def merge_rows(rows: list[list[Any]]) -> list[Any]:
    """Return the batch of several prompt caches, each a list of the layers' caches."""
    return [parts[0].merge(list(parts)) for parts in zip(*rows, strict=True)]


def _run_padded(
    model: Any, make: Callable[[], list[Any]], prompts: list[mx.array], step: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Prefill padded prompts and decode a step; return what caches hold of the shortest before it, and its logits."""
    lengths = [prompt.shape[1] for prompt in prompts]
    padding = [max(lengths) - length for length in lengths]
    tokens = mx.concatenate(
        [mx.pad(prompt, [(0, 0), (0, count)]) for prompt, count in zip(prompts, padding, strict=True)]
    )
    caches = merge_rows([make() for _ in prompts])
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    mx.eval(run_for_logits(model, tokens, caches))
    for cache in caches:
        cache.finalize()
    states = _states([cache.extract(0) for cache in caches])
    logits = run_for_logits(model, step, caches)[:, -1]
    mx.eval(logits)
    return states, logits


def _states(caches: list[Any]) -> list[mx.array]:
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    states = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    mx.eval(states)
    return states


def _differ(model: Any, first: Sequence[mx.array], second: Sequence[mx.array]) -> bool:
    """Return whether arrays of equal shapes differ by more than rounding, on any rank."""
    is_different = False
    for a, b in zip(first, second, strict=True):
        if a.shape == b.shape and a.size and mx.issubdtype(a.dtype, mx.floating):
            finite = mx.isfinite(a) & mx.isfinite(b)
            x, y = mx.where(finite, a, 0).astype(mx.float32), mx.where(finite, b, 0).astype(mx.float32)
            is_different = is_different or bool(mx.abs(x - y).mean() > _TOLERANCE * mx.abs(x - x.mean()).mean())
    return bool(ranks_of(model).any([is_different])[0])


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:160]}"


class OneRow:
    """A batch of one sequence, with the methods of mlx-lm's batches; the model gets the `cache` inside."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @classmethod
    def merge(cls, caches: list["OneRow"]) -> "OneRow":
        return cls(caches[0].extract(0))

    def extract(self, idx: int) -> Any:
        """Return a copy of the cache."""
        return copy.deepcopy(self.cache)

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the only row; without any, mlx-lm drops the caches itself."""

    @property
    def state(self) -> Any:
        return self.cache.state_in_place if isinstance(self.cache, CompressedKVCache) else self.cache.state

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)

    def is_trimmable(self) -> bool:
        return bool(self.cache.is_trimmable())

    def trim(self, n: int) -> int:
        return int(self.cache.trim(n))
