"""What README.md says to type works."""

import re
import shlex
import subprocess
import sys

import pytest

from mlx_tq.cli import COMMANDS
from mlx_tq.generate import build_parser

from .tools import ROOT, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMIT = 300  # seconds


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def sh_lines():
    """Command lines, with continued ones joined, without comment lines and those for a Mac alone."""
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and "# macos" not in line.lower()]


def is_setup(line):
    """Installs something, which a fresh machine does, not a test."""
    return bool(re.match(r"(git clone|cd |\. |(python3? -m )?pip |uv )", line))


def is_served(line):
    """A server, which does not end by itself, or its client: see tests/server/test_readme_lines.py."""
    return line.startswith(("mlx_tq.server", "python examples/openai_client.py"))


COMMAND_LINES = [
    line for line in sh_lines() if not line.startswith("make") and not is_setup(line) and not is_served(line)
]
MAKE_LINES = [line for line in sh_lines() if line.startswith("make")]


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    """A folder with the scripts of the package, for this interpreter and this copy."""
    folder = tmp_path_factory.mktemp("bin")
    calls = {"mlx_tq": "mlx_tq", **{f"mlx_tq.{name}": f"mlx_tq {name}" for name in COMMANDS}}
    for name, module in calls.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        script.chmod(0o755)
    for name in ("python", "python3"):
        (folder / name).symlink_to(sys.executable)
    return folder


def test_readme_shows_commands():
    assert any(line.startswith("mlx_tq.generate") for line in COMMAND_LINES)
    assert {"make demo", "make test"} <= set(MAKE_LINES)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line(scripts, line):
    env = environment()
    done = subprocess.run(
        line,
        shell=True,
        cwd=ROOT,
        env={**env, "PATH": f"{scripts}:{env['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("target", [line.split()[1] for line in MAKE_LINES])
def test_make_target_exists(target):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
    assert target in re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split()


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_our_flags_in_the_readme_exist():
    flags = set(re.findall(r"(?<![\w-])--(?:kv|prompt|model|max|json|verbose)[a-z-]*", README))
    assert flags <= set(build_parser()._option_string_actions)


def test_files_that_the_readme_links_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
