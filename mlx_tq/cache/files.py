"""Save and load prompt caches: one safetensors file, versioned, written whole or not at all.

A file names the model, the configuration and the storage of every layer, and is refused, with the reason, where it does
not fit. A checksum over all of it finds what a disk or a copy changed. A prompt's caches that are not compressed are
written as mlx-lm writes them, and it reads them; what we know besides is one string among their metadata.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_tq.cache.attachments import NAME, attach
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.files import atomic_write, check_kind
from mlx_tq.models import fingerprint

CONVERSATION = "session"  # the metadata of a conversation have it, and that makes the file one
VERSION = "3"
_PLAIN = "2"  # the version before, whose keys are not normalized
_FORMAT = "mlx_tq prompt cache"
_REMEDY = "Take another copy of it, or begin anew without it."  # it may hold a prompt or a conversation
_WITHIN = "mlx_tq"  # the metadata of a file that mlx-lm can read have our header there
_FIELDS = ("version", "model", "config", "classes", "scalars", "metadata")


class Header(NamedTuple):
    """Who wrote a cache file.

    is_ours: mlx_tq, else mlx-lm. model_name: the model that was passed when it was written, "" for the embedded one.
    """

    is_ours: bool
    model_name: str


class Blocks(NamedTuple):
    """Rows that left: bytes of each block, and the blocks, which are read as they are written."""

    sizes: list[int]
    parts: Iterable[bytes]


class Parts(NamedTuple):
    """What caches consist of.

    classes: their names. scalars: numbers and text by their path in the list of the caches' states. arrays: likewise.
    """

    classes: list[str]
    scalars: dict[str, Any]
    arrays: dict[str, mx.array]


class LoadedCache(NamedTuple):
    """What a cache file holds."""

    caches: list[Any]
    config: KVConfig
    metadata: dict[str, str]


def write_caches(
    path: str | Path,
    caches: list[Any],
    *,
    model: Any,
    config: KVConfig,
    metadata: dict[str, str] | None = None,
    blocks: Blocks | None = None,
) -> None:
    """Write caches and blocks of rows that left them; see `sequence.files`, which knows those.

    Raises:
        CacheFormatError: the file cannot be written, or is of another kind.
    """
    metadata = metadata or {}
    check_replaceable(path, conversation=CONVERSATION in metadata)
    classes, scalars, arrays = take_apart(caches)
    header = {
        "format": _FORMAT,
        "version": VERSION,
        "model": fingerprint(model),
        "config": json.dumps(config.to_dict()),
        "classes": json.dumps(classes),
        "scalars": json.dumps(scalars),
        "metadata": json.dumps(metadata),
    }
    header["checksum"] = checksum(arrays, header)
    try:
        with atomic_write(path, ".safetensors") as temporary:
            if config.is_off and CONVERSATION not in metadata:
                theirs = {"model": metadata.get("model", ""), "tokenizer_config": "{}"}
                native.save_prompt_cache(str(temporary), caches, {**theirs, _WITHIN: json.dumps(header)})
            else:
                mx.save_safetensors(str(temporary), arrays, header)
            if blocks is not None and blocks.sizes:
                with atomic_write(temporary) as longer:
                    attach(temporary, longer, *blocks)
    except (OSError, RuntimeError) as error:
        raise CacheFormatError(
            f"cannot write the cache file {path}: {error}. Free space, or choose another path."
        ) from error


def take_apart(caches: list[Any]) -> Parts:
    """Caches of any kind as plain parts, from which `put_together` makes equal ones."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}
    scalars = {name: leaf for name, leaf in leaves if not isinstance(leaf, mx.array)}
    return Parts([type(cache).__name__ for cache in caches], scalars, arrays)


def put_together(parts: Parts) -> list[Any]:
    """The caches that `take_apart` took apart, computed."""
    states = tree_unflatten(list({**parts.scalars, **parts.arrays}.items()))
    classes = [getattr(native, name) for name in parts.classes]
    caches = [cls.from_state(state) for cls, state in zip(classes, states, strict=True)]
    mx.eval([cache.state for cache in caches])
    return caches


def check_replaceable(path: str | Path, *, conversation: bool) -> None:
    """Raise where a conversation, or else a plain prompt cache, would take the place of something else.

    Raises:
        CacheFormatError: it would.
    """

    def is_same(header: Mapping[str, str]) -> bool:
        header = _unwrapped(header)
        ours = header.get("format") == _FORMAT
        return ours and (CONVERSATION in json.loads(header["metadata"])) == conversation

    check_kind(path, "conversation" if conversation else "prompt cache", is_same)


def read_caches(path: str | Path, *, model: Any, config: KVConfig | None = None) -> LoadedCache:
    """Read caches; the blocks behind them stay in the file.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version, model or configuration.
    """
    arrays, header = _load(Path(path))
    if header.get("format") != _FORMAT:
        raise CacheFormatError(f"{path} is not a prompt cache of mlx_tq. Make one with mlx_tq.cache_prompt.")
    if header.get("version") not in (VERSION, _PLAIN):
        raise CacheFormatError(f"{path} has version {header.get('version')}; this mlx_tq reads {VERSION}. {_REMEDY}")
    if header.get("checksum") != checksum(arrays, header):
        raise CacheFormatError(f"{path} is damaged (its checksum differs). {_REMEDY}")
    if header.get("model") != fingerprint(model):
        name = read_header(path).model_name or "the embedded model"
        raise CacheFormatError(
            f"{path} was made with {name}, whose weights are not this model's, or not in this type (--dtype, "
            "--dequantize). Pass that model."
        )
    try:
        plain = {"normalize": False} if header["version"] == _PLAIN else {}
        stored = KVConfig.from_dict(plain | json.loads(header["config"]))
        caches = put_together(Parts(json.loads(header["classes"]), json.loads(header["scalars"]), arrays))
        metadata = json.loads(header["metadata"])
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). {_REMEDY}") from error
    if config is not None:
        check_config(path, stored, config)
    return LoadedCache(caches, stored, metadata)


def check_config(path: str | Path, stored: KVConfig, config: KVConfig) -> None:
    """Raise where a file's configuration is not the one that is wanted.

    Raises:
        CacheFormatError: it is not, with what differs.
    """
    if config != stored:
        wanted = config.to_dict()
        differs = [f"{k} is {v!r}, not {wanted[k]!r}" for k, v in stored.to_dict().items() if v != wanted[k]]
        raise CacheFormatError(f"{path} was made with another configuration: {'; '.join(differs)}. Drop those options.")


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
    arrays.pop(NAME, None)
    try:
        header = _unwrapped(header)
        for name in json.loads(header.get("scalars", "{}")):  # which mlx-lm writes as arrays
            arrays.pop(name, None)
    except (ValueError, TypeError, AttributeError) as error:
        raise CacheFormatError(f"{path} is damaged ({error!r}). {_REMEDY}") from error
    return arrays, header


def _unwrapped(header: Mapping[str, str]) -> dict[str, str]:
    """What a file says of itself: in one that mlx-lm can read, what is there of ours."""
    return dict(json.loads(header[f"0.{_WITHIN}"]) if f"0.{_WITHIN}" in header else header)
