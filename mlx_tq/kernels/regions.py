"""The tokens of one layer that attention reads, and the masks that apply to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, NoReturn

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization, decode_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError, ConfigError, UnsupportedModelError

# As mlx-lm passes it: None, "causal", or an array that broadcasts to [B, Hq, L, S], bool or additive.
Mask = mx.array | str | None
_Select = Callable[[mx.array], mx.array]  # takes some heads of an array [B, H, ...]
MASKED = -1e30  # for minus infinity, so that fully masked scores have finite differences instead of NaN


class SharedRows(NamedTuple):
    """The first `tokens` of packed rows uint32 [B, H, capacity, W] that several caches may share."""

    rows: mx.array
    tokens: int


@dataclass(frozen=True)
class Selection:
    """Packed rows that attention reads: with both, `ranges` are those of the index."""

    ranges: mx.array | None = None  # first row and number of rows of each KV head, int32 [H, 2]; None: all
    index: mx.array | None = None  # rows, in any order and any number of times, int32 [n]; None: as they are stored

    def check(self, rows: int) -> None:
        """Raise ConfigError if a row is not one of the first `rows`: kernels would read other memory."""
        count = rows
        if self.index is not None:
            count = self.index.size
            self._check_bounds(self.index, rows, "row")
        if self.ranges is not None:
            self._check_bounds(self.ranges[:, 0], count + 1, "range that begins at row")
            self._check_bounds(self.ranges.sum(axis=1), count + 1, "range that ends before row")
            self._check_bounds(self.ranges[:, 1], count + 1, "range whose number of rows is")

    def _check_bounds(self, values: mx.array, stop: int, name: str) -> None:
        for value in (int(values.min()), int(values.max())) if values.size else ():
            if not 0 <= value < stop:
                raise ConfigError(f"the selection has a {name} {value}; valid are 0 to {stop - 1}.")


@dataclass(frozen=True)
class HeadRows:
    """The packed rows of some KV heads of a layer whose heads keep different tokens, at batch size 1."""

    heads: tuple[int, ...]  # ascending
    rows: mx.array | None  # uint32 [1, len(heads), capacity, W]; None if all are shared, or there are none
    tokens: int  # including those of `shared`
    shared: tuple[SharedRows, ...] = ()
    mean_index: mx.array | None = None  # as in `KeyNormalization`
    # Of the full-precision tokens, a query sees the first `sinks` and the last `window`, itself included, and none
    # after it; None: all that a mask shows.
    window: int | None = None
    sinks: int = 0

    def query_heads(self, size: int) -> list[int]:
        """Return the numbers of the query heads, `size` for each KV head."""
        return [head * size + i for head in self.heads for i in range(size)]


@dataclass(frozen=True)
class Regions:
    """Keys and values of one layer in logical order: `sinks | packed region | window`.

    Sinks and window are in the model's dtype and lie side by side in one buffer. Spare capacity is never read. Where
    heads keep different tokens, `groups` has the packed rows, and `packed_tokens` are those of the head with most.
    """

    packed_rows: mx.array | None  # uint32 [B, H, capacity, W]; None if all packed tokens are shared, or there are none
    packed_tokens: int  # including those of `shared`
    layout: RowLayout
    full_keys: mx.array  # of sinks and window, [B, H, capacity, Dk]
    full_values: mx.array  # [B, H, capacity, Dv]
    sink_tokens: int
    full_tokens: int  # sinks and window
    normalization: KeyNormalization | None = None  # of the packed keys, row by row; None for plain keys
    shared: tuple[SharedRows, ...] = ()  # precede `packed_rows` in the packed region
    groups: tuple[HeadRows, ...] = ()  # of all heads, each in one

    @property
    def tokens(self) -> int:
        return self.full_tokens + self.packed_tokens

    @property
    def keys(self) -> mx.array:
        return self.full_keys[:, :, : self.full_tokens]

    @property
    def values(self) -> mx.array:
        return self.full_values[:, :, : self.full_tokens]

    @property
    def full_nbytes(self) -> int:
        """Bytes of all keys and values in the model's dtype."""
        batch, heads, _, key_dim = self.full_keys.shape
        return batch * heads * self.tokens * (key_dim + self.full_values.shape[3]) * self.full_keys.dtype.size

    def head(self, index: int) -> "Regions":
        """Return the part of one KV head."""
        groups = self.groups or (self.as_group(),)
        group = next(group for group in groups if index in group.heads)
        place = group.heads.index(index)
        return self._part(group, lambda array: array[:, index : index + 1], lambda rows: rows[:, place : place + 1])

    def part(self, groups: Sequence[HeadRows]) -> "Regions":
        """Return the part of some groups of KV heads, which are numbered from 0 there."""
        heads = sorted(head for group in groups for head in group.heads)

        def select(array: mx.array) -> mx.array:
            return mx.take(array, mx.array(heads), axis=1)

        if len(groups) == 1:
            return self._part(groups[0], select, lambda rows: rows)
        return replace(
            self.with_groups([replace(group, heads=tuple(map(heads.index, group.heads))) for group in groups]),
            full_keys=select(self.full_keys),
            full_values=select(self.full_values),
            layout=self.layout.select_heads(select),
            normalization=self.normalization and self.normalization.select_heads(select),
        )

    def with_groups(self, groups: Sequence[HeadRows]) -> "Regions":
        """Return regions with these packed rows, whose numbers of means count from the first."""
        return replace(
            self,
            packed_rows=None,
            packed_tokens=max(group.tokens for group in groups),
            shared=(),
            normalization=self.normalization and replace(self.normalization, index=None, first=0),
            groups=tuple(groups),
        )

    def packed_buffers(self) -> tuple[SharedRows, ...]:
        """Return the buffers of the packed rows with the tokens in each; none where heads keep different tokens."""
        rest = self.packed_tokens - sum(part.tokens for part in self.shared)
        if self.groups or self.packed_rows is None or rest == 0:
            return self.shared
        return (*self.shared, SharedRows(self.packed_rows, rest))

    def as_group(self) -> HeadRows:
        """Return the packed rows of a layer whose heads keep the same tokens."""
        heads = tuple(range(self.full_keys.shape[1]))
        index = None if self.normalization is None else self.normalization.index
        return HeadRows(heads, self.packed_rows, self.packed_tokens, self.shared, index)

    def _part(self, group: HeadRows, select: _Select, select_rows: _Select) -> "Regions":
        normalization = None
        if self.normalization is not None and group.tokens:
            normalization = replace(self.normalization.select_heads(select), index=group.mean_index)
        return replace(
            self,
            packed_rows=None if group.rows is None else select_rows(group.rows),
            packed_tokens=group.tokens,
            shared=tuple(SharedRows(select_rows(rows), tokens) for rows, tokens in group.shared),
            layout=self.layout.select_heads(select),
            full_keys=select(self.full_keys),
            full_values=select(self.full_values),
            normalization=normalization,
            groups=(),
        )

    def rows(self, start: int = 0, stop: int | None = None) -> mx.array:
        """Return packed rows [start, stop) in one array, uint32 [B, H, n, W]; by default all of them."""
        if self.packed_rows is None and not self.shared:
            raise CacheFormatError("the packed region is empty. Use mlx's own attention.")
        return rows_between(self.shared, self.packed_rows, start, self.packed_tokens if stop is None else stop)

    def decode(self) -> tuple[mx.array, mx.array]:
        """Return all keys [B, H, tokens, Dk] and values [B, H, tokens, Dv] in logical order and the model's dtype."""
        if self.groups:
            refuse_different_heads("the model reads keys and values as arrays")
        if self.packed_tokens == 0:
            return self.keys, self.values
        decoded = decode_keys(self.layout.key, self.layout.keys(self.rows()), self.normalization)
        return splice(self.keys, self.sink_tokens, decoded), self.decode_values()

    def decode_values(self) -> mx.array:
        """Return all values, as `decode` does; of a layer whose heads keep the same tokens."""
        if self.packed_tokens == 0:
            return self.values
        return splice(self.values, self.sink_tokens, self.layout.value.decode(self.layout.values(self.rows())))


def refuse_different_heads(what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{what}, and the heads of a layer keep different tokens. Use neither --kv-evict heads nor --compact."
    )


def splice(full: mx.array, sink_tokens: int, packed: mx.array) -> mx.array:
    """Insert the decoded vectors of the packed region after the sinks: [B, H, T, D] -> [B, H, T + n, D]."""
    return mx.concatenate([full[:, :, :sink_tokens], packed.astype(full.dtype), full[:, :, sink_tokens:]], axis=2)


def rows_between(shared: Sequence[SharedRows], rows: mx.array | None, start: int, stop: int) -> mx.array:
    """Return rows [start, stop) of the shared rows and those after them; a view if they lie in one buffer."""
    edges = [0, *accumulate(part.tokens for part in shared)]
    ends = [*edges[1:], max(stop, edges[-1])]
    buffers = [*(part.rows for part in shared), *([] if rows is None else [rows])]
    pieces = [
        buffer[:, :, max(start - first, 0) : min(stop, end) - first]
        for buffer, first, end in zip(buffers, edges, ends, strict=False)
        if first < stop and start < end
    ]
    pieces = pieces or [buffers[-1][:, :, :0]]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def take_columns(mask: mx.array, *ranges: tuple[int, int]) -> mx.array:
    if mask.shape[-1] == 1:
        return mask
    return mx.concatenate([mask[..., start:stop] for start, stop in ranges], axis=-1)


def apply_mask(scores: mx.array, mask: mx.array, length: int) -> mx.array:
    """Mask scores [B, H, G L, S] of L = `length` queries with an array that broadcasts to [B, H G, L, S]."""
    batch, heads, rows, tokens = scores.shape
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask.reshape(mask.shape[0], heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
    grid = scores.reshape(batch, heads, rows // length, length, tokens)
    grid = mx.where(mask, grid, MASKED) if mask.dtype == mx.bool_ else mx.maximum(grid + mask, MASKED)
    return grid.reshape(scores.shape)
