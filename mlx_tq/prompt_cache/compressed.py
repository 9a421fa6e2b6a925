"""`compressed`: the context in which a model runs on compressed caches."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.patches import patch_attention, patch_forward, patch_make_cache, patch_rope
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.models import fingerprint, ranks_of
from mlx_tq.policies.calibration import Calibration, load_calibration
from mlx_tq.policies.policy import CalibratedPolicy, Policy
from mlx_tq.prompt_cache.allocation import allocate
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.fitting import Fitting
from mlx_tq.prompt_cache.known_queries import known_queries
from mlx_tq.prompt_cache.losses import Losses, known_losses
from mlx_tq.prompt_cache.plan import Plan, make_plan


@contextmanager
def compressed(model: Any, config: KVConfig | None = None, **settings: Any) -> Iterator[None]:
    """Let `model` run on compressed caches until the context ends; then every binding is as it was.

    With a configuration, every cache that mlx-lm makes for the model meanwhile (in its generate, batch generation,
    speculative decoding and server) is a compressed one. Without, caches of one's own are served, as
    `make_prompt_cache` and `load_prompt_cache` give them. Contexts nest, also across threads.

    Args:
        model: of mlx-lm.
        config: how its caches are stored.
        settings: fields of `KVConfig`, in the place of `config`: `compressed(model, key="q8", value="tq4")`.

    Raises:
        UnsupportedModelError: the model cannot run on such caches; the message names it and the reason.
        ConfigError: `model` is no model, or a setting cannot be met.
        CacheFormatError: calibration statistics that are damaged or of another model.
    """
    config = _config(config, settings)
    with ExitStack() as stack:
        if config is not None:
            _check_arguments(model, config)
        stack.enter_context(patch_attention())
        stack.enter_context(patch_rope(model))
        stack.enter_context(patch_forward(model, Fitting(model).before_pass))
        if config is not None and not config.is_off:
            stack.enter_context(patch_make_cache(model, partial(build_caches, plan_caches(model, config))))
        yield


def _config(config: KVConfig | None, settings: dict[str, Any]) -> KVConfig | None:
    if not settings:
        return config
    if config is not None:
        raise ConfigError(
            f"both a config and {', '.join(settings)} were given. Give one of them, or dataclasses.replace(config)."
        )
    return KVConfig(**settings)


def _check_arguments(model: Any, config: Any) -> None:
    if not hasattr(model, "layers"):
        raise ConfigError(f"model is {model!r}; it must be a model of mlx-lm, as `mlx_tq.load()` returns it.")
    if not isinstance(config, KVConfig):
        raise ConfigError(
            f"config is {config!r}; it must be a KVConfig, such as mlx_tq.KVConfig(key='q8', value='tq4')."
        )


def plan_caches(model: Any, config: KVConfig) -> Plan:
    """Decide how each layer of `model` is stored; the first call for a model runs it once on a few tokens.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: a head size that the configured formats cannot take, or an eviction that the model cannot meet.
        CacheFormatError: calibration statistics that are damaged or of another model.
    """
    return planner(model)(config)


def planner(model: Any) -> Callable[[KVConfig], Plan]:
    """`plan_caches` for any number of configurations; raises as it does."""
    facts = model_facts(model)

    def plan(config: KVConfig) -> Plan:
        allocation = None
        if config.mean_bits is not None:
            config, allocation = allocate(facts, config, config.mean_bits, _losses(model))
        policy = None if config.evict is None else config.evict.policy
        planned = make_plan(facts, config, partial(native_caches, model), _calibration(model, policy))
        return planned if allocation is None else replace(planned, allocation=allocation)

    return plan


def _losses(model: Any) -> Losses:
    found = known_losses(fingerprint(model))
    if found is None:
        raise ConfigError(
            "mean_bits is given, but what each layer of this model loses is not known. Run mlx_tq.calibrate --losses "
            "with it once, or name formats."
        )
    return found


def _calibration(model: Any, policy: Policy | None) -> Calibration | None:
    """The statistics of a file that the policy names, or of one that is known of the model, on every rank."""
    if not isinstance(policy, CalibratedPolicy) or (policy.file is None and not policy.uses_auto_calibration):
        return None
    stamp = fingerprint(model)
    path = policy.file or known_queries(stamp, covariance=policy.needs_covariance)
    ranks = ranks_of(model)
    if ranks.any([path is None])[0] or path is None:
        return None
    whole = load_calibration(path, stamp)
    return whole if ranks.is_alone else whole.shard(ranks.rank, ranks.size)


def make_prompt_cache(model: Any, config: KVConfig = PROFILES[DEFAULT_PROFILE]) -> list[Any]:
    """A compressed prompt cache for `model`, for use inside `compressed(model)`: one entry per mlx-lm cache.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: a head size that the configured formats cannot take, no model or no configuration.
    """
    _check_arguments(model, config)
    if config.is_off:
        return native_caches(model)
    return build_caches(plan_caches(model, config))
