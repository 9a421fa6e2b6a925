"""`mlx_tq demo` evicts a fact of the embedded model's conversation, and rescue restores it."""

import pytest

from .tools import FLOAT32, ROOT


@pytest.fixture(autouse=True)
def _search_by_keywords(monkeypatch):
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")


@pytest.mark.parametrize("words", [FLOAT32, pytest.param((), marks=pytest.mark.full)], ids=["float32", "as it is"])
def test_the_fact_is_evicted_and_restored(cli, words):
    result = cli("demo", "--json", *words)
    assert result.code == 0
    fp16, compressed, evicted, rescued = result.json["outcomes"]
    assert fp16["answer"] == compressed["answer"] == rescued["answer"] == result.json["expected"]
    assert not evicted["found"]
    assert evicted["evicted"] == rescued["evicted"] > 0
    assert rescued["quoted_tokens"] > 0 == evicted["quoted_tokens"]
    assert evicted["nbytes"] < compressed["nbytes"] < fp16["nbytes"]


@pytest.mark.full  # in the model's own bfloat16
def test_readme_shows_what_it_prints(cli):
    lines = [line.rstrip() for line in cli("demo").out.splitlines() if line.strip()]
    assert "\n".join(lines) in (ROOT / "README.md").read_text(encoding="utf-8")
