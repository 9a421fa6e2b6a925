"""Compact the cache of a document: of all layers and heads, keep the rows that the model needs most to repeat it.

Source: KVzip (Kim et al., arXiv 2505.23416).
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from mlx_tq.cache.compacted import CompactedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import model_facts
from mlx_tq.models import ranks_of
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.row_weights import repetition, row_weights
from mlx_tq.session.restore import ProgressCallback, prefill

_STEP = 512  # most tokens of a prefill step
_SCORES = 1 << 22  # most scores of a query head in a step


def compact_prompt_cache(
    model: Any,
    tokenizer: Any,
    caches: list[Any],
    ids: Sequence[int],
    share: float,
    *,
    progress: ProgressCallback | None = None,
) -> list[Any]:
    """Return copies of a document's compressed caches that keep a share of its rows, for any number of questions.

    The document is prefilled a second time, as its own repetition. Of all rows of all layers and heads, those with the
    largest attention weights are kept; sink tokens and the recent window are kept in all heads.

    Args:
        model: model of mlx-lm.
        tokenizer: its tokenizer.
        caches: prompt caches of `make_prompt_cache`, of one sequence and without eviction, after a prefill of `ids`.
        ids: token ids of the document.
        share: of the rows to keep, above 0 to 1.
        progress: called with the number of tokens read, and the total.

    Raises:
        ConfigError: caches that evict, have two key formats or do not hold `ids`; a document that is too short to be
            packed, or too long to be repeated; a share below that of the rows in full precision; several processes.
        UnsupportedModelError: the model needs all heads to keep the same tokens.
    """
    layers = compressed_caches(caches)
    _check(model, layers, len(ids))
    count, repeated = _count_rows(layers, share), repetition(model, tokenizer, ids)
    weights = _measure_row_weights(model, caches, repeated, progress or (lambda done, total: None))
    packed = [layer_weights[:, layer.packed_positions] for layer, layer_weights in zip(layers, weights, strict=True)]
    compacted = {
        id(layer): CompactedKVCache.from_cache(layer, indices)
        for layer, indices in zip(layers, choose_rows(packed, count), strict=True)
    }
    result = [_replace(cache, compacted) for cache in caches]
    with compressed_attention(model):
        mx.eval(model(mx.array([repeated[:2]]), cache=copy.deepcopy(result)))  # raises what a question would
    return result


def choose_rows(weights: Sequence[np.ndarray], count: int) -> list[list[np.ndarray]]:
    """Return, for each layer and head, the ascending indices of its rows among the `count` best of all.

    `weights` are those of each layer, [H, n].
    """
    all_weights = np.concatenate([layer.reshape(-1) for layer in weights])
    is_kept = np.zeros(all_weights.size, bool)
    is_kept[np.argsort(-all_weights, kind="stable")[:count]] = True
    edges = np.cumsum([layer.size for layer in weights])[:-1]
    return [
        [np.flatnonzero(head) for head in part.reshape(layer.shape)]
        for part, layer in zip(np.split(is_kept, edges), weights, strict=True)
    ]


def _check(model: Any, layers: list[CompressedKVCache], tokens: int) -> None:
    if not layers:
        raise ConfigError(
            "compaction needs compressed caches, which the profile off does not make. Use another profile."
        )
    if not ranks_of(model).is_alone:
        raise ConfigError("compaction ranks the rows of all heads, which several processes divide. Use one process.")
    if uncompressed := model_facts(model).uncompressed:
        raise ConfigError(
            "compaction keeps different rows in each head, but part of this model's cache keeps all of them "
            f"({uncompressed[0].reason}). Drop --compact."
        )
    if any(layer.evicts for layer in layers):
        raise ConfigError("compaction needs the rows of all tokens, and --kv-evict keeps some of them. Drop it.")
    if any(type(layer) is CompactedKVCache for layer in layers):
        raise ConfigError("the caches are compacted already. Prefill the document again.")
    if any(layer.spec.latent for layer in layers):
        raise ConfigError(
            "compaction ranks the rows of each KV head by its queries, but MLA caches latents, which all heads share. "
            "Drop --compact."
        )
    if any(type(layer) is not CompressedKVCache or layer.spec.shared for layer in layers):
        raise ConfigError(
            "compaction needs caches of one sequence with one key format, which no other layer reads. Use --kv-key q8, "
            "or do without --compact."
        )
    if any(layer.offset != tokens for layer in layers):
        raise ConfigError(f"the caches hold {layers[0].offset:,} tokens, not the {tokens:,} of the document.")
    if not all(layer.packed_tokens for layer in layers):
        raise ConfigError(f"the document of {tokens:,} tokens is too short to be packed. Do without --compact.")


def _count_rows(layers: list[CompressedKVCache], share: float) -> int:
    """Return how many packed rows of all heads make up a share of all rows, with those in full precision."""
    if not 0 < share <= 1:
        raise ConfigError(f"the share of rows to keep is {share}; it must be above 0, and at most 1.")
    heads = [layer.packed_rows()[0].shape[1] for layer in layers]
    full = sum(count * (layer.offset - layer.packed_tokens) for count, layer in zip(heads, layers, strict=True))
    total = sum(count * layer.offset for count, layer in zip(heads, layers, strict=True))
    if share * total < full:
        raise ConfigError(
            f"{full / total:.0%} of the rows are in full precision, which is more than the {share:.0%} to keep. Lower "
            "--kv-sinks or --kv-window, or keep more."
        )
    return int(share * total + 1e-9) - full


def _measure_row_weights(
    model: Any, caches: list[Any], repeated: list[int], progress: ProgressCallback
) -> list[np.ndarray]:
    """Return the largest weight that the repetition gives each stored token, fp32 [H, tokens] of each layer."""
    copies = copy.deepcopy(caches)
    layers = compressed_caches(copies)
    tokens, weights = layers[0].offset, [mx.zeros(0)] * len(layers)

    def add(number: int, queries: mx.array, scale: float, sinks: mx.array | None) -> list[mx.array]:
        keys = layers[number].keys_and_values()[0].materialize()
        new = row_weights(queries, keys, scale, sinks)[:, :tokens]
        weights[number] = mx.maximum(weights[number], new) if weights[number].size else new
        return [weights[number]]

    step = max(1, min(_STEP, _SCORES // (tokens + len(repeated))))
    for number, layer in enumerate(layers):
        layer.on_queries = partial(add, number)
    try:
        with compressed_attention(model):
            prefill(model, copies, repeated, step, progress)
    finally:
        for layer in layers:
            layer.on_queries = None  # which refers to the layers: they are freed now
    return [np.array(layer) for layer in weights]


def _replace(cache: Any, compacted: dict[int, CompactedKVCache]) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_replace(part, compacted) for part in cache.caches))
    return compacted.get(id(cache)) or copy.deepcopy(cache)
