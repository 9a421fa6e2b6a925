"""`mlx_tq.connect`: settings of coding agents, as text, in their files, and for one run of a client."""

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
import yaml
from http_harness import wait_for
from processes import killed_on_failure, read_until
from server.harness import running

from mlx_tq.clients.coding_clients import CLIENTS
from mlx_tq.clients.config_file import COPY_SUFFIX, settings_text
from mlx_tq.clients.endpoint import Endpoint, find_endpoint
from mlx_tq.errors import MlxTqError

from .tools import EMBEDDED, FLOAT32, ROOT, command, environment, refused

MODEL, CONTEXT = EMBEDDED.name, 4096
FILES = [name for name, client in CLIENTS.items() if client.folder is not None]
PARSERS = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load}
# A client that prints its environment and arguments as JSON, asks the server, and then does what CLIENT_DOES says.
STAND_IN = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
models = json.load(urllib.request.urlopen(url + "/v1/models"))["data"]
print(json.dumps({{"environment": dict(os.environ), "arguments": sys.argv[1:], "models": models}}), flush=True)
exec(os.environ.get("CLIENT_DOES", ""))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(EMBEDDED, tmp_path_factory.mktemp("server") / "log", *FLOAT32, "--prefill-step-size", 512) as shared:
        yield shared


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, and no variable that moves a client's files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "MLX_TQ_API_KEY", *(CLIENTS[client].folder.variable for client in FILES)):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def connect(cli, server):
    """Run `mlx_tq.connect` for the running server."""
    return lambda client, *words: cli("connect", client, "--url", server.url, *words)


def files_of(client):
    return list(CLIENTS[client].folder.paths(os.environ))


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("client", CLIENTS)
def test_settings_name_the_model_and_the_context_of_the_server(connect, server, home, client):
    code, out, err = connect(client)
    assert (code, err, snapshot(home)) == (0, "", {})
    title, *rest = out.splitlines()
    assert title == f"# {CLIENTS[client].title} with {MODEL} ({CONTEXT} tokens) at {server.url}"
    shown = "\n".join(rest)
    assert server.url in shown
    assert re.search(rf"\b{MODEL}\b", shown)
    shown_length = CONTEXT // 4 if client == "claude" else CONTEXT  # of an answer: Claude Code takes no such context
    assert re.search(rf"\b{shown_length}\b", shown)
    if client in FILES:
        assert all(f"# {path}\n" in out for path in files_of(client))


def test_the_variables_of_claude_are_shell(connect, server):
    """ANTHROPIC_API_KEY would win over the token, and models of Anthropic's names would be asked for."""
    script = f"{connect('claude').out}\nenv"
    shell = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": "sk-x"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=shell)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert "ANTHROPIC_API_KEY" not in found
    assert (found["ANTHROPIC_BASE_URL"], found["ANTHROPIC_AUTH_TOKEN"]) == (server.url, "none")
    assert "start the server with --scale-usage 200000." in script
    assert found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(CONTEXT // 4)
    models = {name for name, value in found.items() if value == MODEL}
    kinds = {f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")}
    assert models == {"ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *kinds}


def test_the_name_of_a_model_in_opencode_has_no_slash():
    server = Endpoint("http://127.0.0.1:1", "maker/Model-4B", 8192, None)
    (settings,) = CLIENTS["opencode"].files(server, {}).values()
    assert settings["model"] == "mlx_tq/maker-Model-4B"
    assert settings["provider"]["mlx_tq"]["models"]["maker-Model-4B"]["id"] == "maker/Model-4B"


@pytest.mark.parametrize(
    ("context", "scales", "window"),
    [(99_999, False, "200000"), (100_000, False, "100000"), (100_000, True, "200000"), (200_001, True, "200001")],
)
def test_claude_gets_a_window_that_it_takes(context, scales, window):
    variables = CLIENTS["claude"].environment(Endpoint("http://127.0.0.1:1", "m", context, None, scales))
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == window


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_is_shown_or_named_by_its_variable(client):
    server = Endpoint("http://127.0.0.1:1", "m", 8192, "key-of-the-server")
    settings = CLIENTS[client]
    text = json.dumps([settings.environment(server), *settings.files(server, {}).values()])
    assert "key-of-the-server" in text or "MLX_TQ_API_KEY" in text
    assert '"none"' not in text


@pytest.mark.parametrize("client", FILES)
def test_written_settings_join_those_that_are_there(connect, client):
    """The file stays as it was in a copy, and writing twice is the same as once."""
    before = {"theirs": {"a": [1, "two"]}, "providers": {"other": {"b": True}}}
    for path in files_of(client):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(settings_text(path.suffix, before))
        path.chmod(0o664)
    originals = {path: path.read_text() for path in files_of(client)}
    shown = connect(client).out
    for times in range(2):
        code, out, err = connect(client, "--write")
        assert (code, err) == (0, "")
        for path, text in originals.items():
            assert f"{path} {'has the settings already' if times else 'written'}\n" in out
            merged = PARSERS[path.suffix](path.read_text())
            section = shown.partition(f"# {path}\n")[2]
            commented = [line.removeprefix("# ") for line in section.splitlines()]
            ours = PARSERS[path.suffix]("\n".join(commented) if section[0] == "#" else section.partition("\n# ")[0])
            assert merged["theirs"] == before["theirs"]
            assert merged["providers"]["other"] == before["providers"]["other"]
            assert {name: merged[name] for name in ours if name != "providers"} == {
                name: value for name, value in ours.items() if name != "providers"
            }
            assert merged["providers"].items() >= ours.get("providers", {}).items()
            assert path.with_name(path.name + COPY_SUFFIX).read_text() == text
            assert stat.S_IMODE(path.stat().st_mode) == 0o660, "it may have the key, which is not for all"


@pytest.mark.parametrize("client", ["claude", "aider"])
def test_a_shell_can_read_what_has_variables(connect, client, monkeypatch):
    monkeypatch.delenv("MLX_TQ_API_KEY", raising=False)
    lines = [line for line in connect(client).out.splitlines() if line]
    assert all(line.startswith(("#", "export ", "unset ")) for line in lines)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        *(
            ({"id": name, "max_model_len": 8192}, "in a way that no client takes")
            for name in ("x\nrm -rf ~", "$(touch x)", "", "a" * 300)
        ),
        ({"id": "of another server"}, "names no model with its context length, as mlx_tq.server does"),
    ],
)
def test_an_answer_that_no_client_could_use_is_refused(model, says):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"data": [model]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(MlxTqError, match=says):
            find_endpoint(f"http://127.0.0.1:{server.server_port}", None, None)


def test_the_copy_is_of_the_first_file(connect):
    """A second server's settings must not replace what the user had before the first."""
    (path,) = files_of("opencode")
    path.parent.mkdir(parents=True)
    path.write_text('{"model": "mine"}')
    connect("opencode", "--write")
    path.write_text('{"model": "changed"}')
    connect("opencode", "--write")
    assert json.loads(path.with_name(path.name + COPY_SUFFIX).read_text()) == {"model": "mine"}


def test_comments_of_toml_and_other_models_of_a_list_stay(connect):
    (codex,), (qwen,) = files_of("codex"), files_of("qwen")
    for path in (codex, qwen):
        path.parent.mkdir(parents=True)
    codex.write_text('# mine\nmodel = "gpt-5" # the old one\n\n[tui]\ntheme = "dark" # at night\n')
    other = {"id": "other", "baseUrl": "http://x/v1"}
    qwen.write_text(json.dumps({"modelProviders": {"openai": [{"id": MODEL, "baseUrl": "http://old/v1"}, other]}}))
    assert connect("codex", "--write").code == connect("qwen", "--write").code == 0
    text = codex.read_text()
    assert text.startswith("# mine\n")
    assert "# at night" in text
    assert (tomllib.loads(text)["model"], tomllib.loads(text)["tui"]) == (MODEL, {"theme": "dark"})
    models = json.loads(qwen.read_text())["modelProviders"]["openai"]
    assert [model["id"] for model in models] == [MODEL, "other"]
    assert models[0]["baseUrl"] != "http://old/v1"
    assert models[1] == other


def test_new_files_are_the_owners_alone_and_need_no_copy(connect, home):
    assert connect("cline", "--write").code == 0
    (path,) = snapshot(home)
    assert path == home / ".cline/data/settings/providers.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("client", "broken"),
    [("codex", "model = = 1"), ("opencode", '{"a": 1} // mine'), ("pi", "[1]"), ("continue", "a: [")],
)
def test_a_file_that_does_not_parse_is_left_as_it_is(connect, home, client, broken):
    path = files_of(client)[-1]
    path.parent.mkdir(parents=True)
    path.write_text(broken)
    before = snapshot(home)
    refused(connect(client, "--write"), f"{path} cannot be read as", "is left as it is")
    assert snapshot(home) == before


@pytest.mark.parametrize("client", FILES)
def test_a_dry_run_of_writing_shows_what_is_added_or_changed_and_changes_nothing(connect, client):
    """A secret of the user's is not shown, nor what the file has already."""
    others = {
        "theirs": {"key": "secret"},
        "model_providers": {"other": {"key": "secret"}},
        "models": [{"id": "secret"}],
    }
    for path in files_of(client):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(settings_text(path.suffix, others))
    before = {path: path.read_bytes() for path in files_of(client)}
    code, out, _ = connect(client, "--write", "--dry-run")
    assert (code, {path: path.read_bytes() for path in files_of(client)}) == (0, before)
    assert all(f"# would add or change in {path}\n" in out for path in before)
    assert MODEL in out
    assert "secret" not in out
    connect(client, "--write")
    out = connect(client, "--write", "--dry-run").out
    assert all(f"{path} has the settings already\n" in out for path in before)
    assert "would" not in out


def test_a_client_without_a_file_says_so(connect, home):
    code, out, _ = connect("claude", "--write")
    assert (code, snapshot(home)) == (0, {})
    assert "Claude Code is configured by environment variables; nothing is written" in out
    assert "export ANTHROPIC_BASE_URL=" in out


def test_without_a_server_the_line_says_how_to_start_one(cli):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refused(cli("connect", "codex", "--url", f"http://127.0.0.1:{port}"), "Start one with mlx_tq.server")


def test_an_unknown_model_names_those_of_the_server(connect):
    refused(connect("codex", "--model", "other"), f"--model 'other' is unknown; valid are {MODEL}.")


def test_the_list_has_a_line_for_each_client(cli):
    code, out, _ = cli("connect", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(CLIENTS)


# One run of a client.


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH with a stand-in for claude."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "claude").write_text(STAND_IN)
    (folder / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def start_run(*words, does="", **variables):
    """Start `mlx_tq.connect claude --run` in a process group of its own, as a terminal has."""
    line = command("connect", "claude", "--run", *words, "--server-args", shlex.join(FLOAT32))
    return subprocess.Popen(
        [*line, "--", "--print", "a b"],
        env=environment(CLIENT_DOES=does, ANTHROPIC_API_KEY="sk-x", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def servers_of(process):
    """Return the servers that a run has started: one, or none yet."""
    return [child for child in psutil.Process(process.pid).children() if "mlx_tq.server" in child.cmdline()]


def test_a_client_that_is_not_installed_is_one_line(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(cli("connect", "qwen", "--run"), "Qwen Code is not installed", "npm install -g @qwen-code/qwen-code")


@pytest.mark.usefixtures("programs")
def test_a_dry_run_shows_both_commands_and_starts_neither(cli, home):
    before = snapshot(home)
    flags = ("--model", MODEL, "--server-args", "--kv-profile small")
    code, out, _ = cli("connect", "claude", "--run", "--dry-run", *flags, "--", "-p", "a b")
    assert (code, snapshot(home)) == (0, before)
    first, *_, last = out.splitlines()
    assert first.endswith(f"-m mlx_tq.server --model {MODEL} --scale-usage 200000 --kv-profile small --port PORT")
    assert "start the server with" not in out
    assert last == f"{home}/bin/claude -p 'a b'"
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:PORT\n" in out


@pytest.mark.usefixtures("programs")
def test_a_run_with_a_url_uses_that_server_and_a_temporary_folder(server, programs, home):
    (programs / "codex").write_text('#!/bin/sh\nset -e\ncat "$CODEX_HOME/config.toml"\necho "$CODEX_HOME"\nexit 5\n')
    (programs / "codex").chmod(0o755)
    line = command("connect", "codex", "--run", "--url", server.url)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    *config, folder = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (5, "")
    assert tomllib.loads("\n".join(config))["model_context_window"] == CONTEXT
    assert not Path(folder).exists()
    assert not (home / ".codex").exists()


def test_a_run_of_cline_starts_no_daemon_that_would_keep_its_settings(cli):
    out = cli("connect", "cline", "--run", "--dry-run").out
    assert "export CLINE_PROVIDER_SETTINGS_PATH=TEMPORARY_FOLDER/providers.json\n" in out
    assert "export CLINE_SESSION_BACKEND_MODE=local\n" in out


@pytest.mark.full
@pytest.mark.usefixtures("programs")
def test_a_run_has_its_server_settings_and_exit_code(home):
    process = start_run(does="sys.exit(7)")
    with killed_on_failure(process):
        out, _ = process.communicate(timeout=100)
    shown = json.loads(out)
    assert process.returncode == 7
    assert shown["arguments"] == ["--print", "a b"]
    assert shown["models"][0]["id"] == shown["environment"]["ANTHROPIC_MODEL"] == MODEL
    assert "ANTHROPIC_API_KEY" not in shown["environment"]
    port = int(shown["environment"]["ANTHROPIC_BASE_URL"].rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not (home / ".claude").exists()


@pytest.mark.full
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("does", "code", "survives"),
    [("time.sleep(100)", 130, False), ("try:\n time.sleep(100)\nexcept BaseException:\n sys.exit(9)", 9, True)],
    ids=["client ends by it", "client handles it"],
)
def test_interrupt_is_the_clients_and_ends_the_server_with_it(does, code, survives):
    """The signal of Ctrl-C goes to the whole group of a terminal, which the server is not in."""
    default = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    process = start_run(does=does if survives else default + does)
    with killed_on_failure(process):
        read_until(process.stdout.fileno(), "\n")
        (started,) = servers_of(process)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert not started.is_running()


@pytest.mark.full
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_server_starts_ends_it(number):
    process = start_run()
    with killed_on_failure(process):
        read_until(process.stderr.fileno(), "\n")
        wait_for(lambda: servers_of(process))
        (started,) = servers_of(process)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not started.is_running()


@pytest.mark.full
@pytest.mark.usefixtures("programs")
def test_a_server_that_does_not_start_says_why(cli):
    said = cli("connect", "claude", "--run", "--model", "/nope/model")
    assert said.code == 1
    assert "the server ended with exit code 2: mlx_tq server: " in said.err
    assert "/nope/model" in said.err


def test_the_guide_has_the_versions_that_make_test_agents_runs():
    versions = tomllib.loads((ROOT / "tests/agents/versions.toml").read_text())
    versions = {**versions["npm"], **versions["pip"]["aider"]}
    guide = (ROOT / "docs/guides/coding_agents.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d[\d.]+) \|", guide, re.MULTILINE))
    assert rows == {client.title: versions[client.install.split()[-1]] for client in CLIENTS.values()}
