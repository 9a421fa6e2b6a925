"""What a prefix cache restores has the bits of a fresh prefill; damaged files are at most a miss."""

import io
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from cache.tools import same_bits
from cli.tools import environment
from mlx_lm.models.cache import RotatingKVCache
from zoo import build

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.thresholds import HeadShape, KernelThresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import (
    Checkpoint,
    PrefixCache,
    decode_checkpoint,
    reuse_prefix,
    root_key,
    step_keys,
)
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from prefix_cache.runs import CASES, LENGTH, SMALL, STEP, digest, load_model, random_tokens, run_prompt

LLAMA = build("llama")
PROMPT = random_tokens(LENGTH)


def open_cache(folder, warn=print):
    return PrefixCache(LLAMA, plan_caches(LLAMA, SMALL), folder, warn)


def prefill(ids, caches):
    LLAMA(mx.array([ids]), cache=caches)


def run_in_a_process(folder, *names):
    words = [sys.executable, str(Path(__file__).with_name("runs.py")), str(folder), *names]
    env = environment()
    env["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    return json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)


def without_hits(result):
    return {key: value for key, value in result.items() if key != "restored"}


@pytest.mark.parametrize(
    "names", [("qwen3_next", "evicts"), pytest.param(tuple(CASES), marks=pytest.mark.full)], ids=len
)
def test_bits_and_tokens_of_two_processes_are_those_without_a_prefix_cache(tmp_path, names):
    first, second = run_in_a_process(tmp_path, *names), run_in_a_process(tmp_path, *names)
    for name in names:
        model_name, config = CASES[name]
        plain = run_prompt(load_model(model_name), config, PROMPT)
        assert (first[name]["restored"], second[name]["restored"]) == (0, 400 if name == "evicts" else LENGTH - 1)
        assert without_hits(plain) == without_hits(first[name]) == without_hits(second[name]), name


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_a_longer_prompt_continues_from_the_last_step_that_it_shares(name, tmp_path):
    model, (_, config) = load_model(name), CASES[name]
    longer = random_tokens(450) + random_tokens(80, seed=4)
    run_prompt(model, config, PROMPT, tmp_path)
    result = run_prompt(model, config, longer, tmp_path)
    assert result["restored"] == 400
    assert without_hits(result) == without_hits(run_prompt(model, config, longer))


def test_windows_are_stored_without_rows_that_no_token_sees(tmp_path):
    model = load_model("gemma3_text")
    run_prompt(model, SMALL, PROMPT[: STEP + 50], tmp_path)
    sizes = {cache.max_size for cache in model.make_cache() if isinstance(cache, RotatingKVCache)}
    for record in Folder(tmp_path).records():
        arrays = mx.load(io.BytesIO(record.path.read_bytes()[36:]), format="safetensors")
        assert {array.shape[2] for name, array in arrays.items() if name.split(".")[-1] in ("0", "1")} == sizes


WIDE = {"tbq4_0", "tbq3_0"}  # need a head dim of 128; their layout is that of others


@pytest.mark.parametrize("key", [*sorted({*format_names()} - WIDE), "tq4~tq3"])
def test_a_checkpoint_of_every_format(key):
    value = "tq4" if key in ("fp16", "tq4~tq3") or get_format(key).keys_only else key
    config = replace(SMALL, key=key, value=value, recent=64)
    with compressed_attention(LLAMA):
        caches = make_prompt_cache(LLAMA, config)
        prefill(random_tokens(330), caches)
    checkpoint = Checkpoint(caches)
    blocks = {str(number): data for number, data in enumerate(checkpoint.encode_blocks(0))}
    assert len(blocks) == (0 if "~" in key else 1)
    record = checkpoint.encode(list(blocks))
    decoded, block_keys = decode_checkpoint(record, blocks.get)
    assert same_bits([cache.state for cache in caches], [cache.state for cache in decoded])
    assert block_keys == list(blocks)
    assert len(record) < 2 * sum(cache.nbytes for cache in caches)
    if blocks:
        with pytest.raises(CacheFormatError, match="incomplete"):
            decode_checkpoint(record, {}.get)


# The first block is in every checkpoint from 400 tokens on; that of 200 tokens has none.
@pytest.mark.parametrize(("kind", "restored"), [(CHECKPOINTS, 400), (BLOCKS, 200)])
def test_a_damaged_record_is_a_miss_and_is_replaced(kind, restored, tmp_path):
    plain = run_prompt(LLAMA, SMALL, PROMPT)
    run_prompt(LLAMA, SMALL, PROMPT, tmp_path)
    last = step_keys(root_key(LLAMA, plan_caches(LLAMA, SMALL)), [PROMPT[:-1]], STEP)[LENGTH - 1]
    path = tmp_path / CHECKPOINTS / last if kind == CHECKPOINTS else next((tmp_path / BLOCKS).iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    result = run_prompt(LLAMA, SMALL, PROMPT, tmp_path)
    assert result["restored"] == restored
    assert without_hits(result) == without_hits(plain)
    assert run_prompt(LLAMA, SMALL, PROMPT, tmp_path)["restored"] == LENGTH - 1


def test_damage_to_all_records_is_mended_in_one_run(tmp_path):
    ids = random_tokens(1000)
    run_prompt(LLAMA, SMALL, ids, tmp_path)
    paths = [*(tmp_path / BLOCKS).iterdir(), *(tmp_path / CHECKPOINTS).iterdir()]
    for path in paths:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(4096))
    assert [run_prompt(LLAMA, SMALL, ids, tmp_path)["restored"] for _ in range(2)] == [0, len(ids) - 1]


FORGED = {
    "no safetensors": b"forged",
    "no header": {},
    "other fields": {"header": "{}"},
    "no JSON": {"header": "{"},
    "deep": {"header": "[" * 100_000},
    "other blocks": {"blocks": ["../../../etc/passwd"]},
    "a number of blocks": {"blocks": 7},
    "a number for a name": {"blocks": [7]},
    "classes": {"classes": ["os", "os"]},
    "arrays that grow": {"growing": ["nothing"]},
    "scalars": {"scalars": {"0.length": 2**62, "1.length": 2**62}},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a folder in which the prompt is stored."""
    path = tmp_path_factory.mktemp("stored")
    run_prompt(LLAMA, SMALL, PROMPT, path)
    return path


@pytest.fixture(scope="module")
def shorter():
    """Return the result of the first 450 tokens without a prefix cache."""
    return run_prompt(LLAMA, SMALL, PROMPT[:450])


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_record_with_the_right_checksum_is_a_miss(tmp_path, stored, shorter, forged):
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    folder, key = Folder(tmp_path), step_keys(root_key(LLAMA, plan_caches(LLAMA, SMALL)), [PROMPT[:-1]], STEP)[400]
    content = folder.read(CHECKPOINTS, key)
    if isinstance(forged, dict):
        arrays, metadata = mx.load(io.BytesIO(content), format="safetensors", return_metadata=True)
        is_field = forged and "header" not in forged
        metadata = {"header": json.dumps({**json.loads(metadata["header"]), **forged})} if is_field else forged
        file = io.BytesIO()
        mx.save_safetensors(file, arrays, metadata)
        forged = file.getvalue()
    folder.remove(CHECKPOINTS, key)
    with folder.writing():
        folder.write(CHECKPOINTS, key, forged)
    result = run_prompt(LLAMA, SMALL, PROMPT[:450], tmp_path)
    assert result["restored"] == 200
    assert without_hits(result) == without_hits(shorter)


def is_float(array):
    return mx.issubdtype(array.dtype, mx.floating)


def drop_last_layer(arrays, header):
    last = str(len(header["classes"]) - 1)
    arrays, scalars = (
        {n: x for n, x in part.items() if n.split(".")[0] != last} for part in (arrays, header["scalars"])
    )
    growing = [name for name in header["growing"] if name in arrays]
    return arrays, {**header, "classes": header["classes"][:-1], "scalars": scalars, "growing": growing}


def change_spec(arrays, header):
    scalars = {n: x.replace("q8", "q6") if n.endswith("spec") else x for n, x in header["scalars"].items()}
    return arrays, {**header, "scalars": scalars}


def change_arrays(change):
    return lambda arrays, header: ({name: change(array) for name, array in arrays.items()}, header)


CHANGED = {
    "half of the heads": change_arrays(lambda x: x[:, : x.shape[1] // 2] if x.ndim > 2 else x),
    "half of the dims": change_arrays(lambda x: x[..., : x.shape[-1] // 2] if x.ndim > 2 else x),
    "a shorter window": change_arrays(lambda x: x[:, :, :-8] if x.ndim > 3 and is_float(x) else x),
    "not finite": change_arrays(lambda x: mx.full(x.shape, float("nan"), x.dtype) if is_float(x) else x),
    "not finite outside of compressed layers": lambda arrays, header: (
        {n: x + float("nan") if is_float(x) and n.split(".")[-1].isdecimal() else x for n, x in arrays.items()},
        header,
    ),
    "a layer less": drop_last_layer,
    "another format": change_spec,
}


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "gemma3_text", "falcon_h1"))],
)
def test_a_stored_prompt_that_does_not_fit_the_model_is_a_miss_and_is_removed(name, tmp_path):
    model, ids = load_model(name), PROMPT[: STEP + 50]
    plain = run_prompt(model, SMALL, ids)
    run_prompt(model, SMALL, ids, tmp_path)
    folder, keys = Folder(tmp_path), step_keys(root_key(model, plan_caches(model, SMALL)), [ids[:-1]], STEP)
    content = folder.read(CHECKPOINTS, keys[STEP])
    arrays, metadata = mx.load(io.BytesIO(content), format="safetensors", return_metadata=True)
    for what, change in CHANGED.items():
        changed, header = change(arrays, json.loads(metadata["header"]))
        if name == "llama" and "outside" in what:
            continue  # it has no other layers
        file = io.BytesIO()
        mx.save_safetensors(file, changed, {"header": json.dumps(header)})
        with folder.writing():
            for key in keys.values():
                folder.remove(CHECKPOINTS, key)
            folder.write(CHECKPOINTS, keys[STEP], file.getvalue())
        result = run_prompt(model, SMALL, ids, tmp_path)
        assert result["restored"] == 0, what
        assert without_hits(result) == without_hits(plain), what
        assert run_prompt(model, SMALL, ids, tmp_path)["restored"] == len(ids) - 1, what


@pytest.mark.parametrize("times", [10, pytest.param(1000, marks=pytest.mark.full)])
def test_changed_truncated_and_exchanged_files_are_at_most_a_miss(tmp_path, times):
    folder, chance = Folder(tmp_path), random.Random(times)
    prefix_cache = open_cache(folder)
    stored, caches = {}, make_prompt_cache(LLAMA, SMALL)
    with compressed_attention(LLAMA):
        prompt = prefix_cache.prompt([PROMPT], STEP)
        for start, stop in pairwise([0, 200, 400, LENGTH]):
            prefill(PROMPT[start:stop], caches)
            prompt.store(stop, caches)
            stored[stop] = digest(caches)
    contents = {record.path: record.path.read_bytes() for record in folder.records()}
    misses = 0
    for number in range(times):
        path = chance.choice(list(contents))
        changed, place = bytearray(contents[path]), chance.randrange(len(contents[path]))
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes((changed, changed[:place], chance.choice([*contents.values()]))[number % 3])
        prompt = prefix_cache.prompt([PROMPT], STEP)
        caches = prompt.restore()
        misses += prompt.restored < LENGTH
        assert caches is None or digest(caches) == stored[prompt.restored]
        del prompt, caches
        for other, content in contents.items():
            if not other.exists() or other == path:
                other.write_bytes(content)
    assert misses > 0.3 * times, "half of the files are of the last checkpoint"


def test_shared_prefixes_stay_longest(tmp_path):
    """Longer than records that were used later. A conversation that only continues shares nothing with itself."""
    folder = Folder(tmp_path)
    prefix_cache = open_cache(folder)
    shared, checkpoints = random_tokens(400), {}

    def run(ids, system=0):
        caches = make_prompt_cache(LLAMA, SMALL)
        prompt = prefix_cache.prompt([ids], 200, system)
        checkpoints.update(prompt.keys)
        with compressed_attention(LLAMA):
            caches = prompt.restore() or caches
            for start in range(prompt.restored, len(ids), 200):
                prefill(ids[start : start + 200], caches)
                prompt.store(min(start + 200, len(ids)), caches)
        prompt.close()
        return [record.path.name for record in folder.records() if record.is_protected]

    assert run(shared + random_tokens(100, seed=1)) == []
    assert run(shared + random_tokens(100, seed=1) + random_tokens(150, seed=2)) == []
    assert run(shared + random_tokens(250, seed=4)) == run(shared + random_tokens(250, seed=5)) == []
    protected = run(shared + random_tokens(250, seed=6))
    shared_checkpoint = checkpoints[400]
    assert protected[0] == shared_checkpoint, "before the block that it names"
    assert len(protected) == 2
    assert set(protected) <= set(run(random_tokens(450, seed=7), system=200))
    system_message = checkpoints[200]
    for number in range(8, 11):
        run(random_tokens(600, seed=number))
    before = folder.records()
    folder.limit = sum(record.size for record in before) // 3
    with folder.writing():
        folder.write(BLOCKS, "f" * 64, b"a")
    remaining = {record.path.name for record in folder.records()}
    assert {system_message, *protected} <= remaining
    assert len(remaining) < len(before) / 2
    assert prefix_cache.prompt([shared], 200).restore()
    (record,) = [record for record in folder.records() if record.path.name == shared_checkpoint]
    assert record.is_protected, "also after it was used again"
    assert abs(record.last_used - time.time_ns()) < 10**10


def test_a_full_disk_warns_once_and_the_next_prompt_tries_again(tmp_path):
    warnings, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    prefix_cache = open_cache(Folder(tmp_path), warnings.append)

    def run(max_file_size):
        caches = make_prompt_cache(LLAMA, SMALL)
        with compressed_attention(LLAMA), reuse_prefix(prefix_cache, caches, PROMPT[:500], 200) as prefix:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_size, limits[1]))
            try:
                for start in (0, 200):
                    prefill(PROMPT[start : start + 200], caches)
                    prefix.note(start + 200)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return len(Folder(tmp_path).records())

    assert [run(size) for size in (20_000, 20_000)] == [0, 0]
    assert len(warnings) == 1
    assert "cannot be stored" in warnings[0]
    assert run(limits[0]) == 3
    Folder(tmp_path).clear()
    assert run(20_000) == 0
    assert len(warnings) == 2


def test_a_prompt_beyond_the_limit_is_not_stored_and_says_so(tmp_path):
    warnings = []
    small = Folder(tmp_path / "small", 310_000)
    prefix_cache, caches = open_cache(small, warnings.append), make_prompt_cache(LLAMA, SMALL)
    with compressed_attention(LLAMA), reuse_prefix(prefix_cache, caches, PROMPT, 100) as prefix:
        for start in range(0, 500, 100):
            prefill(PROMPT[start : start + 100], caches)
            prefix.note(start + 100)
    (warning,) = warnings
    stop = int(re.search(r"\((\d+) tokens take 0\.\d MB, more than the limit, 0\.3 MB\)", warning)[1])
    assert stop == 400
    assert prefix_cache.prompt([PROMPT], 100).find() == stop - 100
    assert prefix_cache.prompt([PROMPT], 100).restore()


def test_what_another_kernel_computes_is_not_stored(tmp_path):
    """For example after a kernel failed in the middle of a prompt."""
    caches, before = make_prompt_cache(LLAMA, SMALL), KernelThresholds()
    with (
        thresholds.using(before),
        compressed_attention(LLAMA),
        reuse_prefix(open_cache(Folder(tmp_path)), caches, PROMPT[:100], 50) as prefix,
    ):
        for stop, current in ((50, before), (100, replace(before, short_tokens=513))):
            with thresholds.using(current):
                prefill(PROMPT[stop - 50 : stop], caches)
                prefix.note(stop)
    assert len(Folder(tmp_path).records()) == 1


def test_thresholds_of_any_shape_are_part_of_the_key(monkeypatch, tmp_path):
    monkeypatch.setattr(thresholds, "file", lambda: tmp_path / "thresholds.json")
    plan, tuned = plan_caches(LLAMA, SMALL), {HeadShape(64, 2): KernelThresholds()}
    keys = []
    for measured in (tuned, tuned | {HeadShape(512, 1): KernelThresholds(packed_queries=9)}, tuned):
        thresholds.write(measured)
        keys.append(root_key(LLAMA, plan))
    thresholds._table.cache_clear()
    assert keys[0] == keys[2] != keys[1]


def test_another_model_version_configuration_or_step_finds_nothing(monkeypatch):
    plan = plan_caches(LLAMA, SMALL)

    def keys_of(model, plan=plan, ids=PROMPT[:300], step=100, salt=""):
        return set(step_keys(root_key(model, plan, salt), [ids], step).values())

    keys = keys_of(LLAMA)
    tuned, other_rope = build("llama"), build("llama")
    weight = tuned.model.layers[0].mlp.up_proj.weight
    weight[3, 5] += 1e-3
    other_rope.model.layers[1].self_attn.rope.base *= 2
    for model in (tuned, other_rope):
        assert exact_fingerprint(model) != exact_fingerprint(LLAMA)
        assert not keys & keys_of(model)
    for config in (replace(SMALL, seed=1), replace(SMALL, window=64)):
        assert not keys & keys_of(LLAMA, plan_caches(LLAMA, config))
    assert not keys & keys_of(LLAMA, step=150)
    assert not keys & keys_of(LLAMA, salt="another API key")
    assert len(keys & keys_of(LLAMA, ids=[*PROMPT[:250], 7])) == 2
    for name, value in (("FORMAT", 2), ("__version__", "0.2.0"), ("version", lambda name: "9")):
        with monkeypatch.context() as changed:
            changed.setattr(f"mlx_tq.prefix_cache.prefix_cache.{name}", value)
            assert not keys & keys_of(LLAMA)
