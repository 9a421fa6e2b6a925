"""`LatentKVCache`: the latents of a layer of MLA, from which the model makes the keys and values of all heads.

mlx-lm's models pass latents [B, 1, L, R] as keys, and the part of keys that RoPE rotates, [B, 1, L, P], as values. In a
pass of one token they attend to the latents themselves, as keys and as values: these stay packed. In a longer pass they
compute with decoded latents and rotated parts. Scores of the rotated part come as an additive mask.

A search of the archive needs each query as one vector of R + P numbers, which scores latents and rotated parts. The
cache never receives that vector, so it appends unit vectors to the keys: their scores are the query's components.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.batch import BatchCompressedKVCache, BatchView
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.packed_rows import Pair
from mlx_tq.cache.region_map import SHORT_PASS
from mlx_tq.cache.view import Handle, StepView, check_attention_is_patched
from mlx_tq.codec.joint import JointLayout
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import LatentLayout, RowLayout
from mlx_tq.errors import ConfigError
from mlx_tq.kernels.regions import Mask, Regions


@dataclass(frozen=True)
class LatentView(StepView):
    """A view whose keys are also its values."""

    unit_vectors: int = 0  # R + P if unit vectors follow the keys

    @property
    def columns(self) -> int:
        """Columns of the mask in a pass of one token, whose unit vectors have the dims of rotated parts."""
        return self.tokens + (self.regions.full_values.shape[3] if self.unit_vectors else 0)

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attend with the query [B, Hq, 1, R] of one token; the mask [B, Hq, 1, S] has the scores of rotated parts."""
        if not self.unit_vectors or not isinstance(mask, mx.array):
            return super().attend(queries, scale, mask, sinks)
        out = self._attend(queries, scale, mask[..., : self.tokens], sinks)
        pending = [*self.pending]
        if self.listeners:
            rotated = mask[..., self.tokens : self.columns].astype(queries.dtype) / scale
            vectors = mx.concatenate([queries, rotated], axis=-1)
            pending = [vectors, *self.notify(vectors, scale, sinks)]  # an unevaluated vector keeps the pass in memory
        return mx.depends(out, pending) if pending else out

    def value_shape(self) -> tuple[int, ...]:
        return self.key_shape()

    def merged_regions(self) -> Regions:
        regions = self.regions
        return replace(regions, layout=regions.layout.read_as(LatentLayout), full_values=regions.full_keys)

    def take(self, index: mx.array) -> mx.array:
        """Return the latents of tokens [B, 1, k] alone, decoded: [B, 1, k, R]."""
        regions, sinks = self.regions, self.regions.sink_tokens
        packed = regions.packed_tokens

        def select(array: mx.array, rows: mx.array) -> mx.array:
            return mx.take_along_axis(array, mx.clip(rows, 0, array.shape[2] - 1)[..., None], axis=2)

        full = select(regions.keys, mx.where(index < sinks, index, index - packed))
        if packed == 0:
            return full
        rows, key = select(regions.rows(), index - sinks), regions.layout.key
        decoded = key.decode(regions.layout.keys(rows)).astype(full.dtype)
        return mx.where(((index >= sinks) & (index < sinks + packed))[..., None], decoded, full)


def _fetch(view: LatentView, length: int) -> tuple[Any, mx.array]:
    """Return latents and rotated parts as the model computes with them in a pass of `length` tokens.

    If a block is packed in the middle of the pass, its tokens follow the others once more, in full precision: see
    `visible_tokens`. Unit vectors come last.
    """
    regions = view.regions
    rank, rotated_dim = regions.full_keys.shape[3], regions.full_values.shape[3]
    if length == 1:
        rotated = regions.decode_values()
        if view.unit_vectors:
            rotated = _append_tokens(rotated, mx.eye(rotated_dim))
        return Handle(view, regions.full_keys.dtype, is_key=True), rotated
    latents, rotated = mx.depends([*regions.decode()], [*view.pending])
    if view.earlier is not None:
        before = view.earlier[1].regions
        start, count = before.sink_tokens, regions.packed_tokens - before.packed_tokens
        latents = _append_tokens(latents, before.keys[:, :, start : start + count])
        rotated = _append_tokens(rotated, before.values[:, :, start : start + count])
    if view.unit_vectors:
        units = mx.eye(rank + rotated_dim)
        latents, rotated = _append_tokens(latents, units[:, :rank]), _append_tokens(rotated, units[:, rank:])
    return latents, rotated


def _append_tokens(array: mx.array, tokens: mx.array) -> mx.array:
    """Append tokens [..., n, D] to those of an array [1, 1, S, D], in its type."""
    return mx.concatenate([array, tokens.reshape(1, 1, -1, array.shape[3]).astype(array.dtype)], axis=2)


class LatentKVCache(CompressedKVCache):
    """A compressed cache of latents, which are its keys; its values are the part of keys that RoPE rotates."""

    _capturing: LatentView | None = None  # of a pass of several tokens, until its attention

    def append(self, keys: mx.array, values: mx.array) -> LatentView:
        units = self._unit_vectors
        return LatentView(**vars(super().append(keys, values)), unit_vectors=units)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append latents [B, 1, L, R] and rotated parts [B, 1, L, P]; return all that these tokens attend to.

        Latents are a handle if L is 1.
        """
        check_attention_is_patched()
        view = self.append(keys, values)
        self._capturing = view if view.unit_vectors and keys.shape[2] > 1 else None
        return _fetch(view, keys.shape[2])

    def capture_queries(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> tuple[mx.array, mx.array, Mask]:
        """Show the queries [B, Hq, L, D] of several tokens to listeners; return keys, values and mask to attend to."""
        view, self._capturing = self._capturing, None
        if view is None:
            return keys, values, mask
        stop = keys.shape[2] - view.unit_vectors
        visible = mask[..., :stop] if isinstance(mask, mx.array) else mask
        units, keys, values = keys[:, :, stop:], keys[:, :, :stop], values[:, :, :stop]
        if view.listeners:
            products = queries @ units.swapaxes(-1, -2)
            if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
                products = products + mask[..., stop:] / scale
            pending = [products, *view.notify(products, scale, None)]  # unevaluated products keep all keys in memory
            keys, values = mx.depends([keys, values], pending)
        return keys, values, visible

    @property
    def _unit_vectors(self) -> int:
        if self._full is None or self.group is None or not self.group.captures_queries:
            return 0
        return self._full[0].shape[3] + self._full[1].shape[3]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        mask = super().make_mask(N, return_array, window_size)
        has_more_columns = self._unit_vectors or self._packed_in_pass(N) is not None
        if window_size is not None or mask is None or not has_more_columns:
            return mask
        return mx.array(self.visible_tokens(N))

    def visible_tokens(self, count: int, *, captures: bool = True) -> np.ndarray:
        """Return which tokens each of the next `count` tokens sees, bool [count, S].

        If a block is packed in the middle of their pass, each sees it as it would alone: the first ones in full
        precision, in columns behind the others. All see unit vectors, in the last columns, if queries are captured.
        """
        stored = self.size()
        visible: np.ndarray = np.arange(stored + count) <= stored + np.arange(count)[:, None]
        columns = [visible]
        if block := self._packed_in_pass(count):
            queries, start, stop = block
            columns.append(np.repeat(np.arange(count)[:, None] < queries, stop - start, axis=1))
            visible[:, start:stop] &= ~columns[1]
        if self._full is not None and captures and self._unit_vectors:
            columns.append(np.ones((count, self._unit_vectors if count > 1 else self._full[1].shape[3]), bool))
        return np.concatenate(columns, axis=1)

    def _packed_in_pass(self, count: int) -> tuple[int, int, int] | None:
        """Return the tokens of a short pass before which a block is packed, and the columns of that block."""
        first, target = self._packed(self.offset + 1), self._packed(self.offset + count)
        if self.spec.indexed or not 1 < count <= SHORT_PASS or target <= first:
            return None
        queries = target + self.spec.window - 1 - self.offset
        return queries, self.spec.sinks + self._row(first), self.spec.sinks + self._row(target)

    def _short_view(self, full: Pair, before: int, packed: int, target: int) -> StepView:
        view = super()._short_view(full, before, packed, target)
        return replace(view, earlier=None) if self.spec.indexed else view

    # Rows for the archive: latents and rotated parts together are what queries score.

    def searched(self, queries: mx.array) -> tuple[mx.array, Regions]:
        queries, regions = super().searched(queries)
        full = mx.concatenate([regions.full_keys, regions.full_values], axis=-1)
        return queries, replace(regions, layout=regions.layout.read_as(JointLayout), full_keys=full, full_values=full)

    def evictable_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        rows, layout, normalization = super().evictable_rows()
        return rows, layout.read_as(JointLayout), normalization

    @classmethod
    def merge(cls, caches: list["CompressedKVCache"]) -> "BatchLatentKVCache":
        """Return a batch of copies of `caches`."""
        return BatchLatentKVCache.merge(caches)


@dataclass(frozen=True)
class BatchLatentView(BatchView):
    """The latents of all rows in a pass of one token."""

    rows: list[LatentView | None]  # type: ignore[assignment]

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attend to each row with its part of the mask [B, Hq, 1, S], whose columns are padded on the right."""
        outputs = []
        for i, row in enumerate(self.rows):
            if row is None:
                outputs.append(mx.zeros_like(queries[i : i + 1]))
                continue
            part = mask[i : i + 1, ..., : row.columns] if isinstance(mask, mx.array) else mask
            row_queries = mx.depends(queries[i : i + 1], outputs[-1:])  # one after another, which limits memory
            outputs.append(row.attend(row_queries, scale, part, sinks))
        return mx.concatenate(outputs)


class BatchLatentKVCache(BatchCompressedKVCache):
    """A batch whose rows are `LatentKVCache`s. Models get its arrays padded on the right, with a mask to match."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append latents [B, 1, L, R] and rotated parts [B, 1, L, P], without the padding that `prepare` announced."""
        check_attention_is_patched()
        length, counts = keys.shape[2], self.counts(keys.shape[2])
        rows = zip(self.rows, counts, strict=True)
        if length > 1 and any(count and row.group is not None and row.group.captures_queries for row, count in rows):
            raise ConfigError(
                f"a batch of MLA latents captures queries in passes of one token, and this one has {length}. Run its "
                "tokens one by one, or the sequence alone."
            )
        views = self._append(keys, values, counts)
        if length > 1:
            views = [view and replace(view, unit_vectors=0) for view in views]
        parts = [(None, None) if view is None else _fetch(view, length) for view in views]
        rotated = _stack([part for _, part in parts], values)
        if length > 1:
            return _stack([part for part, _ in parts], keys), rotated
        heads = keys.shape[1], keys.shape[3]
        return Handle(BatchLatentView(views, counts, heads, heads), keys.dtype, is_key=True), rotated

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask [B, 1, N, S] of the next N tokens, if rows differ in length or an array is asked for."""
        plain = super().make_mask(N, return_array, window_size)
        counts = zip(self.rows, self.counts(N), strict=True)
        rows = [row.visible_tokens(count, captures=N == 1) for row, count in counts]
        if plain is None and len({row.shape for row in rows}) == 1:
            return plain
        visible = np.zeros((len(rows), 1, N, max(row.shape[1] for row in rows)), bool)
        visible[..., 0] = True  # for padded queries: softmax over no keys is NaN
        for i, row in enumerate(rows):
            visible[i, 0, : len(row), : row.shape[1]] = row
        return mx.array(visible)


def _stack(parts: Sequence[mx.array | None], like: mx.array) -> mx.array:
    """Return arrays [1, H, n, D] as one [B, H, S, D], padded on the right with zeros; None is an empty one."""
    arrays = [like[:1, :, :0] if part is None else part for part in parts]
    longest = max(array.shape[2] for array in arrays)
    return mx.concatenate([mx.pad(array, [(0, 0), (0, 0), (0, longest - array.shape[2]), (0, 0)]) for array in arrays])
