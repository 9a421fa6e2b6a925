"""Load models and their tokenizers, tell one model from another, and divide a model among ranks."""

from mlx_tq.models.dense import DenseWeights, dense_weights, free_ram
from mlx_tq.models.fingerprint import exact_fingerprint, fingerprint
from mlx_tq.models.load import (
    DTYPES,
    EMBEDDED,
    GENERATION_CONFIG,
    config_value,
    embedded_path,
    find_source,
    is_outline,
    load,
    load_outline,
    loaded_name,
    local_path,
    ranks_of,
    read_architecture,
    read_config,
    read_generation_config,
    short_name,
    source_name,
)
from mlx_tq.models.source import ModelSource, source_of

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "GENERATION_CONFIG",
    "DenseWeights",
    "ModelSource",
    "config_value",
    "dense_weights",
    "embedded_path",
    "exact_fingerprint",
    "find_source",
    "fingerprint",
    "free_ram",
    "is_outline",
    "load",
    "load_outline",
    "loaded_name",
    "local_path",
    "ranks_of",
    "read_architecture",
    "read_config",
    "read_generation_config",
    "short_name",
    "source_name",
    "source_of",
]
