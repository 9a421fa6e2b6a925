"""What the server answers to the official client's requests, and its answers held to schemas."""

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


def json_schemas() -> Table:
    """Answers held to schemas, and what that costs."""
    about = report("server_json.json")
    rows = [
        ["answers", f"{about['generations']} to {about['schemas']} schemas"],
        ["ended by themselves", str(about["ended"])],
        ["of these valid", str(about["valid"])],
        ["their tokens", f"{about['tokens']:,}"],
        ["at each token", _times(about["token_us"])],
        ["at each schema", _times(about["schema_us"])],
        ["once, for the vocabulary", f"{about['start_s']:.1f} s"],
    ]
    model = "SmolLM2-135M-Instruct"
    return Table("server_json.json", about["command"], machine(about), ["", ""], rows, model=model)


def _times(found: Record) -> str:
    return f"{found['median'] / 1000:.2f} ms; 99 %: {found['p99'] / 1000:.1f}"


def _cell(answer: Record, why: str) -> str:
    said = "so" if answer["as_documented"] else f"**{answer['seen']}**"
    return f"{said}: {why}" if why else said


TABLES: dict[str, Callable[[], Table | str]] = {"conformance": conformance, "json_schemas": json_schemas}
