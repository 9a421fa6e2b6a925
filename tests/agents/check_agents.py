"""Real clients against a real server: a first turn, a tool loop, a resume after a restart, a prompt that is too long.

`make test-agents` installs the clients and runs this file, which has no test's name: no other target runs it.
"""

import json
import os
import pty
import re
import select
import shlex
import socket
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cli.tools import ROOT, environment
from http_harness import ServerProcess

from benchmarks.agents.replay import TEMPLATE
from benchmarks.models import random_long

from .agents import AGENTS, DONE

INSTALLED = Path(os.environ.get("AGENTS_FOLDER", ROOT / ".venv" / "agents")).resolve()
SERVER = Path(__file__).with_name("scripted_server.py")
NEXT = "417296"
LIMIT_S = 240  # for a run of a client
LONG = 131_072  # tokens
NO_NETWORK = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")


class Server(ServerProcess):
    """A server whose model answers as `script.json` in `folder` says."""

    listening = re.compile(r"listening on (\S+)")

    def __init__(self, folder, model, port):
        flags = ["--model", model, "--chat-template", TEMPLATE, "--prefix-cache", folder / "store", "--port", port]
        words = [sys.executable, SERVER, folder, *flags, "--prefill-step-size", 2048]
        super().__init__([str(word) for word in words], environment(), folder / "log")


class Servers:
    """One server at a time, always on one port and with one prefix cache."""

    def __init__(self, folder):
        self.folder, self.current, self._context = folder, None, None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, context=LONG):
        """Start a server of this context length unless one runs."""
        if self.current is None or context != self._context:
            self.stop()
            self.current, self._context = Server(self.folder, self._model(context), self._port), context
        return self.current

    def stop(self):
        if self.current is not None:
            assert self.current.stop() == 0
            self.current = None

    def _model(self, context):
        """Make a model of a context length."""
        path = self.folder / str(context) / "random_long"
        if not path.exists():
            path.mkdir(parents=True)
            random_long.make(path)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        return path

    def script(self, text, answers, *, need_tools):
        """Set the next answers; `text` is for requests outside of the conversation."""
        script = {"answers": answers, "text": text, "need_tools": need_tools}
        (self.folder / "script.json").write_text(json.dumps(script))
        (self.folder / "requests.jsonl").write_text("")

    def requests(self):
        """Return the requests since the script was set."""
        return [json.loads(line) for line in (self.folder / "requests.jsonl").read_text().splitlines()]


@dataclass
class Run:
    """What a client printed, and what the server logged meanwhile."""

    code: int
    output: str
    log: str
    requests: list

    def check(self):
        """Check that the server understood all requests."""
        assert not re.search(r" POST \S+ [45]\d\d ", self.log), self.log
        assert "not constrained" not in self.log, self.log


class Site:
    """A client with a home and a project of its own."""

    def __init__(self, agent, folder, servers):
        self.agent, self.servers, self.talked_to = agent, servers, None
        self.home, self.project, self._output = folder / "home", folder / "project", folder / "output"
        for path in (self.home, self.project):
            path.mkdir()
        for name, text in agent.settings.items():
            path = self.home / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
        servers.start()
        self._environment = {**self._base_environment(), **self._connect(), **agent.variables(servers.url)}

    def _base_environment(self):
        paths = [INSTALLED / "node_modules" / ".bin", "/usr/local/bin", "/usr/bin", "/bin"]
        path = os.pathsep.join(map(str, paths))
        home = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**home, **NO_NETWORK, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def _connect(self):
        """Write the client's settings; return the variables that the command prints."""
        if not self.agent.connect:
            return {}
        words = [sys.executable, "-m", "mlx_tq.connect", self.agent.connect, "--url", self.servers.url, "--write"]
        env = environment(HOME=str(self.home))
        printed = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        exports = [shlex.split(line)[1] for line in printed.splitlines() if line.startswith("export ")]
        return dict(export.split("=", 1) for export in exports)

    @property
    def notes(self):
        return self.project / "notes.txt"

    def begin(self, prompt, *answers, text=DONE):
        """Begin a conversation in which the model gives these answers, then the text."""
        return self._run(self._run_to_end, self.agent.first, prompt, *answers, text=text)

    def resume(self, prompt, text):
        """Continue the last conversation."""
        words = self.agent.resume
        if self.agent.sessions:
            newest = max(self.home.glob(self.agent.sessions), key=lambda path: path.stat().st_mtime)
            words = [word.replace("{session}", newest.name) for word in words]
        run = self._run_in_terminal if self.agent.resumes_in_terminal else self._run_to_end
        return self._run(run, words, prompt, text=text)

    def _run(self, run, words, prompt, *answers, text):
        server = self.talked_to = self.servers.current
        self.servers.script(text, [*answers, self.agent.end(text)], need_tools=self.agent.has_tools)
        logged = len(server.log())
        code, output = run([find_program(words[0]), *words[1:], prompt])
        return Run(code, output, server.log()[logged:], self.servers.requests())

    def _run_to_end(self, words):
        """Run a program to its end; return its exit code and what it prints."""
        with self._output.open("w") as output, self._started(words, subprocess.DEVNULL, output) as process:
            code = process.wait(LIMIT_S)
        return code, self._output.read_text(errors="replace")

    def _run_in_terminal(self, words):
        """Type the last word into a program, and end it when it shows the number of the answer."""
        *words, prompt = words
        terminal, program_side = pty.openpty()
        termios.tcsetwinsize(terminal, (40, 120))
        with os.fdopen(terminal, "wb", buffering=0) as keys, self._started(words, program_side, program_side):
            os.close(program_side)
            read_screen(terminal, self.agent.resumes_in_terminal)
            for text in (prompt, "\r"):  # one that comes at once is a line of a text
                keys.write(text.encode())
                time.sleep(1)
            return 0, read_screen(terminal, NEXT)

    @contextmanager
    def _started(self, words, stdin, output):
        """Run a program during the block, and end all that it started: some leave daemons behind."""
        options = {"stdin": stdin, "stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(words, env=self._environment, cwd=self.project, **options)
        try:
            yield process
        finally:
            for running in psutil.process_iter(["environ"]):
                if (running.info["environ"] or {}).get("HOME") == str(self.home):
                    with suppress(psutil.NoSuchProcess):
                        running.kill()
            process.wait()


def read_screen(terminal, word):
    """Return the letters and digits that a terminal shows when they include a word; spinners come between them."""
    shown, deadline = "", time.monotonic() + LIMIT_S
    while word not in (text := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[^a-zA-Z0-9]", "", shown)):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 2**16).decode(errors="replace")
    return text


def find_program(name):
    """Return the path of a program: of an environment in the folder, or of a package of npm."""
    return INSTALLED / (name if "/" in name else f"node_modules/.bin/{name}")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def sites():
    return {}


@pytest.fixture(params=AGENTS)
def site(request, sites, servers, tmp_path_factory):
    name = request.param
    if not (program := find_program(AGENTS[name].first[0])).exists():
        pytest.skip(f"{program} is missing: tests/agents/install.py says why")
    if name not in sites:
        sites[name] = Site(AGENTS[name], tmp_path_factory.mktemp(name), servers)
    return sites[name]


def test_first_turn(site):
    site.servers.start()
    run = site.begin("What is the number?")
    assert run.code == 0, run
    assert DONE in run.output
    run.check()


def test_tool_loop(site):
    """The client's own tools do what the model calls for, and the model sees their results."""
    site.servers.start()
    site.notes.write_text("alpha\n")
    run = site.begin("Replace alpha by beta.", *site.agent.steps(str(site.notes)))
    assert run.code == 0, run
    assert DONE in run.output
    assert site.notes.read_text().strip() == "beta", run
    assert (site.project / "copy.txt").read_text().strip() == "beta", run
    asked = [request for request in run.requests if bool(request["tools"]) == site.agent.has_tools]
    assert len(asked) >= 3
    assert "alpha" in json.dumps(asked[1]["messages"][len(asked[0]["messages"]) :])
    run.check()


def test_resume_after_a_restart(site):
    """The new server finds the conversation so far on disk."""
    if site.talked_to is None:
        test_first_turn(site)
    if site.talked_to is site.servers.current:
        site.servers.stop()
    site.servers.start()
    run = site.resume("And the next number?", f"The next is {NEXT}.")
    assert run.code == 0, run
    assert NEXT in run.output
    assert DONE in json.dumps(run.requests[0]["messages"])
    prompt, cached = map(int, re.search(r"(\d+) prompt tokens \((\d+) cached\)", run.log).groups())
    assert cached > site.agent.cached_share * prompt
    run.check()


def test_a_prompt_that_is_too_long(site):
    """The client reports the server's error, or compacts the conversation and goes on."""
    site.servers.start(site.agent.context)
    lines = [f"Item {n} weighs {n * 37 % 91} grams and costs {n * 13 % 29} coins." for n in range(800)]
    site.notes.write_text("\n".join(lines))
    run = site.begin("Summarize notes.txt.", *site.agent.reads * [site.agent.steps(str(site.notes))[0]])
    refusals = re.findall(r" POST \S+ [45]\d\d .*", run.log)
    assert refusals
    assert all(" 400 " in line and "context_length_exceeded" in line for line in refusals)
    assert re.search(site.agent.too_long, run.output) or DONE in run.output
    assert site.servers.current.http.get("/health").is_success
