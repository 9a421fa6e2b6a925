"""mlx-lm's own evaluation on compressed caches, with a stand-in for lm_eval: tasks are on the hub."""

import json
import sys
from textwrap import dedent

import pytest

from mlx_tq.__main__ import main
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.harness import command_line

# What mlx-lm's module asks of lm_eval, and one task of two questions and a text to go on with.
LM_EVAL = {
    "__init__": """
        from types import SimpleNamespace as S

        def simple_evaluate(model, tasks, **options):
            sides = [S(args=("The sky is blue. " * 40 + "The sky is", word)) for word in (" blue", " a cat")]
            scores = model.loglikelihood(sides)
            options |= {"until": ["."], "max_gen_toks": 4}
            said = model.generate_until([S(args=("The sky is blue. " * 40 + "The sky", options))])
            return {"results": {tasks[0]: {"scores": scores, "said": said, "shots": options["num_fewshot"]}}}
        """,
    "api/__init__": "",
    "api/model": "class LM: pass",
    "api/registry": "register_model = lambda name: lambda kind: kind",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Installed for this test alone."""
    for name, text in LM_EVAL.items():
        file = tmp_path / "site" / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    info = tmp_path / "site" / "lm_eval-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name == "mlx_lm.evaluate"]:
        del sys.modules[name]


def run(folder, *flags):
    """The scores and the text of the task, with these flags of the cache."""
    words = ["evaluate", "lm-eval", "--dtype", "float32", *flags, "--", "sky", "--output-dir", str(folder)]
    assert main([*words, "--batch-size", "2", "--num-shots", "3"]) == 0
    (file,) = [file for file in folder.iterdir() if file.name.startswith("eval_")]
    found = json.loads(file.read_text())
    file.unlink()
    return found["sky"]


def test_tasks_run_on_compressed_caches(stand_in):
    plain = run(stand_in, "--kv-profile", "off")
    coarse = run(stand_in, "--kv-key", "tq2", "--kv-value", "tq2", "--kv-sinks", "16", "--kv-window", "16")
    assert plain["shots"] == coarse["shots"] == 3
    assert plain["scores"][0][0] > plain["scores"][1][0]
    assert plain["scores"] != coarse["scores"]
    assert isinstance(coarse["said"][0], str)
    assert "mlx_lm.evaluate" not in sys.argv[0]


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "lm-eval", "--", "arc_easy"]) == 2
    assert "lm_eval is not installed" in capsys.readouterr().err
    assert main(["evaluate", "lm-eval"]) == 2
    assert "no task is named" in capsys.readouterr().err
    assert main(["evaluate", "perplexity", "--", "arc_easy"]) == 2
    assert "arc_easy stands behind --, which is for lm-eval" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no task"):
        command_line(None, ["--limit", "3"])
    assert command_line("m", ["a", "b", "--limit", "3"]) == ["--model", "m", "--tasks", "a", "b", "--limit", "3"]
