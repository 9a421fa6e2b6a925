"""Score texts whose every token is packed before attention reads it: the harshest measurement of a format."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.evaluate.arms import Arm, compared_caches
from mlx_tq.evaluate.results import Advance
from mlx_tq.evaluate.standard_error import cut_clusters
from mlx_tq.evaluate.teacher_forced import TokenScores, check_length, score_step
from mlx_tq.kernels.mlx_attention import attention
from mlx_tq.kernels.regions import Mask
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, planner
from mlx_tq.prompt_cache.measurements import log_probabilities
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recording import WatchedCache

TAIL = 64  # tokens that are read after a piece, so that all of its own are packed


def score_all_packed(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], advance: Advance = lambda tokens: None
) -> list[TokenScores]:
    """Score every token of each chunk, in one pass for the uncompressed cache and for each arm.

    An uncompressed arm reads the first token alone, as in `score_text`.
    """
    length = len(chunks[0])
    check_length(model, length + TAIL)
    plan = planner(model)
    plans = [None, *(None if arm.config.is_off else plan(arm.config) for arm in arms)]
    for arm, planned in zip(arms, plans[1:], strict=True):
        if planned is not None:
            _check_all_packed(arm.name, planned, length)
    makers = compared_caches(model, arms, length + TAIL)
    scores: list[list[np.ndarray]] = [[] for _ in plans]
    with compressed_attention(model):
        for ids, after in zip(chunks, [*chunks[1:], chunks[0]], strict=True):
            reference: mx.array | None = None
            for number, planned in enumerate(plans):
                caches = makers[number]() if planned is None else _packing_caches(planned)
                alone = int(number > 0 and planned is None)
                parts = ids[:alone], [*ids[alone:], *after[:TAIL]]
                read = mx.concatenate([log_probabilities(model, part, caches) for part in parts if part])
                predictions = read[: length - 1]
                reference = predictions if reference is None else reference
                scores[number].append(score_step(reference, predictions, ids[1:]))
                advance(length - 1)
    clusters = cut_clusters([length - 1] * len(chunks))
    return [
        TokenScores.join(
            of_chunks,
            clusters,
            packed=float(planned is not None),
            nbytes=plan(arms[0].config).native_nbytes(length) if planned is None else planned.nbytes(length),
        )
        for planned, of_chunks in zip(plans, scores, strict=True)
    ]


def _check_all_packed(name: str, plan: Plan, length: int) -> None:
    if plan.eviction is not None:
        raise ConfigError(f"{name} evicts, and --protocol reads each piece in one pass. Drop --kv-evict.")
    if any(layer.slot.part is not None or layer.slot.latent for layer in plan.layers):
        raise UnsupportedModelError(f"{plan.model_type} has caches of several parts, which --protocol does not read.")
    if any(layer.spec.sinks or layer.spec.packed_until(length + TAIL) < length for layer in plan.layers):
        raise ConfigError(
            f"--protocol packs all tokens; {name} leaves some of {length} unpacked. Use --kv-sinks 0, --kv-window 0 "
            "and a --length of 136 or more."
        )


def _packing_caches(plan: Plan) -> list[Any]:
    caches = plan.native_caches()
    for layer in plan.layers:
        caches[layer.slot.index] = WatchedCache(partial(_attend_packed, layer.spec))
    return caches


def _attend_packed(
    spec: CacheSpec,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    cache = make_cache(spec)
    cache.append(keys, values).attend(queries, scale, mask, sinks)  # keys are normalized by queries
    stored = (handle.materialize() for handle in cache.keys_and_values())
    return attention(queries, *stored, scale=scale, mask=mask, sinks=sinks)
