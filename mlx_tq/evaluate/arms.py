"""The configurations ("arms") that a measurement compares: profiles by name, and pairs of formats."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from mlx_tq.cli.options import CONFIG_FIELDS, NAMING_FORMATS, Request, make_eviction
from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.config import PAIRS, PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError

if TYPE_CHECKING:
    from mlx_tq.prompt_cache.plan import Plan

_PLAIN = "plain"  # keys without normalization
_CHOOSING = (*NAMING_FORMATS, "--kv-mean-bits")  # flags that choose formats, which the name of an arm does, too


@dataclass(frozen=True)
class Arm:
    """One configuration, with its name in the results."""

    name: str
    config: KVConfig

    def caches(self, model: Any, plan: "Callable[[KVConfig], Plan] | None" = None) -> Callable[[], list[Any]]:
        """Return a function that makes fresh caches; the model is probed once, here, or by the given `planner`."""
        from mlx_tq.integration.probe import native_caches  # imports mlx-lm, which takes seconds
        from mlx_tq.prompt_cache.build import build_caches  # likewise
        from mlx_tq.prompt_cache.compressed import planner  # likewise

        if self.config.is_off:
            return lambda: native_caches(model)
        planned = (plan or planner(model))(self.config)
        return lambda: build_caches(planned)


OFF = Arm("off", PROFILES["off"])


def with_control(arms: list[Arm]) -> list[Arm]:
    """Return the arms with an uncompressed one, whose divergence is the floor of the measurement."""
    return arms if any(arm.config.is_off for arm in arms) else [OFF, *arms]


def compared_caches(model: Any, arms: Sequence[Arm], tokens: int) -> list[Callable[[], list[Any]]]:
    """Return functions that make caches for `tokens` tokens: mlx-lm's own, the reference, and then those of each arm.

    An uncompressed arm has all tokens in the recent window of our cache, whose attention sums in another order: it
    differs from the reference by rounding alone.
    """
    from mlx_tq.prompt_cache.build import build_caches  # imports mlx-lm, which takes seconds
    from mlx_tq.prompt_cache.compressed import planner  # likewise

    plan = planner(model)
    uncompressed = KVConfig(key="q8", value="q8", sinks=0, window=tokens, normalize=False)
    controls = plan(uncompressed) if any(arm.config.is_off for arm in arms) else None
    makers = [OFF.caches(model)]
    for arm in arms:
        makers.append(partial(build_caches, controls) if arm.config.is_off and controls else arm.caches(model, plan))
    return makers


def parse_arm(text: str, **changes: Any) -> Arm:
    """Return the arm of a profile's name or of KEY/VALUE; `changes` are further fields of its configuration.

    Examples: `balanced`, `q8/tq4`, `tq3:matched/tq4:raw` with scale rules, `tq4:plain/tq4` without normalized keys,
    `off@90%` with eviction to this budget, and `4.2bits` with formats chosen by layer.
    """
    name, has_budget, budget = text.partition("@")
    if has_budget:
        changes["evict"] = replace(changes.get("evict") or EvictConfig(recall="off"), budget=budget)
    elif name == OFF.name:
        return OFF
    if name in PROFILES or name in PAIRS:
        chosen = KVConfig.from_profile(name)
        evict = changes.pop("evict", None) or chosen.evict
        if evict is not None:
            evict = replace(evict, recall="off")  # no measurement here recalls
        return Arm(text, KVConfig(**{"key": chosen.key, "value": chosen.value, **changes, "evict": evict}))
    if match := re.fullmatch(r"([\d.]+)bits", name):
        return Arm(text, KVConfig(**changes, mean_bits=float(match[1])))
    key, slash, value = name.partition("/")
    if not slash:
        raise ConfigError(
            f"profile {name!r} is unknown; valid are {', '.join(PROFILES)}, or a pair of formats such as q8/tq4."
        )
    for field, part in (("key", key), ("value", value)):
        changes[field], *options = part.split(":")
        for option in options:
            is_plain = (field, option) == ("key", _PLAIN)
            changes |= {"normalize": False} if is_plain else {f"{field}_scale": option}
    return Arm(text, KVConfig(**changes))


def region_changes(request: Request) -> dict[str, Any]:
    """Return what flags and environment set of the configuration, without the formats."""
    chosen = {field: request.values[flag] for flag, field in CONFIG_FIELDS.items() if flag not in _CHOOSING}
    changes = {field: value for field, value in chosen.items() if value is not None}
    return changes | {"evict": make_eviction(request.values, request.typed)}


def arms_from_request(request: Request) -> list[Arm]:
    """Return the arms that the flags name; a single one if --kv-profile, --kv-key or --kv-value choose it."""
    args = request.args
    if args.profiles is None and any(request.values[flag] is not None for flag in _CHOOSING):
        config, bits = request.config, request.config.mean_bits
        return [Arm(f"{config.key}/{config.value}" if bits is None else f"{bits:g}bits", config)]
    listed = (name.strip() for name in (args.profiles or args.default_profiles).split(","))
    names = list(dict.fromkeys(name for name in listed if name))
    if not names:
        raise ConfigError("--profiles is empty; give some, such as off,balanced,q8/tq3.")
    changes = region_changes(request)
    if any("@" in name for name in names):  # the others do not evict
        return [parse_arm(name, **(changes if "@" in name else changes | {"evict": None})) for name in names]
    return [parse_arm(name, **changes) for name in names]


def sensible_pairs() -> list[str]:
    """Return each format for both sides, as values under q8 keys, and as keys over tq4 values."""
    names = format_names()
    pairs = [pair for name in names for pair in ((name, name), ("q8", name), (name, "tq4"))]
    usable = {(key, value) for key, value in pairs if not get_format(value).keys_only}
    return [f"{key}/{value}" for key, value in sorted(usable, key=lambda pair: [*map(names.index, pair)])]


def parse_pairs(keys: str | None, values: str | None, pairs: str | None = None, **changes: Any) -> list[Arm]:
    """Return the pairs of a list, or all pairs of two lists of formats (default: tq4), or the curated ones."""
    if pairs and (keys or values):
        raise ConfigError("--pairs and --keys or --values both choose formats. Drop one of them.")
    if keys or values:
        names = [f"{key}/{value}" for key, value in product((keys or "tq4").split(","), (values or "tq4").split(","))]
    else:
        names = pairs.split(",") if pairs else sensible_pairs()
    return [parse_arm(name, **changes) for name in names]


def arms_of_measurement(request: Request) -> list[Arm]:
    """Return what a measurement of mlx_tq.evaluate compares."""
    args = request.args
    if args.measurement == "formats":
        return parse_pairs(args.keys, args.values, args.pairs, **region_changes(request))
    return [Arm("cache", request.config)] if args.measurement == "lm-eval" else arms_from_request(request)
