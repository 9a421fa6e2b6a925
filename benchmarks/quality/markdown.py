"""Print the tables of docs/quality.md from the results beside this folder: python benchmarks/quality/markdown.py."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from run import LEAN, RICH

from mlx_tq.evaluate.sweep_table import survival

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAMES = {LEAN: "lean schedule/tq4", RICH: "rich schedule/tq4"}


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of one file of results, or none where it has not been measured."""
    path = RESULTS / f"quality_{name}.json"
    return list(json.loads(path.read_text())["results"].values()) if path.exists() else []


def table(title: str, columns: list[str], lines: Iterable[list[str]]) -> None:
    """Print one table."""
    print(f"\n## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")


def needles(name: str) -> None:
    """Print passes by length and depth."""
    cells = rows(name)
    columns = list(dict.fromkeys((cell["tokens"], cell["depth"]) for cell in cells))
    lines = []
    for arm in dict.fromkeys(cell["name"] for cell in cells):
        line = [arm]
        for column in columns:
            verdicts = [c["verdict"] for c in cells if c["name"] == arm and (c["tokens"], c["depth"]) == column]
            counted = [verdict for verdict in verdicts if verdict != "VOID"]
            line.append(f"{counted.count('PASS')}/{len(counted)}")
        lines.append(line)
    table(name, ["cache", *(f"{tokens} at {depth:g}" for tokens, depth in columns)], lines)


def pairs(title: str, found: list[dict[str, Any]]) -> None:
    """Print pairs of formats, smallest first; needles where they were asked for."""
    asked = any(row.get("asked") for row in found)
    columns = ["K/V", "B/token", "ratio", "K error", "V error", "cosine", "KLD", "±", "top-1 %", "PPL", "change %", "±"]
    lines = [
        [
            NAMES.get(r["name"], r["name"]),
            f"{r['nbytes']:,.0f}",
            f"{r['ratio']:.2f}",
            f"{r['key_error']:.5f}",
            f"{r['value_error']:.5f}",
            f"{r['cosine']:.5f}",
            f"{r['kld']:.5f}",
            f"{r['kld_error']:.5f}",
            f"{r['top1']:.2f}",
            f"{r['ppl']:.2f}",
            f"{r['delta']:+.2f}",
            f"{r['delta_error']:.2f}",
            *([f"{r['found']}/{r['asked']}" if r.get("asked") else "-"] if asked else []),
        ]
        for r in sorted(found, key=lambda r: (r["nbytes"], r["name"]))
    ]
    table(title, [*columns, *(["needles"] if asked else [])], lines)


def ablation() -> None:
    """Print a line for each change, keys and values at 4 and at 3 bits side by side."""
    found = {row["name"]: row for row in rows("ablation")}
    changes = dict.fromkeys(name.replace("fp16/", "").rpartition(".")[0] for name in found)
    lines = []
    for change in changes:
        line = [change]
        for pattern in ("{}.4/fp16", "{}.3/fp16", "fp16/{}.4", "fp16/{}.3"):
            r = found.get(pattern.format(change))
            error = r and r["key_error"] + r["value_error"]
            line += [f"{error:.4f}", f"{r['cosine']:.5f}", f"{r['kld']:.5f} ± {r['kld_error']:.5f}"] if r else ["-"] * 3
        lines.append(line)
    sides = [f"{side}: {what}" for side in ("K 4", "K 3", "V 4", "V 3") for what in ("error", "cosine", "KLD")]
    table("ablation", ["change", *sides], lines)


def sweep(name: str) -> None:
    """Print a line for each way to evict, a column for each retention: texts, then needles by kind and length."""
    cells = rows(name)
    texts = [cell for cell in cells if "ppl" in cell]
    _by_retention(f"{name}: change of perplexity, %, and KLD", texts, _predicts)
    asked = [cell for cell in cells if "kind" in cell]
    for where in dict.fromkeys((c["kind"], c["length"]) for c in asked):
        for once in (True, False):
            found = [c for c in asked if (c["kind"], c["length"]) == where and c.get("once", False) == once]
            title = f"{name}: {where[0]}, {where[1]} tokens, {'one round' if once else 'rounds while reading'}"
            _by_retention(f"{title}: needle tokens alive, %, and answers found", found, _keeps)


def _by_retention(title: str, cells: list[dict[str, Any]], show: Callable[[list[dict[str, Any]]], str]) -> None:
    cells = [cell for cell in cells if "retention" in cell]
    kept = sorted({cell["retention"] for cell in cells}, reverse=True)
    ways = dict.fromkeys((cell["variant"], cell["granularity"], cell["trigger"], cell["prefix"]) for cell in cells)
    lines = []
    for way in ways:
        own = [c for c in cells if (c["variant"], c["granularity"], c["trigger"], c["prefix"]) == way]
        columns = ([cell for cell in own if cell["retention"] == retention] for retention in kept)
        lines.append([*map(str, way), *(show(found) if found else "-" for found in columns)])
    if lines:
        table(title, ["policy", "block", "trigger", "prefix", *(f"{retention:g} %" for retention in kept)], lines)


def _predicts(cells: list[dict[str, Any]]) -> str:
    (cell,) = cells
    return f"{cell['delta']:+.1f} ({cell['delta_error']:.1f}), {cell['kld']:.3f}"


def _keeps(cells: list[dict[str, Any]]) -> str:
    counted = [cell["verdict"] for cell in cells if cell["verdict"] != "VOID"]
    return f"{100 * mean(map(survival, cells)):.0f}, {counted.count('PASS')}/{len(counted)}"


def main() -> None:
    """Print everything that has been measured."""
    table(
        "perplexity",
        ["cache", "PPL", "±", "change %", "±", "packed %"],
        (
            [
                r["name"],
                f"{r['ppl']:.2f}",
                f"{r['ppl_error']:.2f}",
                f"{r['delta']:+.3f}",
                f"{r['delta_error']:.3f}",
                f"{100 * r['packed']:.0f}",
            ]
            for r in rows("perplexity")
        ),
    )
    for name in ("divergence", "scales_key", "scales_value"):
        table(
            name,
            ["cache", "KLD", "±", "median", "99 %", "top-1 %", "±", "packed %"],
            (
                [
                    r["name"],
                    f"{r['kld']:.6f}",
                    f"{r['kld_error']:.6f}",
                    f"{r['kld_median']:.6f}",
                    f"{r['kld_99']:.4f}",
                    f"{r['top1']:.2f}",
                    f"{r['top1_error']:.2f}",
                    f"{100 * r['packed']:.0f}",
                ]
                for r in rows(name)
            ),
        )
    pairs("formats", rows("formats"))
    pairs("all formats", [row for name in ("all_formats", "spectral") for row in rows(name)])
    pairs("mixed", rows("mixed"))
    pairs("mixed, one long step", rows("mixed_long"))
    ablation()
    table(
        "drift",
        ["cache", "read at a time", "first layer", "later layers %", "KLD", "logits", "top-1 %"],
        (
            [
                r["name"],
                str(r["step"]),
                "-" if r["first_layer"] is None else str(r["first_layer"]),
                "-" if r["later_layers"] is None else f"{r['later_layers']:.1f}",
                f"{r['kld']:.6f}",
                f"{r['logits']:.5f}",
                f"{r['top1']:.2f}",
            ]
            for r in rows("drift")
        ),
    )
    needles("needle_default")
    needles("needle")
    for name in ("sweep", "sweep_hybrid"):
        sweep(name)


if __name__ == "__main__":
    main()
