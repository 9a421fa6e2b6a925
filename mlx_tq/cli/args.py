"""Flags that commands share. Each has an environment fallback, `MLX_TQ_` and the flag's name; the flag wins.

`--help` loads this module, so it imports what loads mlx only where a flag's value is used.
"""

import argparse
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_tq.cli.names import BACKENDS, DEFAULT_PROFILE, FORMATS, POLICIES, PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.files import is_replaceable

if TYPE_CHECKING:
    from mlx_tq.config import EvictConfig, KVConfig, RescueConfig


def on_or_off(text: str) -> bool:
    """What the word says.

    Raises:
        argparse.ArgumentTypeError: it is another one.
    """
    if text not in (_OFF, "on"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


class Option(NamedTuple):
    """A flag that sets one thing, such as a field of `KVConfig`; `kind` reads its text and is named in errors."""

    flag: str
    field: str
    kind: Callable[[str], Any]
    help: str

    @property
    def metavar(self) -> str:
        """What stands behind the flag in its help."""
        return "{on,off}" if self.kind is on_or_off else self.field.upper()


PROFILE = Option(
    "--kv-profile", "profile", str, f"how the KV cache is stored: {', '.join(PROFILES)} (default: {DEFAULT_PROFILE})"
)
MEAN_BITS = Option(
    "--kv-mean-bits",
    "mean_bits",
    float,
    "in the place of a profile: choose the formats of each layer so that a value takes so many bits, such as 4.2, "
    "scales included; what layers lose is measured once a model (default: none)",
)
OPTIONS = (
    Option(
        "--kv-key",
        "key",
        str,
        f"format of keys: {', '.join(FORMATS)}; or one for each layer, joined by + (default: the profile's)",
    ),
    Option(
        "--kv-recent",
        "recent",
        int,
        "with two formats of keys, such as --kv-key tq4~tq3: packed tokens that have the first, the latest ones "
        "(default: 512)",
    ),
    Option("--kv-value", "value", str, "format of values: as for keys (default: the profile's)"),
    MEAN_BITS,
    Option("--kv-sinks", "sinks", int, "first tokens kept in the model's type (default: 128)"),
    Option("--kv-window", "window", int, "last tokens kept in the model's type (default: 128)"),
    Option("--kv-boundary", "boundary", int, "first and last layers kept at 8 bits or more (default: 0)"),
    Option(
        "--kv-outlier",
        "outlier",
        float,
        "key norm, in medians, above which a layer's keys keep 8 bits; 0 is off (default: 3)",
    ),
    Option(
        "--kv-normalize",
        "normalize",
        on_or_off,
        "keys are stored less the mean of their block, and dims weighted by what queries read of them (default: on)",
    ),
)
# What names formats, in the place of which MEAN_BITS may be given.
FORMAT_OPTIONS = (PROFILE, *(option for option in OPTIONS if option.field in ("key", "value")))
_PREFIX = "MLX_TQ_"
KEY_VARIABLE = "MLX_TQ_API_KEY"  # of mlx_tq.server
_NO_POLICY = "none"
EVICT = Option(
    "--kv-evict",
    "policy",
    str,
    f"which tokens leave: {', '.join([_NO_POLICY, *POLICIES])}; with options, as in "
    "triattention:trigger=64:warmup=512 (default: none do)",
)
BUDGET = Option(
    "--kv-budget",
    "budget",
    str,
    "what may stay: tokens (4096), a share of those seen (50%%), or bytes (2GB) (default: 90%%)",
)
CALIBRATION = Option(
    "--kv-calibration",
    "calibration",
    str,
    "whose queries tell what to keep: auto, of questions and text, gathered once a model; text, the one that is read; "
    "or a file of mlx_tq.calibrate (default: auto)",
)
CACHE_OPTIONS = (PROFILE, *OPTIONS, EVICT, BUDGET, CALIBRATION)
RECALL = Option(
    "--kv-recall",
    "tokens|auto|off",
    str,
    "with --kv-evict: bring back what the question asks for of all that left, up to so many tokens; auto is a tenth of "
    "the budget, at least 128, and off beside --draft-model, --image and --kv-shadow (default: auto)",
)
RECALL_EVERY = Option(
    "--kv-recall-every",
    "tokens",
    int,
    "tokens of an answer after which its own queries look into what left again; more where much did (default: 64)",
)
ARCHIVE = Option(
    "--kv-archive",
    "archive",
    on_or_off,
    "with --kv-evict: what leaves is kept in a file without a name; off is --kv-recall off, too (default: on)",
)
ARCHIVE_LIMIT = Option(
    "--kv-archive-limit",
    "size",
    lambda text: parse_size(text),
    "bytes of a conversation's archive (default: 20GB, or a tenth of the free disk where that is less)",
)
RECALL_OPTIONS = (RECALL, RECALL_EVERY, ARCHIVE, ARCHIVE_LIMIT)
STORE = Option(
    "--prefix-cache",
    "dir|auto|off",
    str,
    "keep what is read of prompts in this folder, and go on from there when one begins as an earlier one did; auto is "
    "the user's cache folder (default: off)",
)
STORE_LIMIT = Option(
    "--prefix-cache-limit", "size", lambda text: parse_size(text), "bytes of the store (default: 50GB)"
)
SHADOW = Option(
    "--kv-shadow",
    "n",
    int,
    "let the model's own cache answer, run the compressed one beside it, and report every N tokens what that would "
    "have changed, such as 16 (default: off)",
)
BACKEND = Option(
    "--backend",
    "backend",
    str,
    f"what computes on a compressed cache: {', '.join(BACKENDS)}; falls back to MLX_TQ_BACKEND "
    "(default: auto, a GPU's kernels)",
)
RESCUE_OPTIONS = (
    Option(
        "--rescue",
        "service",
        str,
        "brings evicted text back: off, auto (a service on this machine), or a URL "
        "(default: off; in chat with eviction auto)",
    ),
    Option(
        "--rescue-tokens",
        "max_tokens",
        int,
        "brought back in a turn at most (default: an eighth of the context, 2,048 at most)",
    ),
    Option("--rescue-timeout", "timeout", float, "seconds that a turn waits for the service at most (default: 1)"),
)
_AUTO, _OFF = "auto", "off"
_SAVED = ("load", "prompt_cache_file")  # flags of commands that go on with a file, which keeps its settings
_BLOCKS = 64  # tokens that leave together where their text is to be found again
_SIZES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def add_cache_arguments(
    parser: argparse.ArgumentParser, *, recall: bool = False, store: bool = False, shadow: bool = False
) -> None:
    """Add the flags of the compressed cache, and those of recall, store and shadow where a command has them."""
    group = parser.add_argument_group("KV cache", "each flag falls back to MLX_TQ_ and its name, such as MLX_TQ_KV_KEY")
    more = {RECALL_OPTIONS: recall, (STORE, STORE_LIMIT): store, (SHADOW,): shadow}
    for option in (*CACHE_OPTIONS, *(option for options, added in more.items() if added for option in options)):
        group.add_argument(option.flag, type=option.kind, default=None, metavar=option.metavar, help=option.help)
    add_backend_argument(group)


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    """Add --backend, which `choose_backend` puts into effect."""
    parser.add_argument(BACKEND.flag, default=None, metavar="BACKEND", help=BACKEND.help)


def choose_backend(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Take the implementation that a command's --backend or MLX_TQ_BACKEND names, if the command has that flag.

    Raises:
        ConfigError: an unknown name.
        KernelUnavailableError: it needs a GPU that is not here.
    """
    if hasattr(args, "backend"):
        from mlx_tq.kernels import backend  # loads mlx, which --help does without

        backend.choose(option_value(args, BACKEND, environ) or "auto")


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raise where a variable of ours is misspelt: it would have no effect.

    Raises:
        ConfigError: one is, with the most similar name.
    """
    known = [
        *(
            _environment_name(option.flag)
            for option in (*CACHE_OPTIONS, *RECALL_OPTIONS, STORE, STORE_LIMIT, SHADOW, BACKEND, *RESCUE_OPTIONS)
        ),
        KEY_VARIABLE,
    ]
    for name in environ:
        if name.startswith(_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ConfigError(
                f"the environment sets {name}, which is no setting. Did you mean {nearest}? Else unset it."
            )


def field_of(flag: str) -> str:
    """The name under which argparse keeps a flag's value."""
    return flag.removeprefix("--").replace("-", "_")


def _environment_name(flag: str) -> str:
    return _PREFIX + field_of(flag).upper()


def option_value(args: argparse.Namespace, option: Option, environ: Mapping[str, str] = os.environ) -> Any:
    """What the user chose for an option by flag or environment, or None.

    Raises:
        ConfigError: the environment holds a value of the wrong type.
    """
    chosen = getattr(args, field_of(option.flag))
    name = _environment_name(option.flag)
    if chosen is not None or name not in environ:
        return chosen
    try:
        return option.kind(environ[name])
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{name} is {environ[name]!r}; it must be of type {option.kind.__name__}.") from error


def config_from_args(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ, *, base: "KVConfig | None" = None
) -> "KVConfig":
    """The configuration that flags and environment describe.

    Args:
        args: of the command.
        environ: of the process.
        base: what they change where they name no profile; by default the default profile.

    Raises:
        ConfigError: a value that cannot be met.
    """
    from mlx_tq.config import CHOOSING, KVConfig, profile  # loads mlx, which --help does without

    chosen = {option.field: option_value(args, option, environ) for option in OPTIONS}
    changes = {field: value for field, value in chosen.items() if value is not None}
    named = option_value(args, PROFILE, environ)
    if "mean_bits" in changes:
        options = (PROFILE, *(option for option in OPTIONS if option.field in CHOOSING))
        flags = [option.flag for option in options if option_value(args, option, {}) is not None]
        if flags and option_value(args, MEAN_BITS, {}) is not None:
            raise ConfigError(f"{MEAN_BITS.flag} and {flags[0]} both choose formats. Drop one of them.")
        if flags:  # the environment is but a default
            del changes["mean_bits"]
        else:
            named = None
            changes |= {field: getattr(KVConfig, field) for field in CHOOSING}
    if named is None and base is not None:
        config = replace(base, **changes)
    else:
        config = profile(named or DEFAULT_PROFILE, **changes)
    return replace(config, evict=evict_from_args(args, environ, given=config.evict))


def evict_from_args(
    args: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    *,
    given: "EvictConfig | None" = None,
    **defaults: Any,
) -> "EvictConfig | None":
    """The eviction that flags and environment describe, or None.

    Args:
        args: of the command.
        environ: of the process.
        given: by the profile, for what they do not say; a command without --kv-recall brings nothing back.
        defaults: of the policy's options that --kv-evict does not name.

    Raises:
        ConfigError: a value that cannot be met, or a flag that has no effect.
    """
    from mlx_tq.config import EvictConfig  # loads mlx, which --help does without
    from mlx_tq.policies import CalibratedPolicy, parse_policy  # loads mlx, which --help does without

    text = option_value(args, EVICT, environ)
    if not text:
        text, defaults = _NO_POLICY if given is None else str(given.policy), {}  # a profile has chosen its options
    has_recall = hasattr(args, "kv_recall")
    if text == _NO_POLICY:
        options = (BUDGET, CALIBRATION, *(RECALL_OPTIONS if has_recall else ()))
        idle = [option.flag for option in options if option_value(args, option, {}) is not None]
        saved = next(filter(None, (getattr(args, field, None) for field in _SAVED)), None)
        if idle and saved is not None:
            raise ConfigError(f"{idle[0]} is given, but {saved} goes on as it was saved. Drop it.")
        if idle:
            raise ConfigError(f"{idle[0]} is given, but no token leaves: add --kv-evict triattention, or drop it.")
        return None
    recall = _chosen_recall(args, environ, given) if has_recall else _OFF
    chosen: dict[str, Any] = {"budget": option_value(args, BUDGET, environ)}
    for name, option in (("recall_every", RECALL_EVERY), ("archive_limit", ARCHIVE_LIMIT)) if has_recall else ():
        if recall != _OFF:
            chosen[name] = option_value(args, option, environ)
        elif option_value(args, option, {}) is not None:
            how = how_to_recall(args, environ)
            raise ConfigError(f"{option.flag} is given, but nothing is archived: take {how}, or drop it.")
    calibration = option_value(args, CALIBRATION, environ)
    policy = parse_policy(text, **defaults, **({} if calibration is None else {"calibration": calibration}))
    named = option_value(args, CALIBRATION, {})
    if named is not None and named != getattr(policy, "calibration", None):
        why = "names another file" if isinstance(policy, CalibratedPolicy) else "asks no queries"
        raise ConfigError(
            f"--kv-calibration {named} is given, but the policy {policy.name} {why}; drop one of the two."
        )
    changes = {name: value for name, value in chosen.items() if value is not None}
    return replace(given or EvictConfig(), policy=policy, recall=recall, **changes)


def recall_value(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """What the user chose for --kv-recall; off where nothing is archived.

    Raises:
        ConfigError: a flag asks for something else there.
    """
    text: str | None = option_value(args, RECALL, environ)
    if option_value(args, ARCHIVE, environ) is not False:
        return text
    flag = option_value(args, RECALL, {})
    if flag not in (None, _OFF):
        raise ConfigError(f"--kv-recall {flag} has nothing to bring back with --kv-archive off. Drop one of the two.")
    return _OFF


def how_to_recall(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str:
    """The flag with which something would come back that now does not."""
    return "--kv-recall auto" if option_value(args, ARCHIVE, environ) is not False else "--kv-archive on"


def _chosen_recall(args: argparse.Namespace, environ: Mapping[str, str], given: "EvictConfig | None") -> int | str:
    """A count of tokens, or a word that `EvictConfig` checks: auto is off where no rows can come back.

    Raises:
        ConfigError: a count of tokens there.
    """
    text = recall_value(args, environ)
    recall = (_AUTO if given is None else given.recall) if text is None else int(text) if text.isdecimal() else text
    beside = beside_recall(args, environ)
    if beside is None or recall == _OFF:
        return recall
    if recall == _AUTO:
        return _OFF
    raise ConfigError(f"--kv-recall {recall} cannot be combined with {beside}. Drop one of the two.")


def beside_recall(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """What is asked for beside which no rows can come back, or None."""
    if hasattr(args, "kv_shadow") and option_value(args, SHADOW, environ) is not None:
        return SHADOW.flag
    flags = ("--draft-model", "--image")
    return next((flag for flag in flags if getattr(args, field_of(flag), None)), None)


def add_rescue_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of rescue."""
    group = parser.add_argument_group("rescue", "a service's token comes from RESCUE_TOKEN")
    for option in RESCUE_OPTIONS:
        group.add_argument(option.flag, type=option.kind, default=None, metavar=option.metavar, help=option.help)


def rescue_from_args(args: argparse.Namespace, default: str, environ: Mapping[str, str] = os.environ) -> "RescueConfig":
    """The rescue that flags and environment describe; `default` is the service where they name none.

    Raises:
        ConfigError: a value that cannot be met.
    """
    from mlx_tq.config import RescueConfig  # loads mlx, which --help does without

    chosen = {option.field: option_value(args, option, environ) for option in RESCUE_OPTIONS}
    given = {field: value for field, value in chosen.items() if value is not None}
    return RescueConfig(**{"service": default, **given})


def refuse_idle_rescue(args: argparse.Namespace, rescue: "RescueConfig") -> None:
    """Raise where a flag says how text comes back, and none does.

    Raises:
        ConfigError: one does.
    """
    service, *others = RESCUE_OPTIONS
    idle = [option.flag for option in others if option_value(args, option, {}) is not None]
    if idle and rescue.service == _OFF:
        raise ConfigError(f"{idle[0]} is given, but no text comes back: add {service.flag} auto, or drop it.")


def chooses_rescue(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> bool:
    """A flag or the environment says something about rescue."""
    return any(option_value(args, option, environ) is not None for option in RESCUE_OPTIONS)


def with_blocks(config: "KVConfig", args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> "KVConfig":
    """`config` with tokens that leave in blocks, which can be read again, unless --kv-evict names a granularity."""
    return replace(config, evict=evict_from_args(args, environ, given=config.evict, granularity=_BLOCKS))


def names_cache(args: argparse.Namespace) -> bool:
    """A flag chose something about the compressed cache; the environment is but a default."""
    return any(option_value(args, option, {}) is not None for option in CACHE_OPTIONS)


def check_writable(flag: str, path: str, kind: str = ".safetensors file") -> None:
    """Raise where the file of a flag, a `kind`, cannot be written, before the work that it is for.

    Raises:
        ConfigError: it is no file, or its own folder is missing or read-only.
    """
    file = Path(path)
    folder = file.resolve().parent
    if not is_replaceable(file):
        raise ConfigError(f"{flag} {file} is a folder, a device or a pipe; name the {kind} to write.")
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
