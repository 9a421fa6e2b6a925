"""What the server answers to the official client's requests."""

from collections.abc import Callable

from benchmarks.tables.markdown import Record, Table, machine, report


def conformance() -> Table:
    """Forty requests of the official client."""
    about = report("server_conformance.json")
    rows = [
        [row["request"], row["documented"], _cell(row["ours"], row["why"]), _cell(row["mlx_lm"], "")]
        for row in about["rows"]
    ]
    columns = ["request", "documented", "here", "mlx-lm's own server"]
    return Table("server_conformance.json", about["command"], machine(about), columns, rows)


def _cell(answer: Record, why: str) -> str:
    said = "so" if answer["as_documented"] else f"**{answer['seen']}**"
    return f"{said}: {why}" if why else said


TABLES: dict[str, Callable[[], Table | str]] = {"conformance": conformance}
