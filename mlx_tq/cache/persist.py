"""Save and load prompt caches: one safetensors file, versioned, written whole or not at all.

A file names the model, the configuration and the storage of every layer, and is refused, with the reason, where it does
not fit. A checksum over all of it finds what a disk or a copy changed.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.files import written_whole

VERSION = "1"
_FORMAT = "mlx_tq prompt cache"
_REMEDY = "Take another copy of it, or begin anew without it."  # it may hold a prompt or a conversation
_FIELDS = ("version", "model", "config", "classes", "scalars", "metadata")


class Header(NamedTuple):
    """Who wrote a cache file.

    is_ours: mlx_tq, else mlx-lm. model_name: the model that was passed when it was written, "" for the embedded one.
    """

    is_ours: bool
    model_name: str


class LoadedCache(NamedTuple):
    """What a cache file holds."""

    caches: list[Any]
    config: KVConfig
    metadata: dict[str, str]


def save_prompt_cache(
    path: str | Path, caches: list[Any], *, model: str, config: KVConfig, metadata: dict[str, str] | None = None
) -> None:
    """Write caches to `path`; an existing file is replaced only once the new one is complete.

    Args:
        path: of the .safetensors file.
        caches: as `make_prompt_cache` made them, after use.
        model: identity of the model, checked on load.
        config: that made the caches, checked on load.
        metadata: further strings to keep.

    Raises:
        CacheFormatError: the file cannot be written.
    """
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}
    scalars = {name: leaf for name, leaf in leaves if not isinstance(leaf, mx.array)}
    header = {
        "format": _FORMAT,
        "version": VERSION,
        "model": model,
        "config": json.dumps(asdict(config)),
        "classes": json.dumps([type(cache).__name__ for cache in caches]),
        "scalars": json.dumps(scalars),
        "metadata": json.dumps(metadata or {}),
    }
    header["checksum"] = checksum(arrays, header)
    try:
        with written_whole(path, ".safetensors") as temporary:
            mx.save_safetensors(str(temporary), arrays, header)
    except (OSError, RuntimeError) as error:
        raise CacheFormatError(
            f"cannot write the cache file {path}: {error}. Free space, or choose another path."
        ) from error


def load_prompt_cache(path: str | Path, *, model: str, config: KVConfig | None = None) -> LoadedCache:
    """Read caches from `path`.

    Args:
        path: of the file.
        model: identity that the file must name.
        config: configuration that the file must have, or None to take what it has.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version, model or configuration.
    """
    arrays, header = _load(Path(path))
    if header.get("format") != _FORMAT:
        raise CacheFormatError(f"{path} is not a prompt cache of mlx_tq. Make one with mlx_tq.cache_prompt.")
    if header.get("version") != VERSION:
        raise CacheFormatError(f"{path} has version {header.get('version')}; this mlx_tq reads {VERSION}. {_REMEDY}")
    if header.get("checksum") != checksum(arrays, header):
        raise CacheFormatError(f"{path} is damaged (its checksum differs). {_REMEDY}")
    if header.get("model") != model:
        name = read_header(path).model_name or "the embedded model"
        raise CacheFormatError(f"{path} was made with {name}, whose weights are not this model's. Pass that model.")
    try:
        stored = KVConfig.from_dict(json.loads(header["config"]))
        states = tree_unflatten(list({**json.loads(header["scalars"]), **arrays}.items()))
        classes = [getattr(native, name) for name in json.loads(header["classes"])]
        caches = [cls.from_state(state) for cls, state in zip(classes, states, strict=True)]
        mx.eval([cache.state for cache in caches])
        metadata = json.loads(header["metadata"])
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). {_REMEDY}") from error
    if config is not None and config != stored:
        wanted = asdict(config)
        differs = [f"{k} is {v!r}, not {wanted[k]!r}" for k, v in asdict(stored).items() if v != wanted[k]]
        raise CacheFormatError(f"{path} was made with another configuration: {'; '.join(differs)}. Drop those options.")
    return LoadedCache(caches, stored, metadata)


def read_header(path: str | Path) -> Header:
    """Look who wrote a cache file.

    Raises:
        CacheFormatError: no such file, or neither mlx_tq nor mlx-lm did.
    """
    _, header = _load(Path(path))
    if header.get("format") == _FORMAT:
        return Header(True, json.loads(header.get("metadata", "{}")).get("model", ""))
    if "1.0" in header:  # mlx-lm flattens [metadata, class names, scalars]
        return Header(False, header.get("0.model", ""))
    raise CacheFormatError(f"{path} is not a prompt cache. Make one with mlx_tq.cache_prompt.")


def checksum(arrays: dict[str, mx.array], header: dict[str, str]) -> str:
    """32 hex digits over the header's fields, and every array with its name, type and shape."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([header.get(name) for name in _FIELDS]).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.array(array.flatten().view(mx.uint8)).data)
    return digest.hexdigest()


def _load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    arrays: Any
    header: Any
    if not path.is_file():
        raise CacheFormatError(f"there is no cache file {path}. Make one with mlx_tq.cache_prompt.")
    try:
        arrays, header = mx.load(str(path), format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CacheFormatError(f"{path} is damaged or no cache file ({error}). {_REMEDY}") from error
    return arrays, header
