"""Models and their tokenizers: from a folder, the hub, a package or a GGUF file; and what tells one from another."""

from mlx_tq.models.fingerprint import exact_fingerprint, fingerprint
from mlx_tq.models.load import DTYPES, load, load_with_config
from mlx_tq.models.named import EMBEDDED, embedded_path
from mlx_tq.models.shard import ranks_of

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "embedded_path",
    "exact_fingerprint",
    "fingerprint",
    "load",
    "load_with_config",
    "ranks_of",
]
