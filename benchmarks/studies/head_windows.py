"""Ask whether a window for each streaming head keeps more than one window for all of them, at the same rows.

    python -m benchmarks.studies.head_windows

The retrieval heads are those of the policy `heads` at `--share` of `--tokens` tokens. One arm gives all other heads the
policy's window. In the others each head has its own: rows go where they change the outputs of these heads least, on
another part of the text, as the squared change of a head's output divided by the squared outputs of its layer and all
before it. Everyday facts (bench_facts.py) are asked, and text is read, with masks on a full cache in float32.
"""

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.evict.bench_facts import answer, scenes
from benchmarks.reports import ALL_NAMES, named_model, save
from mlx_tq.cli.inputs import load_text
from mlx_tq.kernels.mlx_attention import attend_in_full_precision
from mlx_tq.kernels.regions import Mask
from mlx_tq.models import fingerprint
from mlx_tq.policies.heads import LEAST_WINDOW, Division, divide_heads
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import find_head_scores, log_probabilities
from mlx_tq.prompt_cache.recording import Attended, WatchedCache, watched_caches
from mlx_tq.session.restore import prefill

SINKS = 32
STEP = 512
WINDOWS = (96, 128, 160, 192, 256, 320, 384, 512, 640, 768)
EVERYTHING = 2**30


def near(keys: mx.array, queries: mx.array, windows: mx.array) -> mx.array:
    """Return which rows the queries see, [H, L, S], if the heads have these windows."""
    position = mx.arange(keys.shape[2])
    query = position[-queries.shape[2] :, None]
    return (position <= query) & ((position < SINKS) | (position > query - windows[:, None, None]))


def masked_caches(model: Any, windows: Sequence[Sequence[int]]) -> list[Any]:
    """Return caches whose KV heads see the first tokens and their own windows only."""

    def attend(
        of_heads: mx.array,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array:
        visible = mx.repeat(near(keys, queries, of_heads), queries.shape[1] // keys.shape[1], axis=0)
        return attend_in_full_precision(queries, keys, values, scale=scale, mask=visible, sinks=sinks)

    return [WatchedCache(partial(attend, mx.array(of_heads))) for of_heads in windows]


def text_changes(model: Any, ids: list[int]) -> np.ndarray:
    """Return how much each window changes the outputs of each head while a text is read: [layers, H, windows]."""
    sums: dict[int, mx.array] = {}

    def watch(number: int, attended: Attended) -> None:
        heads, output = attended.keys.shape[1], attended.output.astype(mx.float32)
        squares = [mx.square(output).reshape(heads, -1).sum(axis=-1)]
        for window in WINDOWS:
            visible = near(attended.keys, attended.queries, mx.array([window]))
            other = attend_in_full_precision(
                attended.queries, attended.keys, attended.values, scale=attended.scale, mask=visible, sinks=None
            )
            squares.append(mx.square(output - other.astype(mx.float32)).reshape(heads, -1).sum(axis=-1))
        sums[number] = sums.get(number, mx.array(0.0)) + mx.stack(squares, axis=-1)
        mx.eval(sums[number])

    with compressed_attention(model):
        prefill(model, watched_caches(model, watch), ids, STEP)
    layers = np.stack([np.array(sums[number]) for number in sorted(sums)])
    return layers[..., 1:] / np.cumsum(layers[..., 0].sum(axis=1))[:, None, None]


def own_windows(changes: np.ndarray, rows: float) -> np.ndarray:
    """Return the windows of n heads that change least, [n, windows] changes, of those that take at most `rows` rows."""
    sizes, low, high = np.array(WINDOWS), 0.0, 1.0  # prices of a row
    for _ in range(60):
        price = (low + high) / 2
        if sizes[np.argmin(changes + price * sizes, axis=1)].sum() > rows:
            low = price
        else:
            high = price
    windows: np.ndarray = sizes[np.argmin(changes + high * sizes, axis=1)]
    return windows


def make_arms(division: Division, changes: np.ndarray) -> dict[str, np.ndarray]:
    """Return the windows of all heads [layers, H] for each arm."""
    layers, heads = changes.shape[:2]
    one = np.full((layers, heads), division.window)
    for layer, retrieval in enumerate(division.retrieval_heads):
        one[layer, list(retrieval)] = EVERYTHING
    streaming = one == division.window
    own = one.copy()
    own[streaming] = own_windows(changes[streaming], division.window * streaming.sum())
    return {"one window": one, "own windows": own}


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = named_model(name)
    text = list(tokenizer.encode(load_text(), add_special_tokens=False, verbose=False))
    changes = text_changes(model, text[len(text) // 2 :][: args.tokens])
    asked, scores = scenes(tokenizer, args.tokens, args.texts, None), find_head_scores(fingerprint(model))
    if scores is None:
        raise SystemExit(f"measure the heads first: mlx_tq.calibrate --model {name} --heads")
    chunks = [text[i * args.tokens : (i + 1) * args.tokens] for i in range(args.chunks)]

    def run(windows: np.ndarray) -> tuple[list[list[tuple[float, bool]]], list[float]]:
        found = []
        with compressed_attention(model):
            for scene in asked:
                caches = masked_caches(model, windows)
                prefill(model, caches, scene.ids, STEP)
                found.append([answer(model, copy.deepcopy(caches), question) for question in scene.questions])
            losses = [text_loss(model, masked_caches(model, windows), ids) for ids in chunks]
        return found, losses

    full, full_losses = run(np.full(changes.shape[:2], EVERYTHING))
    rows = []
    for window in args.windows:
        division = divide_heads(scores.scores, args.share / 100, args.tokens, SINKS, LEAST_WINDOW, window)
        for label, windows in make_arms(division, changes).items():
            found, losses = run(windows)
            of_texts = [
                np.mean([a - b for (a, _), (b, _) in zip(*pair, strict=True)]) for pair in zip(found, full, strict=True)
            ]
            of_chunks = 100 * np.expm1(np.subtract(losses, full_losses))
            held = np.minimum(args.tokens, SINKS + windows).mean() / args.tokens
            rows.append(
                {
                    "model": ALL_NAMES[name],
                    "tokens": args.tokens,
                    "arm": label,
                    "retrieval_heads": division.num_retrieval,
                    "mean_window": float(windows[windows < EVERYTHING].mean()),
                    "held": float(held),
                    "difference": float(np.mean(of_texts)),
                    "error": float(np.std(of_texts, ddof=1) / len(of_texts) ** 0.5),
                    "questions": sum(map(len, found)),
                    "right": sum(is_right for document in found for _, is_right in document),
                    "right_full": sum(is_right for document in full for _, is_right in document),
                    "perplexity_change_%": float(of_chunks.mean()),
                    "perplexity_error": float(of_chunks.std(ddof=1) / len(of_chunks) ** 0.5),
                }
            )
            print(rows[-1], flush=True)
    return rows


def text_loss(model: Any, caches: list[Any], ids: list[int]) -> float:
    """Return the mean loss of a text's tokens."""
    scores = np.concatenate([log_probabilities(model, ids[i : i + STEP], caches) for i in range(0, len(ids), STEP)])
    return -float(np.take_along_axis(scores[:-1], np.array(ids[1:])[:, None], axis=1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2", help="of benchmarks.reports, joined by commas")
    parser.add_argument("--tokens", type=int, default=950)
    parser.add_argument("--share", type=float, default=40, help="percent of the rows to keep")
    parser.add_argument("--windows", type=int, nargs="*", default=[160, 320], help="mean windows to try")
    parser.add_argument("--texts", type=int, default=15, help="texts with eight questions each")
    parser.add_argument("--chunks", type=int, default=5, help="pieces of running text")
    parser.add_argument("--json", default="evict_head_windows.json")
    args = parser.parse_args()
    rows = [row for name in args.models.split(",") for row in measure(name, args)]
    command = f"python -m benchmarks.studies.head_windows --models {args.models} --tokens {args.tokens}"
    command += f" --share {args.share:g} --windows {' '.join(map(str, args.windows))}"
    command += f" --texts {args.texts} --chunks {args.chunks}"
    save(args.json, command, rows=rows)


if __name__ == "__main__":
    main()
