"""Quantize vectors: rotations, codebooks, packing and storage formats in pure mx operations.

This is the specification that the kernels must equal.
"""

from mlx_tq.codec.formats import Codec, CodecOptions, Encoded, Format, format_names, get_format, register_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.codec.turboquant import TurboQuant

__all__ = [
    "Codec",
    "CodecOptions",
    "Encoded",
    "Format",
    "RowLayout",
    "TurboQuant",
    "format_names",
    "get_format",
    "register_format",
]
