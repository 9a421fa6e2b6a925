"""`mlx_tq` itself: its commands, exit codes, and how fast it says who it is."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_tq
from mlx_tq.cli import COMMANDS, main

from .tools import ROOT, environment, run

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(cli, flag):
    assert cli(flag) == (result := cli(flag))
    assert (result.code, result.out, result.err) == (0, f"{mlx_tq.__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(cli, flag):
    result = cli(flag)
    assert result.code == 0
    assert result.err == ""
    for command, what in COMMANDS.items():
        assert f"  {command}" in result.out
        assert what in result.out


def test_no_command_is_a_usage_error(cli):
    result = cli()
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("usage: mlx_tq COMMAND")


def test_unknown_command_is_a_usage_error(cli):
    result = cli("generte", "-p", "hi")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("mlx_tq: command 'generte' is unknown\nusage: mlx_tq COMMAND")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module_with_help(cli, command):
    assert find_spec(f"mlx_tq.{command}") is not None
    result = cli(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert re.match(rf"usage: mlx_tq[. ]{command} ", result.out)
    assert all(len(line) <= 200 for line in result.out.splitlines())


def test_scripts_are_commands():
    ours = {name: target for name, target in SCRIPTS.items() if name.startswith("mlx_tq")}
    assert set(ours.values()) == {"mlx_tq.cli:main"}
    assert {name.partition(".")[2] for name in ours} - {""} <= set(COMMANDS)


@pytest.mark.parametrize("script", ["mlx_tq.generate", "mlx_tq.generate.exe"])
def test_a_script_is_its_command(monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [str(Path("/usr/bin") / script), "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("usage: mlx_tq.generate")


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["nonsense"]])
def test_frame_loads_no_model_code(words):
    """Milliseconds, not the second that mlx-lm and transformers take."""
    script = "import sys; from mlx_tq.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment(), check=True
    )
    modules = set(done.stdout.split())
    assert "mlx_tq.cli" in modules
    assert not modules & {"mlx", "mlx.core", "mlx_lm", "numpy", "rich", "transformers", "torch"}


def test_package_costs_no_model_code():
    script = "import sys, mlx_tq; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    assert not set(done.stdout.split()) & {"mlx", "mlx_lm", "numpy", "transformers"}


def test_bad_flag_is_two_lines(cli):
    """Not the 30 lines of every flag that hide the reason."""
    result = cli("generate", "--kv-memory-limit", "big", "-p", "hi")
    assert (result.code, result.out) == (2, "")
    usage, error = result.err.splitlines()
    assert usage == "usage: mlx_tq.generate [-p PROMPT] [options]"
    assert error.endswith("'big' is not a size; write it like 800MB or 4GB, above zero")


def test_python_m_is_the_same():
    result = run("generate", "-p", "Hello", "-m", "2", "--verbose", "F")
    assert result.code == 0
    assert result.out.strip()
    assert result.err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is Linux's")
def test_output_on_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mlx_tq", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "mlx_tq --version: [Errno 28] No space left on device\n")


def test_no_output_at_all():
    script = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'mlx_tq', '--version'])"
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
