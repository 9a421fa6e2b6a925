"""`compressed`: the context in which a model runs on compressed caches, and how their plan is found."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from mlx_lm.models.cache import CacheList

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.config import DEFAULT_PROFILE, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError, UncalibratedWarning
from mlx_tq.integration.batch_probe import check_batch, count_rows
from mlx_tq.integration.module_families import MLX_LM, family_of, language_model
from mlx_tq.integration.patches import patch_attention, patch_forward, patch_make_cache, patch_rope
from mlx_tq.integration.probe import SlotFacts, model_facts, native_caches
from mlx_tq.integration.speculative import patch_speculative
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.policies.calibration import Calibration, load_calibration
from mlx_tq.policies.policy import CalibratedPolicy, Policy
from mlx_tq.prompt_cache.allocation import allocate
from mlx_tq.prompt_cache.build import build_caches, empty_rows
from mlx_tq.prompt_cache.layer_group import begin_pass, compressed_caches
from mlx_tq.prompt_cache.measurements import Losses, find_calibration, find_head_scores, find_losses
from mlx_tq.prompt_cache.plan import Plan, make_plan


@contextmanager
def compressed(
    model: Any, config: KVConfig | None = None, *, profile: str | None = None, **settings: Any
) -> Iterator[None]:
    """Run `model` on compressed caches inside a `with` block; mlx-lm is restored on exit.

    Every cache that mlx-lm makes for the model meanwhile (in its generate, batch generation, speculative decoding and
    server) is compressed. Caches that you pass in, of `make_prompt_cache` or `load_prompt_cache`, keep their own
    configuration. Contexts nest, also across threads. For a model of mlx-vlm, the caches that mlx-vlm's
    `generate` makes for its language model are compressed; import mlx-vlm first.

    Args:
        model: model of mlx-lm or mlx-vlm.
        config: how its caches are stored, in place of `profile` and `settings`.
        profile: profile such as "small"; by default "balanced".
        settings: fields of `KVConfig` that replace the profile's: `compressed(model, key="q8", value="tq3")`.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: `model` is not a model, or a setting is invalid.
        CacheFormatError: calibration statistics that are damaged or of another model.
    """
    config = _choose_config(config, profile, settings)
    with compressed_attention(model):
        if config.is_off:
            yield
            return
        text_model = language_model(model)
        plan = plan_caches(text_model, config)
        warn_uncalibrated(plan, stacklevel=4)  # above the context manager
        make = partial(build_caches, plan)
        with patch_make_cache(text_model, make), patch_make_cache(model, make):
            yield


@contextmanager
def compressed_attention(model: Any) -> Iterator[None]:
    """Run `model` on the compressed caches that you pass in, inside a `with` block; mlx-lm is restored on exit.

    Unlike in `compressed`, the caches that mlx-lm makes for the model meanwhile are its own. Contexts nest, also across
    threads.

    Args:
        model: model of mlx-lm or mlx-vlm.

    Raises:
        ConfigError: `model` is not a model.
    """
    model = language_model(model)
    _check_model(model)
    guard = _PassGuard(model)
    with patch_attention(), patch_rope(model), patch_forward(model, guard.begin_pass), patch_speculative():
        yield


def make_prompt_cache(
    model: Any, config: KVConfig | None = None, *, profile: str | None = None, **settings: Any
) -> list[Any]:
    """Make a compressed prompt cache for `model`: one entry per cache of mlx-lm or mlx-vlm.

    Use it inside `compressed(model)` or `compressed_attention(model)`. `config`, or `profile` and `settings`, say how
    it is stored, as in `compressed`.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: a head size that the configured formats do not support, or a wrong argument.
    """
    config, model = _choose_config(config, profile, settings), language_model(model)
    _check_model(model)
    if config.is_off:
        return native_caches(model)
    plan = plan_caches(model, config)
    warn_uncalibrated(plan, stacklevel=3)
    return build_caches(plan)


def warn_uncalibrated(plan: Plan, stacklevel: int) -> None:
    """Warn with an `UncalibratedWarning` if eviction learns from the prompt what a calibration would tell it."""
    if plan.eviction is not None and plan.calibrates_on_prompt:
        message = (
            f"{plan.eviction.config.policy} finds no calibration of {plan.name or plan.model_type}: it learns from the "
            f"prompt, evicts nothing before {plan.warmup:,} tokens, and may then evict what a question needs. Run "
            "mlx_tq.calibrate with this model once."
        )
        warnings.warn(message, UncalibratedWarning, stacklevel=stacklevel)


def _choose_config(config: KVConfig | None, profile: str | None, settings: dict[str, Any]) -> KVConfig:
    if config is None:
        return KVConfig.from_profile(DEFAULT_PROFILE if profile is None else profile, **settings)
    if not isinstance(config, KVConfig):
        raise ConfigError(
            f"config is {config!r}; it must be a KVConfig, such as mlx_tq.KVConfig.from_profile('small') or "
            "mlx_tq.KVConfig(key='q8', value='tq4')."
        )
    others = [*([] if profile is None else ["profile"]), *settings]
    if others:
        raise ConfigError(
            f"both a config and {', '.join(others)} were given. Give one of them, or dataclasses.replace(config)."
        )
    return config


def _check_model(model: Any) -> None:
    if not hasattr(model, "layers"):
        raise ConfigError(
            f"model is {model!r}; it must be a model of mlx-lm, as `mlx_tq.load()` returns it, or of mlx-vlm."
        )


def plan_caches(model: Any, config: KVConfig) -> Plan:
    """Decide how each layer of `model` is stored; the first call for a model runs it once on a few tokens."""
    return planner(model)(config)


def planner(model: Any) -> Callable[[KVConfig], Plan]:
    """Return `plan_caches` of one model, for any number of configurations."""
    facts = model_facts(model)

    def plan(config: KVConfig) -> Plan:
        allocation = None
        if config.mean_bits is not None:
            config, allocation = allocate(facts, config, config.mean_bits, _find_losses(model))
        policy = None if config.evict is None else config.evict.policy
        planned = make_plan(
            facts,
            config,
            partial(native_caches, model),
            _find_calibration(model, policy),
            find_head_scores(fingerprint(model)) if policy is not None and policy.by_head else None,
        )
        return planned if allocation is None else replace(planned, allocation=allocation)

    return plan


def _find_losses(model: Any) -> Losses:
    losses = find_losses(fingerprint(model))
    if losses is None:
        raise ConfigError(
            "mean_bits is given, but what each layer of this model loses is not known. Run mlx_tq.calibrate --losses "
            "with it once, or name formats."
        )
    return losses


def _find_calibration(model: Any, policy: Policy | None) -> Calibration | None:
    """Load the statistics that the policy names, or those of the model if every rank has them."""
    if not isinstance(policy, CalibratedPolicy) or (policy.file is None and not policy.uses_auto_calibration):
        return None
    stamp = fingerprint(model)
    path = policy.file or find_calibration(stamp, covariance=policy.needs_covariance)
    ranks = ranks_of(model)
    if ranks.any([path is None])[0] or path is None:
        return None
    calibration = load_calibration(path, stamp)
    return calibration if ranks.is_alone else calibration.shard(ranks.rank, ranks.size)


class _PassGuard:
    """Begins the forward passes of one model.

    It refuses caches of another model, once for each prompt cache, and batches that the model gets wrong.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._checked: WeakSet[CompressedKVCache] = WeakSet()

    def begin_pass(self, caches: Sequence[Any], count: int) -> bool:
        layers = compressed_caches(caches)
        if layers and layers[0] not in self._checked:
            check_caches(self._model, caches)
            self._checked.add(layers[0])
        if count_rows(caches) > 1:
            is_compressed = any(isinstance(part, BatchCompressedKVCache) for part in cache_parts(caches))
            make = partial(empty_rows, partial(native_caches, self._model), caches) if is_compressed else None
            if is_compressed or family_of(self._model) is MLX_LM:
                check_batch(self._model, caches, make)
        return begin_pass(caches, count)


def check_caches(model: Any, caches: Sequence[Any]) -> None:
    """Raise CacheFormatError unless caches have the layers, heads and sizes of a model."""
    facts = model_facts(model)
    compared = [(f"{len(caches)} layers", f"{len(facts.classes)} layers")]
    if len(caches) == len(facts.classes):
        compared = [
            (_describe_cache(slot, caches), _describe_heads(slot.heads, slot.key_dim, slot.value_dim))
            for slot in facts.slots
        ]
    for cached, expected in compared:
        if cached not in ("", expected):
            raise CacheFormatError(
                f"the cache is of another model than this {facts.model_type}: it has {cached}, the model "
                f"{expected}. Make a new one with mlx_tq.make_prompt_cache(model)."
            )


def _describe_heads(heads: int, key_dim: int, value_dim: int) -> str:
    return f"{heads} heads of {key_dim} and {value_dim}"


def _describe_cache(slot: SlotFacts, caches: Sequence[Any]) -> str:
    """Describe heads and sizes of what a layer stores; "" if it is empty."""
    cache = caches[slot.index]
    part = cache.caches[slot.part] if isinstance(cache, CacheList) and slot.part is not None else cache
    if not isinstance(part, CompressedKVCache) or part.empty():
        return ""
    keys, values = part.keys_and_values()
    return _describe_heads(keys.shape[1], keys.shape[3], values.shape[3])
