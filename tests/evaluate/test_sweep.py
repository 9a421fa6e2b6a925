import json

import pytest

from benchmarks.studies import sweep
from benchmarks.studies.sweep import Setting, check_settings, grid, sweep_needles, sweep_text, tabulate
from mlx_tq.cli.haystack import load_text
from mlx_tq.cli.model_calibration import calibrate_on_text, save_queries
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.policies import Published, Random, TriAttention

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
    """Return the records by key."""
    results = results or Results(None, "sweep", {})
    options = {"sinks": max(setting.sinks for setting in settings), "kinds": ["single"], "lengths": [512]}
    options |= {"depths": [0.5], "seeds": [0], "warmup": 64, "step": 64, "max_tokens": 8}
    sweep_needles(model, tokenizer, load_text(), settings, base, results, **{**options, **changes})
    return results.rows


@pytest.mark.parametrize("once", [False, True])
def test_random_eviction_is_drawn_again_for_each_text(tiny, embedded, monkeypatch, once):
    """Otherwise all texts lose the same blocks, and are a single draw."""
    drawn, score = [], Random.score

    def recording_score(policy, body):
        drawn.append(policy.seed)
        return score(policy, body)

    monkeypatch.setattr(Random, "score", recording_score)
    setting = Setting("random:seed=3", 50, trigger=16, sinks=0, once=once)
    ask(tiny, embedded[1], [setting], seeds=[4, 5])
    assert list(dict.fromkeys(drawn)) == [7, 8]
    drawn.clear()
    chunks = cut_chunks(embedded[1], load_text(), 2, 256)
    sweep_text(tiny, chunks, [setting], BASE, Results(None, "sweep", {}), warmup=32, step=64)
    assert list(dict.fromkeys(drawn)) == [3, 4]


def test_random_eviction_keeps_its_share_of_the_needles_and_recency_the_last_ones(tiny, embedded):
    """The model passes nothing, so its cells are void; how much of the needles survived is measured all the same."""
    settings = [Setting("random", 50, trigger=16, sinks=0), Setting("recency", 50, trigger=16, sinks=0)]
    records = ask(tiny, embedded[1], settings, kinds=["multi"], seeds=range(3))
    assert {record["verdict"] for key, record in records.items() if not key.startswith("off")} == {"VOID"}
    alive = {
        name: [r["live"] / (r["needle"][1] - r["needle"][0]) for r in records.values() if r["name"] == name]
        for name in {r["name"] for r in records.values()}
    }
    assert alive["off"] == [1.0] * 12
    assert alive[settings[1].name] == [0.0, 0.0, 1.0, 1.0] * 3
    assert 0.35 < sum(alive[settings[0].name]) / 12 < 0.8
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


def needle_record(name, kind, live, verdict):
    about = {"name": name, "variant": name, "retention": 50.0, "granularity": 1, "trigger": 32, "sinks": 0}
    return {**about, "kind": kind, "needle": [100, 120], "live": live, "rounds": 4, "kept": 0.5, "verdict": verdict}


def test_the_table():
    cells = (("a", "single", 20, "PASS"), ("a", "single", 10, "FAIL"), ("a", "decoys", 0, "VOID"))
    records = [needle_record(*cell) for cell in (*cells, ("b", "single", 20, "PASS"))]
    text = {"ppl": 3.0, "delta": 1.234, "delta_error": 0.1, "kld": 0.5, "kept": 1, "rounds": 2}
    columns, rows = tabulate([*records, {"name": "b", "variant": "b", **text}])
    lines = [[show(row) for show in columns.values()] for row in rows]
    assert list(columns)[-4:] == ["alive %", "whole", "single", "decoys"]
    assert lines[0] == ["a", "50", "1", "32", "0", "50", "4", "-", "-", "-", "50", "1/3", "1/2", "0/0"]
    assert lines[1][7:] == ["+1.23", "0.10", "0.5000", "100", "1/1", "1/1", "0/0"]


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
