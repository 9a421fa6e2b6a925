"""mlx-lm's own evaluation on compressed caches, with a stand-in for lm_eval, whose tasks are on a hub."""

import json
import sys
from textwrap import dedent

import pytest

from mlx_tq.__main__ import main

# What mlx-lm's module uses of lm_eval, and one task of two questions and a text to continue.
LM_EVAL = {
    "__init__": """
        from types import SimpleNamespace as S

        def simple_evaluate(model, tasks, **options):
            sides = [S(args=("The sky is blue. " * 40 + "The sky is", word)) for word in (" blue", " a cat")]
            scores = model.loglikelihood(sides)
            options |= {"until": ["."], "max_gen_toks": 4}
            text = model.generate_until([S(args=("The sky is blue. " * 40 + "The sky", options))])
            return {"results": {tasks[0]: {"scores": scores, "text": text, "shots": options["num_fewshot"]}}}
        """,
    "api/__init__": "",
    "api/model": "class LM: pass",
    "api/registry": "register_model = lambda name: lambda kind: kind",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    for name, text in LM_EVAL.items():
        file = tmp_path / "site" / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name == "mlx_lm.evaluate"]:
        del sys.modules[name]


def run(folder, *flags):
    target = folder / "results.json"
    words = ["evaluate", "lm-eval", "--dtype", "float32", *flags, "--tasks", "sky", "--json", str(target)]
    assert main([*words, "--batch-size", "2", "--num-shots", "3"]) == 0
    return json.loads(target.read_text())["results"]["sky"]


def test_tasks_run_on_compressed_caches(stand_in, capsys):
    plain = run(stand_in, "--kv-profile", "off")
    coarse = run(stand_in, "--kv-key", "tq2", "--kv-value", "tq2", "--kv-sinks", "16", "--kv-window", "16")
    assert plain["shots"] == coarse["shots"] == 3
    assert plain["scores"][0][0] > plain["scores"][1][0]
    assert plain["scores"] != coarse["scores"]
    assert isinstance(coarse["text"][0], str)
    assert ["sky", "shots", "3"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "lm-eval", "--tasks", "arc_easy"]) == 2
    assert "lm_eval is not installed" in capsys.readouterr().err
