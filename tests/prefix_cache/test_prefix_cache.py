"""What a prefix cache restores has the bits of what was stored; damaged files are at most a miss."""

import copy
import io
import json
import random
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import same_bits
from cli.tools import environment
from mlx_lm.models.cache import RotatingKVCache, trim_prompt_cache
from zoo import build

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.thresholds import HeadShape, KernelThresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prefix_cache.checkpoint import Checkpoint, decode_checkpoint
from mlx_tq.prefix_cache.folder import BLOCKS, CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache, derive_key, reuse_prefix, root_key
from mlx_tq.prefix_cache.summary import read_summary
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


def key_of(model, ids, config=SMALL, salt=""):
    """Return the key of the checkpoint that holds these tokens."""
    return derive_key(root_key(model, plan_caches(model, config), salt), np.array(ids, np.int32).tobytes())


def split_record(content):
    """Return the summary of a checkpoint as bytes, its arrays and its header."""
    file = io.BytesIO(content)
    read_summary(file)
    place = file.tell()
    arrays, metadata = mx.load(io.BytesIO(content[place:]), format="safetensors", return_metadata=True)
    return content[:place], arrays, json.loads(metadata["header"])


def join_record(summary, arrays, metadata):
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, metadata)
    return summary + file.getvalue()


def without_hits(result):
    return {key: value for key, value in result.items() if key != "restored"}


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "minimax_m3_vl"])
def test_a_longer_prompt_continues_from_the_last_step_that_it_shares(name, tmp_path):
    model, (_, config) = load_model(name), CASES[name]
    longer = random_tokens(450) + random_tokens(80, seed=4)
    run_prompt(model, config, PROMPT, tmp_path)
    result = run_prompt(model, config, longer, tmp_path)
    assert result["restored"] == 400
    assert without_hits(result) == without_hits(run_prompt(model, config, longer))


OTHER = random_tokens(200, seed=11)


@pytest.mark.parametrize(
    ("shared", "restored"), [(30, 0), (150, 0), (180, 128), (250, 192), (380, 320), (LENGTH - 5, LENGTH - 5)]
)
def test_a_prompt_that_diverges_inside_a_step_continues_from_packed_rows(shared, restored, tmp_path):
    """From the last block before the window of 32 tokens; the rows are those that were stored, also in memory."""
    caches, prefix_cache = make_prompt_cache(LLAMA, SMALL), open_cache(Folder(tmp_path))
    with compressed_attention(LLAMA), reuse_prefix(prefix_cache, caches, PROMPT) as prefix:
        prefill(PROMPT, caches)
        prefix.note(LENGTH)
    ids = [*PROMPT[:shared], *OTHER]
    prompts = [CachedPrompt(prefix_cache, ids) for _ in range(2)]
    found = [prompt.restore() for prompt in prompts]
    assert [prompt.restored for prompt in prompts] == [restored, restored]
    if not restored:
        return
    trim_prompt_cache(caches, LENGTH - restored)
    assert digest(found[0]) == digest(found[1]) == digest(caches)
    assert found[0][0]._rows.arrays[0] is found[1][0]._rows.arrays[0], "both prompts share them"
    with compressed_attention(LLAMA):
        logits = [LLAMA(mx.array([ids[restored:]]), cache=states) for states in (found[0], caches)]
    assert same_bits(*logits)
    result = run_prompt(LLAMA, SMALL, ids, tmp_path)
    assert result["restored"] == restored


def test_a_prompt_continues_from_a_prompt_that_continued(tmp_path):
    """Its rows come from three prompts; the blocks that they share are stored once."""
    folder, one, two = Folder(tmp_path), random_tokens(600, seed=5), random_tokens(300, seed=6)
    prompts = [random_tokens(1200), [*random_tokens(900), *one], [*random_tokens(900), *one[:500], *two]]
    restored = [run_prompt(LLAMA, SMALL, prompt, tmp_path)["restored"] for prompt in prompts]
    assert restored == [0, 864, 1344]
    assert [run_prompt(LLAMA, SMALL, prompt, tmp_path)["restored"] for prompt in prompts] == [1199, 1499, 1699]
    blocks = sum(record.path.parent.name == BLOCKS for record in folder.records())
    assert blocks == 4 + (5 - 3) + (6 - 5)


@pytest.mark.full
def test_an_entry_of_another_process_is_found(tmp_path):
    prefix_cache = open_cache(Folder(tmp_path))
    assert CachedPrompt(prefix_cache, PROMPT).find() == 0
    run_in_a_process(tmp_path, "llama")
    assert CachedPrompt(prefix_cache, PROMPT).find() == LENGTH - 1
    Folder(tmp_path).clear()
    assert CachedPrompt(prefix_cache, PROMPT).find() == 0


def test_windows_are_stored_without_rows_that_no_token_sees(tmp_path):
    model = load_model("gemma3_text")
    run_prompt(model, SMALL, PROMPT[: STEP + 50], tmp_path)
    sizes = {cache.max_size for cache in model.make_cache() if isinstance(cache, RotatingKVCache)}
    for record in Folder(tmp_path).records():
        _, arrays, _ = split_record(record.path.read_bytes()[36:])
        assert {array.shape[2] for name, array in arrays.items() if name.split(".")[-1] in ("0", "1")} == sizes


LIKE = {name for name in format_names() if name.startswith(("spectral", "tcq")) and name not in ("spectral8", "tcq3")}
WIDE = {"tbq4_0", "tbq3_0"}  # need a head dim of 128; their layout is that of others


@pytest.mark.parametrize(
    "key",
    [
        *(pytest.param(name, marks=[pytest.mark.full] * (name in LIKE)) for name in sorted({*format_names()} - WIDE)),
        "tq4~tq3",
    ],
)
def test_a_checkpoint_of_every_format(key):
    value = "tq4" if key in ("fp16", "tq4~tq3") or get_format(key).keys_only else key
    config = replace(SMALL, key=key, value=value, recent=64)
    with compressed_attention(LLAMA):
        caches = make_prompt_cache(LLAMA, config)
        prefill(random_tokens(330), caches)
    checkpoint = Checkpoint(caches, range(330))
    assert checkpoint.num_blocks == (0 if "~" in key else 1)
    blocks = {str(number): checkpoint.block(number) for number in range(checkpoint.num_blocks)}

    def read_block(name, parts):
        file = io.BytesIO(blocks[name])
        return all(file.readinto(part) == part.nbytes for part in parts) and not file.read()

    record = checkpoint.record("root", [str(number).zfill(64) for number in range(len(blocks))])
    blocks = {name.zfill(64): data for name, data in blocks.items()}
    decoded, summary = decode_checkpoint(record, read_block)
    assert same_bits([cache.state for cache in caches], [cache.state for cache in decoded])
    assert summary.block_keys == tuple(blocks)
    assert summary.has_prefixes == bool(blocks)
    assert len(record) < 2 * sum(cache.nbytes for cache in caches)
    if not blocks:
        return
    for count in (128, 224, 256):
        prefix, _ = decode_checkpoint(record, read_block, count)
        trimmed = copy.deepcopy(caches)
        trim_prompt_cache(trimmed, 330 - count)
        assert same_bits([cache.state for cache in trimmed], [cache.state for cache in prefix])
    with pytest.raises(CacheFormatError, match="1 of 1 blocks are damaged or missing"):
        decode_checkpoint(record, lambda name, parts: False)


# The first block is in every checkpoint from 400 tokens on; that of 200 tokens has none.
@pytest.mark.parametrize(("kind", "restored"), [(CHECKPOINTS, 400), (BLOCKS, 200)])
def test_a_damaged_record_is_a_miss_and_is_replaced(kind, restored, tmp_path):
    plain = run_prompt(LLAMA, SMALL, PROMPT)
    run_prompt(LLAMA, SMALL, PROMPT, tmp_path)
    path = (
        tmp_path / CHECKPOINTS / key_of(LLAMA, PROMPT[:-1])
        if kind == CHECKPOINTS
        else next((tmp_path / BLOCKS).iterdir())
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    result = run_prompt(LLAMA, SMALL, PROMPT, tmp_path)
    assert result["restored"] == restored
    assert without_hits(result) == without_hits(plain)
    assert run_prompt(LLAMA, SMALL, PROMPT, tmp_path)["restored"] == LENGTH - 1


@pytest.mark.parametrize("offset", [0, pytest.param(4096, marks=pytest.mark.full)])
def test_damage_to_all_records_is_mended_in_one_run(offset, tmp_path):
    ids = random_tokens(1000)
    run_prompt(LLAMA, SMALL, ids, tmp_path)
    paths = [*(tmp_path / BLOCKS).iterdir(), *(tmp_path / CHECKPOINTS).iterdir()]
    for path in paths:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(4096))
    assert [run_prompt(LLAMA, SMALL, ids, tmp_path)["restored"] for _ in range(2)] == [0, len(ids) - 1]


def test_a_checkpoint_that_became_empty_is_stored_again(tmp_path):
    run_prompt(LLAMA, SMALL, PROMPT, tmp_path)
    for path in (tmp_path / CHECKPOINTS).iterdir():
        path.write_bytes(b"")
    assert [run_prompt(LLAMA, SMALL, PROMPT, tmp_path)["restored"] for _ in range(2)] == [0, LENGTH - 1]


FORGED = {
    "no safetensors": b"forged",
    "no header": {},
    "other fields": {"header": "{}"},
    "no JSON": {"header": "{"},
    "deep": {"header": "[" * 100_000},
    "classes": {"classes": ["os", "os"]},
    "arrays that grow": {"growing": {"nothing": [[1, 1, 256, 1], "uint32", 1]}},
    "an endless array": {"growing": {"0.rows": [[1, 2**40, 256, 2**20], "uint32", 1]}},
    "an array of objects": {"growing": {"0.rows": [[1, 1, 256, 1], "object", 1]}},
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


SUMMARIES = {
    "no JSON": b"\x05\0\0\0[[[[[",
    "other blocks": {"block_keys": ["../../../etc/passwd"]},
    "a number of blocks": {"block_keys": 7},
    "a number for a name": {"block_keys": [7]},
    "other tokens": {"tokens": 200},
    "endless tokens": {"tokens": 2**40},
    "no tokens": {"tokens": 0},
    "another root": {"root": "0"},
}


def forge(content, forged):
    """Return a checkpoint in whose header these fields are replaced, or that has this header or text."""
    if isinstance(forged, bytes):
        return forged
    summary, arrays, header = split_record(content)
    is_field = forged and "header" not in forged
    return join_record(summary, arrays, {"header": json.dumps(header | forged)} if is_field else forged)


def forge_summary(content, forged):
    if isinstance(forged, bytes):
        return forged + content
    length = int.from_bytes(content[:4], "little")
    text = json.dumps(json.loads(content[4 : 4 + length]) | forged).encode()
    return len(text).to_bytes(4, "little") + text + content[4 + length :]


@pytest.mark.parametrize(
    ("change", "forged"),
    [*((forge, forged) for forged in FORGED.values()), *((forge_summary, forged) for forged in SUMMARIES.values())],
    ids=[*FORGED, *(f"summary: {name}" for name in SUMMARIES)],
)
def test_a_forged_record_with_the_right_checksum_is_a_miss(tmp_path, stored, shorter, change, forged):
    """The longer one is removed, so that its first tokens are not restored."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    folder, key = Folder(tmp_path), key_of(LLAMA, PROMPT[:400])
    content = change(folder.read(key), forged)
    folder.remove(CHECKPOINTS, key)
    folder.remove(CHECKPOINTS, key_of(LLAMA, PROMPT[:-1]))
    with folder.writing():
        folder.write(CHECKPOINTS, key, content)
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
    growing = {name: kind for name, kind in header["growing"].items() if name in arrays}
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
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen3_next", "gemma3_text", "falcon_h1", "minimax_m3_vl")
        ),
    ],
)
def test_a_stored_prompt_that_does_not_fit_the_model_is_a_miss_and_is_removed(name, tmp_path):
    model, ids = load_model(name), PROMPT[: STEP + 50]
    plain = run_prompt(model, SMALL, ids)
    run_prompt(model, SMALL, ids, tmp_path)
    folder, key = Folder(tmp_path), key_of(model, ids[:STEP])
    summary, arrays, header = split_record(folder.read(key))
    for what, change in CHANGED.items():
        changed, changed_header = change(arrays, header)
        if name == "llama" and "outside" in what:
            continue  # it has no other layers
        with folder.writing():
            for record in folder.records():
                folder.remove(record.path.parent.name, record.path.name)
            folder.write(CHECKPOINTS, key, join_record(summary, changed, {"header": json.dumps(changed_header)}))
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
        prompt = CachedPrompt(prefix_cache, PROMPT)
        for start, stop in pairwise([0, 200, 400, LENGTH]):
            prefill(PROMPT[start:stop], caches)
            prompt.store(PROMPT[:stop], caches)
            stored[stop] = copy.deepcopy(caches)
    contents = {record.path: record.path.read_bytes() for record in folder.records()}
    misses = 0
    for number in range(times):
        path = chance.choice(list(contents))
        changed, place = bytearray(contents[path]), chance.randrange(len(contents[path]))
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes((changed, changed[:place], chance.choice([*contents.values()]))[number % 3])
        prompt = CachedPrompt(prefix_cache, PROMPT)
        caches = prompt.restore()
        misses += prompt.restored < LENGTH
        if caches is not None:
            length, states = min((length, states) for length, states in stored.items() if length >= prompt.restored)
            expected = copy.deepcopy(states)
            trim_prompt_cache(expected, length - prompt.restored)
            assert digest(caches) == digest(expected)
        del prompt, caches
        for other, content in contents.items():
            if not other.exists() or other == path:
                other.write_bytes(content)
    assert misses > 0.3 * times, "half of the files are of the last checkpoint"


def test_a_full_disk_warns_once_and_the_next_prompt_tries_again(tmp_path):
    warnings, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    prefix_cache = open_cache(Folder(tmp_path), warnings.append)

    def run(max_file_size):
        caches = make_prompt_cache(LLAMA, SMALL)
        with compressed_attention(LLAMA), reuse_prefix(prefix_cache, caches, PROMPT[:500]) as prefix:
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
    with compressed_attention(LLAMA), reuse_prefix(prefix_cache, caches, PROMPT) as prefix:
        for start in range(0, 500, 100):
            prefill(PROMPT[start : start + 100], caches)
            prefix.note(start + 100)
    (warning,) = warnings
    stop = int(re.search(r"\((\d+) tokens take 0\.\d MB, more than the limit, 0\.3 MB\)", warning)[1])
    assert stop == 400
    assert CachedPrompt(prefix_cache, PROMPT).find() == stop - 100
    assert CachedPrompt(prefix_cache, PROMPT).restore()


def test_what_another_kernel_computes_is_not_stored(tmp_path):
    """For example after a kernel failed in the middle of a prompt."""
    caches, before = make_prompt_cache(LLAMA, SMALL), KernelThresholds()
    with (
        thresholds.using(before),
        compressed_attention(LLAMA),
        reuse_prefix(open_cache(Folder(tmp_path)), caches, PROMPT[:100]) as prefix,
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


def test_another_model_version_or_configuration_finds_nothing(monkeypatch):
    def keys_of(model, config=SMALL, ids=PROMPT[:300], salt=""):
        return {key_of(model, ids, config, salt)}

    keys = keys_of(LLAMA)
    tuned, other_rope = build("llama"), build("llama")
    weight = tuned.model.layers[0].mlp.up_proj.weight
    weight[3, 5] += 1e-3
    other_rope.model.layers[1].self_attn.rope.base *= 2
    for model in (tuned, other_rope):
        assert exact_fingerprint(model) != exact_fingerprint(LLAMA)
        assert not keys & keys_of(model)
    for config in (replace(SMALL, seed=1), replace(SMALL, window=64)):
        assert not keys & keys_of(LLAMA, config)
    assert not keys & keys_of(LLAMA, salt="another API key")
    assert not keys & keys_of(LLAMA, ids=[*PROMPT[:299], 7])
    for name, value in (("FORMAT", 3), ("__version__", "0.2.0"), ("version", lambda name: "9")):
        with monkeypatch.context() as changed:
            changed.setattr(f"mlx_tq.prefix_cache.prefix_cache.{name}", value)
            assert not keys & keys_of(LLAMA)
