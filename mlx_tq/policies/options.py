"""Options of dataclasses: checked, and parsed from and written as text such as `trigger=64:warmup=512`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from mlx_tq.errors import ConfigError, unknown_name

_SEPARATOR = ":"
# How to parse a text of each type, and what to ask for if that fails.
_PARSERS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: ({"on": True, "off": False}.__getitem__, "on or off"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (lambda text: text.replace("%3A", _SEPARATOR).replace("%25", "%"), "a text"),
}


def option(
    default: Any, *, choices: Iterable[Any] = (), minimum: float | None = None, maximum: float | None = None
) -> Any:
    """Return a dataclass field with a default and the values that `check_options` accepts for it."""
    return field(default=default, metadata={"choices": tuple(choices), "minimum": minimum, "maximum": maximum})


def check_options(settings: Any) -> None:
    """Raise ConfigError if a field has the wrong type (a float may be a whole number) or a value that is excluded."""
    hints = get_type_hints(type(settings))
    for field_ in fields(settings):
        name, value, hint = field_.name, getattr(settings, field_.name), hints[field_.name]
        fits = isinstance(value, hint | int if float in (hint, *get_args(hint)) else hint)
        if not fits or (isinstance(value, bool) and hint is not bool):
            raise ConfigError(f"{name} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}.")
        if value is None:
            continue
        choices, minimum, maximum = map(field_.metadata.get, ("choices", "minimum", "maximum"))
        if choices and value not in choices:
            raise unknown_name(name, value, choices)
        if minimum is not None and not minimum <= value <= (value if maximum is None else maximum):  # NaN included
            valid = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum:,}"
            raise ConfigError(f"{name} is {value}; it must be {valid}.")


def parse_spec(text: str, kind: str, classes: Mapping[str, type]) -> tuple[type, dict[str, Any]]:
    """Return the class that is named at the start of `NAME:OPTION=VALUE:...`, and the values of its options."""
    name, *parts = text.split(_SEPARATOR)
    if name not in classes:
        raise unknown_name(kind, name, classes)
    hints, valid = get_type_hints(classes[name]), sorted(field_.name for field_ in fields(classes[name]))
    values: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"{part!r} in {text!r} is not an option; write options as in {name}:trigger=64:warmup=512."
            )
        if key in values:
            raise ConfigError(f"{key} occurs twice in {text!r}; keep one.")
        if key not in valid:
            raise unknown_name(f"option of {name}", key, valid)
        types = [part for part in (get_args(hints[key]) or (hints[key],)) if part is not NoneType]
        parse, expected = _PARSERS[types[0]]
        try:
            values[key] = parse(value)
        except (KeyError, ValueError):
            raise ConfigError(f"{key}={value} does not fit {name}: {key} takes {expected}.") from None
    return classes[name], values


def format_spec(name: str, settings: Any) -> str:
    """Return the text of a name and its options that are not defaults, as `parse_spec` takes it."""
    parts = [name]
    for field_ in fields(settings):
        value = getattr(settings, field_.name)
        if value == field_.default:
            continue
        if isinstance(value, bool):
            value = "on" if value else "off"
        text = value.replace("%", "%25").replace(_SEPARATOR, "%3A") if isinstance(value, str) else repr(value)
        parts.append(f"{field_.name}={text}")
    return _SEPARATOR.join(parts)
