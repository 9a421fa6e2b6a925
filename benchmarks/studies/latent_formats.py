"""Study what formats lose on MLA latents: affine, tq and tcq, with and without rotation and block means.

    python -m benchmarks.studies.latent_formats --model FOLDER --json FILE [--length 512] [--chunks 8]

Each chunk of text is one pass, in which all latents are stored in the format and the rotated parts of keys in q8.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_tq.cli.inputs import load_text
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.codec.rotation import Rotation
from mlx_tq.integration.probe import model_facts
from mlx_tq.models import load

Store = Callable[[mx.array], mx.array]  # returns vectors [1, 1, L, D] as a format stores them
GROUP = 32  # numbers that share an affine scale and bias


class NoRotation(Rotation):
    """Keeps the order of dims, so that codes are of the dims themselves."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self, x: mx.array) -> mx.array:
        return x * math.sqrt(self.dim)

    def inverse(self, y: mx.array) -> mx.array:
        return y


def store_codes(name: str, dim: int, *, rotated: bool = True) -> tuple[Store, float]:
    """Return how a format stores vectors of `dim` numbers, and its bits per number."""
    codec = get_format(name).codec(dim, CodecOptions(scale="unbiased"))
    if not rotated:
        codec = copy.copy(codec)
        codec.rotation = NoRotation(dim)
    return lambda x: codec.decode(codec.encode(x)), (16 * codec.words + 16) / dim


def store_affine(bits: int) -> tuple[Store, float]:
    def store(x: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(x.astype(mx.float16), GROUP, bits), GROUP, bits)

    return store, bits + 32 / GROUP


def subtract_means(stored: tuple[Store, float], dim: int) -> tuple[Store, float]:
    """Store the differences from the mean of each block, and the mean once."""

    def store(x: mx.array) -> mx.array:
        parts = []
        for start in range(0, x.shape[2], MEAN_TOKENS):
            block = x[:, :, start : start + MEAN_TOKENS].astype(mx.float32)
            mean = block.mean(axis=2, keepdims=True).astype(mx.float16)
            parts.append(stored[0](block - mean) + mean)
        return mx.concatenate(parts, axis=2)

    return store, stored[1] + 16 / MEAN_TOKENS


def find_formats(dim: int) -> dict[str, tuple[Store, float]]:
    formats: dict[str, tuple[Store, float]] = {"exact": (lambda x: x, 16.0)}
    for name in ("q8", "tq4", "tq3", "tcq4", "tcq3"):
        formats[name] = store_codes(name, dim)
        formats[f"{name}, means"] = subtract_means(formats[name], dim)
        formats[f"{name}, not rotated"] = store_codes(name, dim, rotated=False)
        formats[f"{name}, means, not rotated"] = subtract_means(formats[f"{name}, not rotated"], dim)
    return formats | {f"affine {bits}": store_affine(bits) for bits in (8, 4, 3)}


class StoredCache(KVCache):  # type: ignore[misc]
    """mlx-lm's cache of latents and rotated parts as a format stores them."""

    def __init__(self, latents: Store, rotated: Store) -> None:
        super().__init__()
        self._stores = latents, rotated

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        pair = (store(x).astype(x.dtype) for store, x in zip(self._stores, (keys, values), strict=True))
        return super().update_and_fetch(*pair)


def measure(model: Any, chunks: list[mx.array]) -> list[dict[str, Any]]:
    """Return for each format the perplexity, and the KL divergence and agreement with the exact cache."""
    slot = model_facts(model).slots[0]
    rotated, exact, rows = store_codes("q8", slot.value_dim)[0], list[mx.array](), []
    for name, (store, bits) in find_formats(slot.key_dim).items():
        losses, divergences, same = [], [], []
        for number, ids in enumerate(chunks):
            caches = [StoredCache(store, rotated if name != "exact" else store) for _ in model.layers]
            logits = model(ids[None, :-1], cache=caches)[0].astype(mx.float32)
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logits)
            if name == "exact":
                exact.append(logits)
            losses.append(-mx.take_along_axis(logits, ids[1:, None], axis=-1).mean().item())
            divergences.append((mx.exp(exact[number]) * (exact[number] - logits)).sum(axis=-1).mean().item())
            same.append((exact[number].argmax(axis=-1) == logits.argmax(axis=-1)).mean().item())
        count = len(chunks)
        perplexity = math.exp(sum(losses) / count)
        rows.append({"format": name, "bits": bits, "perplexity": perplexity, "kl": sum(divergences) / count})
        rows[-1] |= {"same": sum(same) / count, "rise": perplexity / rows[0]["perplexity"] - 1}
        print(f"{name:24} {bits:6.2f} bits  perplexity {rows[-1]['rise']:+.3%}  KL {rows[-1]['kl']:.2e}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype="float32")
    ids = mx.array(tokenizer.encode(load_text()))
    chunks = [ids[start : start + args.length] for start in range(0, args.chunks * args.length, args.length)]
    report = {"model": args.model, "length": args.length, "chunks": args.chunks, "rows": measure(model, chunks)}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
