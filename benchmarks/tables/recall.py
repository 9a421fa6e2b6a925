"""The table of recall, from recall.json."""

from collections.abc import Callable
from statistics import mean

from benchmarks.tables.markdown import Record, Table, machine, report


def recall() -> Table:
    """Where the evidence ranks, and what is answered, by budget."""
    about = report("recall.json")
    rows = []
    for budget in sorted({row["budget"] for row in about["rows"]}, reverse=True):
        found = [row for row in about["rows"] if row["budget"] == budget]
        rows.append(
            [
                f"{budget:,}",
                f"{min(row['tokens'] for row in found):,} to {max(row['tokens'] for row in found):,}",
                str(len(found)),
                _share(found, lambda row: row["rank"] == 0),
                _share(found, lambda row: row["returned"] == 1),
                *(_answers(found, arm) for arm in ("full", "evicted", "recall")),
                f"{mean(row['recalled'] for row in found):.0f} of {mean(row['archived'] for row in found):.0f}",
            ]
        )
    columns = ["budget", "tokens", "codes", "evidence first", "whole code back"]
    columns += ["full cache", "evicted", "recall", "tokens back"]
    model = f"{about['model']}, float32, prefix 32, window 64, {about['key']}/{about['value']}"
    return Table("recall.json", about["command"], machine(about), columns, rows, model=model)


def _share(rows: list[Record], holds: Callable[[Record], bool]) -> str:
    return f"{sum(map(holds, rows))} of {len(rows)}"


def _answers(rows: list[Record], arm: str) -> str:
    """Right answers, and the mean log-probability of the code."""
    return f"{sum(row[arm] for row in rows)} ({mean(row[f'{arm}_log'] for row in rows):.1f})"


TABLES: dict[str, Callable[[], Table]] = {"recall": recall}
