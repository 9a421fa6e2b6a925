"""The pages of the documentation, and what stands in their blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent.name == "guides"]
# Whose blocks are to be pasted as they are; the others of the reference show calls of a service.
PASTED = [README, *GUIDES, ROOT / "docs" / "reference" / "python.md"]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code. language: "sh", "python", "text", or "" for a block that shows something."""

    language: str
    code: str


def name(page):
    """A page's path from the root."""
    return str(page.relative_to(ROOT))


def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    return [Block(*found) for found in _BLOCK.findall(text(page))]


def without_blocks(page):
    return _BLOCK.sub("", text(page))


def sh_lines(block):
    """Command lines, with continued ones joined, without comments."""
    lines = [line.strip() for line in block.code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def commands(page):
    """All command lines of a page, in order."""
    return [line for block in blocks(page) if block.language == "sh" for line in sh_lines(block)]


def conversation(page):
    """What a user types in the conversation that a page shows, and the lines of the answers."""
    shown = "\n".join(block.code for block in blocks(page) if block.language == "text")
    return re.findall(r"^> (.*)\n(.*)$", shown, re.MULTILINE)


def anchor(heading):
    """The name by which a heading is linked, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(page):
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)}
