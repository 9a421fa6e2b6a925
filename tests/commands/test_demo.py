"""`mlx_tq demo`: the main job, on the embedded model."""

import json

from mlx_tq import cli


def test_every_profile_finds_the_fact(capsys):
    assert cli.main(["demo", "--tokens", "700", "--depth", "0.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    outcomes = {outcome["profile"]: outcome for outcome in report["outcomes"]}
    assert list(outcomes) == ["off", "balanced", "small"]
    assert all(outcome["answer"] == report["expected"] for outcome in outcomes.values())
    assert outcomes["small"]["nbytes"] < outcomes["balanced"]["nbytes"] < outcomes["off"]["nbytes"]


def test_too_short_for_a_packed_fact(capsys):
    assert cli.main(["demo", "--tokens", "200"]) == 2
    assert "take at least" in capsys.readouterr().err
