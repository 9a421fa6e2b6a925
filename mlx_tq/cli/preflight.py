"""What a model and a machine allow, checked before the prompt is read."""

import argparse
import math
from pathlib import Path

import mlx.core as mx

from mlx_tq.cli.screen import human_bytes
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.plan import Plan

_ALL_TOKENS = -1
_AT_LEAST = {"prefill_step_size": 1, "max_kv_size": 1, "num_draft_tokens": 0, "quantized_kv_start": 0, "seed": 0}
_SAMPLING = {"temp": math.inf, "top_p": 1, "min_p": 1, "top_k": math.inf, "xtc_probability": 1, "xtc_threshold": 0.5}


def check_arguments(args: argparse.Namespace) -> None:
    """Raise where a number makes no sense, before a model is loaded for it.

    Raises:
        ConfigError: one does not, with the least that does.
    """
    max_tokens = getattr(args, "max_tokens", 1)
    if max_tokens < 1 and max_tokens != _ALL_TOKENS:
        raise ConfigError(f"--max-tokens is {max_tokens}; it must be 1 or more, or -1 for all that the model allows.")
    for name, least in _AT_LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more.")
    for name, most in _SAMPLING.items():
        value = getattr(args, name, None)
        if value is not None and not 0 <= value <= most:  # also refuses NaN
            allowed = "0 or more" if most == math.inf else f"from 0 to {most}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}.")
    if getattr(args, "kv_bits", None) is not None:
        try:
            mx.quantize(mx.zeros((1, args.kv_group_size)), group_size=args.kv_group_size, bits=args.kv_bits)
        except ValueError as error:
            raise ConfigError(f"--kv-bits {args.kv_bits} --kv-group-size {args.kv_group_size}: {error}") from error


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
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("free memory is unknown on this system; give --kv-memory-limit, such as 8GB.")


def check_memory(plan: Plan, tokens: int, limit: int) -> None:
    """Raise where the cache of `tokens` tokens would not fit into `limit` bytes.

    Raises:
        ConfigError: it would not, with the bytes and the context that would fit.
    """
    needed = plan.peak_nbytes(tokens)
    if needed <= limit:
        return
    fits = next((n for n in (tokens * k // 64 for k in range(63, 0, -1)) if plan.peak_nbytes(n) <= limit), 0)
    remedy = (
        f"About {fits:,} tokens fit: shorten the prompt or --max-tokens, or take --kv-profile small."
        if fits
        else "Not even a short prompt fits: raise --kv-memory-limit, or lower --kv-sinks and --kv-window."
    )
    raise ConfigError(
        f"a context of {tokens:,} tokens needs {human_bytes(needed)} of KV cache; {human_bytes(limit)} are there. "
        f"{remedy}"
    )
