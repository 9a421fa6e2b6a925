"""Tables of what published reports have, beside what is here."""

from collections.abc import Callable
from functools import partial

from benchmarks.published import aither, others, triattention_v3
from benchmarks.published.rows import Row
from benchmarks.tables.markdown import lines

REPORTS: dict[str, Callable[[], list[Row]]] = {
    "published_aither": aither.codec,
    "published_aither_serving": aither.serving,
    "published_v3": triattention_v3.eviction,
    "published_longctx": triattention_v3.rescue,
    "published_ascend": others.ascend,
    "published_tq3_0": others.tq3_0,
    "published_tbq4_0": others.tbq4_0,
}


def table(rows: Callable[[], list[Row]]) -> str:
    """One report, or a part of it."""
    return lines(["feature or figure", "published", "here", "ours", "where"], [list(row) for row in rows()])


TABLES: dict[str, Callable[[], str]] = {name: partial(table, rows) for name, rows in REPORTS.items()}
