"""Random caches for the tests of kernels, attention over them in float64, and the error that is allowed.

Attention is right if its error is at most twice that of mx.fast attention over the decoded cache in the same dtype. The
error is the root mean square over the output, which varies little; the largest error is bounded too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from codec.reference import hadamard_matrix

from mlx_tq.codec import Codec, CodecOptions, Encoded, RowLayout, get_format
from mlx_tq.codec.codebook import POLYNOMIALS
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.codec.formats.sorted_pairs import SortedCodec
from mlx_tq.codec.formats.trellis import TrellisCodec
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization, compute_block_means, decode_keys
from mlx_tq.codec.packing import split_words, unpack
from mlx_tq.codec.rotation import WalshHadamard
from mlx_tq.codec.rows import LatentLayout
from mlx_tq.kernels.regions import Regions

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # half an ulp of 1
DTYPES = tuple(ROUNDING)
FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2")
TRELLIS = ("tcq4", "tcq3", "tcq2")  # in fewer cases, because encoding takes long
SORTED = ("stcq4", "stcq3", "stcq2")  # keys only
DIMS = (48, 64, 80, 96, 112, 128, 192, 256, 512)
GROUPS = (1, 2, 4, 7, 8, 16)
# Parameters of attention; `make_problem` explains them.
PARAMETERS: dict[str, Sequence] = {
    "dims": (*((dim, dim) for dim in DIMS), (192, 128)),
    "packed": (0, 1, 2, 31, 32, 33, 97, 255, 256, 257, 1025),
    "batch": (1, 3),
    "groups": GROUPS,
    "length": (1, 2, 3, 4, 5, 6, 7, 8),
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "sink_tokens": (0, 5, 128),
    "recent": (0, 6, 70),
    "mask": (None, "causal"),
    "sinks": (False, True),
}
ALL_FORMATS = {"key": FORMATS + TRELLIS, "value": FORMATS + TRELLIS}
# Pairs of formats with a trellis for keys, values, or both.
TRELLIS_PAIRS = (
    ("tcq3", "tcq2"),
    ("tcq4", "q8"),
    ("fp16", "tcq4"),
    ("tcq2", "tcq3"),
    ("tq4", "tcq3"),
    ("tcq4", "tcq4"),
)
HEADS = 2
DIM_ORDERS = 4  # orders of the dims in which the reference may sum too
SPARE = 3  # tokens of unused capacity
FITTED = 16  # least tokens from which formats learn


class Problem(NamedTuple):
    """A random cache and the arguments of attention over it."""

    arguments: dict[str, Any]  # fields of Regions and arguments of `attend`; unused capacity of buffers is NaN
    packed: tuple[mx.array, mx.array]  # keys and values of the packed region before encoding, [B, H, packed, D]
    decoded: tuple[np.ndarray, np.ndarray]  # all keys and values as stored, in logical order, float64 [B, H, S, D]
    plain: tuple[mx.array, mx.array]  # the same in the model's dtype, decoded by the codec

    @property
    def tokens(self) -> int:
        return self.decoded[0].shape[2]

    @property
    def layout(self) -> RowLayout:
        return self.arguments["layout"]

    @property
    def rows(self) -> mx.array:
        return self.arguments["packed_rows"]

    @property
    def normalization(self) -> KeyNormalization | None:
        return self.arguments["normalization"]

    def regions(self, **changes: Any) -> Regions:
        arguments = {**self.arguments, **changes}
        return Regions(**{field.name: arguments[field.name] for field in fields(Regions) if field.name in arguments})

    def replace(self, **changes: Any) -> "Problem":
        return self._replace(arguments={**self.arguments, **changes})

    def solve(self, kernel: Callable[..., mx.array], **changes: Any) -> mx.array:
        arguments = {**self.arguments, **changes}
        options = {name: arguments[name] for name in ("scale", "mask", "sinks")}
        return kernel(arguments["queries"], self.regions(**changes), **options)


def double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def random(shape: Sequence[int], dtype: str = "float16", seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype_of(dtype))


def has_same_bits(a: mx.array, b: mx.array) -> bool:
    """Return whether arrays are equal, with NaN equal to NaN and zeros of different signs unequal."""
    kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(kind), b.view(kind)).item()


def add_spare(x: mx.array, spare: int = SPARE) -> mx.array:
    """Append unused tokens in which every number is NaN."""
    word = mx.array([0xFFFFFFFF], mx.uint32).view(x.dtype)[:1]
    return mx.concatenate([x, mx.broadcast_to(word, (*x.shape[:2], spare, x.shape[3]))], axis=2)


def make_layout(dims: Sequence[int], key: str, value: str, dtype: str, **options: Any) -> RowLayout:
    key_codec, value_codec = (
        get_format(name).codec(dim, CodecOptions(seed=seed, **options), dtype_of(dtype))
        for name, dim, seed in ((key, dims[0], 42), (value, dims[1], 43))
    )
    return RowLayout(key_codec, value_codec)


def make_problem(
    dims: tuple[int, int] = (64, 64),
    packed: int = 97,
    batch: int = 2,
    groups: int = 2,
    length: int = 3,
    key: str = "q8",
    value: str = "tq4",
    dtype: str = "float16",
    sink_tokens: int = 5,
    recent: int = 6,
    mask: Any = None,
    sinks: bool = False,
    seed: int = 0,
    rotation: str = "wht",
    rule: str = "ls",
    wide: bool = False,
    normalized: str | None = None,
) -> Problem:
    """Make a random cache of `sink_tokens | packed | window`; the window is `recent` tokens and those of the queries.

    Args:
        dims: head sizes of keys and values, stored as `key` and `value` with that `rotation`, `rule` and `wide` scales.
        groups: query heads of each of two KV heads.
        mask: None, "causal", "bool" or "additive" for a random array [L, S], or an array.
        normalized: keys have means and channels of high energy and are normalized: in whole "blocks", or with "gaps" as
            after an eviction.
    """
    rng = np.random.default_rng(seed)

    def gaussian(heads: int, tokens: int, dim: int) -> mx.array:
        return mx.array(rng.standard_normal((batch, heads, tokens, dim)).astype(np.float32)).astype(dtype_of(dtype))

    layout = make_layout(dims, key, value, dtype, rotation=rotation, scale=rule, fp32_scales=wide)
    tokens = sink_tokens + recent + length
    full = [gaussian(HEADS, tokens, dim) for dim in dims]
    vectors = [gaussian(HEADS, packed, dim) for dim in dims]
    normalization = None
    if normalized or layout.learned_bytes:
        energy, mean = (gaussian(HEADS, 1, dims[0]) for _ in range(2))
        channels = mx.exp(energy.astype(mx.float32) * (1.2 if layout.learned_bytes else 0.7))
        if layout.learned_bytes:  # unequal, so that groups have all widths, but of no more energy
            channels /= mx.sqrt(mx.square(channels).mean(axis=-1, keepdims=True))
        full[0], vectors[0] = (((x + 2 * mean) * channels).astype(x.dtype) for x in (full[0], vectors[0]))
        key_scale = 1 / mx.sqrt(channels)
        if packed >= FITTED:
            layout = layout.fit(vectors[0] * key_scale, vectors[1])
        if normalized:
            normalization = make_normalization(layout.key, vectors[0], key_scale[:, :, 0], normalized, seed)
    rows = layout.encode(*vectors, normalization).rows
    decoded, plain = [], []
    for codec, x, encoded, means in (
        (layout.key, full[0], layout.keys(rows), normalization),
        (layout.value, full[1], layout.values(rows), None),
    ):
        middle = unrotate(codec, decode_exactly(codec, encoded, means), means)
        decoded.append(np.concatenate([double(x[:, :, :sink_tokens]), middle, double(x[:, :, sink_tokens:])], axis=2))
        parts = [x[:, :, :sink_tokens], decode_keys(codec, encoded, means).astype(x.dtype), x[:, :, sink_tokens:]]
        plain.append(mx.concatenate(parts, axis=2))
    unused = mx.full((batch, HEADS, SPARE, layout.words), 0xFFFFFFFF, mx.uint32)
    queries = gaussian(HEADS * groups, length, dims[0])
    arguments = {
        "queries": queries,
        "packed_rows": mx.concatenate([rows, unused], axis=2),
        "packed_tokens": packed,
        "layout": layout,
        "full_keys": add_spare(full[0]),
        "full_values": add_spare(full[1]),
        "sink_tokens": sink_tokens,
        "full_tokens": tokens,
        "normalization": normalization,
        "scale": 1 / math.sqrt(dims[0]),
        "mask": random_mask(mask, (length, tokens + packed), dtype) if mask in ("bool", "additive") else mask,
        "sinks": random((HEADS * groups,), dtype, seed=9) if sinks else None,
    }
    return Problem(arguments, tuple(vectors), tuple(decoded), tuple(plain))


def read_as_latents(problem: Problem) -> Problem:
    """Return the problem of attention whose keys are also its values; rows and buffers stay as they are."""
    keys, decoded, plain = problem.arguments["full_keys"], problem.decoded[0], problem.plain[0]
    latents = problem.replace(layout=LatentLayout(problem.layout), full_values=keys)
    return latents._replace(decoded=(decoded, decoded), plain=(plain, plain))


def make_normalization(codec: Codec, keys: mx.array, scale: mx.array, kind: str, seed: int = 0) -> KeyNormalization:
    """Normalize keys [B, H, S, D]; unused means are NaN, unused entries of an index are far out of bounds."""
    rng, tokens = np.random.default_rng(seed), keys.shape[2]
    first = 32 * int(rng.integers(0, 5))
    index = (first + np.arange(tokens)) // MEAN_TOKENS
    if kind == "gaps":
        index = np.sort(rng.integers(0, 2 + tokens // 9, tokens))
    members = [np.flatnonzero(index == number) for number in range(max(index, default=0) + 1)]
    blocks = [mx.take(keys, mx.array(rows, mx.int32), axis=2) for rows in members]
    blocks = [block if block.shape[2] else mx.ones_like(scale)[:, :, None] for block in blocks]
    means = [compute_block_means(block[:, :, None], scale, codec.rotation).means for block in blocks]
    spare = mx.full((*scale.shape[:2], 1, scale.shape[2]), mx.nan, mx.float16)
    which = mx.array(np.append(index, [1 << 30] * SPARE), mx.int32) if kind == "gaps" else None
    return KeyNormalization(scale, mx.concatenate([*means, spare], axis=2), which, first)


def random_mask(kind: str, shape: Sequence[int], dtype: str) -> mx.array:
    """Make a "bool" or an "additive" mask array in which every query sees the last token."""
    rng = np.random.default_rng(8)
    visible = rng.random(shape) < 0.6
    visible[..., -1] = True
    if kind == "bool":
        return mx.array(visible)
    return mx.array(np.where(visible, rng.standard_normal(shape), -np.inf)).astype(dtype_of(dtype))


def decode_exactly(codec: Codec, encoded: Encoded, normalization: KeyNormalization | None = None) -> np.ndarray:
    """Decode vectors in rotated space, with their means, in float64."""
    if normalization is not None:
        index = np.array(normalization.mean_index(encoded.codes.shape[2]))
        return decode_exactly(codec, encoded) + double(normalization.means)[:, :, index]
    if encoded.scale is None:
        return double(codec.decode_rotated(encoded))
    scale = double(encoded.scale)[..., None]
    if isinstance(codec, SortedCodec):
        return _decode_groups(np.array(encoded.codes), codec) * scale / np.sqrt(codec.head_dim)
    if not hasattr(codec, "bits"):
        return np.array(encoded.codes.view(mx.int8), np.float64) * scale / 127
    if isinstance(codec, TrellisCodec):
        return _decode_ring(np.array(encoded.codes), codec.bits) * scale / np.sqrt(codec.head_dim)
    planes = unpack(split_words(encoded.codes, codec.bits), codec.bits)
    u = np.concatenate([np.array(plane) for plane in planes], axis=-1) - (2**codec.bits - 1) / 2
    level = sum(c * u ** (2 * i + 1) for i, c in enumerate(POLYNOMIALS[codec.bits]))
    return level * scale / np.sqrt(codec.head_dim)


def _decode_ring(words: np.ndarray, bits: int, window: int = 8) -> np.ndarray:
    """Decode trellis codes [..., D bits / 16] to levels [..., D], from the ring's bits one by one."""
    table = double(mx.load(str(files("mlx_tq") / "assets" / "trellis" / "levels.safetensors"))[str(bits)])
    lead, count = words.shape[:-1], words.shape[-1]
    shared = math.gcd(bits, 16)
    of_unit, values, size = bits // shared, 16 // shared, 16 * count // bits
    units = words.reshape(*lead, of_unit, count // of_unit).swapaxes(-1, -2)
    ring = (units[..., None] >> np.arange(15, -1, -1) & 1).reshape(*lead, 16 * count)
    ends = bits * np.arange(1, size + 1)
    state = sum(ring[..., (ends - 1 - i) % ring.shape[-1]].astype(int) << i for i in range(window))
    return table[state].reshape(*lead, size // values, values).swapaxes(-1, -2).reshape(*lead, size)


def _decode_groups(words: np.ndarray, codec: SortedCodec) -> np.ndarray:
    """Decode sorted keys [B, H, S, words] to levels [B, H, S, D], head by head and group by group."""
    levels = np.zeros((*words.shape[:3], codec.head_dim))
    groups = codec.groups
    for place in np.ndindex(*words.shape[:2]):
        head = place if codec.learned is not None else (0, 0)
        start = 0
        for group, (width, size) in enumerate(zip(groups.widths[head], groups.sizes[head], strict=True)):
            stop = start + 2 * width
            if width:
                levels[place][:, 32 * group : 32 * group + 32] = _decode_ring(words[place][:, start:stop], width) * size
            start = stop
    return levels


def unrotate(codec: Codec, y: np.ndarray, normalization: KeyNormalization | None = None) -> np.ndarray:
    """Return R^T y in float64, from the definition of the rotation, divided by the scale of normalized keys."""
    if normalization is not None:
        return unrotate(codec, y) / double(normalization.scale)[:, :, None]
    if codec.rotation is None:
        return y
    if isinstance(codec, SortedCodec):
        signs = double(codec.rotation.parts[0].signs)
        turned = (y.reshape(*y.shape[:3], y.shape[3] // 32, 32) @ hadamard_matrix(32) * signs / np.sqrt(32)).reshape(
            y.shape
        )
        order = np.broadcast_to(codec.groups.order[:, :, None].astype(int), y.shape)
        back = np.empty_like(y)
        np.put_along_axis(back, order, turned, axis=-1)
        return back
    if not isinstance(codec.rotation, WalshHadamard):
        return y @ double(codec.rotation.matrix)
    return (y @ hadamard_matrix(codec.head_dim)) * double(codec.rotation.signs) / np.sqrt(codec.head_dim)


def attend_exactly(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> np.ndarray:
    """Attend in float64."""
    group, (length, tokens) = queries.shape[1] // keys.shape[1], (queries.shape[2], keys.shape[2])
    scores = queries * scale @ np.repeat(keys, group, axis=1).swapaxes(-1, -2)
    if isinstance(mask, str):
        scores = np.where(np.tril(np.ones((length, tokens), bool), tokens - length), scores, -np.inf)
    elif mask is not None:
        scores = np.where(np.array(mask), scores, -np.inf) if mask.dtype == mx.bool_ else scores + double(mask)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(double(sinks)[:, None, None] - peak)
    return weights / total @ np.repeat(values, group, axis=1)


def check_attention(problem: Problem, out: mx.array, *, peak: float = 2.0) -> None:
    """Compare errors with those of mx.fast attention in the same dtype: mean at most 2x, one query at most `peak`x.

    Both are rounded to the dtype and the reference may be exact by chance, so half an ulp of the largest output is
    added. The largest error is that of the query with the largest score, and the order of the dims in that sum matters.
    So the reference is computed in several orders: the mean error is that of all of them, and `peak` may hold for any.
    A single value, which varies more than a query, may differ twice as much. In a thousand cases, some exceed 2x.
    """
    dims = problem.plain[0].shape[-1]
    orders = [slice(None), *(mx.array(np.random.default_rng(seed).permutation(dims)) for seed in range(DIM_ORDERS))]
    queries, mask, sinks, scale = (problem.arguments[name] for name in ("queries", "mask", "sinks", "scale"))
    keys, values = problem.plain
    references = [
        mx.fast.scaled_dot_product_attention(
            queries[..., order], keys[..., order], values, scale=scale, mask=mask, sinks=sinks
        )
        for order in orders
    ]
    truth = attend_exactly(double(queries), *problem.decoded, scale, mask, sinks)
    assert out.shape == references[0].shape
    assert out.dtype == references[0].dtype == queries.dtype
    error, *allowed = (np.abs(double(result) - truth) for result in (out, *references))
    assert np.isfinite(error).all()
    floor = ROUNDING[dtype_name(out.dtype)] * np.abs(truth).max()
    assert rms(error) <= 2 * rms(np.stack(allowed)) + floor / 2
    worst, *worst_allowed = (np.sqrt((x**2).mean(axis=-1)).max() for x in (error, *allowed))
    assert any(
        worst <= peak * query + floor and error.max() <= 2 * peak * one.max() + floor
        for query, one in zip(worst_allowed, allowed, strict=True)
    )


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))
