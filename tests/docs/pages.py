"""The pages of the documentation, and what stands in their blocks."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent.name == "guides"]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language=None):
    """Return (language, code) of each block, or the code of those in a language: sh, python, text, metal."""
    found = _BLOCK.findall(text(page))
    return found if language is None else [code for word, code in found if word == language]


def without_blocks(page):
    return _BLOCK.sub("", text(page))


def sh_lines(code):
    """Return command lines, with continued ones joined, without comments."""
    lines = [line.strip() for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(page):
    return [line for code in blocks(page, "sh") for line in sh_lines(code)]


def conversation(page):
    """Return what a user types in the conversation that a page shows, and the lines of the answers."""
    return re.findall(r"^> (.*)\n(.*)$", "\n".join(blocks(page, "text")), re.MULTILINE)


def anchors(page):
    """Return the names by which headings are linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def run(words, folder, stdin=None, **variables):
    """Run a program on this checkout, by default with an input that does not end; return its exit code and output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipes = {"stdin": os.pipe()[0] if stdin is None else stdin, "capture_output": True, "text": True}
    return subprocess.run(words, cwd=folder, env=env, timeout=300, check=False, **pipes)
