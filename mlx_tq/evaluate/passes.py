"""Read text through several caches side by side and compare every prediction with that of the fp16 cache."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.spec import READY, CacheSpec
from mlx_tq.config import SCHEDULE
from mlx_tq.errors import ConfigError, NonFiniteError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.draws import draw_anew
from mlx_tq.integration.probe import position_limit
from mlx_tq.policies import CalibratedPolicy
from mlx_tq.prompt_cache.compressed import compressed, planner
from mlx_tq.prompt_cache.passes import compressed_caches, sequence_in
from mlx_tq.prompt_cache.predictions import kl_divergence, log_probabilities
from mlx_tq.prompt_cache.statistics import tokens_seen

Advance = Callable[[int], None]  # told how many tokens were read


@dataclass(frozen=True)
class TokenScores:
    """What one arm predicted for each scored token.

    Attributes:
        nll: negative log-likelihood of the true next token in nats, [N].
        kld: KL divergence of the arm's prediction from the fp16 cache's, in nats, [N].
        agrees: both have the same most likely token, [N].
        packed: of all tokens that were attended to, the share that was packed.
        nbytes: of all caches after the last chunk, unused capacity included.
        rounds: of eviction, in all chunks.
        kept: of the tokens seen, the share still in the caches at the end of the last chunk.
        seconds: that reading the last chunk took, where the arms of a step follow each other.
    """

    nll: np.ndarray
    kld: np.ndarray
    agrees: np.ndarray
    packed: float
    nbytes: int
    rounds: int = 0
    kept: float = 1.0
    seconds: float = 0.0


def cut_chunks(tokenizer: Any, text: str, chunks: int, length: int) -> list[list[int]]:
    """The first `chunks` runs of `length` tokens of a text.

    Raises:
        ConfigError: fewer than one chunk, or a text too short for them.
    """
    if chunks < 1:
        raise ConfigError(f"chunks is {chunks}; it must be 1 or more, and 3 for a figure to publish.")
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    if len(ids) < chunks * length:
        raise ConfigError(
            f"the text has {len(ids):,} tokens; {chunks} chunks of {length:,} need {chunks * length:,}. Give a longer "
            "text, fewer --chunks or a smaller --length."
        )
    return [ids[start : start + length] for start in range(0, chunks * length, length)]


def check_evicted(name: str, caches: list[Any]) -> None:
    """Raise where an arm that evicts did not: its figures would be those of another arm.

    Raises:
        ConfigError: no token left.
    """
    sequence = sequence_in(caches)
    if sequence is not None and not sequence.stats.rounds:
        config = sequence.plan.config
        policy = config.policy
        after = f", a warm-up of {policy.warmup:,} tokens" if isinstance(policy, CalibratedPolicy) else ""
        raise ConfigError(
            f"{name} evicted nothing in {tokens_seen(caches):,} tokens, with a budget of {config.budget}{after} and a "
            f"trigger of {policy.trigger}. Take a longer text or a smaller budget, warm-up or trigger."
        )


def steps(total: int, step: int) -> Iterator[tuple[int, int]]:
    """The ranges in which `total` tokens are read."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def check_positions_of(model: Any, length: int) -> None:
    """Raise where a text is longer than the model allows.

    Raises:
        ConfigError: it is, with both lengths.
    """
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ConfigError(f"the length is {length:,}; the model allows {limit:,} positions. Take a smaller --length.")


def check_reading(model: Any, length: int, step: int, arms: Sequence[Arm]) -> None:
    """Raise where a measurement would be none.

    Raises:
        ConfigError: a length beyond the model's positions, or one at which an arm never reads a packed token.
    """
    check_positions_of(model, length)
    if step < 1:
        raise ConfigError(f"step is {step}; it must be 1 or more, such as 512.")
    if length < 2 or length - 1 <= step:
        raise ConfigError(
            f"{length} tokens in steps of {step} leave none to score, for those of the first step attend to nothing "
            f"packed. Take a --length above {step + 1} or a smaller --step."
        )
    last = (length - 2) // step * step
    for arm in arms:
        config = arm.config
        spec = CacheSpec.for_layer(config, 0, *(side.split(SCHEDULE)[0] for side in (config.key, config.value)))
        if not config.is_off and spec.packed_until(last) == config.sinks:
            raise ConfigError(
                f"{length} tokens in steps of {step} never read a packed one with sinks {config.sinks} and window "
                f"{config.window}. Take a longer --length, or a smaller --step, --kv-sinks or --kv-window."
                f"{why_unpacked(spec, last)}"
            )


def why_unpacked(spec: CacheSpec, tokens: int) -> str:
    """A sentence on normalized keys, if it is for them that nothing is packed of so many tokens; else nothing."""
    if replace(spec, normalize=False).packed_until(tokens) == spec.sinks:
        return ""
    return f" Or add --kv-normalize off: normalized keys pack none before {READY} tokens were read."


def body_tokens(caches: list[Any]) -> int:
    """Tokens of a layer that attention reads packed; 0 for the model's own caches."""
    compressed = compressed_caches(caches)
    return compressed[0].body_tokens if compressed else 0


def evicted(caches: list[Any]) -> tuple[int, float]:
    """Rounds of eviction, and of the tokens seen the share that is left."""
    sequence, layers = sequence_in(caches), compressed_caches(caches)
    if sequence is None or not layers[0].offset:
        return 0, 1.0
    return sequence.stats.rounds, layers[0].size() / layers[0].offset


def read_side_by_side(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int, advance: Advance = lambda tokens: None
) -> list[TokenScores]:
    """Score every token after the first step of each chunk, for the fp16 reference and then for each arm.

    All of them take a step before any takes the next, so that one step's logits are held, not a chunk's. The tokens of
    the first step attend to nothing packed and are not scored.

    Raises:
        ConfigError: the reading would measure nothing; see `check_reading`.
        NonFiniteError: the model's logits are NaN.
    """
    check_reading(model, min(map(len, chunks)), step, arms)
    plan = planner(model)
    makers = [arm.caches(model, plan) for arm in (OFF, *arms)]
    scores: list[list[np.ndarray]] = [[] for _ in makers]  # each [3, L] of every step
    attended, packed, nbytes = 0, [0] * len(makers), [0] * len(makers)
    rounds, kept, seconds = [0] * len(makers), [1.0] * len(makers), [0.0] * len(makers)
    with compressed(model):
        for chunk, ids in enumerate(chunks):
            readers = [make() for make in makers]
            for caches in readers:
                draw_anew(caches, chunk)
            seconds = [0.0] * len(makers)  # kernels were compiled in an earlier chunk
            for start, stop in steps(len(ids) - 1, step):
                attended += sum(range(start + 1, stop + 1)) if start else 0
                reference: mx.array | None = None
                for number, caches in enumerate(readers):
                    body = body_tokens(caches)
                    started = time.perf_counter()
                    found = log_probabilities(model, ids[start:stop], caches)
                    mx.eval(found)
                    seconds[number] += time.perf_counter() - started
                    advance(stop - start)
                    reference = found if reference is None else reference
                    if start:
                        packed[number] += body * (stop - start)
                        scores[number].append(_score(reference, found, ids[start + 1 : stop + 1]))
            for arm, caches in zip(arms, readers[1:], strict=True):
                check_evicted(arm.name, caches)
            nbytes = [sum(cache.nbytes for cache in caches) for caches in readers]
            for number, caches in enumerate(readers):
                again, kept[number] = evicted(caches)
                rounds[number] += again
    joined = [np.concatenate(parts, axis=1) for parts in scores]
    if not all(np.isfinite(part).all() for part in joined):
        raise NonFiniteError("the model's logits are NaN on this text. Check its weights, or load it in float32.")
    return [
        TokenScores(nll, kld, agrees.astype(bool), count / attended, size, again, share, taken)
        for (nll, kld, agrees), count, size, again, share, taken in zip(
            joined, packed, nbytes, rounds, kept, seconds, strict=True
        )
    ]


def _score(reference: mx.array, found: mx.array, targets: list[int]) -> np.ndarray:
    """Negative log-likelihood, divergence and agreement of each token: [3, L]."""
    nll = -mx.take_along_axis(found, mx.array(targets)[:, None], axis=-1)[:, 0]
    agrees = reference.argmax(axis=-1) == found.argmax(axis=-1)
    return np.array(mx.stack([nll, kl_divergence(reference, found), agrees.astype(mx.float32)]), dtype=np.float64)
