"""Measure once for a model which KV heads need distant tokens, for the policy `heads`.

The model reads a text and an instruction to repeat it, and is then shown the text again (KVzip, Kim et al., arXiv
2505.23416). Two measures of a head are combined, because either alone misses heads on some texts: how many of the rows
that the repetition needs most are its own, and how much its output changes if it sees only sinks and window.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cli.model_calibration import PacedPrefill
from mlx_tq.cli.screen import note, prefill_progress
from mlx_tq.errors import ConfigError
from mlx_tq.kernels.mlx_attention import attend_in_full_precision
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import HeadScores, head_scores_path, make_folder, save_measurements
from mlx_tq.prompt_cache.recording import Attended, watched_caches
from mlx_tq.prompt_cache.row_weights import repetition, row_weights
from mlx_tq.session.restore import ProgressCallback

TOKENS = 1024
BEST = 0.1  # share of all rows that count as needed; with half of them, many heads have nearly all rows
SINKS, WINDOW = 32, 160  # tokens that a streaming head sees


def save_head_scores(model: Any, tokenizer: Any, text: str, name: str) -> None:
    """Measure and save the scores of a model's heads, with progress on the screen."""
    path = head_scores_path(fingerprint(model))
    make_folder(path)  # before the work, not after it
    with prefill_progress(title=f"Measuring the KV heads of {name} (first run only)") as progress:
        scores = measure_head_scores(model, tokenizer, text, progress=progress)
    save_measurements(path, scores)
    note(f"Saved the scores of its heads to {path}")


def measure_head_scores(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int = TOKENS,
    *,
    progress: ProgressCallback = lambda done, total: None,
) -> HeadScores:
    """Return the scores of all KV heads of the layers that can be compressed, on the first `tokens` of a text."""
    weights, changes = watch_repetition(model, tokenizer, text, tokens, progress=progress)
    scores = mean_ranks(share_of_best(weights), changes)
    return HeadScores(tuple(tuple(layer.tolist()) for layer in scores), weights[0].shape[1])


def watch_repetition(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int,
    *,
    progress: ProgressCallback = lambda done, total: None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Let a model repeat a text, and return for each layer what its KV heads read.

    - weights: fp32 [H, tokens], the largest weight that any query of the repetition gives each row of the text
    - changes: fp32 [H], how much the output changes if a head sees sinks and window only: the squared change, divided
      by the summed squares of the outputs of this layer and all before it
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:tokens]
    if len(ids) < tokens:
        raise ConfigError(f"heads are measured on {tokens} tokens; the text has {len(ids)}. Give a longer --text.")
    repeat = repetition(model, tokenizer, ids)
    weights: dict[int, mx.array] = {}
    squares: dict[int, mx.array] = {}  # [2, H]: of changes and of outputs, summed over queries

    def watch(number: int, attended: Attended) -> None:
        if attended.keys.shape[2] > len(ids):  # of the second reading
            of_rows = row_weights(attended.queries, attended.keys, attended.scale, attended.sinks)[:, : len(ids)]
            of_heads = _squares(attended)
            if number in weights:
                of_rows, of_heads = mx.maximum(weights[number], of_rows), squares[number] + of_heads
            mx.eval(of_rows, of_heads)
            weights[number], squares[number] = of_rows, of_heads

    caches = watched_caches(model, watch)
    prefill = PacedPrefill(model, len(ids) + len(repeat), progress)
    with compressed_attention(model):
        prefill.run(caches, ids)
        prefill.run(caches, repeat)
    ranks, layers = ranks_of(model), sorted(weights)
    changed, outputs = zip(*(ranks.gather(np.array(squares[number]).T).T for number in layers), strict=True)
    changes = [of_heads / total for of_heads, total in zip(changed, np.cumsum([*map(np.sum, outputs)]), strict=True)]
    return [ranks.gather(np.array(weights[number])) for number in layers], changes


def _squares(attended: Attended) -> mx.array:
    """Return the squared change of each KV head's output if it sees sinks and window only, and the output: [2, H]."""
    heads, total = attended.keys.shape[1:3]
    position = mx.arange(total)
    query = position[-attended.queries.shape[2] :, None]
    mask = (position <= query) & ((position < SINKS) | (position > query - WINDOW))
    near = attend_in_full_precision(
        attended.queries, attended.keys, attended.values, scale=attended.scale, mask=mask, sinks=attended.sinks
    )
    output = attended.output.astype(mx.float32)
    both = mx.stack([output - near.astype(mx.float32), output])
    return mx.square(both).reshape(2, heads, -1).sum(axis=-1)


def share_of_best(weights: list[np.ndarray], best: float = BEST) -> list[np.ndarray]:
    """Return for each head the share of its rows among the `best` share of all rows."""
    threshold = np.quantile(np.concatenate(weights), 1 - best)
    return [(layer >= threshold).mean(axis=1) for layer in weights]


def mean_ranks(*measures: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each head the mean of its ranks, where a rank is the share of heads that measure less."""
    flat = [np.concatenate(measure) for measure in measures]
    ranks = [(measure[:, None] > measure).mean(axis=1) for measure in flat]
    return np.split(np.mean(ranks, axis=0), np.cumsum([len(layer) for layer in measures[0]])[:-1])
