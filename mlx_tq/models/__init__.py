"""Load models and their tokenizers, tell one model from another, and divide a model among ranks."""

from mlx_tq.models.fingerprint import exact_fingerprint, fingerprint
from mlx_tq.models.load import (
    DTYPES,
    EMBEDDED,
    GENERATION_CONFIG,
    embedded_path,
    load,
    ranks_of,
    read_generation_config,
)

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "GENERATION_CONFIG",
    "embedded_path",
    "exact_fingerprint",
    "fingerprint",
    "load",
    "ranks_of",
    "read_generation_config",
]
