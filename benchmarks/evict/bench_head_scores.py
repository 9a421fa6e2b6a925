"""Measure which text finds the KV heads that facts need, how long it has to be, and which window is best.

    python -m benchmarks.evict.bench_head_scores --models smollm2 --tokens 950 --share 40 --texts 16

Each row has scores of heads from another text, or another window, and the loss of everyday facts with them; see
bench_facts.py. `overlap` is the share of the heads that the first row also keeps.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.evict.bench_facts import Arm, ask, compare, make_arms, scenes
from benchmarks.reports import ALL_NAMES, named_model, save
from mlx_tq.cli.head_calibration import measure_head_scores
from mlx_tq.cli.inputs import load_text
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.measurements import HeadScores
from mlx_tq.prompt_cache.plan import Plan, make_plan

SOURCE = Path(__file__).parents[2] / "mlx_tq"  # as an example of code


def calibrations(tokenizer: Any) -> Iterator[tuple[str, str, int]]:
    """Yield texts to measure heads on: name, text and number of tokens."""
    text = load_text()
    for tokens in (1024, 256, 512, 2048):
        yield f"WikiText, {tokens:,} tokens", text, tokens
    yield "WikiText, another part, 1,024 tokens", text[len(text) // 2 :], 1024
    yield "code, 1,024 tokens", (SOURCE / "session" / "session.py").read_text(encoding="utf-8"), 1024
    facts = tokenizer.decode(scenes(tokenizer, 1000, 40, None)[-1].ids)
    yield "facts in WikiText, 1,000 tokens", facts, 1000


def retrieval_heads(plan: Plan) -> set[tuple[int, int]]:
    return {(number, head) for number, layer in enumerate(plan.layers) for head in layer.spec.retrieval_heads}


def measure(name: str, tokens: int, share: float, texts: int, windows: list[int]) -> Iterator[dict[str, Any]]:
    model, tokenizer = named_model(name)
    facts, asked = model_facts(model), scenes(tokenizer, tokens, texts, None)
    plain, arm, _ = make_arms(share, tokens, ["heads"])
    full = [ask(model, tokenizer, plan_caches(model, plain.config), plain, scene) for scene in asked]
    first: set[tuple[int, int]] = set()

    def row(label: str, arm: Arm, scores: HeadScores) -> dict[str, Any]:
        nonlocal first
        plan = make_plan(facts, arm.config, partial(native_caches, model), None, scores)
        kept = retrieval_heads(plan)
        first = first or kept
        results = [ask(model, tokenizer, plan, arm, scene) for scene in asked]
        assert plan.division is not None
        about = {
            "model": ALL_NAMES[name],
            "tokens": tokens,
            "scores": label,
            "retrieval_heads": plan.division.num_retrieval,
            "window": plan.division.window,
            "overlap": len(first & kept) / max(1, len(kept)),
        }
        return about | compare(arm, results, full)

    best: HeadScores | None = None
    for label, text, length in calibrations(tokenizer):
        scores = measure_head_scores(model, tokenizer, text, length)
        best = best or scores
        yield row(label, arm, scores)
    assert best is not None
    for window in windows:
        (_, fixed, _) = make_arms(share, tokens, [f"heads:window={window}"])
        yield row(f"the first, window {window}", fixed, best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2", help="of benchmarks.reports, joined by commas")
    parser.add_argument("--tokens", type=int, default=950)
    parser.add_argument("--share", type=float, default=40, help="percent of the rows to keep")
    parser.add_argument("--texts", type=int, default=16, help="texts, with eight questions each")
    parser.add_argument("--windows", default="96,128,192,256", help="joined by commas")
    parser.add_argument("--json", default="evict_head_scores.json")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        for found in measure(name, args.tokens, args.share, args.texts, [int(w) for w in args.windows.split(",")]):
            print(found, flush=True)
            rows.append(found)
    command = f"python -m benchmarks.evict.bench_head_scores --models {args.models} --tokens {args.tokens}"
    save(args.json, f"{command} --share {args.share:g} --texts {args.texts} --windows {args.windows}", rows=rows)


if __name__ == "__main__":
    main()
