"""`--memory` chooses the best profile that fits, evicts where none does, and says what would be needed."""

import math
import re
from importlib import import_module

import mlx.core as mx
import pytest

from mlx_tq.cli.loading import limit_buffer_cache
from mlx_tq.cli.options import Request
from mlx_tq.cli.startup import check_request
from mlx_tq.config import PROFILES, KVConfig, parse_budget
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.memory import other_bytes, sequence_bytes, transient_bytes, weights_nbytes

TOKENS, STEP = 4096, 256  # of the embedded model's context, and of a prefill step


@pytest.fixture(scope="module")
def needed(embedded):
    """Return the bytes of weights, cache and prefill, by configuration."""
    model = embedded[0]
    weights, others = weights_nbytes(model), other_bytes(model)

    def count(config, tokens=TOKENS, step=STEP):
        cache, transient = sequence_bytes(model, config, others, step), transient_bytes(model, config, step)
        return weights + cache(tokens) + transient(tokens)

    return count


def request(*words, command="generate"):
    words += ("--prefill-step-size", str(STEP))
    args = import_module(f"mlx_tq.{command}").build_parser().parse_args(list(words))
    return check_request(Request.from_args(args))


def kilobytes(nbytes, *, up=True):
    return f"{math.ceil(nbytes / 1000) if up else nbytes // 1000}KB"


@pytest.mark.parametrize(
    "command", ["generate", *(pytest.param(name, marks=pytest.mark.full) for name in ("chat", "server"))]
)
@pytest.mark.parametrize(("profile", "next_profile"), [("safe", "balanced"), ("balanced", "small"), ("small", "tiny")])
def test_the_best_profile_that_fits(needed, capsys, command, profile, next_profile):
    enough = needed(PROFILES[profile])
    best = request("--memory", kilobytes(enough), command=command)
    assert best.config == PROFILES[profile]
    assert f": --kv-profile {profile} fits (" in capsys.readouterr().err
    assert request("--memory", kilobytes(enough, up=False), command=command).config == PROFILES[next_profile]
    line = capsys.readouterr().err
    assert f": --kv-profile {next_profile} fits (" in line
    assert re.search(rf" for 4,096 tokens, plus \S+ MB during prefill in steps of 256\); {profile} would need ", line)


def test_the_cache_is_limited_to_what_weights_leave(needed):
    limits = [request("--memory", size).args.kv_memory_limit for size in ("100MB", "200MB")]
    assert limits[1] - limits[0] == 10**8
    assert limits[0] < 10**8


def test_a_shorter_context_takes_a_better_profile(needed):
    memory = ("--memory", kilobytes(needed(PROFILES["safe"], 2048)))
    assert request(*memory, "--context", "2048").config == PROFILES["safe"]
    assert request(*memory).config != PROFILES["safe"]


def test_a_shorter_prefill_step_comes_before_a_smaller_profile(needed, capsys):
    parse = import_module("mlx_tq.generate").build_parser().parse_args
    memory = ("--memory", kilobytes(needed(PROFILES["safe"], step=1024)))
    chosen = check_request(Request.from_args(parse([*memory])))
    assert (chosen.config, chosen.args.prefill_step_size) == (PROFILES["safe"], 1024)
    assert "during prefill in steps of 1,024)" in capsys.readouterr().err
    chosen = check_request(Request.from_args(parse([*memory, "--prefill-step-size", "1100"])))
    assert chosen.args.prefill_step_size == 1100, "a step that was typed stays"
    assert chosen.config != PROFILES["safe"]


def test_other_flags_count(needed):
    wide = KVConfig(key="q8", value="q8", window=512)
    assert request("--memory", kilobytes(needed(wide)), "--kv-window", "512").config == wide
    assert request("--memory", kilobytes(needed(PROFILES["safe"])), "--kv-window", "512").config != wide


def test_tokens_are_evicted_where_no_profile_fits(needed, capsys):
    memory = needed(PROFILES["tiny"]) - 10**6
    config = request("--memory", kilobytes(memory, up=False)).config
    assert (config.key, config.value) == (PROFILES["tiny"].key, PROFILES["tiny"].value)
    budget = parse_budget(config.evict.budget).tokens
    assert needed(config) <= memory < needed(PROFILES["tiny"])
    assert 512 <= budget < TOKENS
    line = capsys.readouterr().err
    assert f"--kv-evict triattention --kv-budget {budget}, because no profile holds all 4,096 tokens" in line


@pytest.mark.parametrize("budget", [(), ("--kv-evict", "recency", "--kv-budget", "2000")], ids=str)
def test_what_would_be_needed_is_enough(needed, budget):
    with pytest.raises(ConfigError, match=r"--memory 14\.5 MB is too small: the weights take 13\.9 MB") as error:
        request("--memory", "14.5MB", *budget)
    enough = re.search(r"Give (\S+) MB", str(error.value))[1]
    assert request("--memory", f"{enough}MB", *budget).config.evict is not None


@pytest.mark.parametrize(("memory", "words"), [("200MB", "fits"), ("15MB", "does not fit")])
def test_a_profile_that_was_typed_stays(capsys, memory, words):
    assert request("--memory", memory, "--kv-profile", "small").config == PROFILES["small"]
    assert re.search(
        rf": --kv-profile small {words} \(.* for 4,096 tokens, plus \S+ MB during prefill in steps of 256\)$",
        capsys.readouterr().err.strip(),
    )


def test_the_environment_gives_way(monkeypatch):
    monkeypatch.setenv("MLX_TQ_KV_PROFILE", "tiny")
    monkeypatch.setenv("MLX_TQ_KV_VALUE", "tq2")
    assert request("--memory", "200MB").config == PROFILES["safe"]


def test_generate_runs_with_what_was_chosen(quick):
    report = quick("generate", "-p", "hi", "-m", 2, "--memory", "200MB", "--json")
    assert report.json["plan"]["config"]["value"] == "q8"
    assert len(re.findall(r"Memory 200\.0 MB, weights .* MB: --kv-profile safe fits \(", report.err)) == 1
    assert ", weights " not in quick("generate", "-p", "hi", "-m", 2, "--memory", "200MB", "--verbose", "F").err


@pytest.mark.parametrize(("usable", "limit"), [(8 * 10**7, 10**7), (16 * 10**9, 2 * 10**9), (128 * 10**9, 8 * 10**9)])
def test_freed_buffers_of_a_gpu_are_limited(usable, limit):
    previous = mx.set_cache_limit(0)
    mx.set_cache_limit(previous)
    assert limit_buffer_cache() is None, "a CPU keeps mlx's own limit"
    try:
        assert limit_buffer_cache(usable) == limit
        buffers = [mx.zeros(1_000_000, mx.uint8) for _ in range(40)]
        mx.eval(buffers)
        del buffers
        assert 10**6 <= mx.get_cache_memory() <= limit
    finally:
        assert mx.set_cache_limit(previous) == limit
