"""`mlx_tq demo`: the main job, on the embedded model."""

import json
from pathlib import Path

import pytest

from mlx_tq import __main__

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    "words", [("--dtype", "float32"), pytest.param((), marks=pytest.mark.full)], ids=["float32", "as it is"]
)
def test_the_fact_is_evicted_and_comes_back(capsys, monkeypatch, words):
    """A CPU computes a third as long in float32 as in bfloat16."""
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")
    assert __main__.main(["demo", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    fp16, compressed, evicted, rescued = report["outcomes"]
    assert fp16["answer"] == compressed["answer"] == rescued["answer"] == report["expected"]
    assert not evicted["found"]
    assert evicted["evicted"] == rescued["evicted"] > 0
    assert rescued["quoted_tokens"] > 0 == evicted["quoted_tokens"]
    assert evicted["nbytes"] < compressed["nbytes"] < fp16["nbytes"]


@pytest.mark.full  # in the model's own bfloat16
def test_readme_shows_what_it_prints(capsys, monkeypatch):
    monkeypatch.setenv("RESCUE_EMBEDDER", "none")
    assert __main__.main(["demo"]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    shown = README.read_text().partition("What it prints at the end:\n\n```text\n")[2].partition("\n```")[0]
    assert printed == shown.splitlines()
