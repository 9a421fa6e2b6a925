"""The pages that hold tables, and the tables by name."""

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.tables import (
    answers,
    by_layer,
    eviction,
    formats,
    four_arms,
    frontier,
    normalized,
    postgres,
    published,
    quality,
    ranks,
    recall,
    recall_grid,
    report_formats,
    rescue,
    rooms,
    server,
    shares,
    speed,
    store,
    sweep,
    trellis,
)
from benchmarks.tables.markdown import Table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLES: dict[str, Callable[[], Table | str]] = {
    **rooms.TABLES,
    **quality.TABLES,
    **answers.TABLES,
    **report_formats.TABLES,
    **normalized.TABLES,
    **formats.TABLES,
    **frontier.TABLES,
    **by_layer.TABLES,
    **four_arms.TABLES,
    **eviction.TABLES,
    **shares.TABLES,
    **sweep.TABLES,
    **recall.TABLES,
    **recall_grid.TABLES,
    **rescue.TABLES,
    **postgres.TABLES,
    **speed.TABLES,
    **server.TABLES,
    **store.TABLES,
    **published.TABLES,
    **ranks.TABLES,
    **trellis.TABLES,
}
PLACE = re.compile(r"^<!-- table: (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def render(text: str) -> str:
    """A page with its tables as they are now.

    Raises:
        KeyError: the page names a table that does not exist.
    """
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->", text)
