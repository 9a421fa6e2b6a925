"""Measure which text, and which score, finds the retrieval heads that facts need, and which window is best.

    python -m benchmarks.evict.bench_head_scores --models smollm2 --texts 12

Documents with everyday facts (bench_facts.py) are prefilled once on the full cache. Then each head set is tried on
copies, whose streaming heads keep the first tokens and a window: for SmolLM2 the loss differs by less than its standard
error from that of a prefill on streaming heads, and a row takes a tenth of the time.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.evict.bench_facts import PLAIN, answer, scenes
from benchmarks.evict.everyday_facts import Scene
from benchmarks.reports import ALL_NAMES, named_model, save
from mlx_tq.cache.headwise import HeadwiseKVCache
from mlx_tq.cli.head_calibration import SINKS, WINDOW, mean_ranks, share_of_best, watch_repetition
from mlx_tq.cli.inputs import load_text
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.session.restore import prefill

SOURCE = Path(__file__).parents[2] / "mlx_tq" / "session" / "session.py"  # as an example of code
SHARES = (0.5, 0.1, 0.02)  # of all rows that count as needed
RETRIEVAL = 0.21  # share of the heads, unless it and the window of the others are varied
VARIED = ((0.27, 96), (0.24, 128), (0.17, 192), (0.08, 256))  # the same rows at 950 tokens
Answers = list[list[tuple[float, bool]]]  # of each document and question


def calibrations(tokenizer: Any) -> Iterator[tuple[str, str, int]]:
    """Yield texts to measure heads on: name, text and number of tokens."""
    text = load_text()
    yield "WikiText, 1,024 tokens", text, 1024
    yield "WikiText, 256 tokens", text, 256
    yield "another part of WikiText, 1,024 tokens", text[len(text) // 2 :], 1024
    yield "code, 1,024 tokens", SOURCE.read_text(encoding="utf-8"), 1024
    yield "facts in WikiText, 1,000 tokens", tokenizer.decode(scenes(tokenizer, 1000, 40, None)[-1].ids), 1000


def divided(layer: Any, retrieval: list[int], window: int) -> Any:
    """Return a copy of a layer's cache, whose other heads keep the first tokens and a window."""
    heads = layer.packed_rows()[0].shape[1]
    if len(retrieval) == heads:
        return layer.fork()
    state = dict(layer.state)
    rows, streaming = state.pop("rows"), [head for head in range(heads) if head not in retrieval]
    spec = replace(layer.spec, retrieval_heads=tuple(retrieval), head_sinks=SINKS, head_window=window)
    state |= {"spec": json.dumps(spec.to_dict()), "rows": mx.take(rows, mx.array(streaming), axis=1)}
    if retrieval:
        state["retrieval_rows"] = mx.take(rows, mx.array(retrieval), axis=1)
    cache = HeadwiseKVCache.from_state(state)
    positions = cache.packed_positions
    kept = np.flatnonzero((positions < SINKS) | (positions >= cache.offset - window))
    cache.compact(kept, positions[kept])
    return cache


def measure(name: str, tokens: int, texts: int) -> Iterator[dict[str, Any]]:
    model, tokenizer = named_model(name)
    asked, plan = scenes(tokenizer, tokens, texts, None), plan_caches(model, PLAIN)
    documents = []
    for scene in asked:
        documents.append(build_caches(plan))
        with compressed_attention(model):
            prefill(model, documents[-1], scene.ids, tokens)
    full = answers(model, asked, documents)

    def row(label: str, heads: list[np.ndarray], retrieval: float, window: int) -> dict[str, Any]:
        scores = np.stack(heads)
        best = np.argsort(-scores.reshape(-1), kind="stable")[: round(retrieval * scores.size)]
        is_retrieval = np.isin(np.arange(scores.size), best).reshape(scores.shape)
        caches = [
            [
                divided(layer, np.flatnonzero(heads).tolist(), window)
                for layer, heads in zip(doc, is_retrieval, strict=True)
            ]
            for doc in documents
        ]
        found = answers(model, asked, caches)
        losses = [
            np.mean([a - b for (a, _), (b, _) in zip(*pair, strict=True)]) for pair in zip(found, full, strict=True)
        ]
        return {
            "model": ALL_NAMES[name],
            "tokens": tokens,
            "scores": label,
            "retrieval_heads": len(best),
            "window": window,
            "questions": sum(map(len, found)),
            "difference": float(np.mean(losses)),
            "error": float(np.std(losses, ddof=1) / len(losses) ** 0.5),
            "right": sum(is_right for document in found for _, is_right in document),
            "right_full": sum(is_right for document in full for _, is_right in document),
        }

    for number, (label, text, length) in enumerate(calibrations(tokenizer)):
        weights, changes = watch_repetition(model, tokenizer, text, length)
        for share in SHARES if number == 0 else SHARES[1:2]:
            yield row(f"{label}, best {share:.0%} of rows", share_of_best(weights, share), RETRIEVAL, WINDOW)
        yield row(f"{label}, change of the output", changes, RETRIEVAL, WINDOW)
        both = mean_ranks(share_of_best(weights), changes)
        yield row(f"{label}, both", both, RETRIEVAL, WINDOW)
        if number == 0:
            yield from (row(f"{label}, both", both, *varied) for varied in VARIED)


def answers(model: Any, asked: list[Scene], documents: list[list[Any]]) -> Answers:
    return [
        [answer(model, copy.deepcopy(caches), question) for question in scene.questions]
        for scene, caches in zip(asked, documents, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2", help="of benchmarks.reports, joined by commas")
    parser.add_argument("--tokens", type=int, default=950)
    parser.add_argument("--texts", type=int, default=12, help="texts, with eight questions each")
    parser.add_argument("--json", default="evict_head_scores.json")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        for found in measure(name, args.tokens, args.texts):
            print(found, flush=True)
            rows.append(found)
    command = f"python -m benchmarks.evict.bench_head_scores --models {args.models} --tokens {args.tokens}"
    save(args.json, f"{command} --texts {args.texts}", rows=rows)


if __name__ == "__main__":
    main()
