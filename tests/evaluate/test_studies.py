"""The studies of benchmarks/studies: drift, spectrum, layers, kinds of needles, the sweep."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer
from zoo import build

from benchmarks.studies import sweep
from benchmarks.studies.drift import measure_drift
from benchmarks.studies.layers import Side, measure_layers
from benchmarks.studies.needle_kinds import DECOY, KINDS, plant
from benchmarks.studies.spectrum import key_schedules, measure_spectrum
from benchmarks.studies.sweep import Setting, check_settings, grid, sweep_needles, sweep_text, tabulate
from mlx_tq.cli.haystack import NEEDLE, QUESTION, Fact, build_scene
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.model_calibration import calibrate_on_text, save_queries
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.models import embedded_path
from mlx_tq.policies import Published, Random, TriAttention
from mlx_tq.prompt_cache.recording import record_attention

REGIONS = {"sinks": 8, "window": 16, "recent": 32}
LENGTH, STEP = 320, 160  # the first step reads nothing packed


@pytest.fixture(scope="module")
def ids(embedded):
    (chunk,) = cut_chunks(embedded[1], load_text(), 1, 384)
    return chunk


@pytest.mark.full
def test_codes_of_the_first_layer_do_not_depend_on_the_step_and_those_of_later_layers_do(exact, ids):
    rows = measure_drift(exact[0], ids, parse_arm("tq3/tq3", sinks=16, window=32), [32, 192, 384])
    assert [(row["step"], row["first_layer"]) for row in rows] == [(32, 0), (192, 0), (384, 0)]
    small, large, whole = rows
    assert whole.items() >= {"later_layers": 0, "kld": 0, "logits": 0, "top1": 100}.items()
    assert small["later_layers"] > 50
    assert small["kld"] > large["kld"] / 4 > 0
    assert small["top1"] < 100


def test_the_fp16_cache_drifts_by_rounding_only(exact, ids):
    (row,) = measure_drift(exact[0], ids[:96], OFF, [32])
    assert (row["first_layer"], row["later_layers"]) == (None, None)
    assert row["kld"] == pytest.approx(0, abs=1e-3)
    with pytest.raises(ConfigError, match="Drop --kv-evict"):
        measure_drift(exact[0], ids, parse_arm("off@50%"), [32])


def test_spectral_shares_are_those_of_the_models_keys(tiny, ids):
    rows = measure_spectrum(tiny, ids[:100])
    assert [row["layer"] for row in rows] == [0, 1]
    for row, layer in zip(rows, record_attention(tiny, ids[:100], 1), strict=True):
        keys = np.array(layer.keys, np.float64)
        energy = np.sort(keys[..., :16] ** 2 + keys[..., 16:] ** 2, axis=-1)[..., ::-1]
        for count, share in row["shares"].items():
            assert share == pytest.approx((energy[..., :count].sum(-1) / energy.sum(-1)).mean(), rel=1e-4)
        assert row["shares"][16] == pytest.approx(1)


def test_a_key_schedule_takes_the_fewest_pairs_that_hold_the_share():
    rows = [
        {"layer": 0, "shares": {8: 0.9, 10: 0.92, 12: 0.94, 14: 0.96, 16: 0.97}},
        {"layer": 1, "shares": {8: 0.3, 10: 0.4, 12: 0.5, 14: 0.6, 16: 0.7}},
    ]
    expected = {"lean": "spectral8+spectral12", "even": "spectral8+spectral16", "rich": "spectral8+tq4"}
    assert key_schedules(rows) == expected


def compare(model, name, reference, ids):
    arms = [OFF if arm == "off" else parse_arm(arm, **REGIONS) for arm in (name, reference)]
    return measure_layers(*(Side(model, arm) for arm in arms), ids[:LENGTH], STEP)


def test_layers_of_a_cache_equal_those_of_the_same_cache(tiny, ids):
    before = list(map(type, tiny.layers))
    with pytest.raises(ConfigError, match="never read a packed one"):
        measure_layers(*[Side(tiny, parse_arm("tq4/tq4", sinks=400))] * 2, ids[:LENGTH], STEP)
    rows, predictions = compare(tiny, "tq4/tq3", "tq4/tq3", ids)
    assert list(map(type, tiny.layers)) == before, "the model's own again"
    assert [row.layer for row in rows] == [0, 1]
    assert [(row.keys, row.values, row.first) for row in rows] == [(100, 100, None)] * 2
    assert [(row.cosine, row.least) for row in rows] == [(pytest.approx(1, abs=1e-12),) * 2] * 2
    assert (predictions.first, predictions.top1, predictions.kld, predictions.tokens) == (None, 100, 0, LENGTH)


def test_the_first_layer_stores_the_codes_of_fp16_and_later_ones_differ(tiny, ids):
    rows, predictions = compare(tiny, "tq2/tq2", "off", ids)
    first, second = rows
    assert (first.keys, first.values, first.first) == (100, 100, None)
    assert 0 < second.keys < 100
    assert 0 < second.values < 100
    assert second.first >= STEP
    assert 1 > first.cosine > second.cosine > second.least > 0.9
    assert predictions.kld > 0
    assert predictions.first is None or predictions.first >= STEP
    other, _ = compare(tiny, "tq4/tq4", "q8/tq4", ids)  # codes of another format are not compared
    assert [row.keys for row in other] == [None, None]
    assert other[0].values == 100 > other[1].values


def test_layers_of_a_hybrid_whose_list_of_layers_is_a_copy():
    """`model.layers` is a slice; a linear layer has hidden states and no codes."""
    model = build("qwen3_next")
    rows, _ = compare(model, "tq4~tq2/tq4", "off", [(7 * i * i + 3 * i) % 160 for i in range(LENGTH)])
    assert [row.keys is None for row in rows] == [type(cache).__name__ != "KVCache" for cache in model.make_cache()]
    assert rows[0].least == pytest.approx(1)  # linear: it has no compressed cache
    assert rows[-1].cosine < 1 - 1e-6


TEXT = load_text()
TOKENIZER = load_tokenizer(embedded_path())
SCENE = {"tokens": 1000, "sinks": 32, "window": 64}


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), depth=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_every_needle_lies_where_the_scene_says_and_within_the_packed_range(kind, depth, seed):
    planted = plant(kind, TOKENIZER, TEXT, depth, seed, **SCENE)
    scene = planted.scene
    for fact, (start, stop) in zip(planted.facts, scene.needles, strict=True):
        assert TOKENIZER.decode(scene.ids[start:stop]) == " " + fact.sentence
        assert SCENE["sinks"] <= start < stop <= len(scene.ids) - SCENE["window"]
    assert scene.needles == sorted(scene.needles)
    assert len({fact.answer for fact in planted.facts}) == len(planted.facts)
    assert len(scene.ids) + max(map(len, scene.questions)) == SCENE["tokens"]
    for index in planted.asked:
        assert planted.facts[index].question in TOKENIZER.decode(scene.questions[index])


def test_what_each_kind_plants_and_asks():
    single = plant("single", TOKENIZER, TEXT, 0.5, 1, **SCENE)
    (fact,) = single.facts
    assert (fact.sentence, fact.question) == (NEEDLE.format(answer=fact.answer), QUESTION)
    other = plant("paraphrased", TOKENIZER, TEXT, 0.5, 1, **SCENE)
    assert other.facts[0].sentence == fact.sentence
    assert other.facts[0].question != QUESTION
    assert plant("multi", TOKENIZER, TEXT, 0.5, 1, **SCENE).asked == [0, 1, 2, 3]
    asked = [plant("decoys", TOKENIZER, TEXT, depth, 1, **SCENE) for depth in (0, 0.5, 1)]
    assert [planted.asked for planted in asked] == [[0], [1], [3]]
    assert len({planted.facts[planted.asked[0]].answer for planted in asked}) == 1


def test_a_decoy_for_an_answer_is_told_apart():
    planted = plant("decoys", TOKENIZER, TEXT, 0.5, 3, **SCENE)
    (index,) = planted.asked
    answers = [fact.answer for fact in planted.facts]
    right = answers.pop(index)
    assert planted.verdict(index, f"It is {right}.") == "PASS"
    assert [planted.verdict(index, answer) for answer in answers] == [DECOY] * 3
    assert [planted.verdict(index, answer) for answer in ("", right[:-1], right + "1")] == ["FAIL"] * 3


@pytest.mark.parametrize(
    ("depths", "words"), [([0.5, 0.2], "do not ascend"), ([0.2, 1.2], "depth is 1.2"), ([0, 1], "no room for needles")]
)
def test_scenes_that_cannot_be_built(depths, words):
    facts = [Fact("The cat is red. " * 20, "?", "red"), Fact("The cat is blue.", "?", "blue")]
    tokens = 200 if depths == [0, 1] else 1000
    with pytest.raises(ConfigError, match=words):
        build_scene(TOKENIZER, TEXT, facts, depths, random.Random(0), tokens=tokens, sinks=32, window=64)
    with pytest.raises(ConfigError, match="valid are single, multi, paraphrased, decoys"):
        plant("double", TOKENIZER, TEXT, 0.5, 0, **SCENE)


BASE = KVConfig(sinks=0, window=32)


def test_variants_are_policies_with_options_that_win():
    setting = Setting("published:evict=highest:trigger=8", 90, granularity=16, trigger=64)
    assert setting.arm(BASE, 32).config.evict == EvictConfig(
        Published(evict="highest", trigger=8, granularity=16, warmup=32), "90%", "off"
    )
    assert Setting("knorm", 50).arm(BASE, 32).config.evict == EvictConfig("knorm:granularity=1", "50%", "off")
    for variant in sweep.POLICIES.split(","):
        assert grid([variant], [90], [1], [128], [0])[0].arm(BASE, 64).config.evict.budget == "90%"


def test_the_grid_gives_v1_and_v2_no_sinks_and_names_each_setting_once():
    settings = grid(["published:mode=v1", "published:recalibrate=256"], [90, 50], [1, 8], [32], [16, 64])
    assert {setting.sinks for setting in settings if setting.variant == "published:mode=v1"} == {0}
    assert len(settings) == len({setting.name for setting in settings}) == 4 + 8


@pytest.mark.parametrize(
    ("variant", "budget", "message"),
    [
        ("random", 95, "evicts nothing of 1,000 tokens"),
        ("triattention:calibration=text", 50, "after 1,024 tokens of calibration"),
        ("random", 50, None),
    ],
)
def test_a_setting_that_would_evict_nothing_is_refused(variant, budget, message):
    setting = Setting(variant, budget, trigger=64)
    arms = [setting.arm(KVConfig(window=64), 1024)]
    if message is None:
        check_settings(arms, [setting], 1000, 1024, 128)
        return
    with pytest.raises(ConfigError, match=message):
        check_settings(arms, [setting], 1000, 1024, 128)


def ask(model, tokenizer, settings, results=None, base=BASE, **changes):
    results = results or Results(None, "sweep", {})
    options = {"sinks": max(setting.sinks for setting in settings), "kinds": ["single"], "lengths": [512]}
    options |= {"depths": [0.5], "seeds": [0], "warmup": 64, "step": 64, "max_tokens": 8}
    sweep_needles(model, tokenizer, load_text(), settings, base, results, **{**options, **changes})
    return results.rows


@pytest.mark.parametrize("once", [pytest.param(False, marks=pytest.mark.full), True])
def test_random_eviction_is_drawn_again_for_each_text(tiny, embedded, monkeypatch, once):
    """Otherwise all texts lose the same blocks, and are a single draw."""
    drawn, score = [], Random.score
    monkeypatch.setattr(Random, "score", lambda policy, body: drawn.append(policy.seed) or score(policy, body))
    setting = Setting("random:seed=3", 50, trigger=16, sinks=0, once=once)
    ask(tiny, embedded[1], [setting], seeds=[4, 5])
    assert list(dict.fromkeys(drawn)) == [7, 8]
    drawn.clear()
    chunks = cut_chunks(embedded[1], load_text(), 2, 256)
    sweep_text(tiny, chunks, [setting], BASE, Results(None, "sweep", {}), warmup=32, step=64)
    assert list(dict.fromkeys(drawn)) == [3, 4]


@pytest.mark.full
def test_random_eviction_keeps_its_share_of_the_needles_and_recency_the_last_ones(tiny, embedded):
    """The model passes nothing, so its cells are void; how much of the needles survived is measured all the same."""
    settings = [Setting("random", 50, trigger=16, sinks=0), Setting("recency", 50, trigger=16, sinks=0)]
    records = ask(tiny, embedded[1], settings, kinds=["multi"], seeds=range(2))
    assert {record["verdict"] for key, record in records.items() if not key.startswith("off")} == {"VOID"}
    alive = {
        name: [r["live"] / (r["needle"][1] - r["needle"][0]) for r in records.values() if r["name"] == name]
        for name in {r["name"] for r in records.values()}
    }
    assert alive["off"] == [1.0] * 8
    assert alive[settings[1].name] == [0.0, 0.0, 1.0, 1.0] * 2
    assert 0.35 < sum(alive[settings[0].name]) / 8 < 0.8
    for record in records.values():
        if record["name"] != "off":
            assert record["rounds"] > 0
            assert 0.5 <= record["kept"] <= (256 + 16 + 64) / 512


def test_needles_that_cannot_be_measured_are_refused(tiny, embedded):
    for setting, changes, message in (
        (Setting("random", 99, trigger=16, sinks=0), {}, "evicted nothing in 511 tokens"),
        (
            Setting("random", 50),
            {"base": KVConfig(window=64), "lengths": [1000]},
            r"more than an eighth of 1,000 tokens.*from 1,536",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ask(tiny, embedded[1], [setting], **changes)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["triattention", "published:mode=v1"])
def test_once_equals_a_single_prefill_step(tiny, embedded, variant, monkeypatch):
    """With a single prefill step nothing is evicted before the question either way; settings share no cache."""
    live, rounds = [], []
    score = TriAttention.score
    monkeypatch.setattr(TriAttention, "score", lambda self, body: rounds.append(0) or score(self, body))
    for once in (False, True):
        rounds.clear()
        settings = grid([variant], [75, 50], [1], [16], [16], once=once)
        records = ask(tiny, embedded[1], settings, kinds=["multi"], step=512, sinks=16)
        live.append([{**r, "name": "", "once": None} for r in records.values() if r["name"] != "off"])
    assert live[0] == live[1]
    assert len(rounds) == 2  # of both settings, and not again for every question
    assert {record["rounds"] for record in live[1]} == {1}
    assert len({record["live"] for record in live[1]}) > 1


@pytest.mark.full
def test_once_takes_calibration_from_a_file_and_refuses_options_that_change_during_prefill(tiny, embedded, tmp_path):
    path = tmp_path / "stats.safetensors"
    save_queries(tiny, path, calibrate_on_text(tiny, list(range(100, 164))))
    lives = []
    for variant in ("triattention", f"triattention:calibration={path}"):
        settings = grid([variant], [50], [1], [16], [16], once=True)
        records = ask(tiny, embedded[1], settings, kinds=["multi"], sinks=16)
        lives.append([record["live"] for record in records.values() if record["name"] != "off"])
    assert lives[0] != lives[1]
    with pytest.raises(ConfigError, match="calibrates again changes its scores"):
        ask(tiny, embedded[1], grid(["published:ema=0.1"], [50], [1], [16], [16], once=True))


@pytest.mark.full
def test_the_embedded_model_answers_with_most_of_the_needle_and_not_without_it(exact):
    """Recency evicts the older part. Both arms have the sinks, so only the needle differs."""
    settings = [Setting("recency", 55, trigger=32, sinks=32)]
    records = ask(*exact, settings, depths=[0, 1], max_tokens=24)
    cells = {(record["name"] == "off", record["depth"]): record for record in records.values()}
    verdicts = {key: cell["verdict"] for key, cell in cells.items()}
    live = {key: cell["live"] for key, cell in cells.items()}
    assert verdicts == {(True, 0): "PASS", (True, 1): "PASS", (False, 0): "FAIL", (False, 1): "PASS"}
    assert live[True, 0] == live[True, 1] > 0
    assert live[False, 0] == 0
    assert live[True, 1] / 2 < live[False, 1]


def test_the_table():
    cells = [("a", "single", 20, "PASS"), ("a", "single", 10, "FAIL"), ("a", "decoys", 0, "VOID")]
    about = {"retention": 50.0, "granularity": 1, "trigger": 32, "sinks": 0, "rounds": 4, "kept": 0.5}
    records = [
        {"name": name, "variant": name, **about, "kind": kind, "needle": [100, 120], "live": live, "verdict": verdict}
        for name, kind, live, verdict in (*cells, ("b", "single", 20, "PASS"))
    ]
    text = {"ppl": 3.0, "delta": 1.234, "delta_error": 0.1, "kld": 0.5, "kept": 1, "rounds": 2}
    columns, rows = tabulate([*records, {"name": "b", "variant": "b", **text}])
    lines = [[show(row) for show in columns.values()] for row in rows]
    assert list(columns)[-4:] == ["alive %", "whole", "single", "decoys"]
    assert lines[0] == ["a", "50", "1", "32", "0", "50", "4", "-", "-", "-", "50", "1/3", "1/2", "0/0"]
    assert lines[1][7:] == ["+1.23", "0.10", "0.5000", "100", "1/1", "1/1", "0/0"]


@pytest.mark.full
def test_the_program_writes_a_record_for_each_cell_and_adds_to_them(tmp_path, capsys):
    target = tmp_path / "sweep.json"
    flags = "--dtype float32 --policies triattention,random --budgets 60 --triggers 16 --sinks 8 --seeds 0 "
    flags += "--kv-window 16 --warmup 64 --chunks 1 --length 256 --step 64 --json"

    def run(*words):
        sweep.run(sweep.build_parser().parse_args([*flags.split(), str(target), *words]))
        return json.loads(target.read_text())["results"]

    first = run()
    assert len(first) == 2
    assert all(cell["rounds"] > 0 and 0.6 <= cell["kept"] < 0.95 and cell["kld"] > 0 for cell in first.values())
    assert "Cost of eviction" in capsys.readouterr().out
    more = run("--policies", "knorm")
    assert len(more) == 3
    assert first.items() < more.items()
    for words, message in (
        (["--warmup", "32"], "results of other settings"),
        (["--budgets", "110"], "above 0 and below 100"),
        (["--budgets", "99"], "evicts nothing"),
        (["--policies", "best"], "policy 'best' is unknown"),
        (["--chunks", "0"], "nothing to measure"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*words)
