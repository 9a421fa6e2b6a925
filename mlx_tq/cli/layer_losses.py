"""Measure the loss of each layer when it alone is quantized, by which `--kv-mean-bits` distributes bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mlx_tq.cli.screen import note, prefill_progress
from mlx_tq.config import SCHEDULE, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import fingerprint
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, planner
from mlx_tq.prompt_cache.measurements import (
    MEASURED_FORMAT,
    Losses,
    kl_divergence,
    log_probabilities,
    losses_path,
    make_folder,
    save_losses,
)

TOKENS = 512  # of the text
STEP = 64  # tokens per prefill step
_SCORED_FROM = 192  # tokens after which packed ones are attended to
_FULL = "fp16"
_FINE = "q8"  # its loss is that of rounding in the model's type
_LEAST_SHARE = 0.1  # of the rounding's loss; a smaller difference from it is noise
_CONFIG = KVConfig(sinks=32, window=32, outlier=0.0)

Progress = Callable[[int, int], None]


def save_measured_losses(model: Any, tokenizer: Any, text: str, name: str) -> None:
    """Measure the layers of a model on a text, and save the losses in the user's cache folder."""
    path = losses_path(fingerprint(model))
    make_folder(path)  # before the work, not after it
    with prefill_progress(title=f"Measuring the layers of {name} (first run only)") as progress:
        losses = measure_losses(model, tokenizer, text, progress)
    save_losses(path, losses)
    note(f"Saved the losses of its layers to {path}")


def measure_losses(model: Any, tokenizer: Any, text: str, progress: Progress = lambda done, total: None) -> Losses:
    """Return the KL divergence from the fp16 cache when the keys, or the values, of one layer alone are quantized.

    Any change makes the model's type round differently from there on; the loss of the finest format, which is nearly
    only that, is subtracted.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[:TOKENS]
    limit = position_limit(model)
    if len(ids) < TOKENS or (limit is not None and limit < TOKENS):
        raise ConfigError(
            f"layer losses are measured on {TOKENS} tokens; the text has {len(ids)}, and the model allows "
            f"{limit or 'any number of'} positions. Name formats with --kv-key and --kv-value."
        )
    plan = planner(model)
    count = len(plan(KVConfig()).layers)
    arms = [plan(replace(_CONFIG, key=_FINE, value=_FINE))]
    arms += [plan(config) for side in ("key", "value") for config in _one_layer_configs(side, count)]
    totals = [0.0] * len(arms)
    with compressed(model):
        native = arms[0].native_caches()
        cache_lists = [build_caches(arm) for arm in arms]
        for start in range(0, TOKENS, STEP):
            ids_of_step = ids[start : start + STEP]
            reference = log_probabilities(model, ids_of_step, native)
            for number, caches in enumerate(cache_lists):
                divergence = kl_divergence(reference, log_probabilities(model, ids_of_step, caches)).sum()
                totals[number] += float(divergence) if start >= _SCORED_FROM else 0.0
                progress(start * len(arms) + (number + 1) * len(ids_of_step), TOKENS * len(arms))
    rounding, *means = (total / (TOKENS - _SCORED_FROM) for total in totals)
    losses = tuple(max(mean - rounding, _LEAST_SHARE * rounding) for mean in means)
    return Losses(losses[:count], losses[count:], TOKENS - _SCORED_FROM)


def _one_layer_configs(side: str, layers: int) -> Iterator[KVConfig]:
    """Yield, for each layer, the configuration that quantizes only its keys or values."""
    other = "value" if side == "key" else "key"
    for layer in range(layers):
        formats = [MEASURED_FORMAT if number == layer else _FULL for number in range(layers)]
        schedule: dict[str, Any] = {side: SCHEDULE.join(formats), other: _FULL}
        yield replace(_CONFIG, **schedule)
