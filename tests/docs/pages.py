"""The pages of the documentation, and what stands in their blocks."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent.name == "guides"]
# Whose blocks are to be pasted as they are; the others of the reference show calls of a service.
PASTED = [README, *GUIDES]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str  # "sh", "python", "text", or "" for a block that shows something
    code: str


def name(page):
    return str(page.relative_to(ROOT))


def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    return [Block(*groups) for groups in _BLOCK.findall(text(page))]


def without_blocks(page):
    return _BLOCK.sub("", text(page))


def sh_lines(block):
    """Return command lines, with continued ones joined, without comments."""
    lines = [line.strip() for line in block.code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(page):
    return [line for block in blocks(page) if block.language == "sh" for line in sh_lines(block)]


def conversation(page):
    """Return what a user types in the conversation that a page shows, and the lines of the answers."""
    shown = "\n".join(block.code for block in blocks(page) if block.language == "text")
    return re.findall(r"^> (.*)\n(.*)$", shown, re.MULTILINE)


def run(words, folder, stdin=None, **variables):
    """Run a program on this checkout, by default with an input that does not end; return its exit code and output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipes = {"stdin": os.pipe()[0] if stdin is None else stdin, "capture_output": True, "text": True}
    return subprocess.run(words, cwd=folder, env=env, timeout=300, check=False, **pipes)
