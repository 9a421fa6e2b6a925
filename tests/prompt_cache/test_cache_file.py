"""Cache files: to continue from one is never to have saved it; one that does not fit is refused with the reason."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from cache.tools import same_bits
from mlx.utils import tree_flatten
from mlx_lm.models import cache as native
from zoo import build

from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import CacheFormatError, UnsupportedModelError
from mlx_tq.prompt_cache import cache_file
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, read_header, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache

CONFIG = KVConfig(key="q8", value="tq4", sinks=4, window=24)
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(150)]
MODEL = build("llama")
FULL = pytest.mark.full


def run(model, caches, *chunks, start=0):
    logits = []
    for chunk in chunks:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        start += chunk
    mx.eval(logits)
    return mx.concatenate(logits, axis=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a file, and the caches that it was made from."""
    with compressed_attention(MODEL):
        caches = make_prompt_cache(MODEL, CONFIG)
        run(MODEL, caches, 100)
    path = tmp_path_factory.mktemp("files") / "cache.safetensors"
    save_prompt_cache(path, caches, model=MODEL, config=CONFIG, metadata={"chat": "a"})
    return path.read_bytes(), caches


@pytest.fixture
def saved(written, tmp_path):
    """A file, and the caches that it was made from."""
    path = tmp_path / "cache.safetensors"
    path.write_bytes(written[0])
    return path, written[1]


@pytest.mark.parametrize(
    ("name", "length"),
    [("llama", 0), ("llama", 2), *((name, 100) for name in ("gemma3_text", "falcon_h1", "afm7", "minimax_m3_vl"))],
)
def test_save_load_and_continue_is_never_saved(name, length, tmp_path):
    model, path = build(name), tmp_path / "cache.safetensors"
    with compressed_attention(model):
        caches = make_prompt_cache(model, CONFIG)
        run(model, caches, *([length] if length else [60]))
        if not length:
            native.trim_prompt_cache(caches, 60)  # to nothing
        save_prompt_cache(path, caches, model=model, config=CONFIG)
        loaded = load_prompt_cache(path, model=model, config=CONFIG)
        assert [type(cache) for cache in loaded.caches] == [type(cache) for cache in caches]
        assert (loaded.config, loaded.metadata) == (CONFIG, {})
        logits = [run(model, each, 1, 5, 20, 1, start=length) for each in (caches, loaded.caches)]
        assert mx.array_equal(*logits)
        assert same_bits([cache.state for cache in caches], [cache.state for cache in loaded.caches])


def test_a_batch_of_sequences(tmp_path):
    """In mlx-lm's own caches, of several sequences of one length."""
    path, config = tmp_path / "cache.safetensors", PROFILES["off"]
    caches = make_prompt_cache(MODEL, config)
    tokens = mx.array([TOKENS[:20], TOKENS[20:40]])
    MODEL(tokens, cache=caches)
    save_prompt_cache(path, caches, model=MODEL, config=config)
    loaded = load_prompt_cache(path, model=MODEL).caches
    assert mx.array_equal(MODEL(tokens, cache=caches), MODEL(tokens, cache=loaded))


def test_peak_memory_is_the_size_of_the_file(tmp_path):
    path, config = tmp_path / "cache.safetensors", PROFILES["off"]
    caches = make_prompt_cache(MODEL, config)
    for cache in caches:
        rows = mx.zeros((1, 2, 8192, 64))
        cache.update_and_fetch(rows, rows)
    save_prompt_cache(path, caches, model=MODEL, config=config)
    del caches, cache, rows
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    loaded = load_prompt_cache(path, model=MODEL).caches
    assert loaded[0].offset == 8192
    assert mx.get_peak_memory() - before < 1.1 * path.stat().st_size


def test_what_a_file_holds(saved):
    path, caches = saved
    assert [file.name for file in path.parent.iterdir()] == ["cache.safetensors"]
    loaded = load_prompt_cache(path, model=MODEL)
    assert loaded.config == CONFIG
    assert loaded.metadata == {"chat": "a"}
    assert same_bits([cache.state for cache in loaded.caches], [cache.state for cache in caches])
    arrays = [x for _, x in tree_flatten([cache.state for cache in caches]) if isinstance(x, mx.array)]
    assert path.stat().st_size < sum(array.nbytes for array in arrays) + 8000


def refuse(path, match, **changes):
    with pytest.raises(CacheFormatError, match=match):
        load_prompt_cache(path, **{"model": MODEL, **changes})


def test_another_model(saved):
    """Another finetune, too, which differs in one matrix."""
    finetune = build("llama")
    finetune.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    for model in (build("llama", seed=1), finetune):
        refuse(saved[0], r"was made with another model than this one\. Load that model\.", model=model)


def test_what_mlx_lm_cannot_load_is_not_written(tmp_path):
    model, config = build("deepseek_v41"), PROFILES["off"]
    caches = make_prompt_cache(model, config)
    model(mx.array([TOKENS[:20]]), cache=caches)
    with pytest.raises(UnsupportedModelError, match=r"is not written: mlx-lm cannot load a LayerCache .* again"):
        save_prompt_cache(tmp_path / "cache.safetensors", caches, model=model, config=config)
    assert list(tmp_path.iterdir()) == []


def test_another_configuration_names_every_field(saved):
    wanted = replace(CONFIG, key="tq4", window=64)
    match = r"another configuration: key is 'q8', not 'tq4'; window is 24, not 64\. Drop those options"
    refuse(saved[0], match, config=wanted)


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
    refuse(tmp_path / "none.safetensors", r"there is no cache file .*none\.safetensors.*mlx_tq\.cache_prompt")
    refuse(tmp_path, "there is no cache file")


def header_of(whole):
    """How many bytes come before the data."""
    return 8 + struct.unpack("<Q", whole[:8])[0]


def test_truncated_at_any_place(saved):
    path, whole = saved[0], saved[0].read_bytes()
    header = header_of(whole)
    places = [*range(10), header // 2, header - 1, header, header + 1]
    for place in [*places, *range(header + 1, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:place])
        refuse(path, r"is damaged or no cache file .*Use another copy of it")


def refuse_flipped(path, whole, place, bit, match):
    data = bytearray(whole)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    refuse(path, match, config=CONFIG)


@pytest.mark.parametrize("first", [pytest.param(0, id="a tenth"), *(pytest.param(i, marks=FULL) for i in range(1, 10))])
def test_any_flipped_byte_of_the_header(saved, first):
    """Names, sizes, types, numbers and strings: nothing in the header may change unseen."""
    path, whole = saved[0], saved[0].read_bytes()
    for place in range(first, header_of(whole), 10):
        if whole[place : place + 1] != b" ":  # between JSON values, where a blank may be a tab
            refuse_flipped(path, whole, place, place % 7, ".")


def test_flipped_bytes_of_the_data(saved):
    path, whole = saved[0], saved[0].read_bytes()
    for place in range(len(whole) - 1, len(whole) // 2, -5003):
        refuse_flipped(path, whole, place, place % 8, r"is damaged .*Use another copy of it")


def edited(path, **fields):
    """Rewrite fields of the header's metadata, as an older or newer program might."""
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    for name, value in fields.items():
        header.pop(name)
        if value is not None:
            header[name] = value
    header["checksum"] = cache_file.checksum(arrays, header)
    mx.save_safetensors(str(path), arrays, header)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError("input/output error"), RuntimeError("[malloc] Unable to allocate 80 bytes.")]
)
def test_a_failure_of_the_machine_is_not_one_of_the_file(saved, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(type(error)) as raised:
        load_prompt_cache(saved[0], model=MODEL)
    assert raised.value is error


def test_a_second_save_takes_the_place_of_the_first(saved):
    path, caches = saved
    save_prompt_cache(path, caches, model=MODEL, config=CONFIG)
    assert [file.name for file in path.parent.iterdir()] == ["cache.safetensors"]
    assert load_prompt_cache(path, model=MODEL).metadata == {}
    edited(path, version="0")
    refuse(path, r"has version 0; this mlx_tq reads 1\. Use another copy of it")


FIELDS = ["version", "model", "source", "config", "classes", "scalars", "metadata"]
EDITS = [{name: value} for name in FIELDS for value in (None, "", "{")]
EDITS += [{"classes": json.dumps(names)} for names in (["KVCache", "KVCache"], ["os", "os"], ["CompressedKVCache"])]
EDITS += [{"metadata": json.dumps(value)} for value in ([], {"model": 7})]
EDITS += [{"model": "0" * 16, "source": json.dumps(value)} for value in ([], {"model": 7}, {"color": 1}, 5)]
EDITS += [{"config": json.dumps(config)} for config in ({"key": "q9"}, {"color": 1}, {"window": -1})]


@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_headers_that_say_something_else(saved, fields):
    """Even where the checksum agrees, every field is checked."""
    path, _ = saved
    edited(path, **fields)
    refuse(path, r"\. (Use another copy of it, or start again without it|Load that model)\.$")


@pytest.mark.parametrize("fields", [{"model": None}, {"dtype": 7}, {"dequantize": 1}, {"architecture": 7}], ids=str)
def test_sources_of_models_are_checked(saved, fields):
    path, _ = saved
    edited(path, source=json.dumps({"model": "needle"}))
    assert read_header(path).source.model == "needle"
    edited(path, source=json.dumps({"model": "needle", **fields}))
    with pytest.raises(CacheFormatError, match=r"Use another copy of it"):
        read_header(path)


# Numbers by which memory would be allocated, or rows read that are not there, by their path in the state.
HUGE = [
    {"0.length": 2**33}, {"1.originals": 2**26, "1.length": 2**26}, {"0.evicted": 2**40, "0.floor": 2**40},
    {"0.evicted": 1, "0.floor": 2**26}, {"0.number": 2**63}, {"0.originals": 36}, {"0.spec.window": 2**33},
    {"0.spec.window": 2**25}, {"0.spec.sinks": 2**40}, {"0.spec.key": "tq4"}, {"0.spec.normalize": 0},
    {"0.spec.key_options.pairs": [[0, 2**31], [1, 5]]}, {"99999999999.length": 1}, {"0.keys.99999999999": 1},
]  # fmt: skip


@pytest.mark.parametrize("numbers", HUGE, ids=str)
def test_numbers_that_the_arrays_contradict(tmp_path, numbers):
    path, config = tmp_path / "cache.safetensors", replace(CONFIG, normalize=False)  # packed after 56 tokens
    with compressed_attention(MODEL):
        caches = make_prompt_cache(MODEL, config)
        run(MODEL, caches, 150)
        assert caches[0].packed_tokens
        save_prompt_cache(path, caches, model=MODEL, config=config)
    scalars = json.loads(mx.load(str(path), return_metadata=True)[1]["scalars"])
    for name, value in numbers.items():
        layer, *fields = name.split(".")
        if fields[0] != "spec":
            scalars[name] = value
            continue
        spec = json.loads(scalars[f"{layer}.spec"])
        (spec[fields[1]] if len(fields) > 2 else spec)[fields[-1]] = value
        scalars[f"{layer}.spec"] = json.dumps(spec)
    edited(path, scalars=json.dumps(scalars))
    refuse(path, r"is damaged .*Use another copy of it, or start again without it\.$")


def test_a_save_that_fails_leaves_the_old_file(saved, monkeypatch):
    path, caches = saved
    before = path.read_bytes()

    def full_disk(*args):
        Path(args[0]).write_bytes(b"half")
        raise RuntimeError("[write] no space left on device.")

    monkeypatch.setattr(mx, "save_safetensors", full_disk)
    with pytest.raises(CacheFormatError, match=r"cannot write .*no space left on device\. Free space, or choose"):
        save_prompt_cache(path, caches, model=MODEL, config=CONFIG)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["cache.safetensors"]


def test_where_no_file_can_be(saved, tmp_path):
    path, caches = saved
    folder = tmp_path / "folder"
    folder.mkdir()
    for target in (folder, tmp_path / "none" / "a.safetensors", path / "a.safetensors"):
        with pytest.raises(CacheFormatError, match=r"cannot write the cache file .*folder.*\. Choose another path\.$"):
            save_prompt_cache(target, caches, model=MODEL, config=CONFIG)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.safetensors", "folder"]
