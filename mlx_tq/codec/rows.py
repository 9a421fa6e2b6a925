"""Store one cached token of one KV head as one row of 32-bit words.

key codes | value codes | key scale | value scale | padding
"""

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mlx_tq.codec.formats.base import Codec, Encoded
from mlx_tq.codec.normalization import KeyNormalization, normalize

L = TypeVar("L", bound="RowLayout")


class Rows(NamedTuple):
    rows: mx.array  # uint32 [..., W]
    health: mx.array  # int32 [2]: vectors clamped to the format's range, vectors that are not finite


class RowLayout:
    """Places the words of a key codec and a value codec in rows. Immutable, so caches share it, even copied ones."""

    def __init__(self, key: Codec, value: Codec, unfitted: "RowLayout | None" = None) -> None:
        self.key = key
        self.value = value
        self.unfitted = unfitted or self  # the same for caches that differ only in what they have learned
        scales = [0 if codec.scale_dtype is None else codec.scale_dtype.size // 2 for codec in (key, value)]
        edges = [0, *accumulate([key.words, value.words, *scales])]  # in 16-bit words
        # The first 16-bit words of codes and scale, of keys and of values.
        self.starts = (edges[0], edges[2]), (edges[1], edges[3])
        self._padding = edges[-1] % 2
        self.words = (edges[-1] + self._padding) // 2  # 32-bit words of a row, W
        self.nbytes = 4 * self.words
        self.split_sizes = key.words + scales[0], value.words + scales[1]  # 16-bit words that `split` returns
        self.learned_bytes = key.learned_bytes + value.learned_bytes  # per head

    def __deepcopy__(self, memo: object) -> "RowLayout":
        return self

    def fit(self, keys: mx.array, values: mx.array) -> "RowLayout":
        """Return the layout with codecs fitted to the first keys [B, H, n, Dk] and values; itself if none learns."""
        return self._with(self.key.fit(keys), self.value.fit(values))

    @property
    def learned(self) -> tuple[mx.array | None, mx.array | None]:
        return self.key.learned, self.value.learned

    def restore(self, key: mx.array | None, value: mx.array | None) -> "RowLayout":
        return self._with(
            self.key if key is None else self.key.restore(key),
            self.value if value is None else self.value.restore(value),
        )

    def select_heads(self, select: Callable[[mx.array], mx.array]) -> "RowLayout":
        """Return the layout of some heads, which `select` takes from arrays [B, H, ...]."""
        return self._with(self.key.select_heads(select), self.value.select_heads(select))

    def _with(self, key: Codec, value: Codec) -> "RowLayout":
        return self if key is self.key and value is self.value else RowLayout(key, value, self.unfitted)

    def read_as(self, make: Callable[["RowLayout"], L]) -> L:
        """Return the layout that reads these rows otherwise: one for each `make`, for as long as this one lives."""
        if make not in self._readings:
            self._readings[make] = make(self)
        return self._readings[make]  # type: ignore[no-any-return]

    @cached_property
    def _readings(self) -> dict[Callable[["RowLayout"], Any], Any]:
        return {}

    def encode(self, keys: mx.array, values: mx.array, normalization: KeyNormalization | None = None) -> Rows:
        """Encode keys [..., Dk] and values [..., Dv] into rows uint32 [..., W]; with `normalization` [B, H, S, D]."""
        if normalization is not None:
            keys = normalize(keys, normalization, self.key.rotation)
        key, value = self.key.encode(keys), self.value.encode(values)
        clamped, broken = mx.array(0), mx.array(0)
        for codec, encoded, x in ((self.key, key, keys), (self.value, value, values)):
            peak = mx.abs(x).max(axis=-1)
            clamped = clamped + codec.find_clamped(peak, encoded).sum()
            broken = broken + mx.logical_not(mx.isfinite(peak)).sum()
        return Rows(self.join(key, value), mx.stack([clamped, broken]).astype(mx.int32))

    def join(self, key: Encoded, value: Encoded) -> mx.array:
        parts = [key.codes, value.codes]
        parts += [scale[..., None].view(mx.uint16) for scale in (key.scale, value.scale) if scale is not None]
        if self._padding:
            parts.append(mx.zeros((*key.codes.shape[:-1], 1), mx.uint16))
        return mx.concatenate(parts, axis=-1).view(mx.uint32)

    def keys(self, rows: mx.array) -> Encoded:
        return self._part(rows, 0, self.key)

    def values(self, rows: mx.array) -> Encoded:
        return self._part(rows, 1, self.value)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Return the words of keys and those of values: rows uint32 [..., W] -> uint16 [..., nk], [..., nv]."""
        return _to_words(self.keys(rows)), _to_words(self.values(rows))

    def unsplit(self, keys: mx.array, values: mx.array) -> mx.array:
        """Invert `split`."""
        return self.join(_from_words(self.key, keys), _from_words(self.value, values))

    def split_keys(self, words: mx.array) -> Encoded:
        """Return the keys whose words uint16 [..., nk] `split` returned."""
        return _from_words(self.key, words)

    def _part(self, rows: mx.array, index: int, codec: Codec) -> Encoded:
        start, scale_start = self.starts[index]
        codes = _slice(rows, start, start + codec.words)
        if codec.scale_dtype is None:
            return Encoded(codes, None)
        scale = _slice(rows, scale_start, scale_start + codec.scale_dtype.size // 2)
        return Encoded(codes, scale.view(codec.scale_dtype)[..., 0])


class LatentLayout(RowLayout):
    """Reads rows whose keys are also their values, as the latents of MLA are.

    What such rows store as values, the part of keys that RoPE rotates, attention gets as an additive mask.
    """

    def __init__(self, stored: RowLayout) -> None:
        super().__init__(stored.key, stored.key)
        self.starts = stored.starts[0], stored.starts[0]
        self.words, self.nbytes, self._padding = stored.words, stored.nbytes, stored._padding


def _to_words(encoded: Encoded) -> mx.array:
    if encoded.scale is None:
        return encoded.codes
    return mx.concatenate([encoded.codes, encoded.scale[..., None].view(mx.uint16)], axis=-1)


def _from_words(codec: Codec, words: mx.array) -> Encoded:
    if codec.scale_dtype is None:
        return Encoded(words, None)
    return Encoded(words[..., : codec.words], words[..., codec.words :].view(codec.scale_dtype)[..., 0])


def _slice(rows: mx.array, start: int, stop: int) -> mx.array:
    """Return 16-bit words [start, stop) of rows; aligned runs are sliced as 32-bit words, which is twice as fast."""
    if start % 2 == 0 and stop % 2 == 0:
        return rows[..., start // 2 : stop // 2].view(mx.uint16)
    covering = rows[..., start // 2 : (stop + 1) // 2].view(mx.uint16)
    return covering[..., start % 2 : start % 2 + stop - start]
