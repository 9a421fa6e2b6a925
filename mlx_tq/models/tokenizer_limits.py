"""Limits of a tokenizer's own programs, its chat template and regular expressions, which a model's author wrote."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import UnsupportedModelError

_MAX_STEPS = 20_000_000  # lines of Python, two seconds; a conversation of 10,000 messages takes a tenth of them


class _TooManySteps(BaseException):
    """Ends a template; code that it calls may catch an Exception."""


def limit_tokenizer(tokenizer: Any, source: str) -> None:
    """Let a tokenizer of mlx-lm raise TemplateError or UnsupportedModelError where it would hang or panic."""
    tokenizer.encode = _without_panics(tokenizer.encode, source)
    tokenizer.apply_chat_template = _with_few_steps(tokenizer.apply_chat_template)


@contextmanager
def report_panics(message: str) -> Iterator[None]:
    """Raise UnsupportedModelError for a panic of Rust code, which is no Exception, and whose class nothing exports."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UnsupportedModelError(
            f"{message} ({str(error)[:200]}). Repair its tokenizer.json, or take another copy of the model."
        ) from error


def _without_panics(encode: Callable[..., Any], source: str) -> Callable[..., Any]:
    def encode_text(*args: Any, **options: Any) -> Any:
        with report_panics(f"the tokenizer of {source!r} fails on this text"):
            return encode(*args, **options)

    return encode_text


def _with_few_steps(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_template(*args: Any, **options: Any) -> Any:
        try:
            with _at_most(_MAX_STEPS):
                return apply(*args, **options)
        except _TooManySteps as error:
            raise TemplateError(f"rendering it takes more than {_MAX_STEPS:,} steps") from error
        except TemplateError:
            raise
        except Exception as error:  # whatever a template does
            raise TemplateError(str(error) or repr(error)) from error

    return apply_template


@contextmanager
def _at_most(steps: int) -> Iterator[None]:
    """Raise _TooManySteps in this thread after `steps` lines of Python."""

    def count(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise _TooManySteps
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
