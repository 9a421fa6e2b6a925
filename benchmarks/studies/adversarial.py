"""Study keys that no healthy model makes: errors of scores, plain and normalized, and of vectors by scale rule.

    python -m benchmarks.studies.adversarial

A layer of 192 keys of 128 dims; the normalization is learned from these keys and queries.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from benchmarks.reports import save
from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.codec.normalization import (
    MEAN_TOKENS,
    KeyNormalization,
    compute_block_means,
    compute_key_scale,
    decode_keys,
    normalize,
)

DIM, TOKENS, SEED = 128, 3 * MEAN_TOKENS // 2, 42
SHAPE = (2, 2, TOKENS, DIM)
FORMATS = ("q8", "tq4", "tq3", "tq2")
SCALED = (*FORMATS[1:], "tcq4", "tcq3", "tcq2")


def _gaussian(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def _codec(name: str, rule: str = "unbiased"):
    return get_format(name).codec(DIM, CodecOptions(SEED, scale=rule))


ROW = np.array(_codec("tq4").rotation.matrix, np.float64)[5]
CONSTANT = _gaussian((2, 2, 1, DIM), 21)
TOKEN = np.arange(TOKENS)[:, None]

# Of Gaussian keys; all are rounded to fp16.
KEYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Gaussian": lambda x: x,
    "one channel of +1000": lambda x: x + 1000 * np.eye(DIM)[9],
    "one channel of +-1000": lambda x: x + 1000 * np.sign(x[..., :1]) * np.eye(DIM)[9],
    # But for a tenth: what lies along it exactly is stored exactly, by luck.
    "along a row of the rotation": lambda x: x[..., :1] * ROW + 0.1 * x / np.sqrt(DIM),
    "around a row of the rotation": lambda x: (np.abs(x[..., :1]) + 20) * ROW + x,
    "norms of 6e4": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True) * 6e4,
    "one norm of 6e4": lambda x: x * np.where(TOKEN == 40, 6e4 / np.sqrt(DIM), 1),
    "denormals": lambda x: x * 2e-7,
    "constants": lambda x: 0 * x + CONSTANT,
    "constants but one": lambda x: np.where(TOKEN == 40, 100 * x, CONSTANT),
    "two means in turn": lambda x: x + 30 * CONSTANT * np.where(TOKEN % 2, -1, 1),
    "zeros": lambda x: 0 * x,
}
# What queries look at: every channel alike, one far more than all others, some more than others.
ASKED = {
    "all": np.ones(DIM),
    "one": np.where(np.arange(DIM) == 3, 30, 0.01),
    "some": np.exp(1.5 * _gaussian((DIM,), 77)),
}


def errors(kind: str, name: str, asked: str) -> tuple[float, float]:
    """Return the RMS errors of scores with plain and with normalized keys, over the norms of queries and keys."""
    keys = KEYS[kind](_gaussian(SHAPE, 4)).astype(np.float16).astype(np.float32)
    queries = (_gaussian((2, 2, 64, DIM), 5) * ASKED[asked]).astype(np.float32)
    size = np.linalg.norm(queries) * np.linalg.norm(keys) / np.sqrt(queries[..., 0].size * keys[..., 0].size * DIM)
    codec = _codec(name)
    rms = (np.sqrt((x**2).mean(axis=2)) for x in (keys - keys.mean(axis=2, keepdims=True), queries))
    scale = compute_key_scale(*(mx.array(x) for x in rms))
    blocks = [mx.array(keys[:, :, None, i : i + MEAN_TOKENS]) for i in range(0, TOKENS, MEAN_TOKENS)]
    means = [compute_block_means(block, scale, codec.rotation).means for block in blocks]
    found = []
    for normalization in (None, KeyNormalization(scale, mx.concatenate(means, axis=2))):
        x = mx.array(keys) if normalization is None else normalize(mx.array(keys), normalization, codec.rotation)
        decoded = np.array(decode_keys(codec, codec.encode(x), normalization), np.float64)
        error = queries @ (decoded - keys).swapaxes(-1, -2)
        found.append(float(np.sqrt((error**2).mean()) / max(size, 1e-30)))
    return found[0], found[1]


def rules(kind: str, name: str) -> dict[str, float]:
    """Return errors of vectors over their norms: least squares, unbiased, and unbiased without its limit."""
    x = KEYS[kind](_gaussian(SHAPE, 4)).astype(np.float16).astype(np.float64)
    decoded = {
        rule: np.array(codec.decode(codec.encode(mx.array(x, mx.float32))), np.float64) for rule, codec in _of(name)
    }
    product = (x * decoded["ls"]).sum(axis=-1, keepdims=True)
    decoded["unlimited"] = decoded["ls"] * (x * x).sum(axis=-1, keepdims=True) / np.maximum(product, 1e-300)
    norm = max(float(np.linalg.norm(x)), 1e-30)
    return {rule: float(np.linalg.norm(found - x)) / norm for rule, found in decoded.items()}


def _of(name: str):
    return [(rule, _codec(name, rule)) for rule in ("ls", "unbiased")]


def main() -> None:
    rows = []
    for kind in KEYS:
        for asked in ASKED:
            for name in FORMATS:
                plain, normalized = errors(kind, name, asked)
                rows.append({"keys": kind, "asked": asked, "format": name, "plain": plain, "normalized": normalized})
                print(f"{kind}, {asked}, {name}: {plain:.5f}, normalized {normalized:.5f}")
    by_rule = [{"keys": kind, "format": name} | rules(kind, name) for kind in KEYS for name in SCALED]
    save("adversarial_keys.json", "python -m benchmarks.studies.adversarial", errors=rows, rules=by_rule)


if __name__ == "__main__":
    main()
