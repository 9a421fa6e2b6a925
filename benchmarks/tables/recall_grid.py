"""The tables of the recall grid: where the evidence ranks, what is answered, prompts, and policies of eviction."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.recall.parts import ARMS
from benchmarks.tables.markdown import Record, Table, in_order, machine, machines, report

FILE = "recall_grid.json"
POLICIES = ("recall_policies.json", "recall_policies_gemma3-270m.json", "recall_policies_embedded.json")
_WHOLE = 0.999
_SEARCHES = ("queries", "words", "meaning")
_RETURNS = ("queries", "words", "meaning", "both", "random")
COLUMNS = ["model", "tokens", "questions", "kept"]


def cells() -> list[tuple[list[str], list[Record]]]:
    """What names each cell of the grid, and its rows."""
    rows = report(FILE)["rows"]
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        found.setdefault((row["model"], row["asked"], row["kind"], row["budget"]), []).append(row)
    models, kinds = in_order(rows, "model"), in_order(rows, "kind")
    order = sorted(found, key=lambda k: (models.index(k[0]), k[1], kinds.index(k[2]), -float(k[3].rstrip("%"))))
    return [([k[0], f"{k[1]:,}", k[2], k[3]], found[k]) for k in order]


def ranks() -> Table:
    """How often the evidence ranks first, and comes back whole."""
    lines = []
    for names, rows in cells():
        gone = [row for row in rows if any(rank is not None for rank in row["ranks"]["queries"])]
        cut = [row for row in gone if any(row["cut"])]
        lines.append(
            [
                *names,
                str(len(gone)),
                *(_of(gone, lambda row, by=by: _first(row, by), by) for by in _SEARCHES),
                *(_of(gone, lambda row, by=by: whole(row, by), by, "back") for by in _RETURNS),
                _of(cut, lambda row: whole(row, "queries"), "queries", "back"),
            ]
        )
    columns = [*COLUMNS, "asked", "first by queries", "by words", "by MiniLM"]
    columns += ["whole back by queries", "by words", "by MiniLM", "by queries and MiniLM", "by chance"]
    columns += ["of those that an edge cuts, by queries"]
    return _table(columns, lines)


def answers() -> Table:
    """Right answers, and the mean log-probability of the right answer, by arm."""
    lines = [[*names, str(len(rows)), *(_answers(rows, arm) for arm in ARMS)] for names, rows in cells()]
    return _table([*COLUMNS, "asked", *ARMS], lines)


def prompts() -> Table:
    """Documents with a question in one prompt: how often any evidence is back, and how much of it."""
    rows = report(FILE)["prompts"]
    lines = []
    for collection in in_order(rows, "collection"):
        found = [row for row in rows if row["collection"] == collection]
        for by in (*_SEARCHES, "random"):
            own = [row for row in found if by in row["back"]]
            if own:
                share = mean(min(1.0, row["back"][by] / row["evidence"]) for row in own)
                first = sum(row["ranks"][by] == 0 for row in own)
                some = sum(row["back"][by] > 0 for row in own)
                lines.append([collection, by, str(len(own)), f"{first}", f"{some}", f"{100 * share:.0f} %"])
    return _table(["documents", "found by", "asked", "evidence first", "some of it back", "of it back, mean"], lines)


def policies() -> Table:
    """What a policy of eviction leaves of the evidence, and what recall makes of it."""
    lines = [line for file in POLICIES for line in _by_policy(file)]
    columns = ["model, tokens", "policy", "kept", "asked", "never left", "of the others first", "whole with recall"]
    first, *also = POLICIES
    settings = report(first)["about"]["settings"]
    given = " ".join(f"--{name} {settings[name]}" for name in ("policies", "budgets", "arms"))
    command = f"python -m benchmarks.recall.bench_grid --model M --kind K --tokens L {given} \\\n    --json FILE"
    columns += ["full", "evicted", "queries"]
    model = "the models named, float32, sinks 32, window 64, q8/tq4"
    return Table(first, command, machines(POLICIES), columns, lines, model=model, also=tuple(also))


def _by_policy(file: str) -> Iterator[list[str]]:
    about = report(file)
    rows, model, tokens = about["rows"], about["about"]["model"], about["about"]["settings"]["tokens"]
    for policy, budget in product(in_order(rows, "policy"), in_order(rows, "budget")):
        own = [row for row in rows if (row["policy"], row["budget"]) == (policy, budget)]
        left = [row for row in own if not _lives(row)]
        yield [
            f"{model}, {tokens:,}",
            f"`{policy}`",
            budget,
            str(len(own)),
            str(len(own) - len(left)),
            _of(left, lambda row: _first(row, "queries"), "queries"),
            str(sum(whole(row, "queries") for row in own)),
            *(_answers(own, arm) for arm in ("full", "evicted", "queries")),
        ]


def whole(row: Record, arm: str) -> bool:
    """Whether all evidence is there, back or live."""
    return all(back + live > _WHOLE for back, live in zip(row["back"][arm], row["live"], strict=True))


def _lives(row: Record) -> bool:
    return all(live > _WHOLE for live in row["live"])


def _first(row: Record, by: str) -> bool:
    """No block without evidence ranks above the best one of any part that left."""
    return not any(rank for rank in row["ranks"][by])


def _of(rows: Sequence[Record], holds: Callable[[Record], bool], by: str, field: str = "ranks") -> str:
    own = [row for row in rows if by in row[field]]
    return f"{sum(map(holds, own))} of {len(own)}" if own else "-"


def _answers(rows: Sequence[Record], arm: str) -> str:
    own = [row["arms"][arm] for row in rows if arm in row["arms"]]
    if not own:
        return "-"
    free = [each["right"] for each in own if each["right"] is not None]
    right = f"{sum(free)}" + ("" if len(free) == len(rows) else f" of {len(free)}")
    return f"{right if free else '-'} ({mean(each['log'] for each in own):.1f})"


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    about = report(FILE)
    return Table(FILE, about["command"], machine(about), columns, rows, model=_measured_on(about))


def _measured_on(about: Record) -> str:
    return f"{about.get('model', 'the models named')}, float32, sinks 32, window 64, {about['key']}/{about['value']}"


TABLES: dict[str, Callable[[], Table]] = {
    "recall_ranks": ranks,
    "recall_answers": answers,
    "recall_prompts": prompts,
    "recall_policies": policies,
}
