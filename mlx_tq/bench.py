"""`mlx_tq.bench`: decode attention on compressed caches against mx.fast and mlx-lm's quantised cache, in one run.

One layer, one new token. Arms are timed in turn, several rounds, each call waiting for the one before it (its output
is the next query), so that a launch's fixed cost is not what is measured. Ratios within a run mean something on any
machine; milliseconds only together with its name.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as native_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from rich.table import Table

from mlx_tq.args import add_impl_argument
from mlx_tq.cache.compressed import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.dispatch import attention, scaled_dot_product_attention
from mlx_tq.environment import environment
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import phases
from mlx_tq.tune import tune
from mlx_tq.ui import console, human_bytes, results, table

_CHUNK = 2048  # tokens appended at a time while a cache is filled
_TARGET = 0.1  # seconds of chained calls in one measurement

Cache = Any  # mlx-lm's KVCache or QuantizedKVCache, or our CompressedKVCache


@dataclass(frozen=True)
class Shape:
    """Of one attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Timing:
    """One arm at one context and type.

    Attributes:
        arm: "fp16" (mx.fast on the model's type), "kv-bits 8", "kv-bits 4", or a profile.
        dtype: of the model.
        tokens: in the cache.
        nbytes: of the cache.
        median: seconds of a call; low and high are the extremes of the rounds.
    """

    arm: str
    dtype: str
    tokens: int
    nbytes: int
    median: float
    low: float
    high: float


def _fill(cache: Cache, shape: Shape, tokens: int, dtype: mx.Dtype) -> None:
    for start in range(0, tokens, _CHUNK):
        count = min(_CHUNK, tokens - start)
        keys, values = (mx.random.normal((1, shape.kv_heads, count, shape.head_dim)).astype(dtype) for _ in range(2))
        with attention(None):
            cache.update_and_fetch(keys, values)
        mx.eval(cache.state)


def _attend(cache: Cache, shape: Shape) -> Callable[[mx.array], mx.array]:
    run = scaled_dot_product_attention if isinstance(cache, CompressedKVCache) else native_attention
    scale = shape.head_dim**-0.5

    def call(queries: mx.array) -> mx.array:
        keys, values = cache.keys_and_values()
        out: mx.array = run(queries, keys, values, cache=cache, scale=scale, mask=None)
        return out

    return call


def _time(call: Callable[[mx.array], mx.array], queries: mx.array, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        queries = call(queries)
    mx.eval(queries)
    return (time.perf_counter() - started) / repeats


def _arms(profiles: dict[str, KVConfig]) -> dict[str, Callable[[], Cache]]:
    arms: dict[str, Callable[[], Cache]] = {
        "fp16": KVCache,
        "kv-bits 8": lambda: QuantizedKVCache(bits=8),
        "kv-bits 4": lambda: QuantizedKVCache(bits=4),
    }
    for name, config in profiles.items():
        spec = CacheSpec.for_layer(config, 0, config.key_of(0, 1), config.value)
        arms[name] = lambda spec=spec: CompressedKVCache(spec)  # type: ignore[misc]
    return arms


def measure(shape: Shape, tokens: int, dtype: str, profiles: dict[str, KVConfig], rounds: int) -> list[Timing]:
    """Time every arm at one context and type."""
    mx.random.seed(0)
    calls, sizes = {}, {}
    for name, make in _arms(profiles).items():
        cache = make()
        _fill(cache, shape, tokens, dtype_of(dtype))
        calls[name], sizes[name] = _attend(cache, shape), cache.nbytes
    queries = mx.random.normal((1, shape.query_heads, 1, shape.head_dim)).astype(dtype_of(dtype))
    mx.eval(queries)
    repeats = {name: max(1, int(_TARGET / max(_time(call, queries, 1), 1e-9))) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(_time(call, queries, repeats[name]))
    return [
        Timing(name, dtype, tokens, sizes[name], statistics.median(s), min(s), max(s)) for name, s in seconds.items()
    ]


def build_parser() -> argparse.ArgumentParser:
    """Shapes, contexts and arms."""
    parser = argparse.ArgumentParser(prog="mlx_tq.bench", description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="contexts")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16", "float32"], help="types of the model")
    parser.add_argument("--profiles", nargs="+", default=["safe", "balanced", "small"], help="profiles to time")
    parser.add_argument("--query-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="times that each arm is measured")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE; - is standard output")
    parser.add_argument("--tune", action="store_true", help="measure this machine's thresholds and keep them, instead")
    add_impl_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Time, show and write; returns the exit code.

    Raises:
        ConfigError: an unknown profile or type, or a count below 1.
    """
    unknown = set(args.profiles) - set(PROFILES)
    if unknown:
        raise ConfigError(f"profiles {sorted(unknown)} are unknown; valid are {', '.join(PROFILES)}.")
    if set(args.dtypes) - {"float16", "bfloat16", "float32"}:
        raise ConfigError(f"types {args.dtypes} are not all known; valid are float16, bfloat16, float32.")
    if min([*args.tokens, args.rounds, args.kv_heads]) < 1 or args.query_heads % args.kv_heads:
        raise ConfigError("tokens, rounds and heads must be 1 or more, and query heads a multiple of KV heads.")
    if args.tune:
        return _tune(args)
    shape = Shape(args.query_heads, args.kv_heads, args.head_dim)
    profiles = {name: PROFILES[name] for name in args.profiles}
    timings: list[Timing] = []
    for dtype in args.dtypes:
        for tokens in args.tokens:
            measured = measure(shape, tokens, dtype, profiles, args.rounds)
            (console if args.json == "-" else results).print(_table(measured))
            timings += measured
    if args.json:
        shown = {"shape": asdict(shape), "environment": environment(), "timings": [asdict(t) for t in timings]}
        _write(shown, args.json)
    return 0


def _tune(args: argparse.Namespace) -> int:
    shown = table(
        f"thresholds, {phases.machine()}", "threshold", "value", "seconds, or of few and short: times the other way"
    )
    measured = list(tune(args.tokens, args.rounds))
    for name, value, figure, _ in measured:
        shown.add_row(name, str(value), f"{figure:.3g}")
    best = measured[-1][-1]
    path = phases.write(best)
    if args.json:
        _write({"environment": environment(), "phases": asdict(best)}, args.json)
    else:
        results.print(shown)
    console.print(f"{best}\nis taken here from now on: {path}", soft_wrap=True)
    return 0


def _write(report: dict[str, Any], name: str) -> None:
    text = json.dumps(report, indent=1) + "\n"
    sys.stdout.write(text) if name == "-" else Path(name).write_text(text, encoding="utf-8")


def _table(timings: list[Timing]) -> Table:
    by_arm = {timing.arm: timing for timing in timings}
    first = timings[0]
    columns = ("arm", "cache", "ms", "low", "high", "times fp16", "times kv-bits 8", "times kv-bits 4")
    shown = table(f"decode attention, {first.dtype}, {first.tokens:,} tokens", *columns)
    for t in timings:
        ratios = [f"{by_arm[base].median / t.median:.2f}" for base in ("fp16", "kv-bits 8", "kv-bits 4")]
        shown.add_row(t.arm, human_bytes(t.nbytes), *(f"{1e3 * s:.2f}" for s in (t.median, t.low, t.high)), *ratios)
    return shown
