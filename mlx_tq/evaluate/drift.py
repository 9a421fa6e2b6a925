"""What the number of tokens read at a time changes.

A token's place in the cache depends on the length alone, and so do the first layer's codes. A later layer's tokens come
from attention, which within a step sees the step's own tokens in the model's type and everything older packed: with
smaller steps it meets packed tokens sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.passes import Advance, check_positions_of, steps
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.prompt_cache.predictions import kl_divergence, log_probabilities


@dataclass(frozen=True)
class DriftRow:
    """One arm read in steps of one size, against the same arm read at once.

    Attributes:
        name: of the arm.
        step: tokens read at a time.
        first_layer: of the first layer's packed vectors, how many have other codes or scales; None where none are.
        later_layers: of the later layers' packed vectors, the percentage that has, or None.
        kld: mean KL divergence of the predictions in nats.
        logits: root mean square change of the log-probabilities over that of the log-probabilities themselves.
        top1: percent of tokens with the same most likely next token.
    """

    name: str
    step: int
    first_layer: int | None
    later_layers: float | None
    kld: float
    logits: float
    top1: float


def check_arm(arm: Arm) -> None:
    """Raise where the drift of an arm means nothing.

    Raises:
        ConfigError: it evicts.
    """
    if arm.config.evict is not None:
        raise ConfigError(
            f"{arm.name} evicts; drift compares the packed rows of the same tokens. Drop --kv-evict, or measure "
            "perplexity with several --step."
        )


def measure_drift(
    model: Any, ids: list[int], arm: Arm, sizes: Sequence[int], advance: Advance = lambda tokens: None
) -> list[DriftRow]:
    """Read `ids` in steps of each size and compare with reading them at once. The arm `off` is the control.

    Raises:
        ConfigError: more tokens than the model has positions, or an arm that evicts.
    """
    check_arm(arm)
    check_positions_of(model, len(ids))
    make = arm.caches(model)
    whole, whole_rows = _read(model, ids, make(), len(ids), advance)
    rows = []
    for size in sizes:
        found, found_rows = _read(model, ids, make(), size, advance)
        changed = [_changed(a, b) for a, b in zip(whole_rows, found_rows, strict=True)]
        tokens = sum(a.shape[0] * a.shape[1] * a.shape[2] for a in whole_rows[1:])
        rows.append(
            DriftRow(
                name=arm.name,
                step=size,
                first_layer=changed[0] if changed else None,
                later_layers=100 * sum(changed[1:]) / tokens if tokens else None,
                kld=float(kl_divergence(whole, found).mean()),
                logits=float(mx.sqrt(mx.square(whole - found).mean() / mx.square(whole).mean())),
                top1=100 * float((whole.argmax(axis=-1) == found.argmax(axis=-1)).mean()),
            )
        )
    return rows


def _read(
    model: Any, ids: list[int], caches: list[Any], step: int, advance: Advance
) -> tuple[mx.array, list[mx.array]]:
    """Log-probabilities [L, V] after each token, and the packed rows [B, H, S, W] of each compressed cache."""
    parts = []
    with compressed(model):
        for start, stop in steps(len(ids), step):
            parts.append(log_probabilities(model, ids[start:stop], caches))
            mx.eval(parts[-1])
            advance(stop - start)
    packed = [cache.state[2] for cache in compressed_caches(caches)]
    return mx.concatenate(parts), [rows for rows in packed if rows is not None]


def _changed(a: mx.array, b: mx.array) -> int:
    """How many rows differ."""
    return int(mx.any(a != b, axis=-1).sum())
