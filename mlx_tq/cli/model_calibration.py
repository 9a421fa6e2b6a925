"""Measure a model once: its queries, by which policies evict, and its layers' losses, for `--kv-mean-bits`.

A text continues its sentence; a question searches far back. Statistics of either alone keep little of what the other
needs, so the default mixes them: see docs/measurements/eviction.md.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.cli.haystack import Fact, build_scene
from mlx_tq.cli.screen import note, prefill_progress
from mlx_tq.config import SCHEDULE, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.policies import ExpectedAttention, TriAttention
from mlx_tq.policies.calibration import SKIP, Calibrator, QueryStats, save_calibration
from mlx_tq.policies.policy import TEXT
from mlx_tq.policies.rope import Rope
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches, planner
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.prompt_cache.measurements import (
    MEASURED_KEY,
    MEASURED_VALUE,
    Losses,
    kl_divergence,
    log_probabilities,
    losses_path,
    make_folder,
    save_measurements,
)
from mlx_tq.session.restore import ProgressCallback, prefill

TEXT_SHARE = 0.25  # weight of the text's statistics
TOKENS = 4096
STEP = 512  # most tokens per prefill step
_FIRST_STEP = 4  # tokens
_STEP_S = 1.0  # after which Ctrl-C should have been noticed
LOSS_TOKENS = 512  # of the text on which losses are measured
_LOSS_STEP = 64
_SCORED_FROM = 192  # tokens after which packed ones are attended to
_FULL = "fp16"
_FINE = "q8"  # its loss is that of rounding in the model's dtype
_LEAST_SHARE = 0.1  # of the rounding's loss; a smaller difference from it is noise
_CONFIG = KVConfig(sinks=32, window=32, outlier=0.0)
_SCENE = 1024  # tokens of a text with a fact of every kind
_ANSWER = 64  # more tokens than any answer has
_ENDLESS = 1 << 40  # a warm-up window that does not end


class PacedPrefill:
    """Prefills in steps of at most about a second, so that Ctrl-C is noticed and progress is shown on any machine.

    The statistics do not depend on the steps; all ranks take the same ones, those of the slowest.
    """

    def __init__(self, model: Any, total: int, progress: ProgressCallback) -> None:
        self._model, self._total, self._progress = model, total, progress
        self._done, self._step = 0, _FIRST_STEP
        progress(0, total)

    def run(self, caches: list[Any], ids: list[int]) -> None:
        start = 0
        while start < len(ids):
            part, began = ids[start : start + self._step], time.perf_counter()
            prefill(self._model, caches, part, len(part))
            (seconds,) = ranks_of(self._model).max(np.array([time.perf_counter() - began]))
            start, self._done = start + len(part), self._done + len(part)
            self._progress(self._done, self._total)
            if seconds > _STEP_S:
                self._step = max(1, len(part) // 2)
            elif seconds < _STEP_S / 3 and len(part) == self._step:
                self._step = min(2 * self._step, STEP)


class Queries(NamedTuple):
    ropes: list[Rope]
    stats: list[QueryStats]
    tokens: int  # of the questions and answers, or of the text if there are none


_NO_QUERIES = Queries([], [], 0)


def _add_queries(mean: Queries, caches: list[Any]) -> Queries:
    """Return the mean of statistics and those of more caches, weighted by their tokens."""
    calibrators = _calibrators(caches)
    counts, stats = zip(*(calibrator.open_window for calibrator in calibrators), strict=True)
    tokens = mean.tokens + counts[0]
    blended = [a.blend(b, counts[0] / tokens) for a, b in zip(mean.stats or stats, stats, strict=True)]
    mx.eval([layer.arrays() for layer in blended])
    return Queries([calibrator.rope for calibrator in calibrators if calibrator.rope], blended, tokens)


def calibrate_on_text(
    model: Any, ids: list[int], *, covariance: bool = False, progress: ProgressCallback = lambda done, total: None
) -> Queries:
    """Return the statistics of the queries of these tokens; the first four do not count."""
    limit = position_limit(model)
    if len(ids) <= SKIP or (limit is not None and len(ids) > limit):
        raise ConfigError(
            f"the text has {len(ids):,} tokens; calibration takes {SKIP + 1} to {limit or 'any number of'} tokens. "
            "Change --tokens or --text."
        )
    caches = _make_caches(model, covariance)()
    with compressed_attention(model):
        PacedPrefill(model, len(ids), progress).run(caches, ids)
    return _add_queries(_NO_QUERIES, caches)


def mix_queries(questions: Queries, text: Queries, text_share: float = TEXT_SHARE) -> Queries:
    """Return the statistics of questions, blended with those of the text by the weight `text_share`."""
    return questions._replace(stats=[a.blend(b, text_share) for a, b in zip(questions.stats, text.stats, strict=True)])


def collect_queries(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int = TOKENS,
    *,
    covariance: bool = False,
    progress: ProgressCallback = lambda done, total: None,
) -> tuple[Queries, Queries]:
    """Return the statistics of questions and answers about `tokens` of a text with planted facts, and of that text."""
    length = max(1, min(_SCENE, tokens, (position_limit(model) or 2 * _SCENE) - _ANSWER))
    count = max(1, tokens // length)
    make_caches = _make_caches(model, covariance)
    of_questions = of_text = _NO_QUERIES
    scenes = list(build_question_scenes(tokenizer, text, count, length))
    prefiller = PacedPrefill(model, sum(scene.tokens for scene in scenes), progress)
    for scene in scenes:
        caches = make_caches()
        with compressed_attention(model):
            prefiller.run(caches, scene.text)
            of_text = _add_queries(of_text, caches)
            for calibrator in _calibrators(caches):
                calibrator.restart_at(len(scene.text))
            for turn in scene.turns:
                copies = copy.deepcopy(caches)
                prefiller.run(copies, turn)
                of_questions = _add_queries(of_questions, copies)
    return of_questions, of_text


def save_queries(model: Any, path: str | Path, queries: Queries) -> None:
    """Write a calibration file of `model` with the heads of all ranks."""
    ranks = ranks_of(model)
    save_calibration(path, fingerprint(model), queries.ropes, [stats.gather(ranks) for stats in queries.stats])


def _make_caches(model: Any, covariance: bool) -> Callable[[], list[Any]]:
    """Return a function that makes lossless caches, which collect the queries of whatever they prefill."""
    policy = ExpectedAttention if covariance else TriAttention
    evict = EvictConfig(policy(warmup=_ENDLESS, calibration=TEXT), "100%", "off")
    return partial(build_caches, plan_caches(model, KVConfig(key="fp16", value="fp16", evict=evict)))


def _calibrators(caches: list[Any]) -> list[Calibrator]:
    sequence = layer_group_of(caches)
    return [] if sequence is None else [calibrator for _, calibrator in sorted(sequence.calibrators.items())]


# Everyday facts. They share no wording with the needles of mlx_tq.evaluate, so calibration does not train on the test.
_WORDS: dict[str, Sequence[Any]] = {
    "name": ("Ivan", "Julia", "Kevin", "Laura", "Martin", "Nora", "Oscar", "Paula"),
    "city": ("London", "Paris", "Berlin", "Madrid", "Tokyo", "Cairo", "Oslo", "Vienna", "Prague", "Lisbon"),
    "thing": ["lantern", "compass", "violin", "telescope", "umbrella", "camera", "teapot", "mirror", "ladder", "radio"],
    "place": ["library", "kitchen", "attic", "garden", "harbor", "museum", "station", "cellar", "bakery", "market"],
    "color": ("red", "orange", "yellow", "brown", "pink", "grey", "black", "gold"),  # codespell:ignore grey
    "price": range(11, 1000),
    "hour": range(8, 19),
    "minutes": ("00", "15", "30", "45"),
}
_MEETING = "When does the meeting in the {place} begin?"
_TEMPLATES = (  # sentence, question, answer
    ("{name} lives in {city}.", "Where does {name} live?", "{city}"),
    ("{name} likes {color} best of all colours.", "Which colour does {name} like best?", "{color}"),  # codespell:ignore
    ("The {thing} costs {price} dollars.", "How much does the {thing} cost?", "{price} dollars"),
    ("The {thing} is kept in the {place}.", "Where can the {thing} be found?", "in the {place}"),
    ("The meeting in the {place} begins at {hour}:{minutes}.", _MEETING, "{hour}:{minutes}"),
)


def _make_fact(templates: tuple[str, str, str], rng: random.Random) -> Fact:
    names = [name for _, name, _, _ in Formatter().parse(templates[0]) if name]
    words = {name: rng.choice(_WORDS[name]) for name in names}
    return Fact(*(template.format(**words) for template in templates))


KINDS = tuple(partial(_make_fact, templates) for templates in _TEMPLATES)


@dataclass(frozen=True)
class QuestionScene:
    text: list[int]  # tokens of a text with facts in it
    turns: list[list[int]]  # tokens of a question and its answer, each to be prefilled after the text

    @property
    def tokens(self) -> int:
        """The number of tokens to prefill."""
        return len(self.text) + sum(map(len, self.turns))


def build_question_scenes(tokenizer: Any, text: str, count: int, length: int) -> Iterator[QuestionScene]:
    """Yield scenes with a fact of every kind; each takes `length` tokens with a question."""
    rng = random.Random(0)
    for _ in range(count):
        facts = [make(rng) for make in rng.sample(KINDS, len(KINDS))]
        depths = sorted(rng.random() for _ in facts)
        scene = build_scene(tokenizer, text, facts, depths, rng, tokens=length, sinks=0, window=0)
        answers = [tokenizer.encode(fact.answer, add_special_tokens=False) for fact in facts]
        yield QuestionScene(scene.ids, [[*q, *a] for q, a in zip(scene.questions, answers, strict=True)])


def save_measured_losses(model: Any, tokenizer: Any, text: str, name: str) -> None:
    path = losses_path(fingerprint(model))
    make_folder(path)  # before the work, not after it
    with prefill_progress(title=f"Measuring the layers of {name} (first run only)") as progress:
        losses = measure_losses(model, tokenizer, text, progress)
    save_measurements(path, losses)
    note(f"Saved the losses of its layers to {path}")


def measure_losses(
    model: Any, tokenizer: Any, text: str, progress: ProgressCallback = lambda done, total: None
) -> Losses:
    """Return the KL divergence from the uncompressed cache of quantizing only the keys, or the values, of one layer.

    Any change makes the model's dtype round differently from there on; the loss of the finest format, which is nearly
    only that, is subtracted.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:LOSS_TOKENS]
    limit = position_limit(model)
    if len(ids) < LOSS_TOKENS or (limit is not None and limit < LOSS_TOKENS):
        raise ConfigError(
            f"layer losses are measured on {LOSS_TOKENS} tokens; the text has {len(ids)}, and the model allows "
            f"{limit or 'any number of'} positions. Name formats with --kv-key and --kv-value."
        )
    plan = planner(model)
    count = len(plan(KVConfig()).layers)
    arms = [plan(replace(_CONFIG, key=_FINE, value=_FINE))]
    for side, other, measured in (("key", "value", MEASURED_KEY), ("value", "key", MEASURED_VALUE)):
        for layer in range(count):
            formats = [measured if number == layer else _FULL for number in range(count)]
            schedule: dict[str, Any] = {side: SCHEDULE.join(formats), other: _FULL}
            arms.append(plan(replace(_CONFIG, **schedule)))
    totals = [0.0] * len(arms)
    progress(0, LOSS_TOKENS * len(arms))
    with compressed_attention(model):
        native = arms[0].native_caches()
        cache_lists = [build_caches(arm) for arm in arms]
        for start in range(0, LOSS_TOKENS, _LOSS_STEP):
            ids_of_step = ids[start : start + _LOSS_STEP]
            reference = log_probabilities(model, ids_of_step, native)
            for number, caches in enumerate(cache_lists):
                divergence = kl_divergence(reference, log_probabilities(model, ids_of_step, caches)).sum()
                totals[number] += float(divergence) if start >= _SCORED_FROM else 0.0
                progress(start * len(arms) + (number + 1) * len(ids_of_step), LOSS_TOKENS * len(arms))
    rounding, *means = (total / (LOSS_TOKENS - _SCORED_FROM) for total in totals)
    losses = tuple(max(mean - rounding, _LEAST_SHARE * rounding) for mean in means)
    return Losses(losses[:count], losses[count:], LOSS_TOKENS - _SCORED_FROM)
