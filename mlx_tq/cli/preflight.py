"""Check before prefill that a context fits into the model and into memory."""

from pathlib import Path

import mlx.core as mx

from mlx_tq.cli.screen import human_bytes
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.plan import Plan


def check_positions(tokens: int, limit: int | None) -> None:
    """Raise ConfigError if a prompt leaves no room for an answer in the model's context."""
    if limit is not None and tokens >= limit:
        raise ConfigError(
            f"the prompt has {tokens:,} tokens; the model allows {limit:,}, answer included. Shorten the prompt, "
            "or use a model with a longer context."
        )


def free_memory() -> int:
    """Return the bytes that this process can still take: of a Mac's GPU working set, of RAM elsewhere."""
    if mx.metal.is_available():
        recommended = mx.device_info()["max_recommended_working_set_size"]
        return int(recommended) - mx.get_active_memory()
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("free memory is unknown on this system; give --kv-memory-limit, such as 8GB.")


def check_memory(plan: Plan, tokens: int, limit: int) -> None:
    """Raise ConfigError if the cache of `tokens` tokens needs more than `limit` bytes, with the context that fits."""
    needed = plan.peak_nbytes(tokens)
    if needed <= limit:
        return
    fits = next((n for n in (tokens * k // 64 for k in range(63, 0, -1)) if plan.peak_nbytes(n) <= limit), 0)
    remedy = "Not even a short prompt fits: raise --kv-memory-limit, or lower --kv-sinks and --kv-window."
    if fits:
        remedy = f"About {fits:,} tokens fit: shorten the prompt or --max-tokens, or use --kv-profile small."
    sizes = f"needs {human_bytes(needed)} of KV cache; {human_bytes(limit)} are available"
    raise ConfigError(f"a context of {tokens:,} tokens {sizes}. {remedy}")
