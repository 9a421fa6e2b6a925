"""Measure what each layer of a model loses by itself, which `--kv-mean-bits` gives bits by."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, planner
from mlx_tq.prompt_cache.losses import MEASURED_AT, Losses
from mlx_tq.prompt_cache.predictions import kl_divergence, log_probabilities

TOKENS = 512  # of the text
STEP = 64  # tokens read at a time
_FROM = 192  # tokens after which packed ones are attended to
_FULL = "fp16"
_FINE = "q8"  # changes little but how the model's type rounds
_SEEN = 0.1  # of the rounding's loss: what a layer loses beside it is known no better
_CONFIG = KVConfig(sinks=32, window=32, outlier=0.0)

Progress = Callable[[int, int], None]


def measure_losses(model: Any, tokenizer: Any, text: str, progress: Progress = lambda done, total: None) -> Losses:
    """Read a text with each layer's keys alone compressed, and with its values, beside the model's own cache.

    Any change lets the model's type round otherwise from there on: what the finest codes lose is subtracted for it.

    Args:
        model: of mlx-lm.
        tokenizer: its own.
        text: whose first TOKENS tokens are read.
        progress: is called with the tokens that were read, and with all.

    Raises:
        ConfigError: the text, or the model's positions, are fewer than TOKENS.
        UnsupportedModelError: a model that cannot run on compressed caches.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:TOKENS]
    limit = position_limit(model)
    if len(ids) < TOKENS or (limit is not None and limit < TOKENS):
        raise ConfigError(
            f"what layers lose is measured on {TOKENS} tokens; the text has {len(ids)}, and the model allows "
            f"{limit or 'any number of'} positions. Name formats with --kv-key and --kv-value."
        )
    plan = planner(model)
    count = len(plan(KVConfig()).layers)
    arms = [plan(replace(_CONFIG, key=_FINE, value=_FINE))]
    arms += [plan(config) for side in ("key", "value") for config in _alone(side, count)]
    totals = [0.0] * len(arms)
    with compressed(model):
        native = arms[0].native_caches()
        readers = [build_caches(arm) for arm in arms]
        for start in range(0, TOKENS, STEP):
            part = ids[start : start + STEP]
            reference = log_probabilities(model, part, native)
            for number, caches in enumerate(readers):
                found = kl_divergence(reference, log_probabilities(model, part, caches)).sum()
                totals[number] += float(found) if start >= _FROM else 0.0
                progress(start * len(arms) + (number + 1) * len(part), TOKENS * len(arms))
    rounding, *means = (total / (TOKENS - _FROM) for total in totals)
    losses = tuple(max(mean - rounding, _SEEN * rounding) for mean in means)
    return Losses(losses[:count], losses[count:], TOKENS - _FROM)


def _alone(side: str, layers: int) -> Iterator[KVConfig]:
    """Configurations of which each compresses the keys, or the values, of one layer."""
    other = "value" if side == "key" else "key"
    for layer in range(layers):
        formats = [MEASURED_AT if number == layer else _FULL for number in range(layers)]
        schedule: dict[str, Any] = {side: SCHEDULE.join(formats), other: _FULL}
        yield replace(_CONFIG, **schedule)
