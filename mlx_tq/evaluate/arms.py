"""The configurations that a measurement compares: profiles by name, and pairs of formats."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlx_tq.cli.args import FORMAT_OPTIONS, MEAN_BITS, OPTIONS, config_from_args, evict_from_args, option_value
from mlx_tq.config import PAIRS, PROFILES, EvictConfig, KVConfig, profile
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import native_caches
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import planner
from mlx_tq.prompt_cache.plan import Plan

# Of keys: not normalized.
_PLAIN = "plain"
# What chooses formats, which an arm's name does.
_CHOOSING = (*FORMAT_OPTIONS, MEAN_BITS)
# Before the budget of an arm that evicts.
_AT = "@"


@dataclass(frozen=True)
class Arm:
    """One configuration under its name in the results."""

    name: str
    config: KVConfig

    def caches(self, model: Any, plan: Callable[[KVConfig], Plan] | None = None) -> Callable[[], list[Any]]:
        """A function that makes fresh caches; the model is probed once, here, or by the `dispatch.planner` given.

        Raises:
            UnsupportedModelError: the model cannot run on compressed caches.
            ConfigError: a head size that the formats cannot take.
        """
        if self.config.is_off:
            return lambda: native_caches(model)
        planned = (plan or planner(model))(self.config)
        return lambda: build_caches(planned)


OFF = Arm("off", PROFILES["off"])


def parse_arm(text: str, **changes: Any) -> Arm:
    """An arm from a profile's name or from KEY/VALUE, where a format may carry its scale rule, and keys be plain.

    Examples: `balanced`, `q8/tq4`, `tq3:matched/tq4:raw`, `tq4:plain/tq4` without normalization, `off@90%` and
    `balanced@90%` with eviction to this budget, `4.2bits` with formats chosen by layer.

    Args:
        text: as above.
        changes: other fields of the configuration.

    Raises:
        ConfigError: an unknown profile, format or scale rule.
    """
    name, at, budget = text.partition(_AT)
    if at:
        changes["evict"] = replace(changes.get("evict") or EvictConfig(recall="off"), budget=budget)
    elif name == OFF.name:
        return OFF
    if name in PROFILES or name in PAIRS:
        chosen = profile(name)
        evict = changes.pop("evict", None) or chosen.evict
        if evict is not None:
            evict = replace(evict, recall="off")  # nothing asks for what left
        return Arm(text, KVConfig(**{"key": chosen.key, "value": chosen.value, **changes, "evict": evict}))
    if match := re.fullmatch(r"([\d.]+)bits", name):
        return Arm(text, KVConfig(**changes, mean_bits=float(match[1])))
    key, slash, value = name.partition("/")
    if not slash:
        raise ConfigError(
            f"profile {name!r} is unknown; valid are {', '.join(PROFILES)}, or a pair of formats such as q8/tq4."
        )
    for field, part in (("key", key), ("value", value)):
        changes[field], *words = part.split(":")
        for word in words:
            changes |= {"normalize": False} if (field, word) == ("key", _PLAIN) else {f"{field}_scale": word}
    return Arm(text, KVConfig(**changes))


def region_changes(args: argparse.Namespace) -> dict[str, Any]:
    """What flags and environment say about everything but the formats."""
    chosen = {option.field: option_value(args, option) for option in OPTIONS if option not in _CHOOSING}
    changes = {field: value for field, value in chosen.items() if value is not None}
    return changes | {"evict": evict_from_args(args)}


def arms_from_args(args: argparse.Namespace) -> list[Arm]:
    """The arms that the flags name; one arm where --kv-profile, --kv-key or --kv-value choose it.

    Raises:
        ConfigError: an unknown name, or formats chosen twice.
    """
    flags = [option.flag for option in _CHOOSING if option_value(args, option, {}) is not None]
    if args.profiles is not None and flags:
        raise ConfigError(f"--profiles and {flags[0]} both choose formats. Drop one of them.")
    if args.profiles is None and any(option_value(args, option) is not None for option in _CHOOSING):
        config = config_from_args(args)
        bits = config.mean_bits
        return [Arm(f"{config.key}/{config.value}" if bits is None else f"{bits:g}bits", config)]
    names = [name.strip() for name in (args.profiles or args.default_profiles).split(",") if name.strip()]
    if not names:
        raise ConfigError("--profiles is empty; give some, such as off,balanced,q8/tq3.")
    changes = region_changes(args)
    if any(_AT in name for name in names):  # the others keep all
        return [parse_arm(name, **(changes if _AT in name else changes | {"evict": None})) for name in names]
    return [parse_arm(name, **changes) for name in dict.fromkeys(names)]
