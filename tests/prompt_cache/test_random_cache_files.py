"""Forged cache files with the right checksum: each loads and continues, or one line says what is wrong."""

import json
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from random_files import check_errors, exit_codes
from zoo import build

from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import MlxTqError
from mlx_tq.models import load
from mlx_tq.prompt_cache.cache_file import CONVERSATION, checksum, load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache

TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(400)]
SMALL = KVConfig(key="q8", value="tq4", sinks=4, window=24)
EVICT = EvictConfig("triattention:warmup=64:trigger=16:granularity=1", 100, recall=64)
KINDS = {
    "plain": ("llama", SMALL),
    "not normalized": ("llama", KVConfig(key="tq4", value="q8", sinks=0, window=33, normalize=False)),
    "two formats": ("llama", KVConfig(key="tq4~tq3", value="tq4", sinks=4, window=24, recent=64)),
    "evicts": ("llama", KVConfig(key="q8", value="tq4", sinks=4, window=24, evict=EVICT)),
    "hybrid": ("falcon_h1", SMALL),
    "sliding": ("gemma3_text", SMALL),
    "full precision": ("llama", PROFILES["off"]),
}
VALUES = [
    None, True, False, 0, 1, -1, 2, 24, 31, 32, 33, 150, 200, 2**26, 2**31, 2**40, 2**63, -(2**70), 0.5, -1.5, 1e300,
    float("nan"), float("inf"), "", "x", "0", "q8", "tq4", "tq3", "wht", "haar", "auto", "off", "x" * 50_000,
    "a\nb\x1b[31m", "{", "[]", "[" * 5000, [], [0], [1, 2, 3], [[0, 1]], [None], ["x"], {}, {"a": 1}, {"0": -5},
    "KVCache", "QuantizedKVCache", "RotatingKVCache", "BatchKVCache", "ArraysCache", "CacheList", "CompressedKVCache",
    "TieredKVCache", "BatchCompressedKVCache", "mx", "LRUPromptCache", "create_attention_mask",
]  # fmt: skip
NAMES = ["", "0", "0.keys", "0.rows.0", "1.cold", "0.normalizer", "9", "99999999999.keys", "0.keys.5", "x.y", "0.group"]
DTYPES = [mx.float32, mx.float16, mx.uint32, mx.int32, mx.uint8, mx.int64]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The arrays and headers of files of several kinds, with their models."""
    path = tmp_path_factory.mktemp("files") / "cache.safetensors"
    return [write(build(name), config, path) for name, config in KINDS.values()]


def write(model, config, path):
    """Write a cache of 200 tokens; return the model, and the file's arrays and header."""
    with compressed_attention(model):
        caches = make_prompt_cache(model, config)
        for start in range(0, 200, 50):
            model(mx.array([TOKENS[start : start + 50]]), cache=caches)
        save_prompt_cache(path, caches, model=model, config=config, metadata={CONVERSATION: "a"})
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    return model, arrays, header


def change_json(value, rng):
    """Return JSON data of which one part, also one inside a text that is JSON itself, is another."""
    if isinstance(value, str) and value[:1] == "{" and value[-1:] == "}" and rng.random() < 0.9:
        return json.dumps(change_json(json.loads(value), rng))
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or rng.random() < 0.05:
        return rng.choice([*VALUES, value + rng.choice((1, -1, 32)) if type(value) is int else 7])
    changed, key = value.copy(), rng.choice(keys)
    match rng.random():
        case chance if chance < 0.05:
            del changed[key]
        case chance if chance < 0.1 and isinstance(value, dict):
            changed[rng.choice([*NAMES, *map(str, keys)])] = rng.choice(VALUES)
        case _:
            changed[key] = change_json(changed[key], rng)
    return changed


def change_array(arrays, rng):
    """Return arrays of which one has another name, type or shape, or other numbers, or is not there."""
    name = rng.choice(list(arrays))
    array = arrays[name]
    axis = rng.randrange(max(1, array.ndim))
    others = [
        dict,
        lambda: {rng.choice([*NAMES, *arrays]): array},
        lambda: {name: array.astype(rng.choice(DTYPES))},
        lambda: {name: array.reshape(-1)},
        lambda: {name: mx.expand_dims(array, 0)},
        lambda: {name: array[:0]},
        lambda: {name: mx.take(array, mx.arange(rng.choice((0, 1, array.shape[axis] // 2))), axis=axis)},
        lambda: {name: mx.concatenate([array, array], axis=axis)},
        lambda: {name: mx.random.randint(0, 300, array.shape).astype(array.dtype)},
        lambda: {name: mx.array(rng.choice((0, 3)))},
    ]
    rest = {other: value for other, value in arrays.items() if other != name}
    return rest | rng.choice(others)() if array.ndim else rest


def forge(files, seed, path):
    """Write a file with one to three wrong parts; return its model."""
    rng = random.Random(seed)
    model, arrays, header = rng.choice(files)
    arrays, header = dict(arrays), dict(header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.3:
            arrays = change_array(arrays, rng)
        else:
            field = rng.choice(
                ["config", "classes", "scalars", "scalars", "scalars", "scalars", "metadata", "attached"]
            )
            if field in header:
                changed = change_json(json.loads(header[field]), rng)
                header[field] = json.dumps(changed)
    blocks = {name: arrays.pop(name) for name in ("attached",) if name in arrays}
    header["checksum"] = checksum(arrays, header)
    mx.save_safetensors(str(path), arrays | blocks, header)
    return model


def load_and_continue(path, model):
    """Return the error of mlx_tq if a file cannot be used."""
    try:
        with compressed_attention(model):
            caches = load_prompt_cache(path, model=model).caches
            for count in (1, 40, 1):
                mx.eval(model(mx.array([TOKENS[:count]]), cache=caches))
    except MlxTqError as error:
        return str(error)
    return None


# 2,000 files take a minute.
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(1000, 3000), marks=pytest.mark.full)], ids=len)
def test_it_continues_or_says_why_not(files, tmp_path, seeds):
    path = tmp_path / "cache.safetensors"
    check_errors(seeds, lambda seed: load_and_continue(path, forge(files, seed, path)), r"[^\n]{50,600}\.")


@pytest.mark.full  # each of 24 processes takes three seconds
def test_the_command_ends_in_an_answer_or_in_one_line(tmp_path):
    path, (model, _) = tmp_path / "cache.safetensors", load(dtype="float32")

    def write_forged(seed):
        forge([write(model, SMALL, path), write(model, replace(SMALL, evict=EVICT), path)], seed, path)

    words = ("generate", "--dtype", "float32", "--prompt-cache-file", path, "-p", "hi", "-m", 1, "--verbose", "F")
    assert exit_codes(range(24), write_forged, *words) == {0, 1}
