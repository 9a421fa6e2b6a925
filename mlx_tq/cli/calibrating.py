"""Gather the statistics of a model's queries: of questions about a text and their answers, of a text, or of both.

A text continues its sentence; a question looks for something far back. Statistics of the one keep little that the
other needs, so the default is a quarter of the text: see docs/measurements/eviction.md.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tq.cli.calibration_questions import build_question_scenes
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.policies import ExpectedAttention, TriAttention
from mlx_tq.policies.calibration import SKIP, Calibrator, QueryStats, save_calibration
from mlx_tq.policies.policy import TEXT
from mlx_tq.policies.rope import Rope
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, plan_caches
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.session.restore import prefill

# Of the statistics, the share that is the text's: the means of both are averaged with this weight.
TEXT_SHARE = 0.25
TOKENS = 4096  # that are read for them
STEP = 512  # tokens read at a time
_SCENE = 1024  # tokens of a text with a fact of every kind
_ANSWER = 64  # more than any answer has
_ENDLESS = 1 << 40  # a window that does not end

Progress = Callable[[int, int], None]


class Queries(NamedTuple):
    """What was gathered.

    ropes, stats: of each layer. tokens: of questions and answers, or of the text where it was read alone.
    """

    ropes: list[Rope]
    stats: list[QueryStats]
    tokens: int


class _Mean:
    """The mean of statistics over several readings, each token weighing the same."""

    def __init__(self) -> None:
        self.tokens = 0
        self.stats: list[QueryStats] = []

    def add(self, caches: list[Any]) -> None:
        """What the open windows of these caches hold."""
        counts, each = zip(*(calibrator.open_window for calibrator in _calibrators(caches)), strict=True)
        self.tokens += counts[0]
        weight = counts[0] / self.tokens
        self.stats = [a.blend(b, weight) for a, b in zip(self.stats or each, each, strict=True)]
        mx.eval([stats.arrays() for stats in self.stats])


def queries_of_text(model: Any, ids: list[int], *, covariance: bool = False) -> Queries:
    """Statistics of the queries of these tokens; the first four do not count.

    Raises:
        ConfigError: too few tokens, or more than the model's positions.
        UnsupportedModelError: a model whose queries cannot be followed.
    """
    limit = position_limit(model)
    if len(ids) <= SKIP or (limit is not None and len(ids) > limit):
        raise ConfigError(
            f"the text has {len(ids):,} tokens; from {SKIP + 1} to {limit or 'any number'} can be read. Change "
            "--tokens or --text."
        )
    caches = _caches(model, covariance)()
    with compressed(model):
        prefill(model, caches, ids, STEP)
    found = _Mean()
    found.add(caches)
    return Queries(_ropes(caches), found.stats, found.tokens)


def queries_of_questions(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int = TOKENS,
    *,
    text_share: float = TEXT_SHARE,
    covariance: bool = False,
    progress: Progress = lambda done, total: None,
) -> Queries:
    """Plant facts in a text and ask for them: statistics of questions and answers, mixed with those of the text.

    Args:
        model: of mlx-lm.
        tokenizer: its own.
        text: what the facts are planted in.
        tokens: of it that are read.
        text_share: weight of the text's statistics, from 0 to 1.
        covariance: gather it too.
        progress: is called with the tokens of the text that were read, and with all.

    Raises:
        ConfigError: fewer tokens, or positions of the model, than a text with its facts takes.
        UnsupportedModelError: a model whose queries cannot be followed.
    """
    asked, heard = listen(model, tokenizer, text, tokens, covariance=covariance, progress=progress)
    mixed = [a.blend(b, text_share) for a, b in zip(asked.stats, heard.stats, strict=True)]
    return asked._replace(stats=mixed)


def listen(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int = TOKENS,
    *,
    covariance: bool = False,
    progress: Progress = lambda done, total: None,
) -> tuple[Queries, Queries]:
    """As `queries_of_questions`, before they are mixed: those of questions and answers, and those of the text."""
    length = max(1, min(_SCENE, tokens, (position_limit(model) or 2 * _SCENE) - _ANSWER))
    count = max(1, tokens // length)
    make = _caches(model, covariance)
    asked, heard, ropes = _Mean(), _Mean(), []
    for number, scene in enumerate(build_question_scenes(tokenizer, text, count, length), 1):
        caches = make()
        with compressed(model):
            prefill(model, caches, scene.text, STEP)
            heard.add(caches)
            ropes = _ropes(caches)
            for calibrator in _calibrators(caches):
                calibrator.restart_at(len(scene.text))
            for turn in scene.turns:
                twins = copy.deepcopy(caches)
                prefill(model, twins, turn, STEP)
                asked.add(twins)
        progress(number * length, count * length)
    return Queries(ropes, asked.stats, asked.tokens), Queries(ropes, heard.stats, heard.tokens)


def save_queries(model: Any, path: str | Path, found: Queries) -> None:
    """Write what was gathered of `model`, by each rank of its heads; raises as `save_calibration`."""
    ranks = ranks_of(model)
    save_calibration(path, fingerprint(model), found.ropes, [stats.gather(ranks) for stats in found.stats])


def _caches(model: Any, covariance: bool) -> Callable[[], list[Any]]:
    """Makes caches that lose nothing and calibrate on whatever they read."""
    policy = ExpectedAttention if covariance else TriAttention
    evict = EvictConfig(policy(warmup=_ENDLESS, calibration=TEXT), "100%", "off")
    return partial(build_caches, plan_caches(model, KVConfig(key="fp16", value="fp16", evict=evict)))


def _calibrators(caches: list[Any]) -> list[Calibrator]:
    sequence = sequence_in(caches)
    return [] if sequence is None else [calibrator for _, calibrator in sorted(sequence.calibrators.items())]


def _ropes(caches: list[Any]) -> list[Rope]:
    return [calibrator.rope for calibrator in _calibrators(caches) if calibrator.rope]
