"""The tables of golden runs: what differs from commit f34aaad, and why that is right."""

from collections.abc import Callable

from benchmarks.golden.compare import Difference, Reason, changes, explained, recorded, same
from benchmarks.golden.reasons import CODE, DEFAULTS
from benchmarks.tables.markdown import lines

_SHOWN = 64  # characters of an example
_FIELDS = {
    "tokens": "greedy tokens (library), and counts of tokens",
    "text": "answers of commands",
    "logprob": "sums of log-probabilities, four digits",
    "live": "positions that stayed",
    "evicted": "tokens evicted",
    "nbytes": "bytes",
}


def agreement() -> str:
    """How many values are what they were, under the defaults of that day and under today's."""
    rows = []
    for field, what in _FIELDS.items():
        then, count = same(field, "before", "then")
        rows.append([what, f"{count:,}", f"{then:,}", f"{same(field, 'before', 'today')[0]:,}"])
    head = ["what", "values", "the same under the defaults of that day", "under today's"]
    return f"*{len(recorded('before'))} runs, on two CPU cores.*\n\n{lines(head, rows)}"


def code() -> str:
    """What the code changed."""
    return _table("before", "then", CODE)


def defaults() -> str:
    """What other defaults changed."""
    return _table("then", "today", DEFAULTS)


def _table(old: str, new: str, reasons: list[Reason]) -> str:
    by_reason = explained(changes(old, new), reasons)
    rows = [
        [reason.kind, str(len({_run(each) for each in found})), f"{len(found):,}", *_example(found[0]), reason.why]
        for reason, found in by_reason.items()
    ]
    head = ["what differs", "runs", "places", "of which one", "before", "after", "why that is right"]
    return lines(head, rows)


def _run(found: Difference) -> str:
    return found.place.partition(" / ")[0]


def _example(found: Difference) -> list[str]:
    return [_run(found), *(_code(text) for text in (found.old, found.new))]


def _code(text: str) -> str:
    text = text.strip('"').replace("|", "\\|")
    return f"`{text if len(text) <= _SHOWN else text[:_SHOWN] + ' ...'}`"


TABLES: dict[str, Callable[[], str]] = {"golden": agreement, "golden_code": code, "golden_defaults": defaults}
