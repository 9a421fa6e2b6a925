"""Measure once for a model which KV heads need distant tokens, for the policy `heads`.

The model reads a text and an instruction to repeat it, and is then shown the text again (KVzip, Kim et al., arXiv
2505.23416). A row of the first reading has as its score the largest weight that a query of the second gives it; a head,
the share of its rows among the best tenth of all rows of all heads.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cli.model_calibration import PacedPrefill
from mlx_tq.cli.screen import note, prefill_progress
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import HeadScores, head_scores_path, make_folder, save_measurements
from mlx_tq.prompt_cache.recording import Attended, watched_caches
from mlx_tq.prompt_cache.row_weights import repetition, row_weights
from mlx_tq.session.restore import ProgressCallback

TOKENS = 1024
BEST = 0.1  # share of all rows that count as needed; with half of them, many heads have nearly all rows


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
    weights = largest_weights(model, tokenizer, text, tokens, progress=progress)
    threshold = np.quantile(np.concatenate(weights), 1 - BEST)
    scores = tuple(tuple((layer >= threshold).mean(axis=1).tolist()) for layer in weights)
    return HeadScores(scores, weights[0].shape[1])


def largest_weights(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int,
    *,
    progress: ProgressCallback = lambda done, total: None,
) -> list[np.ndarray]:
    """Return the largest weight that repeating a text gives each of its rows, fp32 [H, tokens] of each layer."""
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:tokens]
    repeat = repetition(model, tokenizer, ids)
    best: dict[int, mx.array] = {}

    def watch(number: int, attended: Attended) -> None:
        if attended.keys.shape[2] > len(ids):  # of the second reading
            weights = row_weights(attended.queries, attended.keys, attended.scale, attended.sinks)[:, : len(ids)]
            best[number] = mx.maximum(best[number], weights) if number in best else weights
            mx.eval(best[number])

    caches = watched_caches(model, watch)
    prefill = PacedPrefill(model, len(ids) + len(repeat), progress)
    with compressed_attention(model):
        prefill.run(caches, ids)
        prefill.run(caches, repeat)
    ranks = ranks_of(model)
    return [ranks.gather(np.array(best[number])) for number in sorted(best)]
