"""Array types by name: a stored `mx.Dtype` cannot be copied or written to a file."""

from typing import Any

import mlx.core as mx


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of a type, such as "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")


def dtype_of(name: str) -> mx.Dtype:
    """The type of a name; the inverse of `dtype_name`."""
    found: Any = getattr(mx, name)
    return found  # type: ignore[no-any-return]
