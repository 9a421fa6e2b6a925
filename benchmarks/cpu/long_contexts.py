"""Measure decode steps of a small random model at contexts that no small model reaches.

    python -m benchmarks.cpu.long_contexts

The model has four layers in the shape of SmolLM2-135M's attention, 9 query and 3 KV heads of 64, in float32. Its
vocabulary and MLP are small, so that attention takes most of a step; all figures are of whole steps. The caches are
filled directly, with the same random keys and values again and again. They take turns: each decodes the same number of
tokens in every round, on top of what it decoded before.
"""

import argparse
import statistics
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3

from benchmarks.reports import save
from mlx_tq.bench.model import BenchedCache, Caches, decode
from mlx_tq.config import PROFILES

SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
BENCHED = [
    *(BenchedCache("off"), BenchedCache("kv-bits 8", kv_bits=8), BenchedCache("kv-bits 4", kv_bits=4)),
    *(BenchedCache(name, PROFILES[name]) for name in ("balanced", "small", "tiny")),
]
PIECE = 8192  # tokens with random keys and values, which are written repeatedly


def random_model() -> Any:
    sizes = {"hidden_size": 576, "intermediate_size": 576, "vocab_size": 1024, "max_position_embeddings": 1 << 20}
    others = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs(**SHAPE, **sizes, **others))
    mx.eval(model.parameters())
    return model


def fill(model: Any, benched: BenchedCache, tokens: int) -> Caches:
    caches = benched.make(model)
    if benched.kv_bits is not None:
        caches = benched.quantize(caches)
    shape = (1, SHAPE["num_key_value_heads"], PIECE, SHAPE["head_dim"])
    keys, values = (mx.random.normal(shape, key=mx.random.key(seed)) for seed in (0, 1))
    for cache in caches:
        for start in range(0, tokens, PIECE):
            count = min(PIECE, tokens - start)
            cache.update_and_fetch(keys[:, :, :count], values[:, :, :count])
            mx.eval(cache.state)
            mx.clear_cache()
    return caches


def measure(model: Any, tokens: int, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    filled = {}
    for benched in BENCHED:
        with benched.attention(model):
            filled[benched.name] = fill(model, benched, tokens)
    times: dict[str, list[float]] = {benched.name: [] for benched in BENCHED}
    for _ in range(rounds):
        for benched in BENCHED:
            with benched.attention(model):
                times[benched.name].append(1000 / decode(model, filled[benched.name], 0, max_tokens))
    return [
        {
            "arm": name,
            "tokens": tokens,
            "ms": statistics.median(measured),
            "low": min(measured),
            "high": max(measured),
            "kv_nbytes": sum(cache.nbytes for cache in filled[name]),  # after decoding, which packs the last piece
        }
        for name, measured in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=33, help="tokens of a round; the first is not timed")
    args = parser.parse_args()
    model, figures = random_model(), []
    for tokens in args.tokens:
        for figure in measure(model, tokens, args.rounds, args.max_tokens):
            print(figure, flush=True)
            figures.append(figure)
    save("cpu_long_contexts.json", "python -m benchmarks.cpu.long_contexts", shape=SHAPE, figures=figures)


if __name__ == "__main__":
    main()
