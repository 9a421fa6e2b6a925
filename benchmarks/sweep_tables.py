"""Print the tables of docs/eviction.md from results/quality_sweep.json: python benchmarks/sweep_tables.py [FILE].

Needles: tokens alive in percent, then answers found of those that the fp16 cache finds. Text: change of perplexity in
percent and its standard error, or KL divergence in nats.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from plot_sweep import LABELS

from mlx_tq.evaluate.needle import VOID
from mlx_tq.evaluate.sweep_table import survival

RESULTS = Path(__file__).resolve().parent / "results" / "quality_sweep.json"
Record = dict[str, Any]
Fields = dict[str, Any]

QUESTIONS = "v3:stats=questions.safetensors"
RETENTIONS = (95, 90, 85, 80, 75, 65, 50, 25, 10)
FEW = (90, 75, 50)
NEEDLES = {"kind": "multi", "length": 800, "once": True, "granularity": 1}
TEXT = {"text": "3 x 1000", "granularity": 1, "trigger": 32}


def read(path: Path) -> list[Record]:
    """The records, a text cell with its chunks as `text`."""
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    about = {key: key.partition(" | text ")[2] for key in rows}
    return [{"once": False, **row, **({"text": about[key]} if about[key] else {})} for key, row in rows.items()]


def wilson(passed: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share, in percent (Wilson 1927)."""
    z = 1.96
    centre = (passed + z * z / 2) / (asked + z * z)
    half = z / (asked + z * z) * math.sqrt(passed * (asked - passed) / asked + z * z / 4)
    return 100 * (centre - half), 100 * (centre + half)


def needles(found: list[Record]) -> str:
    """Alive and answered."""
    alive = 100 * mean(map(survival, found))
    counted = [record for record in found if record["verdict"] != VOID]
    return f"{alive:.0f}, {sum(record['verdict'] == 'PASS' for record in counted)}/{len(counted)}"


def text(found: list[Record]) -> str:
    """Change of perplexity and its error."""
    (record,) = found
    return f"{record['delta']:+.1f} ({record['delta_error']:.1f})"


def divergence(found: list[Record]) -> str:
    """KL divergence."""
    (record,) = found
    return f"{record['kld']:.3f}"


class Tables:
    """Prints tables of records."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    def find(self, fields: Fields) -> list[Record]:
        """Those that have all the fields; a prefix that is not asked for is 32, or 0 in modes v1 and v2."""
        found = [r for r in self.records if all(r.get(name) == value for name, value in fields.items())]
        if "prefix" not in fields:
            found = [r for r in found if r.get("prefix") == (0 if r["variant"][:2] in ("v1", "v2") else 32)]
        return found

    def show(
        self, title: str, rows: dict[str, Fields], columns: dict[str, Fields], cell: Callable[[list[Record]], str]
    ) -> None:
        """Print one, without the lines of which nothing was measured."""
        print(f"\n## {title}\n\n| | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
        for label, row in rows.items():
            cells = [cell(found) if (found := self.find({**row, **column})) else "-" for column in columns.values()]
            if set(cells) != {"-"}:
                print(f"| {label} | {' | '.join(cells)} |")

    def variants(self, **fields: Any) -> dict[str, Fields]:
        """A row for each variant that was measured so."""
        names = dict.fromkeys(record["variant"] for record in self.find(fields))
        return {LABELS.get(name, name): {"variant": name, **fields} for name in names}


def retentions(shares: tuple[int, ...], **fields: Any) -> dict[str, Fields]:
    """A column for each share that stays."""
    return {f"{share} %": {"retention": share, **fields} for share in shares}


def show_all(tables: Tables) -> None:
    """Print every table."""
    once, rounds = {**NEEDLES, "trigger": 32}, {**NEEDLES, "trigger": 32, "once": False}
    tables.show("Needles, one round", tables.variants(**once), retentions(RETENTIONS), needles)
    tables.show("Text: perplexity", tables.variants(**TEXT), retentions(RETENTIONS), text)
    tables.show("Text: divergence", tables.variants(**TEXT), retentions(RETENTIONS), divergence)
    tables.show("Needles, rounds while reading", tables.variants(**rounds), retentions(FEW), needles)
    kinds = {
        f"{kind}, {share} %": {"kind": kind, "retention": share}
        for kind in ("single", "paraphrased", "decoys")
        for share in FEW
    }
    asked = tables.variants(**{**once, "kind": "decoys"})
    tables.show("Kinds", {name: {**row, "kind": ""} for name, row in asked.items()}, kinds, needles)
    columns = {
        f"{LABELS.get(variant, variant)}, {share} %": {"variant": variant, "retention": share}
        for variant in ("v3", QUESTIONS, "random")
        for share in FEW
    }
    blocks = {str(size): {"granularity": size} for size in (1, 8, 16, 32, 64)}
    tables.show("Blocks", {size: {**once, **fields} for size, fields in blocks.items()}, columns, needles)
    tables.show("Blocks, text", {size: {**TEXT, **fields} for size, fields in blocks.items()}, columns, text)
    for prefix in (0, 16, 32):
        rows = {"needles": tables.variants(**once, prefix=prefix), "text": tables.variants(**TEXT, prefix=prefix)}
        tables.show(f"Needles, prefix {prefix}", rows["needles"], retentions(FEW), needles)
        tables.show(f"Text, prefix {prefix}", rows["text"], retentions(FEW), text)
    long = {"text": "1 x 3000", "retention": 25}
    triggers = {f"{trigger:,}": {"trigger": trigger} for trigger in (32, 128, 512, 2048)}
    tables.show("Triggers, 3,000 tokens at 25 %", tables.variants(**long), triggers, text)
    tables.show("Needles, 2,000 tokens", tables.variants(**{**once, "length": 2000}), retentions(FEW), needles)
    for asked_for in (9, 12, 24):
        shown = [f"{n}: {low:.0f}-{high:.0f}" for n in range(asked_for + 1) for low, high in [wilson(n, asked_for)]]
        print(f"\nWilson intervals of answers of {asked_for}, in percent: {', '.join(shown)}")


if __name__ == "__main__":
    show_all(Tables(read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)))
