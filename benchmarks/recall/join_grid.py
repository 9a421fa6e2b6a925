"""Join the files of bench_grid and bench_one_prompt, and print what is missing of the grid.

    python -m benchmarks.recall.join_grid DIR --embedder minilm

An embedder of the rescue service ranks the same blocks by their text. Arms that were measured separately are added to
the others of their question, also to those in the joined file.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recall.arms import by_rank
from benchmarks.recall.parts import one_a_line
from benchmarks.recall.scenes import PREFIX
from mlx_tq.prompt_cache.archive import ArchivedBlock

RESULTS = Path(__file__).parents[1] / "results" / "recall_grid.json"
NEEDLES = 24  # a cell
KINDS, BUDGETS = ("plain", "paraphrased", "several", "decoys", "two-hop"), ("50%", "25%", "10%")
SMOLLM2, GEMMA, EMBEDDED = "SmolLM2-135M-Instruct", "Gemma 3 270M", "needle"
# Model, tokens, kind and budgets of all cells.
WHOLE = [(SMOLLM2, tokens, kind, BUDGETS) for tokens in (1000, 2000) for kind in KINDS]
LONG = [(SMOLLM2, 7500, "plain"), *((EMBEDDED, tokens, "trained") for tokens in (2000, 3500))]
LONG += [(GEMMA, tokens, "continued") for tokens in (8000, 16000)]
CELLS = [*WHOLE, *((model, tokens, kind, ("50%", "10%")) for model, tokens, kind in LONG)]
CASES = {"longeval": 47, "qmsum": 62}


class Vectors(dict[str, np.ndarray]):
    """Embeds each text once: a text's questions are asked of the same blocks."""

    def __init__(self, embedder: Any) -> None:
        super().__init__()
        self._embedder = embedder

    def of(self, texts: list[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in self]
        self.update(zip(new, self._embedder.embed(new), strict=True) if new else ())
        return np.stack([self[text] for text in texts])


def add_meaning(row: dict[str, Any], known: Vectors) -> None:
    search = row["search"]
    if not search["texts"]:
        return
    vectors = known.of([search["question"], *search["texts"]])
    order = np.argsort(-(vectors[1:] @ vectors[0]), kind="stable")
    holds = np.array(search["holds"])[order] > 0
    strange = np.cumsum([0, *~holds.any(axis=1)])
    ranks = [int(strange[each.argmax()]) if each.any() else None for each in holds.T]
    if "places" not in search:
        row["ranks"]["meaning"] = ranks
        return
    row["ranks"]["meaning"] = min((rank for rank in ranks if rank is not None), default=None)
    blocks = [
        ArchivedBlock(np.arange(first, first + count), 0, 0, 0, lambda: None) for first, count in search["places"]
    ]
    back = by_rank([blocks[i] for i in order], PREFIX, row["most"])
    number = {id(block): i for i, block in enumerate(blocks)}
    row["back"]["meaning"] = sum(sum(search["holds"][number[id(block)]]) for block in back)


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each question once, with the latest measurement of each arm."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "asked", "kind", "text", "budget", "needle"))
        before = found.get(key, row)
        found[key] = row | {name: before[name] | row[name] for name in ("ranks", "back", "arms")}
    return list(found.values())


def missing(rows: list[dict[str, Any]], prompts: list[dict[str, Any]]) -> list[str]:
    found = Counter((row["model"], row["asked"], row["kind"], row["budget"]) for row in rows)
    lacking = [
        f"{model}, {tokens} tokens, {kind}, {budget}: {found[model, tokens, kind, budget]} of {NEEDLES}"
        for model, tokens, kind, budgets in CELLS
        for budget in budgets
        if found[model, tokens, kind, budget] < NEEDLES
    ]
    cases = Counter(row["collection"] for row in prompts)
    return lacking + [f"{name}: {cases[name]} of {count}" for name, count in CASES.items() if cases[name] < count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--embedder", choices=["minilm", "hashing"])
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    known = None
    if args.embedder:
        from rescue_svc.embed import load_embedder

        known = Vectors(load_embedder(args.embedder))
    rows, prompts, about = [], [], {}
    if args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        rows, prompts = before["rows"], before["prompts"]
        about = {name: before[name] for name in ("key", "value", "environment")}
    for path in sorted(args.folder.glob("*.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        about = {"key": part["about"]["key"], "value": part["about"]["value"], "environment": part["environment"]}
        for row in part["rows"]:
            if known is not None and "search" in row:
                add_meaning(row, known)
            row.pop("search", None)
            (prompts if "collection" in row else rows).append({"model": part["about"]["model"], **row})
    rows, prompts = merged(rows), list({(row["collection"], row["case"]): row for row in prompts}.values())
    lacking = missing(rows, prompts)
    head = {"command": "python -m benchmarks.recall.join_grid DIR --embedder minilm", **about, "missing": lacking}
    args.json.write_text(one_a_line({**head, "rows": rows, "prompts": prompts}), encoding="utf-8")
    print(f"{len(rows)} rows, {len(prompts)} prompts; missing: {lacking or 'nothing'}")


if __name__ == "__main__":
    main()
