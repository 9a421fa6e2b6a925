"""Load models and their tokenizers, tell one model from another, and divide a model among ranks."""

from mlx_tq.models.fingerprint import exact_fingerprint, fingerprint
from mlx_tq.models.load import DTYPES, EMBEDDED, embedded_path, is_outline, load, load_outline, ranks_of

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "embedded_path",
    "exact_fingerprint",
    "fingerprint",
    "is_outline",
    "load",
    "load_outline",
    "ranks_of",
]
