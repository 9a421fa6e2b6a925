"""`mlx_tq.bench` measures every cache and writes the figures; their values are not checked here."""

import json
import sys
from dataclasses import replace
from functools import partial, partialmethod
from itertools import repeat

import mlx.core as mx
import pytest
from http_harness import wait_for
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from cli.tools import EMBEDDED, command, environment
from mlx_tq.bench import tuning
from mlx_tq.bench.layer import count_caches, measure_cell
from mlx_tq.bench.layer_caches import Cell, LayerArm, LayerShape
from mlx_tq.bench.machine import hide_home
from mlx_tq.bench.model import BenchedCache, measure_model
from mlx_tq.bench.timing import compare_arms, run_chain
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import PROFILES
from mlx_tq.integration.probe import model_facts
from mlx_tq.kernels import thresholds

SMALL = ("bench", *["--tokens", "512", "--dtypes", "float32", "--rounds", "1", "--query-heads", "2", "--kv-heads", "1"])
MODEL = ["--tokens", "192", "--dtypes", "float32", "--rounds", "1", "-m", "3"]
ARMS = ["off", "kv-bits 8", "kv-bits 4", "small", "small, random 60%"]


@pytest.fixture
def quick_tuning(monkeypatch):
    """Measure each candidate once, and few of them; test_thresholds.py has what is chosen."""
    monkeypatch.setattr(tuning, "CHAIN_SECONDS", 0)
    monkeypatch.setattr(tuning, "SHAPES", (LayerShape(2, 1, 64),))
    monkeypatch.setattr(tuning, "PACKED_QUERIES", (8,))
    yield
    thresholds._table.cache_clear()  # what was measured is in a file of the test's own


def test_one_layer(cli, tmp_path):
    path = tmp_path / "report.json"
    result = cli(*SMALL, "--profiles", "small", "--json", path)
    assert (result.code, "decode attention, float32, 512 tokens" in result.out) == (0, True)
    report = json.loads(path.read_text())
    assert [t["arm"] for t in report["timings"]] == ["off", "kv-bits 8", "kv-bits 4", "small"]
    for timing in report["timings"]:
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        assert timing["caches"] >= 8
    assert set(report["floors"]) == {"launch_seconds", "chained_seconds", "copy_gb_per_s"}
    sizes = {t["arm"]: t["nbytes"] for t in report["timings"]}
    assert sizes["off"] == 512 * 128 * 2 * 4  # float32
    report = cli(*SMALL, "--profiles", "safe", "--json", "-").json  # nothing else is on stdout
    assert report["shape"] == {"query_heads": 2, "kv_heads": 1, "head_dim": 128}


def test_only_whole_names_of_the_home_folder_are_hidden(monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    assert hide_home("/home/al/x /home/alice/x 3 tok/s") == "~/x /home/alice/x 3 tok/s"
    monkeypatch.setenv("HOME", "/")
    assert hide_home("/x 3 tok/s") == "/x 3 tok/s"


@pytest.mark.full
def test_a_report_to_attach(cli, tmp_path, quick_tuning, monkeypatch):
    """It names no user, though a file of thresholds lies in the home folder."""
    home = tmp_path / "jane.doe"
    (home / ".config").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    path = tmp_path / "report.md"
    flags = ["--profiles", "small", "--kv-evict", "random", "--kv-budget", "60%"]
    also = ["--json", tmp_path / "figures.json", "--markdown", tmp_path / "tables.md"]
    assert cli("bench", "--report", path, *MODEL, "--batches", 1, 2, *flags, *also).code == 0
    text = path.read_text()
    assert "thresholds: measured for D 64 G 2 in ~/" in text
    assert "jane.doe" not in text
    for shown in (
        "low_power_mode: ",
        "thermal: ",
        "swap_growth_nbytes: ",
        "Launch floor ",
        "### 8/2 heads of 128, 192",
    ):
        assert shown in text
    assert (tmp_path / "tables.md").read_text().strip() in text
    report = json.loads(text.rpartition("```json\n")[2].removesuffix("\n```\n"))
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == report["figures"]
    figures = {(f["arm"], f["batch"]): f for f in report["figures"]}
    assert list(dict.fromkeys(arm for arm, _ in figures)) == ARMS
    assert {arm for arm, batch in figures if batch == 2} == {arm for arm in ARMS if "kv-bits" not in arm}
    for (_, batch), figure in figures.items():
        assert 0 < figure["low"] <= figure["decode_tps"] <= figure["high"]
        if batch == 1:  # rows of a batch share what they have not changed
            assert figure["kv_nbytes"] <= figure["active_nbytes"] < figure["peak_nbytes"]
    # 6 layers, 2 KV heads of 128, keys and values in float32; mlx-lm's buffers grow by 256 tokens.
    assert figures["off", 1]["kv_nbytes"] == 256 * 6 * 2 * 128 * 2 * 4
    assert "blas" in report["environment"]
    assert "## Self-tests" in text
    assert "| small, random 60% |" in text


class Clock:
    """Arms that take the given seconds, and the order in which they were measured."""

    def __init__(self, **seconds):
        self.seconds, self.order = {name: iter(values) for name, values in seconds.items()}, []

    def arms(self):
        return {name: partial(self.measure, name) for name in self.seconds}

    def measure(self, name):
        self.order.append(name)
        return next(self.seconds[name])


def test_arms_take_turns_in_alternating_order_next_to_an_anchor():
    clock = Clock(anchor=repeat(2.0), a=repeat(1.0), b=repeat(2.0), c=repeat(4.0), d=repeat(8.0))
    compared = compare_arms(clock.arms(), 2)
    assert clock.order == ["anchor", *"abc", "anchor", "d", "anchor", "anchor", *"dcb", "anchor", "a", "anchor"]
    assert {name: times.ratios for name, times in compared.arms.items()} == {
        "anchor": [1, 1],
        "a": [2, 2],
        "b": [1, 1],
        "c": [0.5, 0.5],
        "d": [0.25, 0.25],
    }
    assert (compared.discarded, compared.steady) == (0, True)


def test_what_was_measured_while_the_anchor_drifted_is_discarded():
    clock = Clock(anchor=[1.0, 1.2, 1.25], a=[5.0, 1.0])
    compared = compare_arms(clock.arms(), 1)
    assert clock.order == ["anchor", "a", "anchor", "a", "anchor"]
    assert compared.arms["a"].seconds == [1.0]
    assert compared.arms["a"].ratios == [pytest.approx(1.225)]
    assert (compared.discarded, compared.steady) == (1, True)


def test_an_anchor_that_never_settles_is_named():
    clock = Clock(anchor=[2.0**n for n in range(9)], a=repeat(1.0), b=repeat(1.0))
    compared = compare_arms(clock.arms(), 1)
    assert (compared.discarded, compared.steady) == (4, False)


def test_calls_of_a_chain_take_turns_and_wait_for_each_other():
    """Independent calls of one evaluation overlap on a GPU."""
    seen = []
    steps = [lambda x, n=n: seen.append(n) or 2 * x + n for n in range(3)]
    graph = []
    steps.append(lambda x: graph.append(x) or x)
    run_chain(steps, mx.array(1.0), 8)
    assert seen == [0, 1, 2, 0, 1, 2]
    assert [x.item() for x in graph] == [8 + 2 + 2, 8 * 12 + 4]


@pytest.mark.parametrize(
    ("memory", "counts"),
    [
        (1 << 40, {"fp16": 48, "kv-bits 4": 64}),  # each arm more bytes than any chip's cache holds
        (40 << 20, {"fp16": 7, "kv-bits 4": 7}),
        (6 << 20, {"fp16": 1, "kv-bits 4": 1}),
        (5 << 20, {"kv-bits 4": 4}),
        (1, {}),
    ],
)
def test_fewer_caches_where_eight_do_not_fit(memory, counts):
    arms = [LayerArm("fp16"), LayerArm("kv-bits 4", kv_bits=4)]
    assert count_caches(Cell(LayerShape(32, 8, 128), 1024), arms, memory) == counts


def test_every_way_to_attend_over_random_tokens():
    """Values keep the size of queries, so that a long chain neither fades nor overflows; what has no room is named."""
    arms = [LayerArm("fp16", "float32"), LayerArm("queued", "float32", writes=True)]
    arms += [LayerArm("kv-bits 8", "float32", kv_bits=8), LayerArm("balanced", "float32", PROFILES["balanced"])]
    cell = Cell(LayerShape(4, 2, 64), 96, batch=2, length=3)
    measured = measure_cell(cell, arms, rounds=2, seconds=0, memory=1 << 30)
    assert [timing.arm for timing in measured.timings] == [arm.name for arm in arms]
    assert all(len(timing.ratios) == 2 for timing in measured.timings)
    assert measured.timings[-1].difference < 96 * 2**-23  # a rounding for each token
    none = measure_cell(cell, arms, rounds=2, seconds=0, memory=1)
    assert (none.timings, none.skipped_arms) == ([], {arm.name: "does not fit in memory" for arm in arms})


@pytest.mark.full
def test_contexts_beyond_the_model_are_skipped_and_named(cli):
    flags = ["--profiles", "safe", "--batches", "1", "--kv-evict", "none", "--kv-bits", "--json", "-"]
    result = cli("bench", "--model", EMBEDDED, *MODEL, *flags, "--tokens", 5, 5000)
    assert [(figure["arm"], figure["tokens"]) for figure in result.json["figures"]] == [("off", 5), ("safe", 5)]
    assert list(result.json["skipped"]) == ["5,000 tokens"]
    assert "skipped: 5,000 tokens: the model has 4,096 positions" in result.err


@pytest.mark.full
def test_a_report_that_fails_does_not_change_the_thresholds(cli, tmp_path, quick_tuning, monkeypatch):
    monkeypatch.setattr(thresholds, "write", lambda best: pytest.fail("kept"))
    result = cli("bench", "--report", tmp_path / "report.md", *MODEL, "--tokens", 5000)
    assert (result.code, "all exceed the model's 4,096 positions" in result.err) == (2, True)


RUN = {"dtype": "float32", "batches": [1, 2], "max_tokens": 4, "rounds": 2, "prefill_rounds": 1, "step": 64}
OURS = BenchedCache("small", replace(PROFILES["small"], sinks=16, window=32))
OWN, QUANTIZED = BenchedCache("off"), BenchedCache("k", kv_bits=4)
PROMPT = list(range(100, 350))  # two answers after each other exceed 256 tokens, where buffers of mlx-lm grow


@pytest.mark.full
def test_caches_of_mlx_lm_run_without_our_patches(exact, monkeypatch):
    """Also after a compressed cache had its turn."""
    model = exact[0]
    native = type(model).__call__, type(model.layers[0].self_attn.rope), base.scaled_dot_product_attention
    model_facts(model)  # has a run of its own
    seen = []

    def record(call, *args):
        rope = type(model.layers[0].self_attn.rope)
        seen.append((type(model).__call__, rope, sys.modules[type(model).__module__].scaled_dot_product_attention))
        return call(*args)

    for kind in (KVCache, BatchKVCache, QuantizedKVCache):
        monkeypatch.setattr(kind, "update_and_fetch", partialmethod(partial(record, kind.update_and_fetch)))
    measure_model(model, PROMPT, [OURS, OWN, QUANTIZED], skipped={}, **RUN)
    assert len(seen) > 6 * 4 * 3 * 2
    assert set(seen) == {native}


@pytest.mark.full
def test_later_rounds_decode_from_copies_of_the_prefilled_caches(exact):
    prefilled = []

    class Counted(BenchedCache):
        def make(self, model):
            prefilled.append(self.name)
            return super().make(model)

    caches = [Counted(cache.name, cache.config, cache.kv_bits) for cache in (OWN, QUANTIZED, OURS)]
    copied, skipped = measure_model(exact[0], PROMPT, caches, skipped={}, **RUN), {}
    assert prefilled == ["off", "small"]
    each = measure_model(exact[0], PROMPT, caches, skipped=skipped, **RUN | {"prefill_rounds": 2})
    assert prefilled == 3 * ["off", "small"]
    assert [(f.arm, f.batch, f.kv_nbytes) for f in copied] == [(f.arm, f.batch, f.kv_nbytes) for f in each]
    for figure in copied + each:  # a quantized cache does not prefill on a CPU
        prefills = figure.batch == 1 and figure.arm != "k"
        assert ({figure.prefill_low, figure.prefill_tps, figure.prefill_high, figure.first_token} == {None}) != prefills
        assert not prefills or 0 < figure.prefill_low <= figure.prefill_tps <= figure.prefill_high
    assert list(skipped) == ["k: prefill"]


@pytest.mark.full
def test_memory_is_that_of_one_cache(exact):
    """What others keep for later rounds does not count."""
    alone, *_ = measure_model(exact[0], PROMPT, [OURS], skipped={}, **RUN)
    own, _, beside, _ = measure_model(exact[0], PROMPT, [OWN, OURS], skipped={}, **RUN)
    for name in ("active_nbytes", "peak_nbytes"):
        assert getattr(beside, name) == pytest.approx(getattr(alone, name), abs=own.kv_nbytes / 4)
    assert beside.active_nbytes < own.active_nbytes


@pytest.mark.full
def test_a_cache_of_mlx_lm_for_which_mlx_has_no_kernel_is_skipped(exact, monkeypatch):
    """On CUDA 8 bits in groups of 64 have none for some shapes. A failure of a compressed cache ends the run."""

    def fail(*_):
        raise RuntimeError("[quantized_matmul] No implementation for problem shape")

    monkeypatch.setattr(QuantizedKVCache, "update_and_fetch", fail)
    skipped = {}
    figures = measure_model(exact[0], PROMPT, [OWN, QUANTIZED], skipped=skipped, **RUN)
    assert {figure.arm for figure in figures} == {"off"}
    assert skipped["k"] == "[quantized_matmul] No implementation for problem shape"
    monkeypatch.setattr(CompressedKVCache, "update_and_fetch", fail)
    with pytest.raises(RuntimeError, match="No implementation"):
        measure_model(exact[0], PROMPT, [OURS], skipped={}, **RUN)


@pytest.mark.full
def test_a_killed_run_has_written_its_measurements(tmp_path, popen):
    path = tmp_path / "bench.json"
    flags = ["--profiles", "safe", "--batches", "1", "--kv-evict", "random"]
    flags += ["--tokens", "5", "3000", "-m", "3", "--rounds", "9"]
    process = popen(command("bench", "--model", EMBEDDED, *flags, "--json", path), env=environment())
    wait_for(path.exists)
    process.kill()
    process.wait()
    assert {figure["tokens"] for figure in json.loads(path.read_text())["figures"]} == {5}
