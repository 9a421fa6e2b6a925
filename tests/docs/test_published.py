"""Published reports: every row has a verdict that the page explains and, where that rests on a figure, its source."""

import copy

import pytest

from benchmarks.published import rows as looked_up
from benchmarks.published.rows import MEASURED, VERDICTS
from benchmarks.tables.markdown import report
from benchmarks.tables.published import REPORTS, table

from .pages import ROOT, text

PAGE = ROOT / "docs" / "measurements" / "published.md"


@pytest.mark.parametrize("name", REPORTS)
def test_a_verdict_that_rests_on_a_figure_says_where_it_is(name):
    """In a section of the measurements, or in the bytes of formats."""
    rows = REPORTS[name]()
    assert {row.verdict for row in rows} <= set(VERDICTS)
    assert len({row.what for row in rows}) == len(rows)
    measured = [row for row in rows if row.verdict in MEASURED]
    assert [row for row in measured if not ("(../reference/formats.md)" in row.where or ".md#" in row.where)] == []
    assert [row for row in measured if not any(map(str.isdigit, row.ours))] == []


def test_the_page_explains_every_verdict():
    explained = text(PAGE).split("<!-- table", 1)[0].lower()
    assert [verdict for verdict in VERDICTS if f"**{verdict}**" not in explained] == []


def test_a_figure_that_changes_changes_the_rows_that_show_it(monkeypatch):
    before = table(REPORTS["published_tbq4_0"]).splitlines()
    changed = copy.deepcopy(report("quality_all_formats.json"))
    changed["results"]["tbq4_0/tbq4_0"]["delta"] += 1
    monkeypatch.setattr(looked_up, "report", lambda name: changed if "all_formats" in name else report(name))
    after = table(REPORTS["published_tbq4_0"]).splitlines()
    differ = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [row.split(" | ")[0] for row in differ] == ["| perplexity of tbq4_0"]
