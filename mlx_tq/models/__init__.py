"""Load models and their tokenizers, tell one model from another, and divide a model among ranks."""

from mlx_tq.models.fingerprint import exact_fingerprint, fingerprint
from mlx_tq.models.load import DTYPES, EMBEDDED, embedded_path, find_source, load, name_of, ranks_of, short_name

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "embedded_path",
    "exact_fingerprint",
    "find_source",
    "fingerprint",
    "load",
    "name_of",
    "ranks_of",
    "short_name",
]
