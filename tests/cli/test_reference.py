"""docs/reference/flags.md says what the parsers say."""

import re
import runpy

from mlx_tq.generate import build_parser

from .tools import ROOT

FOLDER = ROOT / "docs" / "reference"
PAGE = (FOLDER / "flags.md").read_text(encoding="utf-8")


def test_the_page_of_flags_is_current():
    written = runpy.run_path(str(FOLDER / "flags.py"))["reference"]()
    assert written == PAGE, "run `python docs/reference/flags.py`"


def test_every_flag_of_generate_is_on_it():
    """Counted without the script: it may lose none."""
    parts = (
        PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in ("mlx_tq.generate", "The KV cache", "Rescue")
    )
    rows = [set(re.findall(r"^\| `(--[\w-]+)", part, re.MULTILINE)) for part in parts]
    flags = {flag for flag in build_parser()._option_string_actions if flag.startswith("--")} - {"--help"}
    assert set().union(*rows) == flags
    assert sum(map(len, rows)) == len(flags)
