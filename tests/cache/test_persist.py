"""Cache files: to continue from one is never to have saved it; one that does not fit is refused with the reason."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as native
from zoo import build

from cache.tools import same_bits
from mlx_tq.cache import persist
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.config import KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache
from mlx_tq.errors import CacheFormatError

CONFIG = KVConfig(key="q8", value="tq4", prefix=4, window=24)
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(150)]
MODEL = "tiny/llama"


def run(model, caches, *chunks, start=0):
    logits = []
    for chunk in chunks:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        start += chunk
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


@pytest.fixture
def saved(tmp_path):
    """A file, and the caches that it was made from."""
    model = build("llama")
    with attention(model):
        caches = make_prompt_cache(model, CONFIG)
        run(model, caches, 100)
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, caches, model=MODEL, config=CONFIG, metadata={"chat": "a"})
    return path, caches


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v2", "afm7"])
@pytest.mark.parametrize("length", [2, 30, 100])
def test_save_load_and_continue_is_never_saved(name, length, tmp_path):
    model, path = build(name), tmp_path / "cache.safetensors"
    with attention(model):
        caches = make_prompt_cache(model, CONFIG)
        run(model, caches, length)
        save_prompt_cache(path, caches, model=name, config=CONFIG)
        loaded = load_prompt_cache(path, model=name, config=CONFIG)
        assert [type(cache) for cache in loaded.caches] == [type(cache) for cache in caches]
        assert (loaded.config, loaded.metadata) == (CONFIG, {})
        logits = [run(model, each, 1, 5, 20, 1, start=length) for each in (caches, loaded.caches)]
        assert mx.array_equal(*logits)
        assert same_bits([cache.state for cache in caches], [cache.state for cache in loaded.caches])


def test_an_unused_cache_and_one_trimmed_to_nothing(tmp_path):
    model, path = build("llama"), tmp_path / "cache.safetensors"
    with attention(model):
        for used in (0, 100):
            caches = make_prompt_cache(model, CONFIG)
            if used:
                run(model, caches, used)
                native.trim_prompt_cache(caches, used)
            save_prompt_cache(path, caches, model=MODEL, config=CONFIG)
            loaded = load_prompt_cache(path, model=MODEL)
            assert mx.array_equal(run(model, loaded.caches, 60, 3), run(model, make_prompt_cache(model, CONFIG), 60, 3))


def test_what_a_file_holds(saved):
    path, caches = saved
    loaded = load_prompt_cache(path, model=MODEL)
    assert loaded.config == CONFIG
    assert loaded.metadata == {"chat": "a"}
    assert same_bits([cache.state for cache in loaded.caches], [cache.state for cache in caches])
    arrays = [x for _, x in tree_flatten([cache.state for cache in caches]) if isinstance(x, mx.array)]
    assert path.stat().st_size < sum(array.nbytes for array in arrays) + 8000


def refuse(path, match, **changes):
    with pytest.raises(CacheFormatError, match=match):
        load_prompt_cache(path, **{"model": MODEL, **changes})


def test_missing_file(tmp_path):
    refuse(tmp_path / "none.safetensors", r"there is no cache file .*none\.safetensors.*mlx_tq\.cache_prompt")
    refuse(tmp_path, "there is no cache file")


def test_another_model(saved):
    refuse(saved[0], r"whose weights are not this model.s\. Pass that model", model="other")


def test_another_configuration_names_every_field(saved):
    wanted = replace(CONFIG, key="tq4", window=64)
    match = r"another configuration: key is 'q8', not 'tq4'; window is 24, not 64\. Drop those options"
    refuse(saved[0], match, config=wanted)


def test_another_version(saved, monkeypatch):
    path, caches = saved
    monkeypatch.setattr(persist, "VERSION", "0")
    save_prompt_cache(path, caches, model=MODEL, config=CONFIG)
    monkeypatch.undo()
    refuse(path, r"has version 0; this mlx_tq reads 1\. Take another copy of it")


def test_foreign_files(tmp_path):
    text, weights, theirs = (tmp_path / name for name in ("a.txt", "weights.safetensors", "theirs.safetensors"))
    text.write_text("not a cache")
    refuse(text, "damaged or no cache file")
    mx.save_safetensors(str(weights), {"w": mx.zeros(4)})
    refuse(weights, "is not a prompt cache of mlx_tq")
    native.save_prompt_cache(str(theirs), [native.KVCache()])
    refuse(theirs, "is not a prompt cache of mlx_tq")
    empty = tmp_path / "empty.safetensors"
    empty.touch()
    refuse(empty, "damaged or no cache file")


def test_truncated_at_any_place(saved, tmp_path):
    whole = saved[0].read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    cut = tmp_path / "cut.safetensors"
    places = [*range(10), header // 2, header + 7, header + 8, header + 9]
    places += [*range(header + 9, len(whole), 9973), len(whole) - 1]
    for place in places:
        cut.write_bytes(whole[:place])
        refuse(cut, r"is damaged or no cache file .*Take another copy of it")


def test_any_flipped_byte_of_the_header(saved, tmp_path):
    """Names, sizes, types, numbers and strings: nothing in the header may change unseen."""
    path, _ = saved
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    flipped = tmp_path / "flipped.safetensors"
    for place in range(8 + header):
        if whole[place : place + 1] == b" ":
            continue  # between JSON values, where a blank may be a tab
        data = bytearray(whole)
        data[place] ^= 1 << place % 7
        flipped.write_bytes(data)
        with pytest.raises(CacheFormatError):
            load_prompt_cache(flipped, model=MODEL, config=CONFIG)


def test_flipped_bytes_of_the_data(saved, tmp_path):
    whole = saved[0].read_bytes()
    flipped = tmp_path / "flipped.safetensors"
    for place in range(len(whole) - 1, len(whole) // 2, -5003):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        flipped.write_bytes(data)
        refuse(flipped, r"is damaged .*Take another copy of it")


def edited(path, **fields):
    """Rewrite fields of the header's metadata, as an older or newer program might."""
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    for name, value in fields.items():
        header.pop(name)
        if value is not None:
            header[name] = value
    header["checksum"] = persist.checksum(arrays, header)
    mx.save_safetensors(str(path), arrays, header)


FIELDS = ["version", "model", "config", "classes", "scalars", "metadata"]
EDITS = [{name: value} for name in FIELDS for value in (None, "", "{")]
EDITS += [{"classes": json.dumps(names)} for names in (["KVCache", "KVCache"], ["os", "os"], ["CompressedKVCache"])]
EDITS += [{"config": json.dumps(config)} for config in ({"key": "q9"}, {"colour": 1}, {"window": -1})]


@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_headers_that_say_something_else(saved, fields):
    """Even where the checksum agrees, every field is checked."""
    path, _ = saved
    edited(path, **fields)
    refuse(path, r"\. (Take another copy of it, or begin anew without it|Pass that model)\.$")


def only_file(folder):
    return [path.name for path in folder.iterdir()]


def test_saving_leaves_one_file(saved):
    path, caches = saved
    assert only_file(path.parent) == ["cache.safetensors"]
    save_prompt_cache(path, caches, model="another", config=CONFIG)
    assert only_file(path.parent) == ["cache.safetensors"]
    assert load_prompt_cache(path, model="another").metadata == {}


def test_a_save_that_fails_leaves_the_old_file(saved, monkeypatch):
    path, caches = saved
    before = path.read_bytes()

    def full_disk(*args):
        Path(args[0]).write_bytes(b"half")
        raise RuntimeError("[write] no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full_disk)
    with pytest.raises(CacheFormatError, match=r"cannot write the cache file .*no space left.* Free space, or choose"):
        save_prompt_cache(path, caches, model=MODEL, config=CONFIG)
    assert path.read_bytes() == before
    assert only_file(path.parent) == ["cache.safetensors"]


def test_where_no_file_can_be(saved, tmp_path):
    path, caches = saved
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CacheFormatError, match=r"cannot write the cache file .*folder"):
        save_prompt_cache(folder, caches, model=MODEL, config=CONFIG)
    assert sorted(only_file(tmp_path)) == ["cache.safetensors", "folder"]
    for target in (tmp_path / "none" / "a.safetensors", path / "a.safetensors"):
        with pytest.raises(CacheFormatError, match=r"cannot write the cache file .*choose another path"):
            save_prompt_cache(target, caches, model=MODEL, config=CONFIG)
