"""Reduce reports with one record per question to counts and means, which is what benchmarks/results keeps.

    python -m benchmarks.summarize REPORT.json ... --to benchmarks/results

Reports of `mlx_tq evaluate` (sweep, needle, reasoning, tools, ruler), of `benchmarks.recall` and of
`benchmarks.rescue.bench_ramp`; a report without such records is copied as it is.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rescue import ramp_cells
from mlx_tq.evaluate.asking import compare_answers

Record = dict[str, Any]
SWEEP = ("name", "variant", "retention", "granularity", "trigger", "sinks", "once", "kind", "length")
NEEDLE = ("name", "tokens")
GRID = ("model", "asked", "kind", "policy", "budget")
COMPLETE = 0.999  # share of a sentence's tokens from which all of it counts as present


def groups(records: Iterable[Record], fields: Sequence[str]) -> list[tuple[Record, list[Record]]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record.get(field) for field in fields), []).append(record)
    return [
        ({field: value for field, value in zip(fields, key, strict=True) if value is not None}, members)
        for key, members in found.items()
    ]


def needles(records: Iterable[Record], fields: Sequence[str]) -> list[Record]:
    """Count the needles found in each group; `void` are those that the uncompressed cache misses."""
    rows = []
    for key, members in groups(records, fields):
        verdicts = [member["verdict"] for member in members]
        sizes = [member["needle"][1] - member["needle"][0] for member in members]
        alive = mean(member["live"] / size for member, size in zip(members, sizes, strict=True))
        counts = {"cases": len(members), "void": verdicts.count("VOID"), "found": verdicts.count("PASS")}
        rows.append({**key, **counts, "alive": round(alive, 4)})
    return rows


def sweep(report: Record) -> list[Record]:
    """Reduce a sweep: needles to counts; records of a text stay as they are."""
    records = [
        {**record, "text": name.partition(" | text ")[2]} if " | text " in name else record
        for name, record in report["results"].items()
    ]
    texts = [record for record in records if "text" in record]
    return needles([record for record in records if "text" not in record], SWEEP) + texts


def grid(report: Record) -> list[Record]:
    """Reduce questions about evicted sentences: where the evidence ranks, what is back, what is answered."""
    rows = []
    for key, members in groups(report["rows"], GRID):
        row: Record = {**key, "questions": len(members), "tokens": members[0]["tokens"]}
        evicted = [m for m in members if any(live <= COMPLETE for live in m["live"])]
        row["evicted"] = len(evicted)
        row["first"] = {
            way: [sum(not any(m["ranks"][way]) for m in evicted), len(evicted)]
            for way in members[0]["ranks"]
            if all(way in m["ranks"] for m in evicted)
        }
        row["back"] = {
            way: [sum(_is_complete(m, way) for m in found), len(found)]
            for way in members[0]["back"]
            if (found := [m for m in members if way in m["back"]])
        }
        row["answers"] = {arm: _answers(members, arm) for arm in members[0]["arms"]}
        rows.append(row)
    return rows


def _is_complete(record: Record, way: str) -> bool:
    return all(back + live > COMPLETE for back, live in zip(record["back"][way], record["live"], strict=True))


def _answers(records: list[Record], arm: str) -> Record:
    asked = [record["arms"][arm] for record in records if arm in record["arms"]]
    free = [answer["right"] for answer in asked if answer["right"] is not None]
    log = round(mean(answer["log"] for answer in asked), 3)
    return {"right": sum(free) if free else None, "asked": len(free), "log_probability": log}


def documents(report: Record) -> list[Record]:
    """Reduce documents with a question in one prompt: how much of the evidence comes back."""
    rows = []
    for key, members in groups(report.get("prompts", []), ("model", "collection")):
        for way in members[0]["back"]:
            asked = [m for m in members if way in m["back"]]
            share = mean(min(1.0, m["back"][way] / m["evidence"]) for m in asked)
            first = None if way not in asked[0]["ranks"] else sum(m["ranks"][way] == 0 for m in asked)
            some = sum(m["back"][way] > 0 for m in asked)
            rows.append({**key, "by": way, "asked": len(asked), "first": first, "some": some, "share": round(share, 4)})
    return rows


def ramp(report: Record) -> list[Record]:
    """Reduce rescued facts: questions answered in each arm, by policy, budget and length."""
    cells = report["cells"]
    rows = []
    for setting in ramp_cells.settings(cells):
        by_arm = {arm: ramp_cells.cells_of(arm, setting, cells) for arm in ramp_cells.ARMS}
        outcomes = {arm: [ramp_cells.outcome(cell, cells) for cell in members] for arm, members in by_arm.items()}
        rescued = by_arm["rescue"]
        if not rescued:
            continue
        policy, budget, tokens = setting
        row = {"policy": policy, "budget": budget, "tokens": tokens, "cases": len(rescued)}
        row["gone"] = sum(not cell["live"] for cell in rescued)
        row |= {arm: found.count("native") for arm, found in outcomes.items()}
        row["rescued"] = outcomes["rescue"].count("rescue")
        row["void"] = outcomes["rescue"].count("void")
        row |= {name: round(mean(cell[name] for cell in rescued)) for name in ("evicted", "injected")}
        rows.append(row)
    return rows


def answers(report: Record) -> list[Record]:
    return compare_answers(list(report["results"].values()))


def summarize(report: Record) -> Record:
    """Return the report with its records reduced; a report without records of single questions stays as it is."""
    command = str(report.get("command", ""))
    reductions: dict[str, tuple[str, Callable[[Record], list[Record]]]] = {
        "sweep": ("results", sweep),
        "needle": ("results", lambda each: needles(each["results"].values(), NEEDLE)),
        **dict.fromkeys(("reasoning", "tools", "ruler"), ("results", answers)),
    }
    if command in reductions:
        field, reduce = reductions[command]
    elif "cells" in report:
        field, reduce = "cells", ramp
    elif report.get("rows") and "arms" in report["rows"][0]:
        field, reduce = "rows", grid
    else:
        return report
    rest = {name: value for name, value in report.items() if name not in (field, "prompts", "done")}
    more = {"documents": documents(report)} if report.get("prompts") else {}
    return {**rest, "rows": reduce(report), **more}


def write(report: Record, path: Path) -> None:
    head = {name: value for name, value in report.items() if not isinstance(value, list)}
    lists = {name: value for name, value in report.items() if isinstance(value, list)}
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    parts += [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in lists.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--to", required=True, type=Path, help="folder")
    args = parser.parse_args()
    for path in args.reports:
        write(summarize(json.loads(path.read_text(encoding="utf-8"))), args.to / path.name)


if __name__ == "__main__":
    main()
