"""What it costs ranks to agree: counted, and a model of the time over a cable."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tables.markdown import Record, Table, machine, report

_COUNTED = "ranks_agreement.json"
_MODEL_SUMS = 64  # of Llama 3.1 8B: two a layer
_HIDDEN_BYTES = 8192  # of one of its tokens, at 16 bits
_TRIGGER = 128  # tokens between two rounds
_LOOKS = 64  # tokens between two looks


@dataclass(frozen=True)
class Link:
    """A cable between two machines, as others have measured it.

    Attributes:
        name: of it.
        latency: seconds from one program to the other.
        rate: bytes a second, half of what the cable is sold for.
    """

    name: str
    latency: float
    rate: float

    def seconds(self, calls: float, nbytes: float) -> float:
        """Of so many sums between two ranks, each two messages of half its bytes, one after the other."""
        return 2 * calls * self.latency + nbytes / self.rate


LINKS = (
    Link("Thunderbolt 5, RDMA", 9e-6, 5e9),
    Link("Thunderbolt 5, TCP", 300e-6, 5e9),
    Link("10 GbE, TCP", 20e-6, 0.625e9),
)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def _named(row: Record) -> str:
    if row["what"] == "token":
        return "a token: all say what the first rank chose"
    if row["what"] == "round":
        kept = "" if row["recall"] == "off" else ", what leaves archived"
        return f"a round, {row['live']:,} live tokens{kept}"
    return f"a look into {row['archived']} blocks that come back, {row['live']:,} live tokens"


def agreement() -> Table:
    """By what is agreed on."""
    about = report(_COUNTED)
    rows = [
        [
            _named(row),
            str(row["calls"]),
            f"{row['bytes']:,}",
            *(_time(link.seconds(row["calls"], row["bytes"])) for link in LINKS),
        ]
        for row in about["rows"]
    ]
    columns = ["what", "calls", "bytes", *(link.name for link in LINKS)]
    return Table(_COUNTED, about["command"], machine(about), columns, rows)


def beside_the_model() -> Table:
    """A token's own sums in a model of 8 billion weights, and all that ranks agree on between two tokens."""
    about = report(_COUNTED)
    own = [link.seconds(_MODEL_SUMS, _MODEL_SUMS * _HIDDEN_BYTES) for link in LINKS]
    rows = [["the model's own sums", str(_MODEL_SUMS), f"{_MODEL_SUMS * _HIDDEN_BYTES:,}", *map(_time, own)]]
    (token,) = (row for row in about["rows"] if row["what"] == "token")
    for live in sorted({row["live"] for row in about["rows"] if row["what"] == "round"}):
        each = {row["what"]: row for row in about["rows"] if row.get("live") == live and row.get("recall") != "off"}
        shares = ((token, 1), (each["round"], _TRIGGER), (each["look"], _LOOKS))
        calls, nbytes = (sum(row[field] / every for row, every in shares) for field in ("calls", "bytes"))
        times = [link.seconds(calls, nbytes) for link in LINKS]
        added = [f"{_time(time)} ({100 * time / base:.1f} %)" for time, base in zip(times, own, strict=True)]
        rows.append([f"agreement, {live:,} live tokens", f"{calls:.2f}", f"{nbytes:,.0f}", *added])
    columns = ["a token", "calls", "bytes", *(link.name for link in LINKS)]
    return Table(_COUNTED, about["command"], machine(about), columns, rows, model="Llama 3.1 8B's shape, two ranks")


TABLES: dict[str, Callable[[], Table | str]] = {"agreement": agreement, "agreement_beside_the_model": beside_the_model}
