"""Study ways to normalize keys: block means and a scale in float32 around the codec of each format.

    python -m benchmarks.studies.normalized_keys [NAME=FOLDER ...] --text FILE

Each model prefills the text in one pass, in which every key behind the sinks is replaced by what its codes say. Without
a folder it is the embedded model. It resumes benchmarks/results/normalized_keys.json.
"""

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.standard_error import cut_clusters, standard_error
from mlx_tq.integration.patches import patch_attention
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.models import load
from mlx_tq.policies.rope import learn_rope
from mlx_tq.prompt_cache.measurements import kl_divergence
from mlx_tq.prompt_cache.recording import WatchedCache

TARGET = Path(__file__).resolve().parent.parent / "results" / "normalized_keys.json"
PREFIX, FIRST, LEARNED, FLOOR = 32, 4, 128, 0.01
# Length of a block, and the tokens of it that its mean is taken of: all, the first so many, or those before it.
MEANS = {
    "none": (0, 0),
    "32": (32, 32),
    "64": (64, 64),
    "64 of first 32": (64, 32),
    "128": (128, 128),
    "128 of first 96": (128, 96),
    "128 of first 32": (128, 32),
    "128 before": (128, -128),
    "first 128": (1 << 20, 0),
}
# What the scale of a dim is learned from, and over which dims it is averaged.
SCALES = ("none", "queries and keys by pair", "queries and keys by dim", "keys by pair")
PAIR = SCALES[1]
FEW = [("none", "none"), ("128 of first 96", "none"), ("32", PAIR), ("128", PAIR), ("128 of first 96", PAIR)]
MANY = list(
    dict.fromkeys([*FEW, ("none", PAIR), ("32", "none"), *product(MEANS, (PAIR,)), *product(FEW[1][:1], SCALES)])
)
ARMS = {"tq4": MANY, "tq3": FEW, "q8": FEW}


@dataclass(frozen=True)
class Fake:
    """Replaces the keys of one layer by what their codes say."""

    codec: Any  # None for the keys themselves
    means: str  # one of MEANS
    scale: str  # one of SCALES
    pairs: np.ndarray  # dims that RoPE turns together, int [2, F]

    def __call__(self, keys: mx.array, queries: mx.array) -> mx.array:
        if self.codec is None:
            return keys
        weight, means = self.weight(keys, queries), self.center(keys)
        found = self.codec.decode(self.codec.encode((keys - means) * weight)) / weight + means
        return mx.concatenate([keys[:, :, :PREFIX], found[:, :, PREFIX:]], axis=2)

    def center(self, keys: mx.array) -> mx.array:
        """Return the mean that each key is stored relative to, rounded to fp16."""
        length, count = MEANS[self.means]
        if not length:
            return mx.zeros_like(keys)
        if not count:
            return mx.broadcast_to(self._rounded(keys[:, :, FIRST:LEARNED]), keys.shape)
        parts = [mx.zeros_like(keys[:, :, :PREFIX])]
        for start in range(PREFIX, keys.shape[2], length):
            block = keys[:, :, start : start + length]
            used = keys[:, :, max(0, start + count) : start] if count < 0 else block[:, :, :count]
            parts.append(mx.broadcast_to(self._rounded(used), block.shape))
        return mx.concatenate(parts, axis=2)

    def _rounded(self, keys: mx.array) -> mx.array:
        return keys.mean(axis=2, keepdims=True).astype(mx.float16).astype(mx.float32)

    def weight(self, keys: mx.array, queries: mx.array) -> mx.array:
        """Return the scale of each dim, [1, H, 1, D], of geometric mean 1."""
        heads, dim = keys.shape[1], keys.shape[3]
        if self.scale == "none":
            return mx.ones((1, heads, 1, dim))
        k = keys[:, :, FIRST:LEARNED]
        k = mx.square(k - k.mean(axis=2, keepdims=True)).mean(axis=2, keepdims=True)
        q = queries[:, :, FIRST:LEARNED].reshape(1, heads, -1, dim)
        q = mx.square(q).mean(axis=2, keepdims=True) if "queries" in self.scale else mx.ones_like(k)
        ratio = self.energy(q) / self.energy(k)
        weight = mx.power(ratio, 0.25)
        return weight / mx.exp(mx.log(weight).mean(axis=-1, keepdims=True))

    def energy(self, squares: mx.array) -> mx.array:
        """Return mean squares of dims, averaged over pairs, at least FLOOR squared of their mean."""
        if "pair" in self.scale:
            partner = np.arange(squares.shape[-1])
            partner[self.pairs[0]], partner[self.pairs[1]] = self.pairs[1], self.pairs[0]
            squares = (squares + squares[..., mx.array(partner)]) / 2
        return mx.maximum(squares, FLOOR**2 * squares.mean(axis=-1, keepdims=True))

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        keys = self(keys, queries)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


class Reader:
    def __init__(self, folder: str | None, text: str, tokens: int) -> None:
        self.model, tokenizer = load(folder, dtype="float32")
        self.ids = mx.array(tokenizer.encode(text)[:tokens])
        self.slots = model_facts(self.model).slots
        self.pairs = [np.array(learn_rope(slot.rope, slot.key_dim).pairs) for slot in self.slots]
        self.exact = self.read(None, "none", "none")

    def read(self, name: str | None, means: str, scale: str) -> mx.array:
        caches = native_caches(self.model)
        for slot, pairs in zip(self.slots, self.pairs, strict=True):
            options = CodecOptions(seed=42 + 1000 * slot.index)
            codec = None if name is None else get_format(name).codec(slot.key_dim, options, mx.float32)
            caches[slot.index] = WatchedCache(Fake(codec, means, scale, pairs).attend)
        with patch_attention():
            logits = self.model(self.ids[None], cache=caches)[0, LEARNED:]
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logits)
        return logits

    def measure(self, name: str, means: str, scale: str) -> dict[str, float]:
        found = self.read(name, means, scale)
        kld = np.array(kl_divergence(self.exact, found), np.float64)
        agrees = np.array(self.exact.argmax(axis=-1) == found.argmax(axis=-1))
        return {
            "kld": kld.mean(),
            "kld_error": standard_error(kld, cut_clusters([len(kld)])),
            "top1": 100 * agrees.mean(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=768)
    args = parser.parse_args()
    settings = {"text": Path(args.text).name, "tokens": args.tokens, "sinks": PREFIX}
    results = Results(str(TARGET), "normalized_keys", settings, resume=True)
    text = Path(args.text).read_text(encoding="utf-8")[: 16 * args.tokens]
    for model in args.models or ["embedded="]:
        label, _, folder = model.partition("=")
        reader = None
        for name, (means, scale) in [(name, arm) for name, arms in ARMS.items() for arm in arms]:
            key = f"{label}, {name}, mean {means}, scale {scale}"
            if key in results.rows:
                continue
            reader = reader or Reader(folder or None, text, args.tokens)
            results.add(
                key,
                {"model": label, "format": name, "means": means, "scale": scale} | reader.measure(name, means, scale),
            )
            print(key, results.rows[key], flush=True)
    columns = {
        "model": lambda row: row["model"],
        "format, mean, scale": lambda row: f"{row['format']}, {row['means']}, {row['scale']}",
        "KLD": lambda row: f"{row['kld']:.5f}",
        "± KLD": lambda row: f"{row['kld_error']:.5f}",
        "top-1 %": lambda row: f"{row['top1']:.1f}",
    }
    results.show("Normalized keys", columns, list(results.rows.values()))


if __name__ == "__main__":
    main()
