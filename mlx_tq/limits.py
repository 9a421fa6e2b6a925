"""What a model and a machine allow, checked before the prompt is read."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.cache.factory import Plan
from mlx_tq.errors import ConfigError


def position_limit(model: Any) -> int | None:
    """Tokens that the model was made for, or None where its configuration does not say."""
    args = getattr(model, "args", None)
    limit = getattr(args, "max_position_embeddings", None)
    return limit or (getattr(args, "text_config", None) or {}).get("max_position_embeddings")


def check_positions(tokens: int, limit: int | None) -> None:
    """Raise where a prompt is longer than the model allows.

    Raises:
        ConfigError: it is, with both lengths.

    """
    if limit is not None and tokens >= limit:
        raise ConfigError(
            f"the prompt has {tokens:,} tokens; the model allows {limit:,} with its answer. Shorten the prompt, or "
            "take a model with a longer context."
        )


def free_memory() -> int:
    """Bytes that this process can still take: of the GPU's working set on a Mac, of RAM elsewhere."""
    if mx.metal.is_available():
        recommended = mx.device_info()["max_recommended_working_set_size"]
        return int(recommended) - mx.get_active_memory()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("free memory is unknown on this system; give --kv-memory-limit, such as 8GB.")


def check_memory(plan: Plan, tokens: int, limit: int) -> None:
    """Raise where the cache of `tokens` tokens would not fit into `limit` bytes.

    Raises:
        ConfigError: it would not, with the bytes and the context that would fit.

    """
    needed = plan.nbytes(tokens)
    if needed <= limit:
        return
    fits = next((n for n in (tokens * k // 64 for k in range(63, 0, -1)) if plan.nbytes(n) <= limit), 0)
    raise ConfigError(
        f"a context of {tokens:,} tokens needs {needed / 1e9:.2f} GB of KV cache; {limit / 1e9:.2f} GB are there. "
        f"About {fits:,} tokens fit: shorten the prompt or --max-tokens, or take --kv-profile small."
    )
