"""From the cache list of a forward pass to the sequences in it."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.prompt_cache.layer_group import LayerGroup, sequence_of


def cache_parts(caches: Sequence[Any]) -> list[Any]:
    """The caches of a prompt cache, those inside a CacheList one by one."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]


def compressed_caches(caches: Sequence[Any]) -> list[CompressedKVCache]:
    """The compressed caches of a prompt cache, also those inside a CacheList."""
    return [part for part in cache_parts(caches) if isinstance(part, CompressedKVCache)]


def sequence_in(caches: Sequence[Any]) -> LayerGroup | None:
    """The sequence of a prompt cache, or None where all its tokens stay.

    Raises:
        CacheFormatError: its layers belong to different ones.
    """
    return sequence_of(compressed_caches(caches))


def sequence_layers(caches: Sequence[Any]) -> list[CompressedKVCache]:
    """The evicting layers of a prompt cache, by their number in the sequence."""
    return _by_number(compressed_caches(caches))


def before_pass(caches: Sequence[Any], count: int) -> bool:
    """Let each sequence of a prompt cache, or of a batch, do what is due before a pass of `count` tokens.

    Returns:
        Whether a layer has to see the queries of the pass.

    Raises:
        ConfigError: a conversation would exceed the model's positions.
        CacheFormatError: layers of a sequence are missing or do not belong together.
    """
    parts = cache_parts(caches)
    batches = [part for part in parts if isinstance(part, BatchCompressedKVCache)]
    rows = [([part for part in parts if isinstance(part, CompressedKVCache)], count)]
    if batches:
        each = batches[0].counts(count)
        rows += [([batch.rows[number] for batch in batches], own) for number, own in enumerate(each)]
    watched = [_before(layers, own) for layers, own in rows]
    return any(watched)


def _before(layers: list[CompressedKVCache], count: int) -> bool:
    sequence = sequence_of(layers)
    if sequence is None:
        return False
    return sequence.before(_by_number(layers), count)


def batch_row(caches: Sequence[Any], number: int) -> list[CompressedKVCache]:
    """The compressed caches of one row of a batch, themselves and no copies."""
    return [part.rows[number] for part in cache_parts(caches) if isinstance(part, BatchCompressedKVCache)]


def _by_number(layers: list[CompressedKVCache]) -> list[CompressedKVCache]:
    evicting = [layer for layer in layers if layer.sequence is not None]
    return sorted(evicting, key=lambda layer: layer.number)
