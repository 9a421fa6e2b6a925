"""Run commands in three ways, with their exit codes; help loads no model code."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import mlx_tq
from mlx_tq.__main__ import COMMANDS
from mlx_tq.cli import screen
from mlx_tq.cli.runner import run_reporting_errors

from .tools import ROOT, environment

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
HEAVY = ("mlx", "mlx_lm", "numpy", "rich", "transformers", "torch", "starlette", "uvicorn")
# Runs a module as `python -m` does, where importing anything of HEAVY is an error.
BLOCKED = f"""
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ImportError(name + " was loaded")
sys.meta_path.insert(0, Blocker())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(*words, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options}
    return subprocess.run([sys.executable, *map(str, words)], text=True, check=False, **options)


def without_model_code(module, *words):
    """`python -m MODULE WORDS` in a process that cannot load mlx, mlx-lm or anything else that takes long."""
    return run("-c", BLOCKED, module, *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_no_model_code(command):
    by_module, by_word = without_model_code(f"mlx_tq.{command}", "--help"), without_model_code("mlx_tq", command, "-h")
    assert (by_module.returncode, by_module.stderr) == (0, "")
    assert (by_word.returncode, by_word.stdout) == (0, by_module.stdout)
    assert by_module.stdout.startswith(f"usage: mlx_tq.{command} ")


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["--version"], 0), (["nonsense"], 2)])
def test_without_a_command_no_model_code_is_loaded(words, code):
    done = without_model_code("mlx_tq", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize("words", [("mlx_tq", "generate"), pytest.param(("mlx_tq.generate",), marks=pytest.mark.full)])
def test_no_command_imports_torch(words, tmp_path):
    """As transformers does where it is installed, which would double the time of a command's start."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    done = run("-m", *words, "--prompt", "hi", "--max-tokens", 1, env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert (done.returncode, "torch" in done.stderr.lower()) == (0, False)


def test_the_blocker_blocks():
    assert "ImportError: mlx was loaded" in without_model_code("mlx_tq", "doctor").stderr


REQUIRED = {
    "cache_prompt": ["--prompt-cache-file", "x"],
    "evaluate": ["needle"],
    "store": ["list"],
    "connect": ["claude"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_three_ways_to_call_a_command(command, cli, monkeypatch, capsys):
    module, words = import_module(f"mlx_tq.{command}"), REQUIRED.get(command, [])
    assert SCRIPTS[f"mlx_tq.{command}"] == f"mlx_tq.{command}:main"
    refused = cli(command, "--frobnicate")
    assert (refused.code, refused.out) == (2, "")
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/mlx_tq.{command}", "--frobnicate"])
    with pytest.raises(SystemExit) as exit_:
        module.main()
    assert (exit_.value.code, capsys.readouterr().err) == (2, refused.err)
    monkeypatch.setenv("MLX_TQ_KV_SINK", "64")
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/mlx_tq.{command}", *words])
    assert module.main() == cli(command, *words).code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_without_a_home_and_a_missing_temporary_folder_are_one_line(command, cli, monkeypatch):
    words = REQUIRED.get(command, [])
    with monkeypatch.context() as patch:
        patch.delenv("HOME")
        patch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, as for a user that the system does not know
        done = cli(command, *words)
        fault = f"HOME is not set, and user {os.getuid()} has no home folder. Set HOME to a folder."
        assert done == (2, "", f"mlx_tq {command}: {fault}\n")
    if command != "store":
        monkeypatch.setenv("TMPDIR", "/no/such/folder")
        fault = "temporary files cannot be written to /no/such/folder (No such file or directory). "
        remedy = "Set TMPDIR to another folder."
        assert cli(command, *words) == (2, "", f"mlx_tq {command}: {fault}{remedy}\n")


GENERATE = ("mlx_tq.generate", "-p", "Hello", "-m", "2", "--verbose", "F")
# Runs a module as `python -m` does, after changing this process.
CHANGED = """
import os, resource, runpy, signal, sys
change, module, *sys.argv[1:] = sys.argv[1:]
exec(change)
os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))",
            r"the hard limit of open files is 1024, and mlx-lm needs 4096\..*limits\.conf.*--ulimit nofile=4096",
        ),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))", "temporary files cannot be written to .*File too"),
    ],
)
def test_too_few_files_or_too_little_room_are_one_line(change, fault):
    done = run("-c", CHANGED, change, *GENERATE)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"mlx_tq generate: {fault}.*\n", done.stderr)


@pytest.mark.full
def test_a_closed_standard_input_does_no_harm():
    """mlx takes descriptor 0 for none, which a file would get."""
    done = run("-c", CHANGED, "os.close(0)", *GENERATE)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 1


def test_children_have_standard_streams_too():
    child = "import os; [os.fstat(number) for number in range(3)]"
    parent = f"""
import subprocess, sys
from http_limits.process_checks import open_standard_streams
open_standard_streams()
sys.exit(subprocess.run([sys.executable, "-c", {child!r}], check=False).returncode)
"""
    closing = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, parent]
    assert subprocess.run(closing, env=environment(), cwd=ROOT, check=False).returncode == 0


@pytest.mark.full
def test_a_module_does_the_same_as_a_word(cli):
    words = ["-p", "Hello", "-m", "2", "--verbose", "F"]
    done = run("-m", "mlx_tq.generate", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == cli("generate", *words).out != "\n"


def test_version_help_and_unknown_commands(cli):
    for flag in ("--version", "-V"):
        assert cli(flag) == (0, f"{mlx_tq.__version__}\n", "")
    for flag in ("--help", "-h"):
        result = cli(flag)
        assert (result.code, result.err) == (0, "")
        for command, what in COMMANDS.items():
            assert re.search(rf"^  {command} +{re.escape(what)}$", result.out, re.MULTILINE)
    code, out, err = cli()
    assert (code, out, err.splitlines()[0]) == (2, "", "usage: mlx_tq COMMAND [options]")
    listed = ", ".join(COMMANDS)
    for word, hint in (("generte", " Did you mean generate?"), ("frobnicate", "")):
        said = f"mlx_tq: command {word!r} is unknown; valid are {listed}.{hint}\n"
        assert cli(word, "-p", "hi") == (2, "", said)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_version(command):
    done = without_model_code("mlx_tq", command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{mlx_tq.__version__}\n", "")


def test_bad_flag_is_two_lines(cli):
    result = cli("generate", "--kv-memory-limit", "big", "-p", "hi")
    assert (result.code, result.out) == (2, "")
    usage, error = result.err.splitlines()
    assert usage == "usage: mlx_tq.generate [-p PROMPT] [options]"
    assert error.endswith("'big' is not a size; write it like 800MB or 4GB, above zero")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is Linux's")
def test_output_on_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = run("-m", "mlx_tq", "--version", stdout=full)
    assert (done.returncode, done.stderr) == (1, "mlx_tq --version: [Errno 28] No space left on device\n")
    script = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'mlx_tq', '--version'])"
    done = run("-c", script)
    assert (done.returncode, done.stderr) == (0, ""), "no output at all"


def test_too_little_memory_is_one_line(capsys):
    assert run_reporting_errors("generate", lambda: len(bytes(2**62))) == 1
    assert re.fullmatch(r"mlx_tq generate: the machine has too little memory \(.*\).*\n", capsys.readouterr().err)


def test_no_color(monkeypatch, capsys):
    for variable, colored in (("FORCE_COLOR", True), ("NO_COLOR", False)):
        monkeypatch.setenv(variable, "1")
        screen.make_console(stderr=True).print("warning", style="red")
        assert ("\x1b[31m" in capsys.readouterr().err) == colored
