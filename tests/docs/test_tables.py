"""The tables of the pages are what the package and the results say now."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.tables import PLACE, RESULTS, TABLES, lines, render

from .pages import PAGES, ROOT, name, text

HAND_WRITTEN = {"published.md", "formats.md"}  # their tables of words have no other source


def places(page):
    return re.findall(r"^<!-- table: (\w+) -->$", text(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_current(page):
    assert render(text(page)) == text(page), "run: python -m benchmarks.tables"
    assert len(places(page)) == len(PLACE.findall(text(page))), "a table without its end"


def test_every_table_is_generated_and_used():
    assert {table for page in PAGES for table in places(page)} == set(TABLES)
    for page in (ROOT / "docs" / "measurements").glob("*.md"):
        assert page.name in HAND_WRITTEN or not re.search(r"^\|", PLACE.sub("", text(page)), re.MULTILINE), name(page)
    with pytest.raises(ValueError, match="do not fit"):
        lines(["one", "two"], [["1"]])


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"profiles", "formats"}))
def test_a_table_names_model_machine_and_command(table):
    shown = TABLES[table]()
    command, caption = re.match(r"```\n(.+?)\n```\n\n\*(.+?)\*\n", shown, re.DOTALL).groups()
    assert re.search(r"python (-m |benchmarks)|make |mlx_tq", command)
    assert re.match(r"Measured on .+; .+(mlx|cores of).+results/", caption)


def test_what_is_compared_over_a_text_was_measured_over_the_same_one():
    """All records of a text imply one perplexity of the fp16 cache."""
    for path in RESULTS.glob("*.json"):
        about, whole = json.loads(path.read_text()), {}
        for row in about["rows"] if about.get("command") == "sweep" else ():
            if "delta" in row:
                whole.setdefault(row["text"], set()).add(row["ppl"] / (1 + row["delta"] / 100))
        assert all(max(perplexities) < 1.0001 * min(perplexities) for perplexities in whole.values()), path.name


def test_a_number_that_changes_changes_its_table(monkeypatch):
    """Nothing in between remembers a figure."""
    before, source = TABLES["divergence"](), "quality_profiles_smollm2.json"
    changed = json.loads((RESULTS / source).read_text())
    changed["results"]["balanced"]["kld"] += 1
    report = tables.report
    monkeypatch.setattr(tables, "report", lambda file: changed if file == source else report(file))
    differ = [line for line in TABLES["divergence"]().splitlines() if line not in before]
    assert len(differ) == 1
    assert differ[0].startswith("| q8/tq4 ")


def test_results_keep_no_record_of_a_single_question():
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 3e6
    for path in RESULTS.glob("*.json"):
        assert '"answer": "' not in path.read_text("utf-8"), f"{path.name}: see benchmarks/summarize.py"
