"""Recurrent states in the prefix cache: on a grid, exact or at 8 bits, with bytes that follow from the shape."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from cli.tools import environment
from mlx_lm.models.cache import ArraysCache
from zoo import build

from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.recurrent_states import EXACT, Q8, StateStorage
from mlx_tq.errors import ConfigError
from mlx_tq.prefix_cache.checkpoint import Checkpoint, decode_checkpoint
from mlx_tq.prefix_cache.folder import CHECKPOINTS, Folder
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache, root_key
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_bytes import native_row_bytes
from mlx_tq.prompt_cache.memory import memory_report, state_nbytes
from prefix_cache.runs import SMALL, random_tokens, run_prompt
from prefix_cache.test_prefix_cache import join_record, split_record

QWEN = build("qwen3_5")
STEP, LENGTH = 100, 560  # run_prompt prefills in steps of 200
PROMPT = random_tokens(LENGTH)

# The layers, the value heads of the linear ones (three of four), the KV heads of the others, and the bytes of states in
# float32, of two models as published.
SHAPES = {"Qwen3.6-35B-A3B": (40, 32, 2, 62.9e6), "Qwen3.8-27B": (64, 48, 4, 151.0e6)}
KEY_HEADS, LINEAR_DIM, HEAD_DIM = 16, 128, 256


def four_layers(name):
    """Return a model of four layers, with the states of a large one and little else."""
    changes = {
        "num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_value_heads": SHAPES[name][1],
        "linear_num_key_heads": KEY_HEADS, "linear_key_head_dim": LINEAR_DIM, "linear_value_head_dim": LINEAR_DIM,
    }  # fmt: skip
    return build("qwen3_5", mx.bfloat16, hidden_size=8, intermediate_size=8, vocab_size=64, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_states_of_32k_tokens_at_8_bits_take_at_most_what_keys_and_values_take(name):
    (layers, value_heads, kv_heads, published), model = SHAPES[name], four_layers(name)
    exact, q8 = (layers // 4 * state_nbytes(model, state_format) for state_format in (EXACT, Q8))
    linear = layers * 3 // 4
    numbers = linear * value_heads * LINEAR_DIM * LINEAR_DIM
    convolutions = linear * 3 * (2 * KEY_HEADS + value_heads) * LINEAR_DIM * 2
    assert 4 * numbers == pytest.approx(published, rel=0.001)
    assert exact == 4 * numbers + convolutions
    assert q8 == numbers + 2 * numbers // LINEAR_DIM + convolutions
    keys_and_values = memory_report(2**15, layers // 4, kv_heads, HEAD_DIM).total
    checkpoints = 2**15 // StateStorage().step
    assert 0.7 < checkpoints * (q8 - convolutions) / keys_and_values <= 1
    assert checkpoints * q8 <= 1.08 * keys_and_values, "with the inputs of convolutions"


@pytest.mark.parametrize("state_format", [EXACT, Q8])
def test_a_record_takes_the_bytes_of_the_formula(state_format):
    model = build("qwen3_5", linear_num_key_heads=8, linear_num_value_heads=32)
    caches, ids = make_prompt_cache(model, SMALL), PROMPT[:4]
    with compressed_attention(model):
        model(mx.array([ids]), cache=caches)
    record = Checkpoint(caches, ids, state_format).record("0" * 64, [])
    rows = sum(native_row_bytes(layer.slot, len(ids)) for layer in plan_caches(model, SMALL).layers)
    assert len(record) == pytest.approx(state_nbytes(model, state_format) + rows, rel=0.05)


def lengths_of(folder):
    return sorted(len(summary.tokens) for summary in Folder(folder).checkpoints().values())


def test_prompts_are_stored_on_the_grid_and_at_their_end(tmp_path):
    longer = [*PROMPT[:450], *random_tokens(80, seed=4)]
    for step, stored, restored in ((StateStorage().step, [LENGTH - 1], 0), (400, [400, LENGTH - 1], 400)):
        folder, states = tmp_path / str(step), StateStorage(step=step)
        run_prompt(QWEN, SMALL, PROMPT, folder, states)
        assert lengths_of(folder) == stored
        assert run_prompt(QWEN, SMALL, longer, folder, states)["restored"] == restored, "the nearest states"
    run_prompt(build("llama"), SMALL, PROMPT, tmp_path / "llama", StateStorage(step=400))
    assert lengths_of(tmp_path / "llama") == [200, 400, LENGTH - 1], "after each step, as there are no states"


def test_small_states_have_a_finer_grid(tmp_path):
    """The inputs of convolutions alone take less than keys and values of 512 tokens."""
    model, prompt = build("lfm2"), random_tokens(1200)
    run_prompt(model, SMALL, prompt, tmp_path, StateStorage())
    assert lengths_of(tmp_path) == [600, 1199], "in prefill steps of 200, what follows 512 and 1,024"
    diverging = [*prompt[:1100], *random_tokens(40, seed=4)]
    assert run_prompt(model, SMALL, diverging, tmp_path, StateStorage())["restored"] == 600


@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_a_format_that_saves_nothing_is_refused(name, tmp_path):
    model = build(name)
    with pytest.raises(ConfigError, match=r"state format q8 saves nothing for this model.*Valid is exact"):
        PrefixCache(model, plan_caches(model, SMALL), Folder(tmp_path), print, states=StateStorage(Q8))


def test_formats_never_mix(tmp_path):
    runs = [(EXACT, 0), (Q8, 0), (EXACT, LENGTH - 1), (Q8, LENGTH - 1)]
    results = [run_prompt(QWEN, SMALL, PROMPT, tmp_path, StateStorage(name)) for name, _ in runs]
    assert [result["restored"] for result in results] == [restored for _, restored in runs]
    assert results[0]["before"] == results[1]["before"] == results[2]["before"] != results[3]["before"]
    plain = build("llama")
    assert PrefixCache(plain, plan_caches(plain, SMALL), Folder(tmp_path), print, states=StateStorage(Q8)).root == (
        root_key(plain, plan_caches(plain, SMALL))
    ), "nothing changes for a model without states"


@pytest.mark.full
def test_states_at_8_bits_differ_by_half_a_step_at_most(tmp_path):
    run_prompt(QWEN, SMALL, PROMPT, tmp_path, StateStorage(Q8))
    exact = make_prompt_cache(QWEN, SMALL)
    with compressed_attention(QWEN):
        for start in range(0, LENGTH - 1, 200):
            QWEN(mx.array([PROMPT[start : min(start + 200, LENGTH - 1)]]), cache=exact)
    cache = PrefixCache(QWEN, plan_caches(QWEN, SMALL), Folder(tmp_path), print, states=StateStorage(Q8))
    restored = CachedPrompt(cache, PROMPT[:-1]).restore()
    for before, after in zip(cache_parts(exact), cache_parts(restored), strict=True):
        if isinstance(before, ArraysCache):
            assert mx.array_equal(before[0], after[0])
            errors = mx.abs(before[1] - after[1]).max(axis=-1)
            assert errors.max() > 0
            assert (errors <= 0.503 / 127 * mx.abs(before[1]).max(axis=-1)).all()


def forge(content, change):
    summary, arrays, header = split_record(content)
    change(arrays, header["packed_states"])
    return join_record(summary, arrays, {"header": json.dumps(header)})


CODES, SCALES = "0.0.1.codes", "0.0.1.scales"
FORGERIES = {
    "NaN": lambda arrays, types: arrays.update({SCALES: arrays[SCALES] * mx.array(mx.nan, mx.bfloat16)}),
    "fewer heads": lambda arrays, types: arrays.update({name: arrays[name][:, :1] for name in (CODES, SCALES)}),
    "scales of fewer heads": lambda arrays, types: arrays.update({SCALES: arrays[SCALES][:, :1]}),
    "no codes": lambda arrays, types: arrays.pop(CODES),
    "an unknown type": lambda arrays, types: types.update({"0.0.1": "int32x"}),
}


def prompt_of_forged(model, states, change, folder):
    """Return the results of a prompt before and after its checkpoint was changed."""
    before = run_prompt(model, SMALL, PROMPT, folder, states)
    folder = Folder(folder)
    ((key, summary),) = folder.checkpoints().items()
    assert decode_checkpoint(folder.read(key), folder.read_block)[1].root == summary.root
    content = forge(folder.read(key), change)
    folder.remove(CHECKPOINTS, key)
    with folder.writing():
        folder.write(CHECKPOINTS, key, content)
    return before, run_prompt(model, SMALL, PROMPT, folder.path, states)


@pytest.mark.parametrize(
    "forgery", [pytest.param(name, marks=[pytest.mark.full] * (name != "fewer heads")) for name in FORGERIES]
)
def test_forged_states_are_a_miss(forgery, tmp_path):
    before, after = prompt_of_forged(QWEN, StateStorage(Q8), FORGERIES[forgery], tmp_path)
    assert (after["restored"], after["answer"]) == (0, before["answer"])


def test_forged_states_of_mamba_are_a_miss(tmp_path):
    """One channel could be broadcast to all."""

    def change(arrays, types):
        arrays["0.0.1"] = arrays["0.0.1"][:, :1]

    before, after = prompt_of_forged(build("jamba"), StateStorage(), change, tmp_path)
    assert (after["restored"], after["answer"]) == (0, before["answer"])


@pytest.mark.full
@pytest.mark.parametrize("state_format", [EXACT, Q8])
def test_256_greedy_tokens_after_a_restart(state_format, tmp_path):
    """In a process that ends by kill -9, and in another one: equal with exact states."""
    code = """\
import os, signal, sys
from zoo import build
from mlx_tq.cache.recurrent_states import StateStorage
from prefix_cache.runs import SMALL, random_tokens, run_prompt
result = run_prompt(build("qwen3_5"), SMALL, random_tokens(560), sys.argv[1], StateStorage(sys.argv[2]), 256)
print(result["restored"], *result["answer"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = environment()
    env["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    words = [sys.executable, "-c", code, str(tmp_path), state_format]
    runs = [subprocess.run(words, env=env, capture_output=True, text=True, check=False) for _ in range(2)]
    assert {run.returncode for run in runs} == {-signal.SIGKILL}
    (none, *first), (restored, *second) = ([*map(int, run.stdout.split())] for run in runs)
    assert (none, restored, len(first), len(second)) == (0, LENGTH - 1, 256, 256)
    if state_format == EXACT:
        assert first == second
    assert first[:8] == second[:8]
