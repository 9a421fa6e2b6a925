"""`LatentKVCache`: the latents of a layer of MLA, from which the model makes the keys and values of all heads.

mlx-lm's models pass latents [B, 1, L, R] as keys, and the part of keys that RoPE rotates, [B, 1, L, P], as values. In a
pass of one token they attend to the latents themselves, which are keys and values at once: these stay packed. In a
longer pass they compute with both, which are decoded. Scores of the rotated part come as an additive mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.batch import BatchCompressedKVCache, BatchView
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.packed_rows import Pair
from mlx_tq.cache.region_map import SHORT_PASS
from mlx_tq.cache.view import Handle, StepView, check_attention_is_patched
from mlx_tq.codec.rows import LatentLayout, RowLayout
from mlx_tq.kernels.regions import Mask, Regions


@lru_cache(maxsize=4096)
def _latent_layout(stored: RowLayout) -> LatentLayout:
    return LatentLayout(stored)


class LatentView(StepView):
    """A view whose keys are also its values."""

    def value_shape(self) -> tuple[int, ...]:
        return self.key_shape()

    def merged_regions(self) -> Regions:
        regions = self.regions
        return replace(regions, layout=_latent_layout(regions.layout), full_values=regions.full_keys)

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
    `visible_tokens`.
    """
    regions = view.regions
    if length == 1:
        return Handle(view, regions.full_keys.dtype, is_key=True), regions.decode_values()
    latents, rotated = mx.depends([*regions.decode()], [*view.pending])
    if view.earlier is None:
        return latents, rotated
    before = view.earlier[1].regions
    start, count = before.sink_tokens, regions.packed_tokens - before.packed_tokens
    keys, values = (full[:, :, start : start + count] for full in (before.keys, before.values))
    return mx.concatenate([latents, keys], axis=2), mx.concatenate([rotated, values], axis=2)


class LatentKVCache(CompressedKVCache):
    """A compressed cache of latents, which are its keys; its values are the part of keys that RoPE rotates."""

    def append(self, keys: mx.array, values: mx.array) -> LatentView:
        return LatentView(**vars(super().append(keys, values)))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append latents [B, 1, L, R] and rotated parts [B, 1, L, P]; return all that these tokens attend to.

        Latents are a handle if L is 1.
        """
        check_attention_is_patched()
        return _fetch(self.append(keys, values), keys.shape[2])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        if window_size is not None or self._packed_in_pass(N) is None:
            return super().make_mask(N, return_array, window_size)
        return mx.array(self.visible_tokens(N))

    def visible_tokens(self, count: int) -> np.ndarray:
        """Return which tokens each of the next `count` tokens sees, bool [count, S].

        If a block is packed in the middle of their pass, each sees it as it would alone: the first ones in full
        precision, in the last columns.
        """
        stored = self.size()
        visible: np.ndarray = np.arange(stored + count) <= stored + np.arange(count)[:, None]
        block = self._packed_in_pass(count)
        if block is None:
            return visible
        queries, start, stop = block
        before = np.repeat(np.arange(count)[:, None] < queries, stop - start, axis=1)
        visible[:, start:stop] &= ~before
        return np.concatenate([visible, before], axis=1)

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

    @classmethod
    def merge(cls, caches: list["CompressedKVCache"]) -> "BatchLatentKVCache":
        """Return a batch of copies of `caches`."""
        return BatchLatentKVCache.merge(caches)


@dataclass(frozen=True)
class BatchLatentView(BatchView):
    """The latents of all rows in a pass of one token."""

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attend to each row with its part of the mask [B, Hq, 1, S], whose columns are padded on the right."""
        outputs = []
        for i, row in enumerate(self.rows):
            if row is None:
                outputs.append(mx.zeros_like(queries[i : i + 1]))
                continue
            part = mask[i : i + 1, ..., : row.tokens] if isinstance(mask, mx.array) else mask
            row_queries = mx.depends(queries[i : i + 1], outputs[-1:])  # one after another, which limits memory
            outputs.append(row.attend(row_queries, scale, part, sinks))
        return mx.concatenate(outputs)


class BatchLatentKVCache(BatchCompressedKVCache):
    """A batch whose rows are `LatentKVCache`s. Models get its arrays padded on the right, with a mask to match."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append latents [B, 1, L, R] and rotated parts [B, 1, L, P], without the padding that `prepare` announced."""
        check_attention_is_patched()
        length, counts = keys.shape[2], self.counts(keys.shape[2])
        views = self._append(keys, values, counts)
        parts = [(None, None) if view is None else _fetch(view, length) for view in views]
        rotated = _stack([part for _, part in parts], values)
        if length > 1:
            return _stack([part for part, _ in parts], keys), rotated
        heads = keys.shape[1], keys.shape[3]
        return Handle(BatchLatentView(views, counts, heads, heads), keys.dtype, is_key=True), rotated

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask [B, 1, N, S] of the next N tokens, if rows differ in length or an array is asked for."""
        plain = super().make_mask(N, return_array, window_size)
        rows = [row.visible_tokens(count) for row, count in zip(self.rows, self.counts(N), strict=True)]
        if plain is None and len({row.shape for row in rows}) == 1:
            return plain
        visible = np.zeros((len(rows), 1, N, max(row.shape[1] for row in rows)), bool)
        visible[..., 0] = True  # to padding too: attention to nothing would not be a number
        for i, row in enumerate(rows):
            visible[i, 0, : len(row), : row.shape[1]] = row
        return mx.array(visible)


def _stack(parts: Sequence[mx.array | None], like: mx.array) -> mx.array:
    """Return arrays [1, H, n, D] as one [B, H, S, D], padded on the right with zeros; None is an empty one."""
    arrays = [like[:1, :, :0] if part is None else part for part in parts]
    longest = max(array.shape[2] for array in arrays)
    return mx.concatenate([mx.pad(array, [(0, 0), (0, 0), (0, longest - array.shape[2]), (0, 0)]) for array in arrays])
