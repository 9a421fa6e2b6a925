"""Ask the same questions on every cache, the uncompressed one first, and judge the answers."""

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import comb, sqrt
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.inspection import check_evicted, count_needle_tokens, eviction_counts, packed_tokens
from mlx_tq.evaluate.results import Advance, Record, Results
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.session.restore import prefill

PASS = "PASS"  # noqa: S105  no password
VOID = "VOID"  # verdict on a needle that the uncompressed cache does not find either
_Z95 = 1.959964  # standard deviations that hold 95 % of a normal distribution

Judge = Callable[[str], tuple[str, float]]  # returns what it reads in an answer, and a score from 0 to 1


@dataclass(frozen=True)
class Sample:
    """A question with its judge; with a needle, what the cache holds of the needle is counted, too."""

    key: str  # unique among the samples
    ids: list[int]  # the whole prompt
    expected: str
    judge: Judge
    fields: Record = field(default_factory=dict)  # of the records
    shared: int = 0  # length of the prefix that other samples have, too, so that it is prefilled once
    question: int = -1  # first token of the question, which is prefilled in a step of its own
    needle: tuple[int, int] | None = None  # positions [start, stop)
    stop: str = ""  # text that ends the answer


Prefill = Callable[[Sample], list[Any]]  # returns caches that hold the shared prefix of a sample


def prefill_caches(model: Any, caches: list[Any], ids: list[int], step: int) -> list[Any]:
    """Prefill tokens into the caches, and return the caches."""
    with compressed_attention(model):
        prefill(model, caches, ids, step)
    return caches


def share_prefixes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of one group with `shared` set to the longest prefix that all of them have."""
    first = samples[0].ids
    limit = max(min(len(sample.ids) for sample in samples) - 2, 0)  # the end of a prompt is prefilled by itself
    shared = next((n for n in range(limit) if any(sample.ids[n] != first[n] for sample in samples)), limit)
    return [replace(sample, shared=shared if len(samples) > 1 else 0) for sample in samples]


def ask_samples(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    results: Results,
    *,
    max_tokens: int,
    temp: float = 0.0,
    step: int = 512,
    ask_void: bool = False,
    prefill_with: Callable[[Arm], Prefill] | None = None,
    advance: Advance = lambda done: None,
) -> list[Record]:
    """Answer every sample on the uncompressed cache and on that of each arm; results that exist are not asked again.

    Needles that the uncompressed cache does not find are void: the other arms are not asked for them. With `ask_void`
    they prefill the question, so that the live tokens of the needle are counted. Random numbers are the same for every
    arm.
    """
    check_positions(model, samples, max_tokens)
    sampler, records, void = make_sampler(temp), [], set()
    for arm in (OFF, *(arm for arm in arms if not arm.config.is_off)):
        prefilled = prefill_with(arm) if prefill_with else _fresh_caches(model, arm, step)
        prefix, of_arm = None, []
        for sample in samples:
            key, is_void = f"{arm.name} {sample.key}", sample.key in void
            if key not in results.rows:
                held: Record = {"live": 0, "packed": 0, "rounds": 0, "kept": 1.0, "answer": ""}
                if ask_void or not is_void:
                    if prefix != sample.ids[: sample.shared]:
                        prefix, caches_of_prefix = sample.ids[: sample.shared], prefilled(sample)
                    caches = copy.deepcopy(caches_of_prefix)
                    held = _answer(model, tokenizer, sample, caches, 0 if is_void else max_tokens, sampler, step)
                    if sample.needle:
                        check_evicted(arm.name, caches)
                value, score = sample.judge(held["answer" if sample.needle else "text"])
                verdict: Record = {"key": sample.key, "read": value, "score": score}
                if sample.needle:
                    verdict = {"needle": sample.needle, "verdict": VOID if is_void else value}
                results.add(key, {"name": arm.name, **sample.fields, "expected": sample.expected, **verdict, **held})
            of_arm.append(results.rows[key])
            if sample.needle and arm is OFF and of_arm[-1]["verdict"] != PASS:
                void.add(sample.key)
            advance(1)
        if not (arm.config.is_off or samples[0].needle or any(record["packed"] for record in of_arm)):
            raise ConfigError(
                f"{arm.name} packed none of the prompts' tokens with sinks {arm.config.sinks} and window "
                f"{arm.config.window}, so there is nothing to compare. Use a smaller --kv-sinks and --kv-window."
            )
        records += of_arm
    return records


def check_positions(model: Any, samples: Sequence[Sample], max_tokens: int) -> None:
    """Raise ConfigError if a prompt and its answer exceed the model's positions."""
    limit, longest = position_limit(model), max(len(sample.ids) for sample in samples)
    if limit is not None and longest + max_tokens > limit:
        raise ConfigError(
            f"a prompt and an answer of {max_tokens:,} tokens exceed the model's {limit:,} positions: they take "
            f"{longest + max_tokens:,}. Use smaller --lengths, fewer --shots or a smaller --max-tokens."
        )


def _fresh_caches(model: Any, arm: Arm, step: int) -> Prefill:
    make = arm.caches(model)
    return lambda sample: prefill_caches(model, make(), sample.ids[: sample.shared], step)


def _answer(
    model: Any, tokenizer: Any, sample: Sample, caches: list[Any], max_tokens: int, sampler: Any, step: int
) -> Record:
    """Prefill the rest of the prompt and generate an answer; return it with what the cache holds then."""
    prefill_caches(model, caches, sample.ids[sample.shared : sample.question], step)
    # A round of eviction comes with the question's pass, so the needle is counted after it.
    prefill_caches(model, caches, sample.ids[sample.question : -1], len(sample.ids))
    live, packed = count_needle_tokens(caches, sample.needle) if sample.needle else (0, 0)
    mx.random.seed(zlib.crc32(sample.key.encode()))
    options = {"max_tokens": max_tokens, "prompt_cache": caches, "sampler": sampler}
    text, tokens = "", 0
    with compressed_attention(model):
        for response in stream_generate(model, tokenizer, sample.ids[-1:], **options) if max_tokens else ():
            text, tokens = text + response.text, response.generation_tokens
            if sample.stop and sample.stop in text:
                text = text.partition(sample.stop)[0]
                break
    if sample.needle is None:
        return {"text": text, "tokens": tokens, "packed": packed_tokens(caches)}
    rounds, kept_share = eviction_counts(caches)
    return {"live": live, "packed": packed, "rounds": rounds, "kept": kept_share, "answer": text}


def compare_answers(records: Sequence[Record]) -> list[Record]:
    """Count the right answers of each arm and group, and those that changed against the uncompressed cache."""
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        scores.setdefault((record["group"], record["name"]), {})[record["key"]] = record["score"]
    rows = []
    for (group, name), score in scores.items():
        right = {key for key in score if score[key] == 1}
        right_before = {key for key in score if scores[group, OFF.name][key] == 1}
        lost, gained = len(right_before - right), len(right - right_before)
        low, high = wilson(len(right), len(score))
        row: Record = {"group": group, "name": name, "samples": len(score), "right": len(right)}
        row |= {"low": low, "high": high, "score": sum(score.values()) / len(score)}
        changes = {"lost": lost, "gained": gained, "p": mcnemar(lost, gained)}
        rows.append(row | dict.fromkeys(changes) if name == OFF.name else row | changes)
    return sorted(rows, key=lambda row: str(row["group"]))


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927): within 0 to 1, and sound near both."""
    share, spread = hits / total, _Z95**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = _Z95 * sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(lost: int, gained: int) -> float:
    """Return the exact two-sided p-value of as uneven a change of paired samples (McNemar 1947)."""
    changed = lost + gained
    tail = sum(comb(changed, fewer) for fewer in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / (1 << changed))
