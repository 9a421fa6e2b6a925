import json

import pytest

from mlx_tq.__main__ import main
from mlx_tq.cli.calibrating import queries_of_text, save_queries
from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.flags import DEFAULT_VARIANTS
from mlx_tq.evaluate.passes import cut_chunks, read_side_by_side
from mlx_tq.evaluate.scenes import questions
from mlx_tq.evaluate.settings import Setting, grid
from mlx_tq.evaluate.sweep import check_protected, check_settings, sweep_needles, text_passes
from mlx_tq.evaluate.sweep_table import sweep_lines
from mlx_tq.policies import Published, Random, TriAttention

BASE = KVConfig(sinks=0, window=32)


def test_variants_are_policies_with_options_that_win():
    setting = Setting("published:evict=highest:trigger=8", 90, granularity=16, trigger=64)
    assert setting.config(BASE, 32).evict == EvictConfig(
        Published(evict="highest", trigger=8, granularity=16, warmup=32), "90%", "off"
    )
    assert Setting("knorm", 50).config(BASE, 32).evict == EvictConfig("knorm:granularity=1", "50%", "off")
    for variant in DEFAULT_VARIANTS.split(","):
        assert grid([variant], [90], [1], [128], [0])[0].config(BASE, 64).evict.budget == "90%"


def test_the_grid_gives_v1_and_v2_no_prefix_and_names_each_setting_once():
    found = grid(["published:mode=v1", "published:recalibrate=256"], [90, 50], [1, 8], [32], [16, 64])
    assert {setting.sinks for setting in found if setting.variant == "published:mode=v1"} == {0}
    assert len(found) == len({setting.name for setting in found}) == 4 + 8


def test_what_would_measure_nothing_is_refused():
    with pytest.raises(ConfigError, match="evicts nothing of 1,000 tokens"):
        check_settings([Setting("random", 95, trigger=64)], 64, [1000, 2000], 256, 128)
    with pytest.raises(ConfigError, match="after 1,024 tokens of calibration"):
        check_settings([Setting("triattention:calibration=text", 50, trigger=64)], 64, [1000], 1024, 128)
    check_settings([Setting("random", 50, trigger=64)], 64, [1000], 1024, 128)
    with pytest.raises(ConfigError, match=r"more than an eighth of 1,000 tokens.*from 1,536"):
        check_protected(128, 64, 1000)
    check_protected(61, 64, 1000)


class Records(dict):
    """What a sweep reports, and how much of it was fresh."""

    fresh = 0

    def __call__(self, key, record, fresh):
        self.fresh += fresh
        self[key] = record


def ask(model, tokenizer, settings, records, **changes):
    options = {"sinks": max(setting.sinks for setting in settings), "kinds": ["single"]}
    options |= {"lengths": [512], "depths": [0.5], "seeds": [0]}
    options |= {"warmup": 64, "step": 64, "max_tokens": 8, "known": records.get, "report": records}
    sweep_needles(model, tokenizer, load_text(), settings, BASE, **{**options, **changes})


@pytest.mark.parametrize("once", [False, True])
def test_what_leaves_at_random_is_drawn_anew_for_each_text(tiny, embedded, monkeypatch, once):
    """Else all texts lose the same blocks, and however many there are, they are one draw."""
    drawn, score = [], Random.score

    def heard(policy, body):
        drawn.append(policy.seed)
        return score(policy, body)

    monkeypatch.setattr(Random, "score", heard)
    setting = Setting("random:seed=3", 50, trigger=16, sinks=0, once=once)
    ask(tiny, embedded[1], [setting], Records(), seeds=[4, 5])
    assert list(dict.fromkeys(drawn)) == [7, 8]
    drawn.clear()
    chunks = cut_chunks(embedded[1], load_text(), 2, 256)
    read_side_by_side(tiny, chunks, [Arm("random", setting.config(BASE, 32))], 64)
    assert list(dict.fromkeys(drawn)) == [3, 4]


def test_random_eviction_spares_its_share_of_the_needles_and_recency_the_last_ones(tiny, embedded):
    """The model passes nothing, so its cells are void; how much of the needles survived is measured all the same."""
    settings = [Setting("random", 50, trigger=16, sinks=0), Setting("recency", 50, trigger=16, sinks=0)]
    records = Records()
    ask(tiny, embedded[1], settings, records, kinds=["multi"], seeds=range(3))
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


def test_known_cells_are_not_measured_again(tiny, embedded):
    settings = [Setting("random", 50, trigger=16, sinks=0)]
    records = Records()
    ask(tiny, embedded[1], settings, records)
    assert (len(records), records.fresh) == (2, 2)
    before = dict(records)
    ask(tiny, embedded[1], [*settings, Setting("random", 75, trigger=16, sinks=0)], records)
    assert (len(records), records.fresh) == (3, 3)
    assert {key: records[key] for key in before} == before
    with pytest.raises(ConfigError, match="evicts nothing of 512 tokens"):
        ask(tiny, embedded[1], [Setting("random", 99, trigger=16, sinks=0)], Records())
    assert len(records) == questions(["single"], 1) + 2
    assert text_passes(settings * 10, {}.get, 3, 512) == 12  # of the progress bar
    assert text_passes(settings, lambda key: {}, 3, 512) == 0


@pytest.mark.parametrize("variant", ["triattention", "published:mode=v1"])
def test_once_is_a_text_that_is_read_at_once(tiny, embedded, variant, monkeypatch):
    """Where a text is read in one step, nothing leaves before the question either way; settings share no cache."""
    found = []
    rounds = []
    score = TriAttention.score
    monkeypatch.setattr(TriAttention, "score", lambda self, body: rounds.append(0) or score(self, body))
    for once in (False, True):
        rounds.clear()
        settings = grid([variant], [75, 50], [1], [16], [16], once=once)
        records = Records()
        ask(tiny, embedded[1], settings, records, kinds=["multi"], step=512, sinks=16)
        found.append([{**r, "name": "", "once": None} for r in records.values() if r["name"] != "off"])
    assert found[0] == found[1]
    assert len(rounds) == 2  # of both settings, and not again for every question
    assert {record["rounds"] for record in found[1]} == {1}
    assert len({record["live"] for record in found[1]}) > 1


def test_once_takes_statistics_from_a_file_and_refuses_what_changes_while_reading(tiny, embedded, tmp_path):
    path = tmp_path / "stats.safetensors"
    save_queries(tiny, path, queries_of_text(tiny, list(range(100, 164))))
    lives = []
    for variant in ("triattention", f"triattention:calibration={path}"):
        records = Records()
        ask(tiny, embedded[1], grid([variant], [50], [1], [16], [16], once=True), records, kinds=["multi"], sinks=16)
        lives.append([record["live"] for record in records.values() if record["name"] != "off"])
    assert lives[0] != lives[1]
    with pytest.raises(ConfigError, match=r"ema=.* calibrates again while a text is read"):
        ask(tiny, embedded[1], grid(["published:ema=0.1"], [50], [1], [16], [16], once=True), Records())


def test_the_embedded_model_answers_with_most_of_the_needle_and_not_without_it(exact):
    """The older part of each segment goes. The sinks stay in both arms, so that the needle alone differs."""
    settings = [Setting("recency", 55, trigger=32, sinks=32)]
    records = Records()
    ask(*exact, settings, records, depths=[0, 1], max_tokens=24)
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
    records = [
        needle_record("a", "single", 20, "PASS"),
        needle_record("a", "single", 10, "FAIL"),
        needle_record("a", "decoys", 0, "VOID"),
        {**needle_record("b", "single", 20, "PASS")},
        dict.fromkeys(("name", "variant"), "b")
        | {"ppl": 3.0, "delta": 1.234, "delta_error": 0.1, "kld": 0.5, "kept": 1, "rounds": 2},
    ]
    columns, lines = sweep_lines(records)
    assert columns[-4:] == ["alive %", "whole", "single", "decoys"]
    assert lines[0] == ["a", "50", "1", "32", "0", "50", "4", "-", "-", "-", "50", "1/3", "1/2", "0/0"]
    assert lines[1][7:] == ["+1.23", "0.10", "0.5000", "100", "1/1", "1/1", "0/0"]


def test_the_command_writes_one_record_a_cell_and_takes_up_more(tmp_path, capsys):
    target = tmp_path / "sweep.json"
    words = ["evaluate", "sweep", "--dtype", "float32", "--policies", "triattention,random", "--retentions", "60"]
    words += ["--triggers", "16", "--prefixes", "8", "--seeds", "0", "--kv-window", "16", "--warmup", "64"]
    words += ["--chunks", "1", "--length", "256", "--step", "64", "--json", str(target)]
    assert main(words) == 0
    first = json.loads(target.read_text())["results"]
    assert len(first) == 2
    assert all(f"  {json.dumps(key)}: {json.dumps(row)}" in target.read_text() for key, row in first.items())  # a line
    assert all(cell["rounds"] > 0 and 0.6 <= cell["kept"] < 0.95 and cell["kld"] > 0 for cell in first.values())
    assert "What eviction costs" in capsys.readouterr().out
    assert main([*words, "--policies", "knorm"]) == 0
    grown = json.loads(target.read_text())["results"]
    assert len(grown) == 3
    assert first.items() < grown.items()
    assert main([*words, "--warmup", "32"]) == 2
