"""The tables of recall: what comes back, what a look costs, and which layers it needs."""

from collections.abc import Callable
from statistics import mean, median

from benchmarks.named_models import NAMES
from benchmarks.tables.markdown import Record, Table, by_row, machine, machines, report

_MODELS = "the models named, float32"


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
    model = f"{about['model']}, float32, sinks 32, window 64, {about['key']}/{about['value']}"
    return Table("recall.json", about["command"], machine(about), columns, rows, model=model)


def looks() -> Table:
    """What a look takes beside the 64 steps between two looks."""
    when = {"question": "for a question of {} tokens", "answer": "while answering, of {} tokens"}
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "a look": lambda r: when[r["when"]].format(r["asked"]),
        "layers that look": _looking,
        "archived tokens": lambda r: f"{r['archived']:,}",
        "keys read": lambda r: f"{r['nbytes'] / 1e6:.1f} MB",
        "it takes": lambda r: f"{r['look_ms']:,.0f} ms",
        "64 steps": _steps,
        "of them": _of_steps,
    }
    return by_row("recall_look.json", columns, _MODELS)


def live() -> Table:
    """What the sum of all live weights takes of a look while answering."""
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "layers that look": _looking,
        "live tokens": lambda r: f"{r['live']:,}",
        "their sums": lambda r: f"{r['sums_ms']:,.0f} ms",
        "64 steps": _steps,
        "of them": _of_steps,
    }
    return by_row("recall_live.json", columns, _MODELS)


def _looking(row: Record) -> str:
    return f"{row['looking']} of {row['layers']}"


def _steps(row: Record) -> str:
    return f"{row['steps_ms']:,.0f} ms"


def _of_steps(row: Record) -> str:
    return f"{100 * row['share']:.1f} %"


def listening() -> Table:
    """What a step takes longer of which the queries are kept for the next look."""
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "layers that listen": lambda r: str(r["listening"]),
        "a step without": lambda r: f"{r['step_ms']:.1f} ms",
        "with it longer by (error)": lambda r: f"{r['added']:+.1f} % ({r['error']:.1f})",
    }
    turns = report("recall_listening.json")["rows"][0]["turns"]
    return by_row("recall_listening.json", columns, f"{_MODELS}, {turns} turns of 64 steps")


def text() -> Table:
    """What eviction alone costs the text, by budget."""
    whose = {"": "`triattention`", "chance_": "`random`"}
    files = {f"recall_text_{by}{name}.json": (model, whose[by]) for name, model in NAMES.items() for by in whose}
    rows = []
    for name, (model, policy) in files.items():
        about = report(name)
        found = {arm.partition("@")[2]: cell for arm, cell in about["results"].items() if "@" in arm}
        changes = [f"{cell['delta']:+.1f} % ({cell['delta_error']:.1f})" for cell in found.values()]
        rows.append([model, f"{about['settings']['length']:,}", policy, *changes])
    command = """python -m mlx_tq evaluate perplexity --profiles off,off@50%,off@25%,off@10% --kv-evict POLICY \\
    --length L --chunks 3 --step 256 --dtype float32 [--model smollm2 --dequantize]"""
    columns = ["model", "tokens", "policy", *found]
    model, (first, *also) = "the models named, float32, sinks and window 128", files
    return Table(first, command, machines(files), columns, rows, model=model, also=tuple(also))


def worth() -> Table:
    """By what a block is worth: where the evidence ranks, and what comes back with it."""
    about = report("recall_worth.json")
    parts = list(about["rows"][0]["parts"])
    rows = [
        [row["model"], f"{row['tokens']:,}", row["kind"], row["rule"], f"{row['first']} of {row['asked']}"]
        + [f"{found}, {strange}" for found, strange in row["parts"].values()]
        for row in about["rows"]
    ]
    columns = ["model", "tokens", "questions", "a block's worth", "evidence first", *(f"from {each}" for each in parts)]
    model = "the models named, float32, sinks 32, window 64, q8/tq4, 25% kept"
    return Table("recall_worth.json", about["command"], machine(about), columns, rows, model=model)


def floor() -> Table:
    """What comes back for whom, did a block have to be worth so much."""
    about = report("recall_floor.json")
    floors = (0, 0.1, 0.2, 0.3, 0.4)
    rows = []
    for row in about["rows"]:
        asked, left = row["found"], row["about"] == "what left"
        come = [each for each in asked if each["right"] or not left]
        counts = [str(sum(each["worth"] >= floor for each in come)) for floor in floors]
        worth = f"{median(each['worth'] for each in asked):.2f}"
        rows.append([row["model"], f"{row['tokens']:,}", row["kind"], row["about"], str(len(asked)), worth, *counts])
    columns = ["model", "tokens", "texts of", "asked about", "asked", "worth of the best block, median"]
    columns += ["no floor", *(f"from {floor}" for floor in floors[1:])]
    model = "the models named, float32, sinks 32, window 64, q8/tq4, 25% kept"
    return Table("recall_floor.json", about["command"], machine(about), columns, rows, model=model)


def neighbours() -> Table:
    """How often all evidence is back, by which neighbours come with a block."""
    about = report("recall_neighbours.json")
    rules = list(about["rows"][0]["whole"])
    rows = [
        [row["model"], f"{row['tokens']:,}", row["kind"], row["budget"], str(row["asked"])]
        + [str(row["whole"][rule]) for rule in rules]
        for row in about["rows"]
    ]
    columns = ["model", "tokens", "questions", "kept", "asked", *rules]
    model = "the models named, float32, sinks 32, window 64, q8/tq4"
    return Table("recall_neighbours.json", about["command"], machine(about), columns, rows, model=model)


def shortlist() -> Table:
    """What is found by how long a list a few layers make for the others."""
    about = report("recall_shortlist.json")
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in about["rows"]:
        cell = (row["model"], f"{row['tokens']:,}", row["kind"], f"{row['archived']:,}", str(row["asked"]))
        same = "" if row["listed"] == "all" else f", {row['same']}"
        cells.setdefault(cell, []).append(f"{row['first']}, {row['whole']}{same}")
    columns = ["model", "tokens", "questions", "archived", "asked", *dict.fromkeys(r["listed"] for r in about["rows"])]
    model = "the models named, float32, sinks 32, window 64, q8/tq4, 10% kept"
    rows = [[*cell, *ways] for cell, ways in cells.items()]
    return Table("recall_shortlist.json", about["command"], machine(about), columns, rows, model=model)


def layers() -> Table:
    """Where the evidence ranks by what looks."""
    about = report("recall_layers.json")
    names = ("all", "every other", "every fourth", "middle half", "third quarter", "first half", "second half")
    names += tuple(f"all, {way}" for way in ("every other query", "the other queries", "box, rotated", "box"))
    names += ("of the middle half, those that decided another question",)
    places = about["ranks"]
    rows = [
        [name, f"{sum(place == 0 for place in places[name])} of {len(places[name])}", str(max(places[name]))]
        for name in names
    ]
    model = f"{about['model']}, float32, sinks 32, window 64, {about['key']}/{about['value']}"
    columns = ["layers that look", "evidence first", "worst rank"]
    return Table("recall_layers.json", about["command"], machine(about), columns, rows, model=model)


def _share(rows: list[Record], holds: Callable[[Record], bool]) -> str:
    return f"{sum(map(holds, rows))} of {len(rows)}"


def _answers(rows: list[Record], arm: str) -> str:
    """Right answers, and the mean log-probability of the code."""
    return f"{sum(row[arm] for row in rows)} ({mean(row[f'{arm}_log'] for row in rows):.1f})"


TABLES: dict[str, Callable[[], Table]] = {
    "recall": recall,
    "recall_look": looks,
    "recall_live": live,
    "recall_listening": listening,
    "recall_floor": floor,
    "recall_layers": layers,
    "recall_neighbours": neighbours,
    "recall_shortlist": shortlist,
    "recall_text": text,
    "recall_worth": worth,
}
