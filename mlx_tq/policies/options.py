"""The options of a dataclass: checked, and read from and written as text such as `aggregation=v3:warmup=512`."""

import difflib
from collections.abc import Callable, Container, Iterable
from dataclasses import field, fields
from functools import wraps
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from mlx_tq.errors import ConfigError

Settings = TypeVar("Settings")
_SEPARATOR = ":"
_SWITCH = {"on": True, "off": False}
# How a text gives a value of each type, and what to say where it gives none.
_READ: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (_SWITCH.__getitem__, "on or off"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (lambda text: text.replace("%3A", _SEPARATOR).replace("%25", "%"), "a text"),
}


def option(default: Any, *, choices: Iterable[Any] = (), least: int | None = None) -> Any:
    """A field of a dataclass with a default, and what `check_options` allows: one of `choices`, or `least` and more."""
    return field(default=default, metadata={"choices": tuple(choices), "least": least})


def unknown(what: str, value: object, valid: Iterable[Any]) -> ConfigError:
    """The error for a word that is none of the valid ones; it names them, and the nearest one if it is near."""
    words = [str(word) for word in valid]
    nearest = difflib.get_close_matches(str(value), words, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return ConfigError(f"{what} {value!r} is unknown; valid are {', '.join(words)}.{hint}")


def names_settings(kind: type[Settings]) -> type[Settings]:
    """Let a dataclass raise a ConfigError that names the nearest field where it is made with one that it has not."""
    make: Callable[..., None] = kind.__init__

    @wraps(make)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        valid = [each.name for each in fields(self)]
        for name in given:
            if name not in valid:
                raise unknown(f"setting of {type(self).__name__}", name, valid)
        make(self, *args, **given)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def check_types(settings: Any) -> None:
    """Check that every field of a dataclass has its type; a whole number serves as a float.

    Raises:
        ConfigError: a field has another type.
    """
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, hint = getattr(settings, each.name), hints[each.name]
        fits = isinstance(value, hint | int if float in (hint, *get_args(hint)) else hint)
        if not fits or (isinstance(value, bool) and hint is not bool):
            raise ConfigError(f"{each.name} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}.")


def check_options(settings: Any) -> None:
    """Check the type of every field of a dataclass, and what `option` allows for it.

    Raises:
        ConfigError: a value that is not allowed, with those that are.
    """
    check_types(settings)
    for each in fields(settings):
        value, choices, least = getattr(settings, each.name), each.metadata.get("choices"), each.metadata.get("least")
        if choices and value not in choices:
            raise unknown(each.name, value, choices)
        if least is not None and value < least:
            raise ConfigError(f"{each.name} is {value}; it must be {least} or more.")


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """The name that `text` begins with, and its options as they stand there.

    Raises:
        ConfigError: a part that is no option, or an option that stands there twice.
    """
    name, *parts = text.split(_SEPARATOR)
    found: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{part!r} in {text!r} is no option; write options as in {name}:trigger=64:pooling=mean.")
        if key in found:
            raise ConfigError(f"{key} stands twice in {text!r}; keep one.")
        found[key] = value
    return name, found


def read_options(kind: type, name: str, texts: dict[str, str]) -> dict[str, Any]:
    """The values of options of the dataclass `kind`, which messages call `name`.

    Raises:
        ConfigError: an option that it does not have, or a text that gives no value of the option's type.
    """
    hints, own = get_type_hints(kind), sorted(each.name for each in fields(kind))
    found = {}
    for key, text in texts.items():
        if key not in own:
            raise unknown(f"option of {name}", key, own)
        types = [part for part in (get_args(hints[key]) or (hints[key],)) if part is not NoneType]
        read, expected = _READ[types[0]]
        try:
            found[key] = read(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{key}={text} does not fit {name}: {key} takes {expected}.") from None
    return found


def write_spec(name: str, settings: Any, always: Container[str] = ()) -> str:
    """The name and options, as `split_spec` and `read_options` take them: those of `always`, and what is no default."""
    parts = [name]
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default or each.name in always:
            parts.append(f"{each.name}={_written(value)}")
    return _SEPARATOR.join(parts)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return next(word for word, meaning in _SWITCH.items() if meaning is value)
    return str(value).replace("%", "%25").replace(_SEPARATOR, "%3A") if isinstance(value, str) else repr(value)
