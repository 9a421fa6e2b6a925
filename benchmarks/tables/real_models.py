"""The table of eviction on a real model, from real_models.json, which was written from runs of prototypes."""

from collections.abc import Callable

from benchmarks.tables.markdown import lines, report

SOURCE = "real_models.json"


def _table(part: str, columns: list[str], rows: list[list[str]]) -> str:
    about = report(SOURCE)[part]["setting"]
    file = f"[{SOURCE}](../../benchmarks/results/{SOURCE})"
    return f"*Measured with a prototype, on a CPU: {about}; {file}.*\n\n{lines(columns, rows)}"


def eviction() -> str:
    """What stays of a needle, and what a text's prediction loses."""
    rows = [
        [row["policy"], *(f"{row['alive'][share]} %" for share in ("90", "75")), f"{row['perplexity']:+.1f} %"]
        for row in report(SOURCE)["eviction"]["rows"]
    ]
    return _table("eviction", ["policy", "alive at 90 %", "alive at 75 %", "perplexity at 90 %"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "real_eviction": eviction,
}
