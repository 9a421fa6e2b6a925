"""Tables of the rescue service on PostgreSQL, from rescue_postgres.json."""

from collections.abc import Callable
from typing import Any

from benchmarks.tables.markdown import Table, machine, report

SOURCE = "rescue_postgres.json"
COMMAND = "python -m benchmarks.rescue.bench_postgres"
MEASURES = {"R@5": "R@5", "R@10": "R@10", "R@20": "R@20", "MRR": "MRR", "nDCG@10": "nDCG"}
SERVICE = "the service alone"


def _table(what: str, columns: list[str], rows: list[list[str]], model: str = SERVICE) -> Table:
    timed = "chrt -r 10 " if model == SERVICE else ""
    return Table(SOURCE, f"{timed}{COMMAND} {what}", machine(report(SOURCE)), columns, rows, model=model)


def _sizes() -> dict[int, dict[str, Any]]:
    """What was measured at each size, by the number of spans."""
    found = report(SOURCE)["results"]
    return {int(part.removesuffix(" spans")): found[part] for part in found if part.endswith(" spans")}


def words() -> Table:
    """What either store finds by words."""
    found = report(SOURCE)["results"]["words"]
    rows = [[store, *(f"{found[store][name]:.3f}".lstrip("0") for name in MEASURES)] for store in found]
    columns = ["words alone, on", *MEASURES.values()]
    return _table("words --data DIR", columns, rows, "text of the collection, no language model")


def latency() -> Table:
    """How long a question takes."""
    sizes = _sizes()
    arms = list(dict.fromkeys(arm for found in sizes.values() for arm in found["retrieve"]))

    def cell(found: dict[str, Any], arm: str) -> str:
        times = found["retrieve"].get(arm)
        return f"{times['p50_ms']} / {times['p95_ms']} ms" if times else "-"

    rows = [[f"{spans:,}", *(cell(found, arm) for arm in arms)] for spans, found in sorted(sizes.items())]
    return _table("size SPANS", ["spans", *(f"{arm}: p50 / p95" for arm in arms)], rows)


def growth() -> Table:
    """What a session of so many spans takes."""
    rows = []
    for spans, found in sorted(_sizes().items()):
        sizes, recall = found["bytes"], found["recall"]
        rows.append(
            [
                f"{spans:,}",
                *(f"{sizes[part] / spans:,.0f}" for part in ("spans and words", "index of words")),
                *(f"{sizes[part] / spans:,.0f}" for part in ("vectors", "index by HNSW", "all")),
                *(f"{recall[kind]:.3f}".lstrip("0") for kind in ("near a stored one", "random")),
            ]
        )
    columns = ["spans", "bytes a span: text and words", "index of words", "vectors", "HNSW", "all"]
    return _table("size SPANS", [*columns, "recall@10, question near a vector", "question at random"], rows)


def load() -> Table:
    """Many clients at once."""
    found = report(SOURCE)["results"]["load"]
    rows = [
        [
            arm,
            f"{r['calls_a_second']:,}",
            str(r["errors_other_than_429_503"]),
            str(sum(r["statuses"].get(status, 0) for status in ("429", "503"))),
            *(f"{r[call]['p50_ms']} / {r[call]['p95_ms']} ms" for call in ("write", "retrieve")),
        ]
        for arm, r in found.items()
    ]
    columns = ["64 clients", "calls a second", "errors", "429 and 503", "write: p50 / p95", "retrieve: p50 / p95"]
    return _table("load", columns, rows)


TABLES: dict[str, Callable[[], Table]] = {
    "postgres_words": words,
    "postgres_latency": latency,
    "postgres_growth": growth,
    "postgres_load": load,
}
