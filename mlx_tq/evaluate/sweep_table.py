"""The table of a sweep: a line for each setting."""

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from mlx_tq.evaluate.needle import VOID
from mlx_tq.evaluate.report import Results
from mlx_tq.evaluate.scenes import KINDS

Record = dict[str, Any]


def show_sweep(results: Results) -> None:
    """Print the table of all settings that were measured."""
    columns, lines = sweep_lines(list(results.rows.values()))
    note = "alive: share of a needle's tokens that the question could attend to; whole: needles of which all were"
    results.show("What eviction costs", columns, lines, note)


def sweep_lines(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Columns, and a line for the fp16 cache and each setting."""
    kinds = [kind for kind in KINDS if any(record.get("kind") == kind for record in records)]
    columns = ["policy", "stays %", "block", "trigger", "sinks", "kept %", "rounds", "PPL %", "+-", "KLD"]
    columns += ["alive %", "whole", *kinds]
    names = dict.fromkeys(record["name"] for record in records)
    return columns, [_line([record for record in records if record["name"] == name], kinds) for name in names]


def _line(records: list[Record], kinds: Iterable[str]) -> list[str]:
    first = records[0]
    text = next((record for record in records if "ppl" in record), None)
    asked = [record for record in records if "kind" in record]
    about = [str(first.get(field, "-")) for field in ("granularity", "trigger", "sinks")]
    if first.get("once"):
        about[1] = "once"
    line = [
        str(first.get("variant", first["name"])),
        f"{first['retention']:g}" if "retention" in first else "-",
        *about,
    ]
    kept = [record["kept"] for record in asked] or [record["kept"] for record in records]
    rounds = [record["rounds"] for record in asked] or [record["rounds"] for record in records]
    line += [f"{100 * mean(kept):.0f}", f"{mean(rounds):.0f}"]
    line += ["-"] * 3 if text is None else [f"{text['delta']:+.2f}", f"{text['delta_error']:.2f}", f"{text['kld']:.4f}"]
    alive = [survival(record) for record in asked]
    line += [f"{100 * mean(alive):.0f}", f"{alive.count(1.0)}/{len(alive)}"] if alive else ["-", "-"]
    return line + [_passes([record for record in asked if record["kind"] == kind]) for kind in kinds]


def survival(record: Record) -> float:
    """Of a needle's tokens, the share that the question could attend to."""
    start, stop = record["needle"]
    return float(record["live"] / (stop - start))


def _passes(records: list[Record]) -> str:
    counted = [record for record in records if record["verdict"] != VOID]
    return f"{sum(record['verdict'] == 'PASS' for record in counted)}/{len(counted)}"
