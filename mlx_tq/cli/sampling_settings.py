"""The sampling of a run: that of its flags, else of the model's generation_config.json, else mlx-lm's defaults."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from mlx_tq.cli.options import PENALTIES, SAMPLING, Option, check_numbers, name_of
from mlx_tq.cli.screen import warn
from mlx_tq.errors import ConfigError
from mlx_tq.models import GENERATION_CONFIG, read_generation_config

_FLAGS, _DEFAULT = "from flags", "default"
_OFF = (0, 1)  # repetition penalties that change nothing


def choose_sampling(args: argparse.Namespace, model: str | None) -> tuple[dict[str, Any], str]:
    """Return the sampling settings of a command by name, and a line that says what they are and where they are from.

    The configuration of `model` counts where the parser has no defaults of its own.
    """
    options, settings = (*SAMPLING, *PENALTIES), dict[str, Any]()
    from_model = any(getattr(args, name_of(option.flag)) is None for option in options)
    config = _read_sampling(model) if from_model else {}
    groups: dict[str, list[str]] = {_FLAGS: [], GENERATION_CONFIG: [], _DEFAULT: []}
    for option in options:
        name = name_of(option.flag)
        source = _FLAGS if option.flag in args.typed else GENERATION_CONFIG if name in config else _DEFAULT
        settings[name] = {_FLAGS: getattr(args, name), GENERATION_CONFIG: config.get(name)}.get(source, option.default)
        if source != _DEFAULT or name == "temp":
            groups[source].append(f"{option.flag.removeprefix('--')} {settings[name]:g}")
        if (name, settings[name]) == ("temp", 0):
            groups[source].append("greedy")
    parts = [f"{', '.join(texts)} ({source})" for source, texts in groups.items() if texts]
    return settings, f"Sampling: {'; '.join(parts)}"


def parse_setting(option: Option, text: str) -> Any:
    """Return the value of an option that `text` writes; raise ConfigError if it is not valid."""
    name = option.flag.removeprefix("--")
    try:
        value = option.parse(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}.") from error
    except ValueError as error:
        kind = "a whole number" if option.parse is int else "a number"
        raise ConfigError(f"{name} is {text[:40]!r}; it must be {kind}.") from error
    check_numbers(argparse.Namespace(command="chat", **{name_of(option.flag): value}))
    return value


def make_processors(settings: Mapping[str, Any], logit_bias: Mapping[int, float] | None = None) -> list[Any]:
    """Return mlx-lm's logits processors for the penalties of settings, and for biases of tokens."""
    penalties = {name_of(option.flag): settings[name_of(option.flag)] for option in PENALTIES}
    if penalties["repetition_penalty"] in _OFF:
        penalties["repetition_penalty"] = None
    return list(make_logits_processors(logit_bias, **penalties))


def _read_sampling(model: str | None) -> dict[str, Any]:
    """Return the sampling settings that a model's generation_config.json has; warn of those that are not valid."""
    config, settings = read_generation_config(model), dict[str, Any]()
    for option in (*SAMPLING, *PENALTIES):
        value = config.get(option.config_name or "")
        if value is not None:
            try:
                settings[name_of(option.flag)] = parse_setting(option, json.dumps(value))
            except ConfigError as error:
                warn(f"{GENERATION_CONFIG} of the model: {error} It is not used.")
    if config.get("do_sample") is False:
        settings["temp"] = 0.0
    elif config.get("do_sample") is True:
        settings.setdefault("temp", 1.0)  # transformers' default
    return settings
