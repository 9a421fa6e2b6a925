"""The tables of the pages are what the package and the JSON of the measurements say now."""

import json
import re

import pytest

from benchmarks.tables.markdown import EMBEDDED, RESULTS, Table, lines
from benchmarks.tables.pages import PLACE, TABLES, render
from benchmarks.tables.rooms import first_line, rooms

from .pages import PAGES, README, ROOT, name, text

MEASUREMENTS = sorted((ROOT / "docs" / "measurements").glob("*.md"))
NEW = "run: python -m benchmarks.tables"


def places(page):
    return re.findall(r"^<!-- table: (\w+) -->$", text(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_current(page):
    assert render(text(page)) == text(page), NEW
    assert len(places(page)) == len(PLACE.findall(text(page))), "a table without its end"


def test_every_table_is_generated_and_every_result_shown():
    """And a page of the embedded model says first how small that is."""
    assert {table for page in PAGES for table in places(page)} == set(TABLES)
    for page in MEASUREMENTS:
        assert not re.search(r"^\|", PLACE.sub("", text(page)), re.MULTILINE), name(page)
        said_first = text(page).split("<!-- table", 1)[0]
        assert EMBEDDED not in text(page) or "million weights" in said_first, name(page)
    shown = "".join(map(text, MEASUREMENTS))
    assert [path.name for path in RESULTS.glob("*.json") if f"results/{path.name}" not in shown] == []
    with pytest.raises(ValueError, match="do not fit"):
        lines(["one", "two"], [["1"]])


@pytest.mark.parametrize("table", TABLES)
def test_a_table_names_model_machine_and_command(table):
    found = TABLES[table]()
    if isinstance(found, Table):
        assert all((found.model, found.machine, found.command))
        assert (RESULTS / found.source).exists()


def test_what_is_compared_over_a_text_was_read_over_the_same_one():
    """Of the fp16 cache all cells of a text have the same perplexity."""
    for path in RESULTS.glob("*.json"):
        about, whole = json.loads(path.read_text()), {}
        for key, row in about["results"].items() if about.get("command") == "sweep" else ():
            if "delta" in row:
                whole.setdefault(key.partition(" | text ")[2], set()).add(row["ppl"] / (1 + row["delta"] / 100))
        assert all(max(each) < 1.0001 * min(each) for each in whole.values()), path.name


def test_a_number_that_changes_changes_its_table(monkeypatch):
    """Nothing in between remembers a figure."""
    before = str(TABLES["perplexity"]())
    report = json.loads((RESULTS / "quality_perplexity.json").read_text())
    report["results"]["balanced"]["ppl"] += 1
    monkeypatch.setattr("benchmarks.tables.quality.report", lambda _: report)
    after = str(TABLES["perplexity"]())
    changed = [line for line in after.splitlines() if line not in before]
    assert len(changed) == 1
    assert changed[0].startswith("| balanced ")


def test_readme_shows_every_room_with_its_first_line():
    shown = dict(re.findall(r"^  (\w+)/ +(\S.*)$", text(README), re.MULTILINE))
    assert shown == {room.name: first_line(room) for room in rooms()}
    assert all(len(line.split()) > 3 for line in shown.values())
