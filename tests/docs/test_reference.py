"""The generated pages of the reference equal their generator."""

import re
import runpy

import pytest

from mlx_tq.generate import build_parser

from .pages import PAGES as ALL_PAGES
from .pages import ROOT, name, text

FOLDER = ROOT / "docs" / "reference"
PAGES = runpy.run_path(str(FOLDER / "generate.py"))["PAGES"]


SLOW = {"architectures.md"}  # of a model of each architecture; tests/test_zoo.py sees files without one


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.full] * (page in SLOW)) for page in PAGES])
def test_a_generated_page_is_current(page):
    text = (FOLDER / page).read_text(encoding="utf-8")
    assert "generated" in text.splitlines()[0]
    assert PAGES[page]() == text, "run: python docs/reference/generate.py"


def test_every_flag_of_generate_is_listed_once():
    """Counted without the generator, which may lose none."""
    text = (FOLDER / "flags.md").read_text(encoding="utf-8")
    titles = ("mlx_tq.generate", "The KV cache", "Rescue")
    parts = [text.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in titles]
    rows = [set(re.findall(r"^\| `(--[\w-]+)", part, re.MULTILINE)) for part in parts]
    flags = {flag for flag in build_parser()._option_string_actions if flag.startswith("--")}
    flags -= {"--help", "--help-kv", "--version"}
    assert set().union(*rows) == flags
    assert sum(map(len, rows)) == len(flags)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_the_bundled_model_has_one_name(page):
    assert not re.findall(r"(?i)\bembedded (?:model|one)\b|\(embedded\b", text(page))
