"""One cached token of one KV head as one row of 32-bit words: key codes, value codes, then the scales.

An append to the cache is then a single slice update, and a kernel finds everything about a token in one place.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.formats.base import Codec, Encoded
from mlx_tq.codec.normalization import KeyNormalization, normalize


class Segment(NamedTuple):
    """A run of 16-bit words in a row."""

    start: int
    stop: int


class Rows(NamedTuple):
    """Encoded rows and what went wrong with them.

    rows: uint32 [..., W]. health: int32 [2], vectors that were clamped to fp16's range and vectors that are not finite.
    """

    rows: mx.array
    health: mx.array


class RowLayout:
    """Where a key codec and a value codec put their words. Immutable; shared by caches also when they are copied."""

    def __init__(self, key: Codec, value: Codec) -> None:
        self.key = key
        self.value = value
        sizes = [key.words, value.words, *(c.scale_dtype.size // 2 if c.scale_dtype else 0 for c in (key, value))]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._codes = [Segment(end - size, end) for size, end in zip(sizes[:2], ends[:2], strict=True)]
        self._scales = [Segment(end - size, end) for size, end in zip(sizes[2:], ends[2:], strict=True)]
        self._padding = ends[-1] % 2
        self.words = (ends[-1] + 1) // 2

    def __deepcopy__(self, memo: object) -> "RowLayout":
        return self

    @property
    def split_words(self) -> tuple[int, int]:
        """How many words `split` gives of a key and of a value."""
        keys, values = (
            codec.words + (codec.scale_dtype.size // 2 if codec.scale_dtype else 0) for codec in (self.key, self.value)
        )
        return keys, values

    @property
    def learned_bytes(self) -> int:
        """Bytes for each head of what the codecs learn."""
        return self.key.learned_bytes + self.value.learned_bytes

    def fit(self, keys: mx.array, values: mx.array) -> "RowLayout":
        """The layout with codecs fitted to the first keys [B, H, n, Dk] and values; itself where none learns."""
        key, value = self.key.fit(keys), self.value.fit(values)
        return self if key is self.key and value is self.value else RowLayout(key, value)

    @property
    def learned(self) -> tuple[mx.array | None, mx.array | None]:
        """What the key codec and the value codec found in `fit`."""
        return self.key.learned, self.value.learned

    def restore(self, key: mx.array | None, value: mx.array | None) -> "RowLayout":
        """The layout with what its codecs had `learned`."""
        codecs = zip((self.key, self.value), (key, value), strict=True)
        return RowLayout(*(codec if learned is None else codec.restore(learned) for codec, learned in codecs))

    @property
    def nbytes(self) -> int:
        """Stored bytes of a token and KV head: the payload padded to 4 bytes."""
        return 4 * self.words

    def encode(self, keys: mx.array, values: mx.array, normalization: KeyNormalization | None = None) -> Rows:
        """Encode keys [..., Dk] and values [..., Dv] into rows uint32 [..., W]; with `normalization` [B, H, S, D]."""
        if normalization is not None:
            keys = normalize(keys, normalization, self.key.rotation)
        encoded = [self.key.encode(keys), self.value.encode(values)]
        return Rows(self.join(*encoded), self._health(encoded, keys, values))

    def join(self, key: Encoded, value: Encoded) -> mx.array:
        """Rows uint32 [..., W] of keys and values that are encoded already."""
        encoded = (key, value)
        parts = [e.codes for e in encoded]
        parts += [e.scale[..., None].view(mx.uint16) for e in encoded if e.scale is not None]
        if self._padding:
            parts.append(mx.zeros((*key.codes.shape[:-1], 1), mx.uint16))
        return mx.concatenate(parts, axis=-1).view(mx.uint32)

    def _health(self, encoded: list[Encoded], keys: mx.array, values: mx.array) -> mx.array:
        clamped, broken = [], []
        for codec, e, x in zip((self.key, self.value), encoded, (keys, values), strict=True):
            peak = mx.abs(x).max(axis=-1)
            broken.append(mx.logical_not(mx.isfinite(peak)).sum())
            clamped.append(codec.clamped(peak, e).sum())
        return mx.stack([sum(clamped, mx.array(0)), sum(broken, mx.array(0))]).astype(mx.int32)

    def keys(self, rows: mx.array) -> Encoded:
        """The key part of rows uint32 [..., W]."""
        return self._part(rows, 0, self.key)

    def values(self, rows: mx.array) -> Encoded:
        """The value part of rows uint32 [..., W]."""
        return self._part(rows, 1, self.value)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """The words of keys and those of values apart: rows uint32 [..., W] -> uint16 [..., nk], [..., nv]."""
        return _words(self.keys(rows)), _words(self.values(rows))

    def unsplit(self, keys: mx.array, values: mx.array) -> mx.array:
        """The inverse of `split`: rows uint32 [..., W]."""
        return self.join(_encoded(self.key, keys), _encoded(self.value, values))

    def split_keys(self, words: mx.array) -> Encoded:
        """The keys of which `split` gave the words uint16 [..., nk]."""
        return _encoded(self.key, words)

    def _part(self, rows: mx.array, index: int, codec: Codec) -> Encoded:
        codes = _slice(rows, self._codes[index])
        if codec.scale_dtype is None:
            return Encoded(codes, None)
        scale = _slice(rows, self._scales[index]).view(codec.scale_dtype)
        return Encoded(codes, scale[..., 0])


def _words(encoded: Encoded) -> mx.array:
    """Codes, then the scale, as 16-bit words."""
    if encoded.scale is None:
        return encoded.codes
    return mx.concatenate([encoded.codes, encoded.scale[..., None].view(mx.uint16)], axis=-1)


def _encoded(codec: Codec, words: mx.array) -> Encoded:
    """The inverse of `_words`."""
    if codec.scale_dtype is None:
        return Encoded(words, None)
    return Encoded(words[..., : codec.words], words[..., codec.words :].view(codec.scale_dtype)[..., 0])


def _slice(rows: mx.array, segment: Segment) -> mx.array:
    """16-bit words of rows; copies 32-bit words where the run is aligned, which is twice as fast."""
    start, stop = segment
    if start % 2 == 0 and stop % 2 == 0:
        return rows[..., start // 2 : stop // 2].view(mx.uint16)
    whole = rows[..., start // 2 : (stop + 1) // 2].view(mx.uint16)
    return whole[..., start % 2 : start % 2 + stop - start]
