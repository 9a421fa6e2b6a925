"""Limits of a tokenizer's own programs, its chat template and regular expressions, which a model's author wrote."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import UnsupportedModelError

_MAX_STEPS = 20_000_000  # lines of Python, two to five seconds; a conversation of 10,000 messages takes a tenth of them


class _TooManySteps(BaseException):
    """Ends a template; code that it calls may catch an Exception."""


def limit_tokenizer(tokenizer: Any) -> None:
    """Let a tokenizer of mlx-lm raise TemplateError or UnsupportedModelError where it would hang or panic.

    It also adds no second start token to text that begins with one.

    A copy of the tokenizer has these limits too; a pickled one loads without them.
    """
    for function in (encode, apply_chat_template):
        owner = getattr(tokenizer, function.__name__).__self__  # mlx-lm's wrapper, or the tokenizer inside it
        # Copying a bound method binds it to the copy, which a closure would not do, and pickling it works.
        setattr(owner, function.__name__, MethodType(function, owner))


@contextmanager
def report_panics(message: str) -> Iterator[None]:
    """Raise UnsupportedModelError for a panic of Rust code, which is no Exception, and whose class nothing exports."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UnsupportedModelError(
            f"{message} ({str(error)[:200]}). Repair its tokenizer.json, or use another copy of the model."
        ) from error


def encode(tokenizer: Any, text: Any, *args: Any, **options: Any) -> Any:
    """Call the `encode` of a tokenizer's class; text that begins with the start token gets no second one.

    As in mlx-lm's `stream_generate`, such text gets no token of the tokenizer's own.
    """
    if isinstance(text, str) and tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        options["add_special_tokens"] = False
    with report_panics("the model's tokenizer fails on this text"):
        return type(tokenizer).encode(tokenizer, text, *args, **options)


def apply_chat_template(tokenizer: Any, *args: Any, **options: Any) -> Any:
    """Call the `apply_chat_template` of a tokenizer's class."""
    try:
        with _at_most(_MAX_STEPS):
            return type(tokenizer).apply_chat_template(tokenizer, *args, **options)
    except _TooManySteps as error:
        raise TemplateError(f"rendering it takes more than {_MAX_STEPS:,} steps") from error
    except TemplateError:
        raise
    except Exception as error:  # whatever a template does
        raise TemplateError(str(error) or repr(error)) from error


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
        steps = sys.maxsize  # the frame of a generator that outlives the block keeps `count`
