"""Prompt caches in files, with the archive of what left them."""

from pathlib import Path
from typing import Any

from mlx_tq.cache.attachments import attached
from mlx_tq.cache.files import LoadedCache, read_caches, write_caches
from mlx_tq.config import KVConfig
from mlx_tq.sequence.passes import sequence_in, sequence_layers


def save_prompt_cache(
    path: str | Path, caches: list[Any], *, model: Any, config: KVConfig, metadata: dict[str, str] | None = None
) -> None:
    """Write caches to `path`; a file of the same kind is replaced, once the new one is complete.

    Args:
        path: of the .safetensors file.
        caches: as `make_prompt_cache` made them, after use.
        model: that the caches are of; its weights are checked on load.
        config: that made the caches, checked on load.
        metadata: further strings to keep.

    Raises:
        CacheFormatError: the file cannot be written, or is of another kind.
    """
    sequence = sequence_in(caches)
    blocks = None if sequence is None else sequence.archived_blocks()
    write_caches(path, caches, model=model, config=config, metadata=metadata, blocks=blocks)


def load_prompt_cache(path: str | Path, *, model: Any, config: KVConfig | None = None) -> LoadedCache:
    """Read caches from `path`. A damaged block of their archive is left out, of which the archive warns.

    Args:
        path: of the file.
        model: that the caches must be of.
        config: configuration that the file must have, or None to take what it has.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version, model or configuration.
    """
    loaded = read_caches(path, model=model, config=config)
    sequence = sequence_in(loaded.caches)
    if sequence is not None and sequence.plan.config.recalls:
        sequence.take_archive(sequence_layers(loaded.caches), attached(Path(path)))
    return loaded
