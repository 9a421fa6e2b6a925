"""Invalid requests: exit code 2, and one line that says what, which value, and what to do."""

import io
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from .tools import EMBEDDED, PACKED, environment, facts, refused

WORDS = {"{model}": str(EMBEDDED), "{5000-words}": "one two " * 2500, "{18000-words}": "one two " * 9000}
LINES = Path(__file__).with_name("refused.txt").read_text().splitlines()
EARLY, LATE = "  =>  ", "  =model=>  "
REFUSED = [line for line in LINES if line and line[0] != "#"]
# Runs commands, one a line of standard input, where importing a slow package is an error; writes what each says.
WITHOUT_MLX_LM = """
import contextlib, io, json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"mlx_lm", "transformers", "torch", "uvicorn", "faiss"}:
            raise ImportError(name + " was loaded")
sys.meta_path.insert(0, Blocker())
from mlx_tq.__main__ import main
commands, sys.stdin = sys.stdin.readlines(), io.StringIO()
for words in map(json.loads, commands):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(words)
        except (Exception, SystemExit) as error:
            err.write(repr(error))
    print(json.dumps(err.getvalue()))
"""


def words_of(typed):
    words = shlex.split(typed)
    for name, meant in WORDS.items():
        words = [word.replace(name, meant) for word in words]
    return words


@pytest.mark.parametrize("line", REFUSED)
def test_refused(cli, tmp_path, monkeypatch, line):
    """Nothing but the reason: no plan, no progress, no traceback, no file half written."""
    monkeypatch.chdir(tmp_path)
    typed, says = line.split(EARLY if EARLY in line else LATE)
    words = words_of(typed)
    said = refused(cli(*words), says)
    assert said.startswith(f"mlx_tq {words[0]}: ")
    assert len(said) < 500
    assert not list(tmp_path.iterdir())


def test_refused_before_anything_slow_is_imported(tmp_path):
    """mlx-lm and transformers take seconds, and so does the server's framework."""
    lines = [line.split(EARLY) for line in REFUSED if EARLY in line]
    assert len(lines) > len(REFUSED) / 2
    commands = "\n".join(json.dumps(words_of(typed)) for typed, _ in lines)
    words = [sys.executable, "-c", WITHOUT_MLX_LM]
    done = subprocess.run(
        words, input=commands, capture_output=True, text=True, check=True, env=environment(), cwd=tmp_path
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line, err) for line, err in zip(lines, said, strict=True) if line[1] not in err] == []


@pytest.mark.parametrize("size", ["4", "GB", "-1GB", "0GB", "4XB", "", "nanGB", "infGB"])
def test_sizes(cli, size):
    result = cli("generate", "-p", "hi", f"--kv-memory-limit={size}")
    assert (result.code, result.out) == (2, "")
    assert f"'{size}' is not a size" in result.err


@pytest.mark.full
def test_a_server_whose_memory_limit_holds_no_prompt_does_not_start(cli):
    result = cli("server", "--port", 0, "--kv-memory-limit", "1KB")
    assert (result.code, result.out) == (2, "")
    assert "a context of 16 tokens needs" in result.err.splitlines()[-1]


TEMPLATE_OPTIONS = [
    ("generate", "-p", "hi", "--chat-template-config"),
    ("chat", "--chat-template-config"),
    ("server", "--chat-template-args"),
    ("evaluate", "lm-eval", "--tasks", "x", "--chat-template-args"),
]


@pytest.mark.parametrize("words", TEMPLATE_OPTIONS, ids=" ".join)
@pytest.mark.parametrize("options", ["{", "[1]"])
def test_template_options_are_an_object(cli, words, options):
    result = cli(*words, options)
    assert (result.code, result.out) == (2, "")
    assert f"'{options}' is not a JSON object" in result.err


def test_forecast_comes_before_prefill(cli, embedded):
    said = "".join(facts(60))
    prompt = len(embedded[1].apply_chat_template([{"role": "user", "content": said}], add_generation_prompt=True))
    result = cli("generate", "-p", said, "-m", 2000, *PACKED, "--kv-memory-limit", "3MB", "--json")
    line = refused(
        result, f"a context of {prompt + 2000:,} tokens needs ", "3.0 MB are available. About", "--max-tokens"
    )
    assert 500 < int(line.split("About ")[1].split(" tokens")[0].replace(",", "")) < prompt + 2000


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_binary_on_standard_input(monkeypatch, cli, errors):
    """With either way in which Python sets standard input up, which depends on the locale."""
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8", errors=errors)
    refused(cli("generate", stdin=stream), "the prompt is not UTF-8 text")


@pytest.mark.parametrize("command", ["cache_prompt -p hi --prompt-cache-file", "calibrate -o"])
def test_a_file_of_another_kind_is_not_replaced(cli, tmp_path, command):
    """Said before a model is looked for."""
    file = tmp_path / "thesis.txt"
    file.write_text("thesis")
    name, *words = command.split()
    result = cli(name, "--model", "nobody/nothing", *words, file)
    assert (result.code, result.out) == (1, "")
    assert "and is not replaced. Name another file, or remove it first" in result.err
    assert file.read_text() == "thesis"


def test_no_prompt_at_a_terminal(cli):
    terminal = io.StringIO("never read")
    terminal.isatty = lambda: True
    refused(cli("generate", stdin=terminal), "there is no prompt; give one with -p TEXT, --prompt-file FILE or on")


@pytest.mark.parametrize("offline", [False, True])
def test_hub_without_network(cli, monkeypatch, offline):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else gets the port
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        result = cli("generate", "-p", "hi", "--model", "mlx-tq/no-such-model")
    line = result.err.splitlines()[-1]
    assert (result.code, result.out, "Traceback" in result.err) == (2, "", False)
    assert "the model 'mlx-tq/no-such-model' cannot be loaded: there is no such folder, and it could not" in line
    assert "Give a folder with config.json and safetensors, a .gguf file, a hub name" in line
