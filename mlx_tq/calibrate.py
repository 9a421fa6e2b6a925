"""`mlx_tq.calibrate`: gather a model's query statistics from a text into a file, for eviction without a warm-up."""

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import build_caches, cache_parts
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.dispatch import attention, plan_caches
from mlx_tq.errors import ConfigError
from mlx_tq.evict.calibration import save_calibration
from mlx_tq.evict.queries import SKIP
from mlx_tq.haystack import load_text
from mlx_tq.models import fingerprint, load
from mlx_tq.probe import position_limit

STEP = 512  # tokens read at a time


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.calibrate", description="Gather a model's query statistics for eviction into a file (--kv-stats)."
    )
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    parser.add_argument("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
    parser.add_argument("--tokens", type=int, default=4096, help="that count (default: 4096)")
    parser.add_argument("--covariance", action="store_true", help="also what expected_attention needs")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="safetensors file to write")
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.
    """
    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be 1 or more, such as 4096.")
    try:
        text = load_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {args.text} cannot be read: {error}. Give a UTF-8 file.") from error
    options = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer = load(args.model, tokenizer_config=options, **options)
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[: args.tokens + SKIP]
    calibrate(model, ids, args.output, covariance=args.covariance)
    sys.stderr.write(f"statistics of {len(ids) - SKIP:,} tokens are in {args.output}\n")
    return 0


def calibrate(model: Any, ids: list[int], path: str, *, covariance: bool = False) -> None:
    """Run `model` on tokens and write the statistics of its queries; the first four tokens do not count.

    Raises:
        ConfigError: too few tokens, or more than the model's positions.
        UnsupportedModelError: a model whose queries cannot be followed.
    """
    limit = position_limit(model)
    if len(ids) <= SKIP or (limit is not None and len(ids) > limit):
        raise ConfigError(
            f"the text has {len(ids):,} tokens; from {SKIP + 1} to {limit or 'any number'} can be read. Change "
            "--tokens or --text."
        )
    aggregation = "expected_attention" if covariance else "paper"
    evict = EvictConfig(budget="100%", warmup=len(ids) - SKIP, aggregation=aggregation)
    plan = plan_caches(model, KVConfig(key="fp16", value="fp16", evict=evict))
    caches = build_caches(plan)
    with attention(model):
        for start in range(0, len(ids), STEP):
            mx.eval(model(mx.array(ids[start : start + STEP])[None], cache=caches))
    layers = [part.calibrator for part in cache_parts(caches) if isinstance(part, EvictingKVCache)]
    found = [(each.rope, each.stats) for each in layers if each and each.rope and each.stats]
    save_calibration(path, fingerprint(model), [rope for rope, _ in found], [stats for _, stats in found])
