"""A 2- to 8-bit KV cache for mlx-lm models, with eviction and recall.

import mlx_lm, mlx_tq

model, tokenizer = mlx_tq.load("mlx-community/Qwen3-4B-4bit")
with mlx_tq.compressed(model, profile="small"):
    for part in mlx_lm.stream_generate(model, tokenizer, prompt):
        print(part.text, end="", flush=True)
"""

from importlib import import_module
from typing import Any

from mlx_tq.errors import backend_error

__version__ = "0.1.0"

# Imported when first used, so that `import mlx_tq` costs no model code.
_HOMES = {
    "EvictConfig": "mlx_tq.config",
    "KVConfig": "mlx_tq.config",
    "MlxTqError": "mlx_tq.errors",
    "RescueConfig": "mlx_tq.config",
    "Session": "mlx_tq.session",
    "TurboQuant": "mlx_tq.codec",
    "compact_prompt_cache": "mlx_tq.session.compaction",
    "compressed": "mlx_tq.prompt_cache.compressed",
    "compressed_attention": "mlx_tq.prompt_cache.compressed",
    "load": "mlx_tq.models",
    "load_prompt_cache": "mlx_tq.prompt_cache.cache_file",
    "make_prompt_cache": "mlx_tq.prompt_cache.compressed",
    "memory_report": "mlx_tq.prompt_cache.memory",
    "save_prompt_cache": "mlx_tq.prompt_cache.cache_file",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_tq' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        if (fault := backend_error(error)) is None:
            raise
        raise fault from error


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
