"""Write calibration files of one model that differ in how questions and text are mixed.

    python -m benchmarks.studies.query_mixtures --model M --dtype float32 --dequantize on FOLDER

Files: `questions.safetensors`, `textPERCENT.safetensors` for shares of the text's means, and `both.safetensors`, in
which a KV head has the mean queries of questions and of text, so that a token counts by the mean of both weights.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.loading import load_model
from mlx_tq.cli.model_calibration import Queries, collect_queries, mix_queries, save_queries
from mlx_tq.cli.parser import add_model_arguments
from mlx_tq.config import KVConfig
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.prompt_cache.compressed import plan_caches

SHARES = {"questions": 0.0, **{f"text{percent}": percent / 100 for percent in (15, 25, 35, 50, 75, 100)}}


def beside(model: Any, asked: Queries, heard: Queries) -> Queries:
    """Return the heads of both, those of one KV head together."""
    layers = plan_caches(model, KVConfig()).layers

    def joined(heads: int, a: mx.array, b: mx.array) -> mx.array:
        parts = [x.reshape(heads, -1, *x.shape[1:]) for x in (a, b)]
        return mx.concatenate(parts, axis=1).reshape(2 * a.shape[0], *a.shape[1:])

    pairs = zip(layers, asked.stats, heard.stats, strict=True)
    return asked._replace(
        stats=[
            QueryStats(joined(x.slot.heads, a.center, b.center), joined(x.slot.heads, a.amplitude, b.amplitude))
            for x, a, b in pairs
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser, adapter=False)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_model(args)
    asked, heard = collect_queries(
        model, tokenizer, load_text(), args.tokens, progress=lambda *done: print(*done, flush=True)
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, share in SHARES.items():
        save_queries(model, args.folder / f"{name}.safetensors", mix_queries(asked, heard, share))
    save_queries(model, args.folder / "both.safetensors", beside(model, asked, heard))


if __name__ == "__main__":
    main()
