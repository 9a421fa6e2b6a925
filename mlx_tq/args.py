"""Flags that commands share. Each has an environment fallback, `MLX_TQ_` and the flag's name; the flag wins."""

import argparse
import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.codec.formats import format_names
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, EvictConfig, KVConfig, RescueConfig, profile
from mlx_tq.errors import ConfigError
from mlx_tq.evict.policy import get_policy, policy_names
from mlx_tq.files import is_replaceable
from mlx_tq.kernels import impl


class Option(NamedTuple):
    """A flag that sets one field of `KVConfig` or `EvictConfig`."""

    flag: str
    field: str
    kind: type
    help: str


PROFILE = Option(
    "--kv-profile", "profile", str, f"how the KV cache is stored: {', '.join(PROFILES)} (default: {DEFAULT_PROFILE})"
)
OPTIONS = (
    Option("--kv-key", "key", str, f"format of keys: {', '.join(format_names())}; or one for each layer, joined by +"),
    Option(
        "--kv-recent",
        "recent",
        int,
        "with two formats of keys, such as --kv-key tq4~tq3: packed tokens that have the first, the latest ones (512)",
    ),
    Option("--kv-value", "value", str, "format of values: the same but for spectral"),
    Option("--kv-prefix", "prefix", int, "first tokens kept in the model's type"),
    Option("--kv-window", "window", int, "last tokens kept in the model's type"),
    Option("--kv-boundary", "boundary", int, "first and last layers kept at 8 bits or more"),
    Option("--kv-outlier", "outlier", float, "key norm, in medians, above which a layer's keys keep 8 bits; 0 is off"),
)
_PREFIX = "MLX_TQ_"
KEY_VARIABLE = "MLX_TQ_API_KEY"  # of mlx_tq.server
_NO_POLICY = "none"
EVICT = Option(
    "--kv-evict", "policy", str, f"which tokens leave: {', '.join([_NO_POLICY, *policy_names()])} (default: none do)"
)
EVICT_OPTIONS = (
    Option("--kv-budget", "budget", str, "what may stay: tokens (4096), of those seen (90%%), or bytes (2GB)"),
    Option(
        "--kv-evict-mode",
        "mode",
        str,
        "v1, v2 or v3: over all, in segments, in those after the prefix (default: v3)",
    ),
    Option("--kv-segments", "segments", int, "of modes v2 and v3 (default: 8)"),
    Option("--kv-warmup", "warmup", int, "tokens that calibrate; nothing leaves before (default: 1024)"),
    Option("--kv-granularity", "granularity", int, "tokens that leave together: 1, 8, 16, 32 or 64 (default: 1)"),
    Option("--kv-stats", "stats", str, "file of mlx_tq.calibrate, instead of a warm-up"),
)
CACHE_OPTIONS = (PROFILE, *OPTIONS, EVICT, *EVICT_OPTIONS)
IMPL = Option(
    "--impl",
    "impl",
    str,
    f"what computes on a compressed cache: {', '.join(impl.IMPLS)} (default: auto, a GPU's kernels)",
)
RESCUE_OPTIONS = (
    Option("--rescue", "service", str, "brings evicted text back: off, auto (a service on this machine), or a URL"),
    Option("--rescue-tokens", "max_tokens", int, "brought back in a turn at most (default: an eighth of the context)"),
    Option("--rescue-timeout", "timeout", float, "seconds that a turn waits for the service at most (default: 1)"),
)
# Tokens that leave together where their text is to be found again.
_BLOCKS = 64
_SIZES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the compressed cache."""
    group = parser.add_argument_group("KV cache", "each flag falls back to MLX_TQ_ and its name, such as MLX_TQ_KV_KEY")
    for option in CACHE_OPTIONS:
        group.add_argument(option.flag, type=option.kind, default=None, metavar=option.field.upper(), help=option.help)
    add_impl_argument(parser)


def add_impl_argument(parser: argparse.ArgumentParser) -> None:
    """Add --impl, which `choose_impl` puts into effect."""
    parser.add_argument(IMPL.flag, default=None, metavar="IMPL", help=f"{IMPL.help}; falls back to MLX_TQ_IMPL")


def choose_impl(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Take the implementation that a command's --impl or MLX_TQ_IMPL names, if the command has that flag.

    Raises:
        ConfigError: an unknown name.
        KernelUnavailableError: it needs a GPU that is not here.
    """
    if hasattr(args, "impl"):
        impl.choose(option_value(args, IMPL, environ) or "auto")


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raise where a variable of ours is misspelt: it would have no effect.

    Raises:
        ConfigError: one is, with the most similar name.
    """
    known = [*(_environment_name(option.flag) for option in (*CACHE_OPTIONS, IMPL, *RESCUE_OPTIONS)), KEY_VARIABLE]
    for name in environ:
        if name.startswith(_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ConfigError(
                f"the environment sets {name}, which is no setting. Did you mean {nearest}? Else unset it."
            )


def _environment_name(flag: str) -> str:
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def option_value(args: argparse.Namespace, option: Option, environ: Mapping[str, str] = os.environ) -> Any:
    """What the user chose for an option by flag or environment, or None.

    Raises:
        ConfigError: the environment holds a value of the wrong type.
    """
    chosen = getattr(args, option.flag.removeprefix("--").replace("-", "_"))
    name = _environment_name(option.flag)
    if chosen is not None or name not in environ:
        return chosen
    try:
        return option.kind(environ[name])
    except ValueError as error:
        raise ConfigError(f"{name} is {environ[name]!r}; it must be of type {option.kind.__name__}.") from error


def config_from_args(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> KVConfig:
    """The configuration that flags and environment describe.

    Raises:
        ConfigError: a value that cannot be met.
    """
    chosen = {option.field: option_value(args, option, environ) for option in OPTIONS}
    changes = {field: value for field, value in chosen.items() if value is not None}
    evict = evict_from_args(args, environ)
    return profile(option_value(args, PROFILE, environ) or DEFAULT_PROFILE, **changes, evict=evict)


def evict_from_args(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EvictConfig | None:
    """The eviction that flags and environment describe, or None.

    Raises:
        ConfigError: a value that cannot be met, or a flag without a policy.
    """
    policy = option_value(args, EVICT, environ) or _NO_POLICY
    if policy == _NO_POLICY:
        idle = [option.flag for option in EVICT_OPTIONS if option_value(args, option, {}) is not None]
        if idle:
            raise ConfigError(f"{idle[0]} is given, but no token leaves: add --kv-evict triattention, or drop it.")
        return None
    chosen = {option.field: option_value(args, option, environ) for option in EVICT_OPTIONS}
    config = EvictConfig(policy=policy, **{field: value for field, value in chosen.items() if value is not None})
    get_policy(config)
    return config


def add_rescue_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of rescue."""
    group = parser.add_argument_group("rescue", "a service's token comes from RESCUE_TOKEN")
    for option in RESCUE_OPTIONS:
        group.add_argument(option.flag, type=option.kind, default=None, metavar=option.field.upper(), help=option.help)


def rescue_from_args(args: argparse.Namespace, default: str, environ: Mapping[str, str] = os.environ) -> RescueConfig:
    """The rescue that flags and environment describe; `default` is the service where they name none.

    Raises:
        ConfigError: a value that cannot be met.
    """
    chosen = {option.field: option_value(args, option, environ) for option in RESCUE_OPTIONS}
    given = {field: value for field, value in chosen.items() if value is not None}
    return RescueConfig(**{"service": default, **given})


def with_blocks(config: KVConfig, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> KVConfig:
    """`config` with tokens that leave in blocks, which can be read again, unless a granularity was chosen."""
    granularity = next(option for option in EVICT_OPTIONS if option.field == "granularity")
    if config.evict is None or option_value(args, granularity, environ) is not None:
        return config
    return replace(config, evict=replace(config.evict, granularity=_BLOCKS))


def names_cache(args: argparse.Namespace) -> bool:
    """A flag chose something about the compressed cache; the environment is but a default."""
    return any(option_value(args, option, {}) is not None for option in CACHE_OPTIONS)


def check_writable(flag: str, path: str) -> None:
    """Raise where the file of a flag cannot be written, before the work that it is for.

    Raises:
        ConfigError: it is no file, or its own folder is missing or read-only.
    """
    file = Path(path)
    folder = file.resolve().parent
    if not is_replaceable(file):
        raise ConfigError(f"{flag} {file} is a folder, a device or a pipe; name the .safetensors file to write.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag} {file} cannot be written: {folder} is no writable folder.")


def parse_size(text: str) -> int:
    """Bytes of a size such as 800MB or 4GB.

    Raises:
        argparse.ArgumentTypeError: not a size.
    """
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * _SIZES[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 800MB or 4GB, above zero")
    return size
