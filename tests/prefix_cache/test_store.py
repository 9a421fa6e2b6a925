"""From a resume point everything is bit for bit as without a store; whatever becomes of its files, at most a miss."""

import json
import random
import resource
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
from zoo import build

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.kernels import thresholds
from mlx_tq.models import exact_fingerprint
from mlx_tq.prefix_cache.folder import BLOCKS, POINTS, Folder
from mlx_tq.prefix_cache.keys import root, steps
from mlx_tq.prefix_cache.points import Point, block_name, from_record
from mlx_tq.prefix_cache.store import PrefixCache
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache, plan_caches
from prefix_cache.reading import CASES, LENGTH, SMALL, answer, bits, model_of, tokens

LLAMA = build("llama")


def process(folder, *names):
    """What another process makes of the cases."""
    words = [sys.executable, str(Path(__file__).with_name("reading.py")), str(folder), *names]
    env = environment()
    env["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    return json.loads(subprocess.run(words, env=env, capture_output=True, check=True).stdout)


def without_hit(found):
    return {key: value for key, value in found.items() if key != "restored"}


@pytest.mark.parametrize(
    "names", [("embedded", "qwen3_next", "evicts"), pytest.param(tuple(CASES), marks=pytest.mark.full)], ids=len
)
def test_bits_and_tokens_across_two_processes_are_those_without_a_store(tmp_path, names):
    first, second = process(tmp_path, *names), process(tmp_path, *names)
    for name in names:
        kind, config = CASES[name]
        plain = answer(model_of(kind), config, tokens(LENGTH))
        assert (first[name]["restored"], second[name]["restored"]) == (0, 400 if name == "evicts" else LENGTH - 1)
        assert without_hit(plain) == without_hit(first[name]) == without_hit(second[name]), name


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_a_longer_prompt_goes_on_from_the_last_step_that_it_shares(name, tmp_path):
    model, (_, config) = model_of(name), CASES[name]
    longer = tokens(450) + tokens(80, seed=4)
    answer(model, config, tokens(LENGTH), tmp_path)
    again = answer(model, config, longer, tmp_path)
    assert again["restored"] == 400
    assert without_hit(again) == without_hit(answer(model, config, longer))


WIDE = {"tbq4_0", "tbq3_0"}  # need a head dim of 128; their layout is that of others


@pytest.mark.parametrize("key", [*sorted({*format_names()} - WIDE), "tq4~tq3"])
def test_every_format(key):
    value = "tq4" if key in ("fp16", "tq4~tq3") or get_format(key).keys_only else key
    config = replace(SMALL, key=key, value=value, recent=64)
    with compressed(LLAMA):
        caches = make_prompt_cache(LLAMA, config)
        LLAMA(mx.array([tokens(330)]), cache=caches)
    point = Point(caches)
    blocks = {block_name(data): data for data in point.new_blocks(0)}
    assert len(blocks) == (0 if "~" in key else 1)
    record = point.to_bytes_without(list(blocks))
    again = from_record(record, blocks.get)
    assert same_bits([cache.state for cache in caches], [cache.state for cache in again])
    assert len(record) < 2 * sum(cache.nbytes for cache in caches)
    if blocks:
        assert from_record(record, {}.get) is None


def test_a_damaged_record_is_a_miss_and_goes(tmp_path):
    plain = answer(LLAMA, SMALL, tokens(LENGTH))
    for kind, restored in ((POINTS, 400), (BLOCKS, 0)):
        answer(LLAMA, SMALL, tokens(LENGTH), tmp_path)
        names = steps(root(LLAMA, plan_caches(LLAMA, SMALL)), [tokens(LENGTH)[:-1]], 200)
        path = tmp_path / POINTS / names[-1].key if kind == POINTS else next((tmp_path / BLOCKS).iterdir())
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        again = answer(LLAMA, SMALL, tokens(LENGTH), tmp_path)
        # The first block is in every point from 400 tokens on; the point of 200 has none.
        assert again["restored"] == (restored or 200)
        assert without_hit(again) == without_hit(plain)
        assert answer(LLAMA, SMALL, tokens(LENGTH), tmp_path)["restored"] == LENGTH - 1


@pytest.mark.parametrize("times", [10, pytest.param(1000, marks=pytest.mark.full)])
def test_flips_truncations_and_exchanges_are_at_most_a_miss(tmp_path, times):
    """Whatever becomes of a file, what is restored is to the bit what was stored there."""
    folder, ids, chance = Folder(tmp_path), tokens(LENGTH), random.Random(times)
    store = PrefixCache(LLAMA, plan_caches(LLAMA, SMALL), folder, print)
    stored, stops, caches = {}, [200, 400, LENGTH], make_prompt_cache(LLAMA, SMALL)
    with compressed(LLAMA):
        prompt = store.prompt([ids], 200)
        for start, stop in pairwise([0, *stops]):
            LLAMA(mx.array([ids[start:stop]]), cache=caches)
            prompt.store(stop, caches)
            stored[stop] = bits(caches)
    whole = {record.path: record.path.read_bytes() for record in folder.records()}
    missed = 0
    for number in range(times):
        path = chance.choice(list(whole))
        data, place = bytearray(whole[path]), chance.randrange(len(whole[path]))
        if number % 3 == 0:
            data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(
            data if number % 3 == 0 else data[:place] if number % 3 == 1 else chance.choice([*whole.values()])
        )
        again = store.prompt([ids], 200)
        caches = again.restore()
        missed += again.restored < LENGTH
        assert caches is None or bits(caches) == stored[again.restored]
        del again, caches
        for each, content in whole.items():
            if not each.exists() or each == path:
                each.write_bytes(content)
    assert missed > 0.3 * times, "a half of the files are of the last point"


def test_what_prompts_share_stays_longest(tmp_path):
    """Also than what was used later; a conversation that just goes on shares nothing with itself."""
    folder = Folder(tmp_path)
    store = PrefixCache(LLAMA, plan_caches(LLAMA, SMALL), folder, print)
    shared, points = tokens(400), {}

    def read(ids, system=0):
        caches = make_prompt_cache(LLAMA, SMALL)
        prompt = store.prompt([ids], 200, system)
        points.update(dict(prompt._ends))
        with compressed(LLAMA):
            caches = prompt.restore() or caches
            for start in range(prompt.restored, len(ids), 200):
                LLAMA(mx.array([ids[start : start + 200]]), cache=caches)
                prompt.store(min(start + 200, len(ids)), caches)
        prompt.close()
        return [record.path.name for record in folder.records() if record.protected]

    assert read(shared + tokens(100, seed=1)) == []
    assert read(shared + tokens(100, seed=1) + tokens(150, seed=2)) == []
    assert read(shared + tokens(250, seed=4)) == read(shared + tokens(250, seed=5)) == []
    names = read(shared + tokens(250, seed=6))
    point = points[400]
    assert names[0] == point, "before the block that it names"
    assert len(names) == 2
    assert set(names) <= set(read(tokens(450, seed=7), system=200))
    own = points[200]
    for number in range(8, 11):
        read(tokens(600, seed=number))
    before = folder.records()
    folder.limit = sum(record.size for record in before) // 3
    with folder.writing():
        folder.write(BLOCKS, "last", b"a")
    left = {record.path.name for record in folder.records()}
    assert {own, *names} <= left
    assert len(left) < len(before) / 2
    assert store.prompt([shared], 200).restore()
    (kept,) = [record for record in folder.records() if record.path.name == point]
    assert kept.protected, "also once it was used again"
    assert abs(kept.used - time.time_ns()) < 10**10


def test_a_full_disk_is_said_once_and_tried_again_with_the_next_prompt(tmp_path):
    warned = []
    store = PrefixCache(LLAMA, plan_caches(LLAMA, SMALL), Folder(tmp_path), warned.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def read(most):
        caches = make_prompt_cache(LLAMA, SMALL)
        with compressed(LLAMA), store.reading(caches, tokens(500), 200) as reading:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                for start in (0, 200):
                    LLAMA(mx.array([tokens(500)[start : start + 200]]), cache=caches)
                    reading.note(start + 200)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return len(Folder(tmp_path).records())

    assert [read(most) for most in (20_000, 20_000)] == [0, 0]
    assert len(warned) == 1
    assert "cannot be stored" in warned[0]
    assert read(limits[0]) == 3
    Folder(tmp_path).clear()
    assert read(20_000) == 0
    assert len(warned) == 2


def test_what_another_implementation_reads_is_not_stored(tmp_path):
    """As when a kernel fails in the middle of a prompt, and mlx's operations serve from then on."""
    store = PrefixCache(LLAMA, plan_caches(LLAMA, SMALL), Folder(tmp_path), print)
    caches, before = make_prompt_cache(LLAMA, SMALL), thresholds.current()
    with compressed(LLAMA), store.reading(caches, tokens(100), 50) as reading:
        for stop, other in ((50, before), (100, replace(before, short=513))):
            with thresholds.using(other):
                LLAMA(mx.array([tokens(100)[stop - 50 : stop]]), cache=caches)
                reading.note(stop)
    assert len(Folder(tmp_path).records()) == 1


def test_another_model_version_configuration_or_step_finds_nothing(monkeypatch):
    plan = plan_caches(LLAMA, SMALL)
    ids = tokens(300)
    keys = {step.key for step in steps(root(LLAMA, plan), [ids], 100)}
    tuned, turned = build("llama"), build("llama")
    weight = tuned.model.layers[0].mlp.up_proj.weight
    weight[3, 5] += 1e-3
    turned.model.layers[1].self_attn.rope.base *= 2
    for model in (tuned, turned):
        assert exact_fingerprint(model) != exact_fingerprint(LLAMA)
        assert not keys & {step.key for step in steps(root(model, plan), [ids], 100)}
    for other in (replace(SMALL, seed=1), replace(SMALL, window=64)):
        assert not keys & {step.key for step in steps(root(LLAMA, plan_caches(LLAMA, other)), [ids], 100)}
    assert not keys & {step.key for step in steps(root(LLAMA, plan), [ids], 150)}
    assert len(keys & {step.key for step in steps(root(LLAMA, plan), [[*ids[:250], 7]], 100)}) == 2
    for name, other in (("FORMAT", 2), ("__version__", "0.2.0"), ("version", lambda name: "9")):
        with monkeypatch.context() as changed:
            changed.setattr(f"mlx_tq.prefix_cache.keys.{name}", other)
            assert not keys & {step.key for step in steps(root(LLAMA, plan), [ids], 100)}
