"""Prompt caches in files: one versioned safetensors file, written whole or not at all.

A file names the model, the configuration and the storage of every layer, and is refused, with the reason, if it does
not fit. A checksum finds what a disk or a copy changed. Caches that are not compressed are written as mlx-lm writes
them, so it can read them; our header is then one string in their metadata.

Archived blocks follow the arrays, as one more array of bytes that is never in memory as a whole. Each block has a
checksum of its own, and a damaged one is left out.
"""

import copy
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from http_limits.process_checks import is_disk_full
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.errors import CacheFormatError, UnsupportedModelError, is_out_of_memory, one_line
from mlx_tq.files import atomic_write, check_kind
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.models import ModelSource, ranks_of, source_of, weights_fingerprint
from mlx_tq.policies.policy import CalibratedPolicy
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import (
    cache_arrays,
    compressed_caches,
    evicting_layers,
    layer_group_of,
)
from mlx_tq.prompt_cache.plan import learn_ropes

CONVERSATION = "session"  # a metadata key that only conversations have
VERSION = "1"
_FORMAT = "mlx_tq prompt cache"
_REMEDY = "Use another copy of it, or start again without it."  # it may hold a prompt or a conversation
_HEADER_KEY = "mlx_tq"  # in the metadata of a file that mlx-lm can read
_CHECKED_FIELDS = ("version", "model", "source", "config", "classes", "scalars", "metadata")
_MAX_INDEX = 10_000  # of a layer, or in a list of a state; as many elements are made
_MAX_BATCH = 256  # sequences in one cache, for each of which the model computes logits
_TRIED_TOKENS = 8
_GROWING = (native.KVCache, native.QuantizedKVCache)  # have rows of all tokens, in their order
_IN_PLACE_OF_PLAIN = (native.QuantizedKVCache, native.RotatingKVCache, CompressedKVCache)
_BLOCKS = "attached"  # the array of archived blocks, and the metadata key of their sizes


class Header(NamedTuple):
    """Origin of a cache file: its writer and its model."""

    is_ours: bool  # else mlx-lm
    source: ModelSource | None  # None if the model was not loaded by name


class CacheState(NamedTuple):
    """The classes, scalars and arrays of caches; the latter by their path in the list of the caches' states."""

    classes: list[str]
    scalars: dict[str, Any]
    arrays: dict[str, mx.array]


class LoadedCache(NamedTuple):
    """The content of a cache file."""

    caches: list[Any]
    config: KVConfig
    metadata: dict[str, str]


def save_prompt_cache(
    path: str | Path, caches: list[Any], *, model: Any, config: KVConfig, metadata: dict[str, str] | None = None
) -> None:
    """Write a prompt cache to a .safetensors file, including its archived rows.

    A file of the same kind is replaced once the new one is complete.

    Args:
        path: path of the file.
        caches: caches of `make_prompt_cache`, after use.
        model: model of the caches; its weights are checked on load.
        config: configuration of the caches, checked on load. The file names the formats that `mean_bits` chose.
        metadata: further strings to store.

    Raises:
        CacheFormatError: the file cannot be written, or is of another kind.
    """
    group = layer_group_of(caches)
    sizes, blocks = ([], ()) if group is None else group.archived_bytes()
    if config.mean_bits is not None:  # another machine need not know the layers' sensitivity
        specs = [cache.spec for cache in compressed_caches(caches)]
        key, value = (SCHEDULE.join(getattr(spec, side) for spec in specs) for side in ("key", "value"))
        config = replace(config, key=key, value=value, mean_bits=None, outlier=0.0)
    metadata = metadata or {}
    for part in cache_parts(caches):
        if getattr(native, type(part).__name__, None) is not type(part):
            raise UnsupportedModelError(
                f"{path} is not written: mlx-lm cannot load a {type(part).__name__} of {type(part).__module__} again."
            )
    check_replaceable(path, conversation=CONVERSATION in metadata)
    classes, scalars, arrays = split_caches(caches)
    source = source_of(model)
    header = {
        "format": _FORMAT,
        "version": VERSION,
        "model": weights_fingerprint(model),
        "source": json.dumps(source and asdict(source)),
        "config": json.dumps(config.to_dict()),
        "classes": json.dumps(classes),
        "scalars": json.dumps(scalars),
        "metadata": json.dumps(metadata),
    }
    header["checksum"] = checksum(arrays, header)
    try:
        with atomic_write(path, ".safetensors") as temporary:
            if config.is_off and CONVERSATION not in metadata:
                theirs = {"model": source.model if source else "", "tokenizer_config": "{}"}
                native.save_prompt_cache(str(temporary), caches, {**theirs, _HEADER_KEY: json.dumps(header)})
            else:
                mx.save_safetensors(str(temporary), arrays, header)
            if sizes:
                with atomic_write(temporary) as longer:
                    _append_blocks(temporary, longer, sizes, blocks)
    except (OSError, RuntimeError) as error:  # mlx gives no error number
        is_full = is_disk_full(error) or isinstance(error, RuntimeError)
        remedy = "Free space, or choose another path." if is_full else "Choose another path."
        raise CacheFormatError(f"cannot write the cache file {path}: {one_line(error)}. {remedy}") from error


def load_prompt_cache(path: str | Path, *, model: Any, config: KVConfig | None = None) -> LoadedCache:
    """Read a prompt cache from a file. The archive warns of damaged blocks, which are left out.

    Args:
        path: path of the file.
        model: model that the caches must be of.
        config: configuration that the file must have, or None to accept any.

    Raises:
        CacheFormatError: no such file, a damaged or foreign one, another version, model or configuration.
        ConfigError: `mean_bits` of `config` is invalid.
    """
    loaded = _read(Path(path), model)
    if config is not None:
        check_config(path, loaded.config, with_formats(model, config))
    with refuse_damaged(path):
        group = layer_group_of(loaded.caches)
        if group is not None and isinstance(group.plan.config.policy, CalibratedPolicy):
            group.set_ropes(learn_ropes(model_facts(model)))
        if group is not None and group.plan.config.recalls:
            group.restore_archive(evicting_layers(loaded.caches), _read_blocks(Path(path)))
    return loaded


@contextmanager
def refuse_damaged(path: str | Path) -> Iterator[None]:
    """Raise CacheFormatError for whatever the content of a file leads to; let failures of the machine pass."""
    try:
        yield
    except (UnsupportedModelError, OSError):  # of the model or the disk, not of the file
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(error if isinstance(error, CacheFormatError) else repr(error))
        raise CacheFormatError(f"{path} is damaged ({reason}). {_REMEDY}") from error


def _read(path: Path, model: Any) -> LoadedCache:
    arrays, header = _load(path)
    if header.get("format") != _FORMAT:
        raise CacheFormatError(f"{path} is not a prompt cache of mlx_tq. Make one with mlx_tq.cache_prompt.")
    if header.get("version") != VERSION:
        raise CacheFormatError(f"{path} has version {header.get('version')}; this mlx_tq reads {VERSION}. {_REMEDY}")
    if header.get("checksum") != checksum(arrays, header):
        raise CacheFormatError(f"{path} is damaged (its checksum differs). {_REMEDY}")
    with refuse_damaged(path):
        made, this = _parse_source(header), source_of(model)
    if header.get("model") != weights_fingerprint(model):
        other = "another model than this one"
        if made is not None:
            other = f"{made}, whose weights are not those of this model{f' ({this})' if this else ''}"
        raise CacheFormatError(f"{path} was made with {other}. Load that model.")
    with refuse_damaged(path):
        config = KVConfig.from_dict(json.loads(header["config"]))
        caches = join_caches(CacheState(json.loads(header["classes"]), json.loads(header["scalars"]), arrays))
        metadata = json.loads(header["metadata"])
        if not all(isinstance(text, str) for text in metadata.values()):
            raise CacheFormatError("its metadata are not texts")
        if hasattr(model, "layers"):
            try_out(caches, model)
        return LoadedCache(caches, config, metadata)


def try_out(caches: list[Any], model: Any) -> None:
    """Run the model on parts of copies if some caches are its own, whose states nothing else checks.

    Raises whatever a damaged cache leads to.
    """
    _check_classes(caches, native_caches(model))
    parts = cache_parts(caches)
    if all(isinstance(part, CompressedKVCache) for part in parts) or not ranks_of(model).is_alone:
        return
    batch = next((leaf.shape[0] for part in parts for leaf in cache_arrays(part) if leaf.ndim > 2), 1)
    lengths = {part.offset for part in parts if isinstance(getattr(part, "offset", None), int)}
    if not 0 < batch <= _MAX_BATCH or len(lengths) > 1:
        raise CacheFormatError(f"its caches are of {batch} sequences, and hold {sorted(lengths)[:4]} tokens")
    with compressed_attention(model):
        for count in (1, 2):  # which caches with a window treat differently
            mx.eval(model(mx.zeros((batch, count), mx.int32), cache=_copy_beginning(caches)))


def _copy_beginning(caches: list[Any]) -> list[Any]:
    """Return copies with the first tokens of caches that hold all; the others share arrays until they are written."""
    arrays: dict[int, mx.array] = {}  # what `deepcopy` takes as the copies of arrays, by their ids
    for part in cache_parts(caches):
        if type(part) in _GROWING:
            rows = min((leaf.shape[-2] for leaf in cache_arrays(part)), default=0)
            if not 0 <= part.offset <= rows:
                raise CacheFormatError(f"it has {part.offset} tokens, and arrays of {rows}")
            arrays |= {id(leaf): leaf[..., :_TRIED_TOKENS, :] for leaf in cache_arrays(part)}
        elif not isinstance(part, CompressedKVCache):  # whose copies share arrays
            arrays |= {id(leaf): leaf[...] for leaf in cache_arrays(part)}
    copies = copy.deepcopy(caches, arrays)
    for part in cache_parts(copies):
        if type(part) in _GROWING:
            part.trim(max(0, part.offset - _TRIED_TOKENS))
    return copies


def _check_classes(caches: Sequence[Any], natives: Sequence[Any]) -> None:
    """Raise CacheFormatError unless each cache is of the class of the model's own, or one that may replace that."""
    if len(caches) != len(natives):
        raise CacheFormatError(f"it has {len(caches)} caches, the model {len(natives)}")
    for cache, expected in zip(caches, natives, strict=True):
        replaces = type(expected) is native.KVCache and isinstance(cache, _IN_PLACE_OF_PLAIN)
        if type(cache) is not type(expected) and not replaces:
            raise CacheFormatError(f"it has a {type(cache).__name__}, the model a {type(expected).__name__}")
        if isinstance(expected, native.CacheList):
            _check_classes(cache.caches, expected.caches)


def split_caches(caches: list[Any]) -> CacheState:
    """Split caches of any class into plain parts, from which `join_caches` makes equal ones."""
    leaves: list[tuple[str, Any]] = tree_flatten([cache.state for cache in caches])  # type: ignore[assignment]
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}
    scalars = {name: leaf for name, leaf in leaves if not isinstance(leaf, mx.array)}
    return CacheState([type(cache).__name__ for cache in caches], scalars, arrays)


def join_caches(parts: CacheState) -> list[Any]:
    """Return the caches that were split, evaluated; parts of a file may raise any exception."""
    indices = (int(part) for name in (*parts.scalars, *parts.arrays) for part in name.split(".") if part.isdecimal())
    if max(indices, default=0) > _MAX_INDEX:
        raise CacheFormatError("the path of an array has a number that is too large")
    states = tree_unflatten(list({**parts.scalars, **parts.arrays}.items()))
    classes = [getattr(native, name) for name in parts.classes]
    caches = [cls.from_state(state) for cls, state in zip(classes, states, strict=True)]
    mx.eval([cache.state for cache in caches])
    return caches


def with_formats(model: Any, config: KVConfig) -> KVConfig:
    """Replace `mean_bits` by the formats that it chooses for a model."""
    return config if config.mean_bits is None else plan_caches(model, config).config


def check_config(path: str | Path, stored: KVConfig, config: KVConfig) -> None:
    """Raise CacheFormatError with the differences if a file has another configuration than `config`."""
    if config != stored:
        fields = config.to_dict()
        differs = [f"{k} is {v!r}, not {fields[k]!r}" for k, v in stored.to_dict().items() if v != fields[k]]
        raise CacheFormatError(f"{path} was made with another configuration: {'; '.join(differs)}. Drop those options.")


def check_replaceable(path: str | Path, *, conversation: bool) -> None:
    """Raise CacheFormatError if a conversation, or a plain prompt cache, would replace a file of another kind."""

    def is_same_kind(header: Mapping[str, str]) -> bool:
        header = _own_header(header)
        is_ours = header.get("format") == _FORMAT
        return is_ours and (CONVERSATION in json.loads(header["metadata"])) == conversation

    check_kind(path, "conversation" if conversation else "prompt cache", is_same_kind)


def read_header(path: str | Path) -> Header:
    """Return who wrote a cache file; raise CacheFormatError if neither mlx_tq nor mlx-lm did."""
    _, header = _load(Path(path))
    if header.get("format") == _FORMAT:
        with refuse_damaged(path):
            return Header(True, _parse_source(header))
    if "1.0" in header:  # mlx-lm flattens [metadata, class names, scalars]
        name = header.get("0.model")
        return Header(False, ModelSource(name) if name else None)
    raise CacheFormatError(f"{path} is not a prompt cache. Make one with mlx_tq.cache_prompt.")


def _parse_source(header: Mapping[str, str]) -> ModelSource | None:
    source = json.loads(header["source"])
    return None if source is None else ModelSource(**source)


def checksum(arrays: dict[str, mx.array], header: dict[str, str]) -> str:
    """Return 32 hex digits over the header's fields, and every array with its name, dtype and shape."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([header.get(name) for name in _CHECKED_FIELDS]).encode())
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
    arrays.pop(_BLOCKS, None)
    with refuse_damaged(path):
        header = _own_header(header)
        for name in json.loads(header.get("scalars", "{}")):  # which mlx-lm writes as arrays
            arrays.pop(name, None)
    return arrays, header


def _own_header(header: Mapping[str, str]) -> dict[str, str]:
    """Return our header, which is a part of the metadata in a file that mlx-lm can read."""
    return dict(json.loads(header[f"0.{_HEADER_KEY}"]) if f"0.{_HEADER_KEY}" in header else header)


# Archived blocks behind the arrays.


def _append_blocks(source: Path, target: Path, sizes: list[int], blocks: Iterable[bytes]) -> None:
    """Write the safetensors file `source` to `target`, with blocks of these sizes behind its arrays."""
    with source.open("rb") as old, target.open("wb") as new:
        header = _read_safetensors_header(old)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        total = sum(sizes)
        header[_BLOCKS] = {"dtype": "U8", "shape": [total], "data_offsets": [end, end + total]}
        header["__metadata__"] = header.get("__metadata__", {}) | {_BLOCKS: json.dumps(sizes)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new)
        for block in blocks:
            new.write(block)


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the blocks behind the arrays of a safetensors file; shorter ones if it ends early."""
    with path.open("rb") as file:
        header = _read_safetensors_header(file)
        if _BLOCKS not in header:
            return
        start, stop = header[_BLOCKS]["data_offsets"]
        sizes = json.loads(header["__metadata__"][_BLOCKS])
        if not all(type(size) is int and 0 <= size <= stop - start for size in sizes):
            raise CacheFormatError("its archived blocks have invalid sizes")
        file.seek(start, 1)
        for size in sizes:
            yield file.read(size)


def _read_safetensors_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file, up to the first byte of its arrays."""
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(length))
    return header
