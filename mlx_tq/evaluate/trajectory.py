"""Compare the answer that each cache generates by itself, in which errors accumulate, with the uncompressed cache's.

All answers to a prompt use the same random numbers, so differences come from the cache alone. The KL divergence is from
the uncompressed cache's prediction after the same tokens, which also decodes them one by one, with the same rounding.
"""

import copy
from collections.abc import Callable, Sequence
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
from mlx_tq.integration.batch_probe import batch_facts, merge_rows
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import batch_row, compressed_caches
from mlx_tq.prompt_cache.measurements import kl_divergence, log_softmax
from mlx_tq.session.restore import prefill

_TOGETHER = 8  # answers of a batch, whose passes take about twice as long as those of one answer


@dataclass(frozen=True)
class Trajectories:
    """The answers of one arm to S prompts, of N tokens each."""

    tokens: np.ndarray  # [S, N]
    kld: np.ndarray  # [S, N], of the uncompressed cache's prediction after the same tokens, in nats

    @classmethod
    def join(cls, parts: Sequence["Trajectories"]) -> "Trajectories":
        return cls(np.concatenate([part.tokens for part in parts]), np.concatenate([part.kld for part in parts]))


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
    answers: list[list[Trajectories]] = [[] for _ in makers]
    with compressed_attention(model):
        together = _TOGETHER if all(_can_batch(model, make) for make in makers) else 1
        for start in range(0, len(prompts), together):
            batch = prompts[start : start + together]
            keys = mx.stack([mx.random.split(mx.random.key(seed + start + i), answer) for i in range(len(batch))], 1)
            last_tokens = mx.array([prompt[-1] for prompt in batch])
            reference: list[Any] = []  # of the first arm, with the prompts alone
            for arm, make in enumerate(makers):
                rows = [make() for _ in batch]
                for i, (row, prompt) in enumerate(zip(rows, batch, strict=True)):
                    reseed_random(row, start + i)
                    alone = int(is_control[arm] and len(prompt) > 2)
                    prefill(model, row, prompt[:alone], step)
                    prefill(model, row, prompt[alone:-1], step)
                caches = merge_rows(rows) if len(rows) > 1 else rows[0]
                reference = reference or copy.deepcopy(caches)
                answers[arm].append(_write(model, caches, copy.deepcopy(reference), last_tokens, keys, temp, advance))
                for i in range(len(batch) if arm else 0):
                    check_evicted(arms[arm - 1].name, batch_row(caches, i))
    return [Trajectories.join(of_arm) for of_arm in answers]


def _can_batch(model: Any, make: Callable[[], list[Any]]) -> bool:
    is_compressed = bool(compressed_caches(make()))
    return not batch_facts(model, make if is_compressed else None).refusal


def _write(
    model: Any, caches: list[Any], reference: list[Any], tokens: mx.array, keys: mx.array, temp: float, advance: Advance
) -> Trajectories:
    """Return the answers after `tokens` [S] and their divergence; `keys` [N, S] are of random numbers."""
    written, klds = [], []
    for of_rows in keys:
        expected, log_p = (log_softmax(model(tokens[:, None], cache=cache)[:, -1]) for cache in (reference, caches))
        tokens = log_p.argmax(axis=-1)
        if temp:
            draws = [mx.random.categorical(of_row / temp, key=key) for of_row, key in zip(log_p, of_rows, strict=True)]
            tokens = mx.stack(draws)
        written.append(np.array(tokens))
        klds.append(np.array(kl_divergence(expected, log_p)))
        if not np.isfinite(klds[-1]).all():
            raise NonFiniteError("the model's logits are NaN on this text. Check its weights, or load it in float32.")
        advance(len(tokens))
    return Trajectories(np.stack(written, axis=1), np.stack(klds, axis=1))


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
