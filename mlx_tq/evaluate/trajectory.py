"""Compare the answer that each cache generates by itself, in which errors accumulate, with the uncompressed cache's.

All answers to a prompt use the same random numbers, so differences come from the cache alone. The KL divergence is from
the uncompressed cache's prediction after the same tokens, which also decodes them one by one, with the same rounding.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.evaluate.arms import Arm, compared_caches
from mlx_tq.evaluate.inspection import check_evicted, reseed_random
from mlx_tq.evaluate.results import Advance, Record
from mlx_tq.evaluate.standard_error import standard_error
from mlx_tq.evaluate.teacher_forced import check_packed
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities
from mlx_tq.session.restore import prefill


@dataclass(frozen=True)
class Trajectories:
    """The answers of one arm to S prompts, of N tokens each."""

    tokens: np.ndarray  # [S, N]
    kld: np.ndarray  # [S, N], of the uncompressed cache's prediction after the same tokens, in nats


def run_trajectories(
    model: Any,
    prompts: Sequence[list[int]],
    arms: Sequence[Arm],
    *,
    answer: int,
    step: int = 512,
    temp: float = 0.0,
    seed: int = 0,
    advance: Advance = lambda tokens: None,
) -> list[Trajectories]:
    """Return the answers of the uncompressed cache and then those of each arm; `temp` 0 is greedy.

    An uncompressed arm reads the first token alone, as in `score_text`.
    """
    longest, limit = max(map(len, prompts)), position_limit(model)
    if limit is not None and longest + answer > limit:
        raise ConfigError(
            f"{longest:,} tokens of a prompt and {answer:,} of its answer exceed the model's {limit:,} positions."
            " Use a smaller --length or --answer-tokens."
        )
    last = min(map(len, prompts)) - 1
    check_packed(arms, last, f"answers after {last + 1:,} tokens")
    makers = compared_caches(model, arms, longest + answer)
    is_control = [False, *(arm.config.is_off for arm in arms)]
    answers: list[list[tuple[list[int], list[float]]]] = [[] for _ in makers]
    with compressed_attention(model):
        for number, prompt in enumerate(prompts):
            keys = mx.random.split(mx.random.key(seed + number), answer)
            reference = makers[0]()
            prefill(model, reference, prompt[:-1], step)
            for arm, make in enumerate(makers):
                caches = make()
                reseed_random(caches, number)
                alone = int(is_control[arm] and len(prompt) > 2)
                if alone:
                    prefill(model, caches, prompt[:1], step)
                prefill(model, caches, prompt[alone:-1], step)
                answers[arm].append(_write(model, caches, copy.deepcopy(reference), prompt[-1], keys, temp, advance))
                if arm:
                    check_evicted(arms[arm - 1].name, caches)
    return [Trajectories(*map(np.array, zip(*of_arm, strict=True))) for of_arm in answers]


def _write(
    model: Any, caches: list[Any], reference: list[Any], token: int, keys: mx.array, temp: float, advance: Advance
) -> tuple[list[int], list[float]]:
    """Return the answer after `token`, with one key a token, and the divergence at each of its tokens."""
    tokens, klds = [], []
    for key in keys:
        expected, log_p = (log_probabilities(model, [token], cache)[-1] for cache in (reference, caches))
        drawn = mx.random.categorical(log_p / temp, key=key) if temp else log_p.argmax()
        token, kld = np.array(drawn).item(), np.array(kl_divergence(expected, log_p)).item()
        if not math.isfinite(kld):
            raise NonFiniteError("the model's logits are NaN on this text. Check its weights, or load it in float32.")
        tokens.append(token)
        klds.append(kld)
        advance(1)
    return tokens, klds


def compare_trajectories(name: str, answers: Trajectories, reference: Trajectories) -> Record:
    """Return how the answers of an arm differ from those of the uncompressed cache; errors are over answers."""
    equal = answers.tokens == reference.tokens
    count, length = equal.shape
    same_until = np.where(equal.all(axis=1), length, equal.argmin(axis=1))
    agreement, kld = equal.mean(axis=1), answers.kld.mean(axis=1)
    return {
        "name": name,
        "answers": count,
        "tokens": length,
        "same_until": float(np.median(same_until)),  # tokens before the first that differs
        "agreement": 100 * float(agreement.mean()),
        "agreement_error": 100 * standard_error(agreement),
        "exact": int(equal.all(axis=1).sum()),
        "kld": float(kld.mean()),
        "kld_error": standard_error(kld),
        "kld_quarters": [float(part.mean()) for part in np.array_split(answers.kld, 4, axis=1)],
    }
