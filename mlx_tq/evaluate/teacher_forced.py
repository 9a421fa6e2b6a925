"""Predict every token of a text from the true ones before it, on several caches side by side.

The log-probabilities reduce to perplexity, and to the divergence from the predictions of the uncompressed cache.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.region_map import SCALE_READY
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import SCHEDULE
from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.evaluate.arms import Arm, compared_caches
from mlx_tq.evaluate.inspection import check_evicted, eviction_counts, packed_tokens, reseed_random
from mlx_tq.evaluate.results import Advance, Record
from mlx_tq.evaluate.standard_error import count_clusters, cut_clusters, standard_error
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities

TOP = 5


@dataclass(frozen=True)
class TokenScores:
    """How one arm predicted each scored token; N is the number of tokens."""

    nll: np.ndarray  # [N], negative log-likelihood of the true next token in nats
    kld: np.ndarray  # [N], KL divergence from the uncompressed cache's prediction in nats
    agrees: np.ndarray  # [N], the most likely next token is that of the uncompressed cache
    in_top: np.ndarray  # [N], the uncompressed cache's most likely next token is among the TOP most likely
    clusters: np.ndarray  # [N], the number of the part of the text that each token is in
    packed: float  # share of the attended tokens that was packed
    nbytes: int  # of all caches after the last chunk, unused capacity included
    rounds: int = 0  # of eviction, in all chunks
    live_share: float = 1.0  # of the tokens of the last chunk, still in the caches at its end
    seconds: float = 0.0  # of the last chunk, where the arms take turns step by step

    @classmethod
    def join(cls, steps: Sequence[np.ndarray], clusters: np.ndarray, **measured: Any) -> "TokenScores":
        """Return the scores of all steps, each as `score_step` returns it; raise NonFiniteError if one is NaN."""
        joined = np.concatenate(steps, axis=1)
        if not np.isfinite(joined).all():
            raise NonFiniteError("the model's logits are NaN on this text. Check its weights, or load it in float32.")
        nll, kld, agrees, in_top = joined
        return cls(nll, kld, agrees.astype(bool), in_top.astype(bool), clusters, **measured)


def cut_chunks(tokenizer: Any, text: str, chunks: int, length: int) -> list[list[int]]:
    if chunks < 1:
        raise ConfigError(f"chunks is {chunks}; it must be 1 or more, and 3 for a figure to publish.")
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    if len(ids) < chunks * length:
        raise ConfigError(
            f"the text has {len(ids):,} tokens; {chunks} chunks of {length:,} need {chunks * length:,}. Give a longer "
            "text, fewer --chunks or a smaller --length."
        )
    return [ids[start : start + length] for start in range(0, chunks * length, length)]


def check_length(model: Any, length: int) -> None:
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ConfigError(f"the length is {length:,}; the model allows {limit:,} positions. Use a smaller --length.")


def check_steps(model: Any, length: int, step: int, arms: Sequence[Arm]) -> None:
    """Raise ConfigError for a length beyond the model's positions, or one at which an arm reads no packed token."""
    check_length(model, length)
    if step < 1:
        raise ConfigError(f"step is {step}; it must be 1 or more, such as 512.")
    if length < 2 or length - 1 <= step:
        raise ConfigError(
            f"{length} tokens in steps of {step} leave none to score, for those of the first step attend to nothing "
            f"packed. Use a --length above {step + 1} or a smaller --step."
        )
    check_packed(arms, (length - 2) // step * step, f"{length} tokens in steps of {step}")


def check_packed(arms: Sequence[Arm], last: int, what: str) -> None:
    """Raise ConfigError if an arm has packed nothing after `last` tokens; `what` reads them, in the message."""
    for arm in arms:
        config = arm.config
        spec = CacheSpec.for_layer(config, 0, *(side.split(SCHEDULE)[0] for side in (config.key, config.value)))
        if not config.is_off and spec.packed_until(last) == config.sinks:
            raise ConfigError(
                f"{what} never read a packed one with sinks {config.sinks} and window {config.window}. Use a longer "
                f"--length, or a smaller --step, --kv-sinks or --kv-window.{normalization_hint(spec, last)}"
            )


def normalization_hint(spec: CacheSpec, tokens: int) -> str:
    """Return a remedy for an error message if nothing is packed because keys are normalized, else nothing."""
    if replace(spec, normalize=False).packed_until(tokens) == spec.sinks:
        return ""
    return f" Or add --kv-normalize off: normalized keys pack none before {SCALE_READY} tokens were read."


def score_text(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int = 512, advance: Advance = lambda tokens: None
) -> list[TokenScores]:
    """Score every token after the first step of each chunk, for the uncompressed cache and then for each arm.

    All arms take a step before any takes the next, so that the logits of one step are in memory, not those of a chunk.
    The tokens of the first step attend to nothing packed and are not scored. An uncompressed arm reads the first token
    alone, so that all later ones round differently on any backend.
    """
    check_steps(model, min(map(len, chunks)), step, arms)
    makers = compared_caches(model, arms, max(map(len, chunks)))
    is_control = [False, *(arm.config.is_off for arm in arms)]
    scores: list[list[np.ndarray]] = [[] for _ in makers]  # each [4, L] of every step
    attended, packed, rounds = 0, [0] * len(makers), [0] * len(makers)
    with compressed_attention(model):
        for number, ids in enumerate(chunks):
            caches_of_arms = [make() for make in makers]
            for caches in caches_of_arms:
                reseed_random(caches, number)
            seconds = [0.0] * len(makers)  # of the last chunk alone: kernels were compiled in an earlier one
            for start in range(0, len(ids) - 1, step):
                stop = min(start + step, len(ids) - 1)
                attended += sum(range(start + 1, stop + 1)) if start else 0
                reference: mx.array | None = None
                for arm, caches in enumerate(caches_of_arms):
                    packed_before = packed_tokens(caches)
                    started = time.perf_counter()
                    alone = int(is_control[arm] and start == 0 and stop > 1)
                    parts = ids[start : start + alone], ids[start + alone : stop]
                    predictions = [log_probabilities(model, part, caches) for part in parts if part][-1]
                    mx.eval(predictions)
                    seconds[arm] += time.perf_counter() - started
                    advance(stop - start)
                    reference = predictions if reference is None else reference
                    if start:
                        packed[arm] += packed_before * (stop - start)
                        scores[arm].append(score_step(reference, predictions, ids[start + 1 : stop + 1]))
            for arm, caches in enumerate(caches_of_arms):
                if arm:
                    check_evicted(arms[arm - 1].name, caches)
                rounds[arm] += eviction_counts(caches)[0]
    clusters = cut_clusters([len(ids) - 1 - step for ids in chunks])
    return [
        TokenScores.join(
            steps,
            clusters,
            packed=packed[arm] / attended,
            nbytes=sum(cache.nbytes for cache in caches_of_arms[arm]),
            rounds=rounds[arm],
            live_share=eviction_counts(caches_of_arms[arm])[1],
            seconds=seconds[arm],
        )
        for arm, steps in enumerate(scores)
    ]


def score_step(reference: mx.array, predictions: mx.array, targets: list[int]) -> np.ndarray:
    """Return `nll`, `kld`, `agrees` and `in_top` of each token: [4, L]."""
    nll = -mx.take_along_axis(predictions, mx.array(targets)[:, None], axis=-1)[:, 0]
    best = reference.argmax(axis=-1)
    agrees = best == predictions.argmax(axis=-1)
    above = (predictions > mx.take_along_axis(predictions, best[:, None], axis=-1)).sum(axis=-1)
    parts = (nll, kl_divergence(reference, predictions), agrees, above < TOP)
    return np.array(mx.stack([part.astype(mx.float32) for part in parts]), dtype=np.float64)


def perplexity(name: str, scores: TokenScores, baseline: np.ndarray) -> Record:
    """Return the perplexity of an arm, and its change in percent from the uncompressed cache, of nll `baseline` [N].

    `delta_error` comes from the differences token by token, and is far smaller than `ppl_error`.
    """
    ppl = math.exp(scores.nll.mean())
    difference = scores.nll - baseline
    ratio = math.exp(difference.mean())
    return {
        "name": name,
        "tokens": len(scores.nll),
        "ppl": ppl,
        "ppl_error": ppl * standard_error(scores.nll, scores.clusters),
        "delta": 100 * (ratio - 1),
        "delta_error": 100 * ratio * standard_error(difference, scores.clusters),
        "packed": scores.packed,
        "clusters": count_clusters(scores.clusters),
        "nbytes": scores.nbytes,
        "kept": scores.live_share,
        "rounds": scores.rounds,
        "seconds": scores.seconds,
    }


def divergence(name: str, scores: TokenScores, other: TokenScores | None = None) -> Record:
    """Return the KL divergence of one arm in nats, and the percentage of equal most likely tokens.

    With the scores of another arm, it includes the difference from its divergence, paired token by token.
    """
    paired = {}
    if other is not None:
        change = scores.kld - other.kld
        paired = {"kld_change": float(change.mean()), "kld_change_error": standard_error(change, scores.clusters)}
    median, high = np.quantile(scores.kld, [0.5, 0.99])
    return {
        "name": name,
        "tokens": len(scores.kld),
        "kld": float(scores.kld.mean()),
        "kld_error": standard_error(scores.kld, scores.clusters),
        **paired,
        "kld_median": float(median),
        "kld_99": float(high),
        "top1": 100 * float(scores.agrees.mean()),
        "top1_error": 100 * standard_error(scores.agrees.astype(np.float64), scores.clusters),
        "packed": scores.packed,
        "clusters": count_clusters(scores.clusters),
    }
