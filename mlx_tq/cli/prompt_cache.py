"""The prompt cache that a command's flags describe: fresh, or from a file of ours or of mlx-lm."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import load_prompt_cache as load_native_cache
from mlx_lm.models.cache import make_prompt_cache as make_native_cache

from mlx_tq.cache.files import check_config, read_header
from mlx_tq.cli.args import config_from_args, names_cache, rescue_from_args, with_blocks
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.prompt_cache.build import adopt_caches, build_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.files import load_prompt_cache, with_formats
from mlx_tq.prompt_cache.plan import Plan, unasked
from mlx_tq.rescue import OFF


class PromptCache(NamedTuple):
    """The caches of a model, new or from a file, and what they are saved with.

    caches: one for each of the model's own. plan: how they were made, None where mlx-lm's own serve. config: its own.
    """

    caches: list[Any]
    plan: Plan | None
    config: KVConfig


def chosen_config(args: argparse.Namespace) -> KVConfig:
    """The configuration of the flags; mlx-lm's own --kv-bits and --max-kv-size replace the default profile.

    Raises:
        ConfigError: one of them together with a flag of the compressed cache.
    """
    native = _native_flags(args)
    config = config_from_args(args)
    if config.evict is not None and hasattr(args, "rescue") and rescue_from_args(args, OFF).service != OFF:
        config = with_blocks(config, args)
    if not native or config.is_off:
        return config
    if names_cache(args):
        raise ConfigError(
            f"{native[0]} is a cache of mlx-lm and cannot be combined with a compressed one. Drop it, or add "
            "--kv-profile off."
        )
    return PROFILES["off"]


def _native_flags(args: argparse.Namespace) -> list[str]:
    flags = {"--kv-bits": args.kv_bits, "--max-kv-size": args.max_kv_size}
    return [flag for flag, value in flags.items() if value is not None]


def saved_model(path: str) -> str | None:
    """The model that a cache file of ours or of mlx-lm names, or None for the embedded one.

    Raises:
        CacheFormatError: no such file, or no cache.
    """
    return read_header(path).model_name or None


def make_caches(model: Any, config: KVConfig, max_kv_size: int | None = None) -> PromptCache:
    """Fresh caches; `max_kv_size` is for mlx-lm's own.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches.
        ConfigError: a head size that the formats cannot take.
    """
    if config.is_off:
        return PromptCache(make_native_cache(model, max_kv_size), None, config)
    plan = plan_caches(model, config)
    return PromptCache(build_caches(plan), plan, plan.config)


def open_prompt_cache(model: Any, args: argparse.Namespace) -> PromptCache:
    """Make or load the caches of `model`.

    Raises:
        ConfigError: flags that contradict one another or that the model cannot meet.
        CacheFormatError: --prompt-cache-file is damaged or does not fit.
        UnsupportedModelError: the model cannot run on compressed caches.
    """
    config, path = chosen_config(args), args.prompt_cache_file
    if path is None:
        return make_caches(model, config, args.max_kv_size)
    header = read_header(path)
    if header.is_ours:
        return _open_ours(model, path, args)
    if args.model is not None and Path(args.model).resolve() != Path(header.model_name).resolve():
        raise CacheFormatError(f"{path} was made with the model {header.model_name!r}. Pass that model, or no --model.")
    return _open_native(model, path, args, config)


def _open_ours(model: Any, path: str, args: argparse.Namespace) -> PromptCache:
    loaded = load_prompt_cache(path, model=model)
    if names_cache(args):
        check_config(path, loaded.config, with_formats(model, config_from_args(args, {}, base=loaded.config)))
    if loaded.config.is_off:
        return PromptCache(loaded.caches, None, loaded.config)
    if native := _native_flags(args):
        raise ConfigError(f"{path} holds a compressed cache, which {native[0]} cannot change. Drop it.")
    return PromptCache(loaded.caches, plan_caches(model, loaded.config), loaded.config)


def _open_native(model: Any, path: str, args: argparse.Namespace, config: KVConfig) -> PromptCache:
    try:
        native = load_native_cache(path)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). Make it again with mlx_tq.cache_prompt.") from error
    if not config.is_off:
        plan = unasked(plan_caches(model, config))
        return PromptCache(adopt_caches(plan, native), plan, plan.config)
    if len(native) != len(make_native_cache(model)):
        raise CacheFormatError(f"{path} has {len(native)} caches, not one for each of the model's. Pass its own model.")
    for cache in native:
        if isinstance(cache, QuantizedKVCache) and args.kv_bits not in (None, cache.bits):
            raise ConfigError(f"{path} was made with --kv-bits {cache.bits}, not {args.kv_bits}. Drop that flag.")
    return PromptCache(native, None, config)
