"""Prompt caches in files, with the archive of what left them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_tq.cache.attachments import attached
from mlx_tq.cache.files import LoadedCache, read_caches, write_caches
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.integration.probe import model_facts
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.passes import compressed_caches, sequence_in, sequence_layers
from mlx_tq.prompt_cache.plan import learn_ropes


def save_prompt_cache(
    path: str | Path, caches: list[Any], *, model: Any, config: KVConfig, metadata: dict[str, str] | None = None
) -> None:
    """Write caches to `path`; a file of the same kind is replaced, once the new one is complete.

    Args:
        path: of the .safetensors file.
        caches: as `make_prompt_cache` made them, after use.
        model: that the caches are of; its weights are checked on load.
        config: that made the caches, checked on load; the file names the formats that its `mean_bits` chose.
        metadata: further strings to keep.

    Raises:
        CacheFormatError: the file cannot be written, or is of another kind.
    """
    sequence = sequence_in(caches)
    blocks = None if sequence is None else sequence.archived_blocks()
    if config.mean_bits is not None:  # another machine need not know what layers lose
        specs = [cache.spec for cache in compressed_caches(caches)]
        key, value = (SCHEDULE.join(getattr(spec, side) for spec in specs) for side in ("key", "value"))
        config = replace(config, key=key, value=value, mean_bits=None, outlier=0.0)
    write_caches(path, caches, model=model, config=config, metadata=metadata, blocks=blocks)


def load_prompt_cache(path: str | Path, *, model: Any, config: KVConfig | None = None) -> LoadedCache:
    """Read caches from `path`. A damaged block of their archive is left out, of which the archive warns.

    Args:
        path: of the file.
        model: that the caches must be of.
        config: configuration that the file must have, or None to take what it has.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version, model or configuration.
        ConfigError: `mean_bits` of `config` cannot be met.
    """
    loaded = read_caches(path, model=model, config=None if config is None else with_formats(model, config))
    sequence = sequence_in(loaded.caches)
    if sequence is not None and sequence.calibrators:
        sequence.learn(learn_ropes(model_facts(model)))
    if sequence is not None and sequence.plan.config.recalls:
        sequence.take_archive(sequence_layers(loaded.caches), attached(Path(path)))
    return loaded


def with_formats(model: Any, config: KVConfig) -> KVConfig:
    """The configuration with the formats that its `mean_bits` choose for a model, or as it is.

    Raises:
        ConfigError: they cannot be met, or what the model's layers lose is not known.
    """
    return config if config.mean_bits is None else plan_caches(model, config).config
