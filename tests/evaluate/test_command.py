import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tq.cli import main

ROOT = Path(__file__).parents[2]
READ = ["--chunks", "1", "--length", "160", "--step", "64", "--kv-prefix", "16", "--kv-window", "16"]


def evaluate(*words):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mlx_tq", "evaluate", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


def test_json_on_stdout_and_nothing_else():
    done = evaluate("divergence", "--profiles", "off,tq2/tq2", *READ, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found) == {"command", "settings", "versions", "results"}
    assert found["command"] == "divergence"
    assert {"model", "text", "chunks", "length", "step", "arms"} == set(found["settings"])
    assert found["settings"]["arms"]["tq2/tq2"]["prefix"] == 16
    assert set(found["versions"]) == {"mlx_tq", "mlx", "mlx_lm"}
    assert set(found["results"]) == {"off", "tq2/tq2"}
    assert found["results"]["off"]["kld"] == 0 < found["results"]["tq2/tq2"]["kld"]


def test_a_table_on_stdout_and_json_in_a_file(tmp_path):
    target = tmp_path / "out.json"
    done = evaluate("perplexity", "--profiles", "small", *READ, "--json", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    assert "change %" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["off", "small"]
    assert json.loads(target.read_text())["results"]["small"]["tokens"] == 95
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["perplexity", "--profiles", "bold"], "profile 'bold' is unknown"),
        (["divergence", "--length", "9000"], "the model allows 4,096 positions"),
    ],
)
def test_errors_have_a_remedy_and_exit_code_2(words, message):
    done = evaluate(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["perplexity", "--chunks", "0"], "chunks is 0"),
        (["perplexity", "--chunks", "90"], "Give a longer text"),
        (["perplexity", "--text", "/nowhere.txt"], "the text /nowhere.txt cannot be read"),
        (["divergence", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["needle", "--lengths", "many"], "--lengths is 'many'"),
        (["needle", "--lengths", "5000"], "exceed the model's 4,096 positions"),
        (["needle", "--lengths", "100"], "take at least"),
        (["needle", "--depths", "top"], "depth 'top' is unknown"),
        (["needle", "--depths", "2"], "depth is 2"),
        (["needle", "--seeds", "0"], "--seeds is 0"),
        (["drift", "--steps", "0"], "--steps is '0'"),
        (["drift", "--length", "5000"], "the model allows 4,096 positions"),
        (["formats", "--keys", "tq7"], "format 'tq7' is unknown"),
    ],
)
def test_bad_input(words, message, capsys):
    assert main(["evaluate", *words]) == 2
    assert message in capsys.readouterr().err


def test_formats_resume_and_refuse_other_settings(tmp_path, monkeypatch, capsys):
    target = tmp_path / "formats.json"
    words = ["evaluate", "formats", "--keys", "tq2", "--values", "q8,tq2", *READ, "--json", str(target)]
    assert main(words) == 0
    first = json.loads(target.read_text())
    assert set(first["results"]) == {"tq2/q8", "tq2/tq2"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["tq2/tq2", "tq2/q8"]  # sorted by bytes

    del first["results"]["tq2/tq2"]
    first["results"]["tq2/q8"]["ppl"] = 123.25  # kept, not measured again
    target.write_text(json.dumps(first))
    assert main(words) == 0
    assert json.loads(target.read_text())["results"]["tq2/q8"]["ppl"] == 123.25
    assert set(json.loads(target.read_text())["results"]) == {"tq2/q8", "tq2/tq2"}

    assert main([*words, "--step", "48"]) == 2
    assert "holds results of other settings" in capsys.readouterr().err
    target.write_text("{")
    assert main(words) == 2
    assert "no results to resume" in capsys.readouterr().err


@pytest.mark.full
def test_formats_ask_for_needles_once(tmp_path, capsys):
    target = tmp_path / "formats.json"
    words = ["evaluate", "formats", "--pairs", "fp16/fp16,q8/q8", *READ, "--json", str(target)]
    words += ["--needle-length", "260", "--needles", "1"]
    assert main(words) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-2:]] == ["3/3", "-"]
    found = json.loads(target.read_text())
    found["results"]["q8/q8"]["found"] = 1  # kept, not asked again
    target.write_text(json.dumps(found))
    assert main(words) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-2:]] == ["1/3", "-"]
