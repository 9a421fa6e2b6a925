"""What README.md, the guides and the Python page say to type works as it is, in the order in which it stands there."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from server.harness import running
from smollm2 import PATH

from mlx_tq.__main__ import COMMANDS, main
from mlx_tq.models import embedded_path
from mlx_tq.models.load import SMOLLM2_REQUIREMENT

from .pages import GUIDES, README, ROOT, blocks, commands, conversation, name, run, sh_lines

SERVER = "http://127.0.0.1:8080"  # where the pages say that the server is
FACT = "417295"
# In `make test` commands read a third of a text, and in float32, which takes a CPU a third as long as bfloat16; these
# read less. `make test-full` runs all as they stand there.
SHORTER = {
    "mlx_tq.generate": "--dtype float32",
    "mlx_tq.cache_prompt": "--dtype float32",
    "mlx_tq.calibrate": "--tokens 512 --dtype float32",
    "mlx_tq.evaluate": "--length 320 --step 64 --kv-sinks 32 --kv-window 64",
    "mlx_tq.server": "--dtype float32",
}
LOAD, QUICK_LOAD = "mlx_tq.load()", 'mlx_tq.load(dtype="float32")'  # likewise, in Python
TEXT = "LICENSE"
LAUNCH = "mlx.launch"  # two processes: in `make test-full` alone
CHAT = "mlx_tq.chat --model smollm2"
SLOW = ("evict_by_head.md", "save_memory.md", "long_chats.md", "prefix_cache.md", "coding_agents.md", "serve.md")
PAGES = [
    *[
        pytest.param(page, False, id=name(page), marks=[pytest.mark.full] if page.name in SLOW else [])
        for page in (README, *GUIDES)
    ],
    *[
        pytest.param(page, True, id=f"{name(page)} in full", marks=pytest.mark.full)
        for page in (README, *GUIDES)
        if any({*SHORTER, LAUNCH, TEXT} & set(line.split()) or line.startswith(CHAT) for line in commands(page))
    ],
]


def is_setup(line):
    """Return whether the owner of a machine does this once."""
    return bool(re.match(r"(\. |(python3? -m )?pip )", line))


class Reader:
    """Somebody who types a page from its top to its end; if `full`, every command as it is, however long it takes."""

    def __init__(self, page, folder, full, capsys, monkeypatch):
        self.page, self.folder, self.full = page, folder, full
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.names = {"__name__": "__main__"}
        self.server = None
        self.stack = ExitStack()

    def type(self, line):
        words = [re.sub(r"\$\(cat (\w+)\)", lambda file: Path(file[1]).read_text(), word) for word in shlex.split(line)]
        if words[0] == "make":
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE), line
        elif words[0] == "mlx_tq.server":
            self.stack.close()
            added = [] if self.full else SHORTER[words[0]].split()
            same = [] if self.server is None else ["--port", self.server.url.rpartition(":")[2]]
            self.server = self.stack.enter_context(
                running(embedded_path(), self.folder / "log", *words[1:], *same, *added)
            )
        elif words[0] == "rm":
            for file in words[1:]:
                Path(file).unlink()
        elif words[0] == "python":
            self.program(words[1:])
        elif words[0] == "mlx-tq-rescue":  # one that ends with its standard input
            added = ["--port", "0", "--ephemeral", "true"] if words[1] == "serve" else []
            program = [sys.executable, "-m", "rescue_svc", *words[1:], *added]
            done = run(program, self.folder, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
        elif words[0] == LAUNCH:
            if self.full:
                self.launch(words[1:])
        elif line.startswith(CHAT):
            unasked = [] if self.full else ["--kv-evict", "recency"]  # needs no statistics of questions
            self.command([*words, *unasked])
        elif not is_setup(line):
            self.command(words)

    def command(self, words):
        package, _, command = words[0].partition(".")
        assert package == "mlx_tq", words
        assert command in COMMANDS, words
        known = self.full or "--kv-mean-bits" in words  # by what is shipped for the model's own type
        added = [] if known or "--memory" in words else SHORTER.get(words[0], "").split()
        added += ["--url", self.server.url] if command == "connect" else []
        talk = conversation(self.page) if command == "chat" else []
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{said}\n" for said, _ in talk)))
        code = main([command, *words[1:], *added])
        shown = self.capsys.readouterr()
        if "smollm2" in words and PATH is None:
            assert (code, SMOLLM2_REQUIREMENT in shown.err) == (2, True)
            return
        assert code == 0, f"{words}\n{shown.out}\n{shown.err}"
        if "What is the capital of France?" in words:
            assert "The capital of France is Paris." in shown.out
        if "--capacity" in words:  # the example shows what the profiles change
            longest = re.findall(r"^\w+ +([\d,]+ +[\d,]+ .+)$", shown.out, re.MULTILINE)
            assert len(set(longest)) > 1, shown.out
        if "What is the access code?" in " ".join(words):
            assert FACT in shown.out, f"{words}\n{shown.out}\n{shown.err}"
        if talk:
            assert [line for line in shown.out.splitlines() if line] == [answer for _, answer in talk]

    def program(self, words):
        done = run([sys.executable, *words], self.folder, OPENAI_BASE_URL=f"{self.server.url}/v1")
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        assert FACT in done.stdout, done.stdout

    def launch(self, words):
        """Start several processes on this machine."""
        program = Path(sys.executable).with_name("mlx.launch")
        done = run([program, *(sys.executable if word == "python" else word for word in words)], self.folder)
        rows = [
            line
            for code in blocks(self.page, "text")
            for line in code.splitlines()
            if re.match(r"\d +[\d.]+ .B ", line)
        ]
        assert len(rows) == 2
        assert [row for row in rows if row not in done.stderr] == [], f"{words}\n{done.stdout}\n{done.stderr}"

    def paste(self, code):
        if not self.full:
            code = code.replace(LOAD, QUICK_LOAD)
        if self.server is not None:
            code = code.replace(SERVER, self.server.url)
        exec(compile(code, name(self.page), "exec"), self.names)
        shown = self.capsys.readouterr().out
        assert FACT in shown or FACT not in code, f"{code}\n{shown}"
        assert not re.search(r"\b0 evicted", shown), f"{code}\n{shown}"


@pytest.mark.parametrize(("page", "full"), PAGES)
def test_a_page_typed_from_top_to_end(page, full, tmp_path, capsys, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = (ROOT / TEXT).read_text()
    (tmp_path / TEXT).write_text(text if full else text[: len(text) // 3])
    monkeypatch.chdir(tmp_path)
    reader = Reader(page, tmp_path, full, capsys, monkeypatch)
    with reader.stack:
        for language, code in blocks(page):
            if language == "sh":
                for line in sh_lines(code):
                    reader.type(line)
            elif language == "python":
                reader.paste(code)
    assert {path.name for path in tmp_path.iterdir()} <= {"examples", TEXT, "log"}


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_begins_with_a_sentence_and_a_command(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[2].endswith(":")
    assert lines[4] == "```sh"
    assert len(lines) <= 90


def test_readme_installs_and_then_shows_python():
    assert commands(README)[0] == "pip install mlx-tq"
    assert "with mlx_tq.compressed(" in blocks(README, "python")[0]
