"""`mlx_tq demo` evicts a fact of the embedded model's conversation, and rescue restores it."""

import re

import pytest

from .tools import FLOAT32, ROOT, zoo_model


@pytest.fixture(autouse=True)
def _search_by_keywords(monkeypatch):
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")


@pytest.mark.parametrize("words", [FLOAT32, pytest.param((), marks=pytest.mark.full)], ids=["float32", "as it is"])
def test_the_fact_is_evicted_and_restored(cli, words):
    result = cli("demo", "--json", *words)
    assert result.code == 0
    own, compressed, evicted, rescued = result.json["outcomes"]
    assert own["answer"] == compressed["answer"] == rescued["answer"] == result.json["expected"]
    assert not evicted["found"]
    assert min(evicted["evicted"], rescued["evicted"]) > 0
    assert rescued["quoted_tokens"] > 0 == evicted["quoted_tokens"]
    assert evicted["nbytes"] < compressed["nbytes"] < own["nbytes"]
    assert own["name"] == ("float32" if words else "bfloat16")
    assert {each["native_nbytes"] for each in (compressed, evicted)} == {own["nbytes"]}
    bars = [line for line in result.err.splitlines() if " live " in line]
    for bar, outcome in zip(bars, result.json["outcomes"], strict=True):
        assert f" {outcome['live']:,} live  {outcome['evicted']:,} evicted" in bar
        assert f"  {outcome['quoted_tokens']:,} rescued" in bar


@pytest.mark.full
def test_the_table_shows_whole_answers(cli, tmp_path):
    """A random model talks until its answer is full."""
    words = ("demo", "--model", zoo_model(tmp_path / "model", "llama"), "--tokens", 300)
    answers = [" ".join(outcome["answer"].split()) for outcome in cli(*words, "--json").json["outcomes"]]
    assert min(map(len, answers)) > 60
    head, *rows = [line for line in cli(*words).out.splitlines() if line.strip()]
    assert head.rstrip().endswith("of float32")
    assert rows[0].startswith("float32 ")
    for answer in answers:
        assert any(answer[-8:] in row for row in rows)


@pytest.mark.full
def test_without_a_service_the_other_rows_are_shown(cli, tmp_path, monkeypatch):
    """And the reason for the missing one, which names no flag that the demo lacks."""
    monkeypatch.setenv("RESCUE_PROT", "5054")
    words = ("demo", "--model", zoo_model(tmp_path / "model", "llama"), "--tokens", 300)
    result = cli(*words)
    rows = [line.split("  ")[0] for line in result.out.splitlines() if line[:1].strip()]  # others continue an answer
    assert (result.code, rows) == (1, ["KV cache", "float32", "compressed", "+ evicted"])
    last = result.err.splitlines()[-1]
    assert re.fullmatch(
        r"warning: \+ rescued is left out: the private rescue service did not start: .*RESCUE_PROT.*", last
    )
    assert "--rescue" not in result.err
    report = cli(*words, "--json").json
    assert [outcome["name"] for outcome in report["outcomes"]] == rows[1:]
    assert "RESCUE_PROT" in report["left_out"]["+ rescued"]


@pytest.mark.full  # in the model's own bfloat16
def test_readme_shows_what_it_prints(cli):
    lines = [line.rstrip() for line in cli("demo").out.splitlines() if line.strip()]
    assert "\n".join(lines) in (ROOT / "README.md").read_text(encoding="utf-8")
