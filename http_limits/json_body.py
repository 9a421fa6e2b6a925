"""Parsing of JSON from clients."""

import gc
from typing import Any

from pydantic_core import from_json


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is not valid."""
    gc.disable()  # with a million lists, it takes most of the time and holds the GIL
    try:
        # Caching strings can double the parsing time of a body with many distinct ones.
        return from_json(text, cache_strings="none")
    finally:
        gc.enable()
