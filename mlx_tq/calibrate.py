"""`mlx_tq.calibrate`: gather a model's query statistics into a file, for eviction without a warm-up.

By default the queries of questions about a text, and of their answers. Those of the text itself, which are also what a
run's own warm-up sees, look for other things than a question will: see docs/eviction.md.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.args import check_writable
from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import build_caches, cache_parts
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.dispatch import attention, plan_caches
from mlx_tq.errors import ConfigError
from mlx_tq.evict.calibration import save_calibration
from mlx_tq.evict.queries import SKIP, Calibrator, QueryStats
from mlx_tq.haystack import load_text
from mlx_tq.models import DTYPES, fingerprint, load
from mlx_tq.probe import position_limit
from mlx_tq.questions import scenes

STEP = 512  # tokens read at a time
_SCENE = 1024  # tokens of a text with a fact of every kind
_ANSWER = 64  # more than any answer has
_ENDLESS = 1 << 40  # a window that does not end


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.calibrate", description="Gather a model's query statistics for eviction into a file (--kv-stats)."
    )
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type to compute in, which is that of the runs it is for (default: that of the model's weights)",
    )
    parser.add_argument("--text", metavar="FILE", help="text to read (default: WikiText-2's test split, an excerpt)")
    parser.add_argument("--tokens", type=int, default=4096, help="that are read (default: 4096)")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="queries of the text itself, instead of those of questions about it and their answers",
    )
    parser.add_argument(
        "--covariance",
        action="store_true",
        help="also the covariance, for `EvictConfig(aggregation='expected_attention')` in Python",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="safetensors file to write")
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way.
    """
    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; it must be 1 or more, such as 4096.")
    check_writable("-o", args.output)
    try:
        text = load_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {args.text} cannot be read: {error}. Give a UTF-8 file.") from error
    options = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer = load(args.model, dtype=args.dtype, tokenizer_config=options, **options)
    if args.plain:
        ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))[: args.tokens + SKIP]
        calibrate(model, ids, args.output, covariance=args.covariance)
        told = f"{len(ids) - SKIP:,} tokens"
    else:
        asked = calibrate_on_questions(model, tokenizer, text, args.tokens, args.output, covariance=args.covariance)
        told = f"questions and answers of {asked:,} tokens"
    sys.stderr.write(f"statistics of {told} are in {args.output}\n")
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
    caches = _caches(model, covariance)()
    _read(model, ids, caches)
    _write(model, path, [calibrator.so_far[1] for calibrator in _calibrators(caches)], caches)


def calibrate_on_questions(
    model: Any, tokenizer: Any, text: str, tokens: int, path: str, *, covariance: bool = False
) -> int:
    """Plant facts in `tokens` tokens of a text, ask for them, and write the statistics of question and answer.

    Returns:
        How many tokens counted.

    Raises:
        ConfigError: fewer tokens than a text with its facts takes.
        UnsupportedModelError: a model whose queries cannot be followed.
    """
    length = min(_SCENE, tokens, (position_limit(model) or 2 * _SCENE) - _ANSWER)
    make = _caches(model, covariance)
    found: list[QueryStats] = []
    seen = 0
    for scene in scenes(tokenizer, text, max(1, tokens // length), length):
        caches = make()
        for calibrator in _calibrators(caches):
            calibrator.begin_at(len(scene.text))
        _read(model, scene.text, caches)
        for turn in scene.turns:
            twins = copy.deepcopy(caches)
            _read(model, turn, twins)
            counts, each = zip(*(calibrator.so_far for calibrator in _calibrators(twins)), strict=True)
            seen += counts[0]
            weight = counts[0] / seen
            found = [a.map(b, weight) for a, b in zip(found or each, each, strict=True)]
            mx.eval([stats.arrays() for stats in found])
    _write(model, path, found, caches)
    return seen


def _caches(model: Any, covariance: bool) -> Callable[[], list[Any]]:
    """Makes caches that lose nothing and calibrate on whatever they read."""
    aggregation = "expected_attention" if covariance else "paper"
    evict = EvictConfig(budget="100%", warmup=_ENDLESS, aggregation=aggregation)
    return partial(build_caches, plan_caches(model, KVConfig(key="fp16", value="fp16", evict=evict)))


def _calibrators(caches: list[Any]) -> list[Calibrator]:
    layers = [part.calibrator for part in cache_parts(caches) if isinstance(part, EvictingKVCache)]
    return [calibrator for calibrator in layers if calibrator is not None]


def _read(model: Any, ids: list[int], caches: list[Any]) -> None:
    with attention(model):
        for start in range(0, len(ids), STEP):
            mx.eval(model(mx.array(ids[start : start + STEP])[None], cache=caches))


def _write(model: Any, path: str, stats: list[QueryStats], caches: list[Any]) -> None:
    ropes = [calibrator.rope for calibrator in _calibrators(caches) if calibrator.rope]
    save_calibration(path, fingerprint(model), ropes, stats)
