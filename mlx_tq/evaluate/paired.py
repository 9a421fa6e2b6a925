"""The same questions to every cache, the fp16 one first: who got which right, and whether the difference is chance."""

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm
from mlx_tq.evaluate.asking import read_text
from mlx_tq.evaluate.passes import body_tokens
from mlx_tq.evaluate.significance import mcnemar, wilson
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.compressed import compressed


@dataclass(frozen=True)
class Judged:
    """What was read out of an answer, and how much of what was asked for is in it, 0 to 1."""

    read: str
    score: float


@dataclass(frozen=True)
class Sample:
    """A question with its judge.

    Attributes:
        key: unique among the samples.
        group: what it is counted under.
        ids: tokens of the whole prompt.
        shared: how many of the first of them other samples begin with too, so that they are read once.
        expected: for people.
        judge: of the answer's text.
        stop: text at which an answer is over, or "".
    """

    key: str
    group: str
    ids: list[int]
    shared: int
    expected: str
    judge: Callable[[str], Judged]
    stop: str = ""


@dataclass(frozen=True)
class Answered:
    """One sample answered on one cache.

    Attributes:
        name: of the arm.
        key: of the sample.
        group: of the sample.
        expected: of the sample.
        read: out of the answer.
        score: 0 to 1; a sample is right where it is 1.
        text: generated.
        tokens: of it.
        packed: tokens in the packed body when the answer ended.
    """

    name: str
    key: str
    group: str
    expected: str
    read: str
    score: float
    text: str
    tokens: int
    packed: int


@dataclass(frozen=True)
class Compared:
    """One arm's answers to one group, beside those of the fp16 cache.

    Attributes:
        name: of the arm.
        group: of the samples.
        asked: samples.
        right: of them.
        low, high: 95 % interval of their share.
        score: mean over the samples.
        lost: right on the fp16 cache alone.
        gained: right on this one alone.
        p: of so uneven a change by chance.
    """

    name: str
    group: str
    asked: int
    right: int
    low: float
    high: float
    score: float
    lost: int
    gained: int
    p: float


def with_shared(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, each with what all of its neighbours of one group begin with as its `shared`."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    found = []
    for group in groups.values():
        shortest = min(len(sample.ids) for sample in group) - 2  # the end of a prompt is read by itself
        first = group[0].ids
        shared = next(
            (n for n in range(shortest) if any(sample.ids[n] != first[n] for sample in group)), max(shortest, 0)
        )
        found += [Sample(**{**vars(sample), "shared": shared if len(group) > 1 else 0}) for sample in group]
    return found


def measure_paired(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    *,
    max_tokens: int,
    temp: float = 0.0,
    step: int = 512,
    known: Callable[[str], dict[str, Any] | None] = lambda key: None,
    report: Callable[[str, Answered], None] = lambda key, answered: None,
) -> list[Answered]:
    """Answer every sample on the fp16 cache and on each arm's.

    Args:
        model: to ask.
        tokenizer: of the model.
        samples: to answer.
        arms: to compare with the fp16 cache.
        max_tokens: of an answer.
        temp: of sampling, 0 for the likeliest; the random numbers of a sample are the same for every arm.
        step: tokens read at a time.
        known: what an earlier run answered, by key.
        report: is told each answer.

    Raises:
        ConfigError: a prompt beyond the model's positions, or an arm that packed nothing of any.
    """
    longest, limit = max(len(sample.ids) for sample in samples) + max_tokens, position_limit(model)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a prompt and an answer of {max_tokens:,} take {longest:,} tokens; the model has {limit:,} positions. "
            "Take smaller --lengths, fewer --shots or a smaller --max-tokens."
        )
    sampler = make_sampler(temp)
    found = []
    for arm in (OFF, *(arm for arm in arms if not arm.config.is_off)):
        make = arm.caches(model)
        begun: tuple[list[int], list[Any]] = ([], [])
        answers = []
        for sample in samples:
            key = f"{arm.name} {sample.key}"
            before = known(key)
            if before is not None:
                answered = Answered(**before)
            else:
                shared = sample.ids[: sample.shared]
                if not begun[1] or begun[0] != shared:
                    begun = (shared, make())
                    read_text(model, shared, begun[1], step)
                caches = copy.deepcopy(begun[1])
                read_text(model, sample.ids[sample.shared : -1], caches, step)
                mx.random.seed(zlib.crc32(sample.key.encode()))
                text, tokens = _answer(model, tokenizer, sample, caches, max_tokens, sampler)
                judged = sample.judge(text)
                told = (sample.key, sample.group, sample.expected, judged.read, judged.score)
                answered = Answered(arm.name, *told, text, tokens, body_tokens(caches))
            report(key, answered)
            answers.append(answered)
        _check_packed(arm, answers)
        found += answers
    return found


def _answer(
    model: Any, tokenizer: Any, sample: Sample, caches: list[Any], max_tokens: int, sampler: Any
) -> tuple[str, int]:
    """The text of an answer up to where it is over, and how many tokens were generated."""
    text, tokens = "", 0
    with compressed(model):
        replies = stream_generate(
            model, tokenizer, sample.ids[-1:], max_tokens=max_tokens, prompt_cache=caches, sampler=sampler
        )
        for reply in replies:
            text += reply.text
            tokens = reply.generation_tokens
            if sample.stop and sample.stop in text:
                return text.partition(sample.stop)[0], tokens
    return text, tokens


def _check_packed(arm: Arm, answers: Sequence[Answered]) -> None:
    if not arm.config.is_off and not any(answered.packed for answered in answers):
        raise ConfigError(
            f"{arm.name} packed none of the prompts' tokens with sinks {arm.config.sinks} and window "
            f"{arm.config.window}, so there is nothing to compare. Take a smaller --kv-sinks and --kv-window."
        )


def compare(answers: Sequence[Answered]) -> list[Compared]:
    """Count the answers of each arm and group beside those of the fp16 cache to the same samples."""
    by_arm: dict[tuple[str, str], dict[str, Answered]] = {}
    for answered in answers:
        by_arm.setdefault((answered.group, answered.name), {})[answered.key] = answered
    rows = []
    for (group, name), found in by_arm.items():
        reference = by_arm[group, OFF.name]
        right = {key for key, answered in found.items() if answered.score == 1}
        before = {key for key in found if reference[key].score == 1}
        lost, gained = len(before - right), len(right - before)
        mean = sum(answered.score for answered in found.values()) / len(found)
        interval = wilson(len(right), len(found))
        rows.append(Compared(name, group, len(found), len(right), *interval, mean, lost, gained, mcnemar(lost, gained)))
    return sorted(rows, key=lambda row: row.group)
