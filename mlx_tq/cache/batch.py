"""`BatchCompressedKVCache`: several sequences of different lengths, each stored and attended to as if alone.

Every row is a `CompressedKVCache` of its own, left-aligned: padding is dropped on append, so a row's blocks do not
depend on its neighbors, and rows join and leave without a copy.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
from mlx_lm.models.cache import _BaseCache

from mlx_tq.cache.handles import Handle, StepView, check_seam, handles
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend_batch
from mlx_tq.kernels.regions import Mask


@dataclass(frozen=True)
class BatchView:
    """The regions of each row, None where a row got no token in this step.

    Attributes:
        rows: one for each sequence.
        counts: how many of the L queries are the row's own; the rest is padding on the right.
        key_heads: [H, Dk] and [H, Dv] of the model.
    """

    rows: list[StepView | None]
    counts: list[int]
    key_heads: tuple[int, int]
    value_heads: tuple[int, int]

    def _longest(self, heads: tuple[int, int]) -> tuple[int, ...]:
        tokens = max((row.tokens for row in self.rows if row is not None), default=0)
        return len(self.rows), heads[0], tokens, heads[1]

    def _shape(self, heads: tuple[int, int]) -> tuple[int, ...]:
        rows = {(row and row.tokens, count) for row, count in zip(self.rows, self.counts, strict=True)}
        if len(rows) > 1:
            raise UnsupportedModelError(
                "the model reads the number of keys of a batch, which differs from row to row (in mlx-lm's own batches "
                "such a model gets positions wrong). Run the sequences one at a time."
            )
        return self._longest(heads)

    def key_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dk]; refused where rows have different S."""
        return self._shape(self.key_heads)

    def value_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv]; refused where rows have different S."""
        return self._shape(self.value_heads)

    @property
    def wants_queries(self) -> bool:
        """A row's observer has not seen the queries of this step."""
        return any(row.wants_queries for row in self.rows if row is not None)

    def observed(self, queries: mx.array, rope: Any) -> "BatchView":
        """The same regions, whose observers have seen queries [B, Hq, L, D] as they were before `rope`."""
        rows = [
            row and row.observed(queries[i : i + 1, :, :count], rope)
            for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True))
        ]
        return replace(self, rows=rows)

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of each row; queries of padding give zeros. [B, Hq, L, Dk] -> [B, Hq, L, Dv].

        A step of all rows is one call; prompts, of which rows have more or fewer tokens, are one each.
        """
        if isinstance(mask, mx.array):
            raise ConfigError(
                "a batch on a compressed cache was given an attention mask of its own; rows here have no padding that "
                "such a mask could describe. Run the sequences one at a time."
            )
        length = queries.shape[2]
        if self._steps_together(length):
            rows = [row for row in self.rows if row is not None]
            for i, each in enumerate(rows):
                if each.hear is not None:
                    each.hear(queries[i : i + 1], scale)
            out = attend_batch(queries, [row.undivided() for row in rows], scale=scale, mask=mask, sinks=sinks)
            pending = [array for i, row in enumerate(rows) for array in row.awaited(queries[i : i + 1])]
            return mx.depends(out, pending) if pending else out
        outputs = []
        for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            padding = mx.zeros((1, queries.shape[1], length - count, self.value_heads[1]), queries.dtype)
            if row is None:
                outputs.append(padding)
                continue
            out = row.attend(queries[i : i + 1, :, :count], scale, mask, sinks)
            outputs.append(out if count == length else mx.concatenate([out, padding], axis=2))
        return mx.concatenate(outputs, axis=0)

    def _steps_together(self, length: int) -> bool:
        """Every row attends to packed tokens with L = `length` queries of its own, and all rows are laid out alike."""
        return (
            length <= thresholds.current().packed_queries
            and all(row is not None and row.earlier is None for row in self.rows)
            and all(count == length for count in self.counts)
            and any(row.regions.packed_tokens for row in self.rows if row is not None)
            and len({id(row.regions.layout) for row in self.rows if row is not None}) == 1
        )

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys and values, padded on the right with zeros: [B, H, S, D] each."""
        keys, values = mx.zeros(self._longest(self.key_heads)), mx.zeros(self._longest(self.value_heads))
        for i, row in enumerate(self.rows):
            if row is not None:
                k, v = row.materialize()
                keys[i : i + 1, :, : k.shape[2]] = k
                values[i : i + 1, :, : v.shape[2]] = v
        return keys, values


class Row(Protocol):
    """One sequence of a batch: a `CompressedKVCache`."""

    spec: CacheSpec
    offset: int
    nbytes: int
    state_in_place: tuple[Any, ...]

    def arrays(self) -> list[mx.array]:
        """All that is stored; rows that caches share are the same array in each."""
        ...

    def append(self, keys: mx.array, values: mx.array) -> StepView:
        """Store tokens; returns what they attend to."""
        ...

    def fork(self) -> Any:
        """A copy that shares no change with this one."""
        ...

    def trim(self, n: int) -> int:
        """Drop the last n tokens."""
        ...

    def size(self) -> int:
        """Tokens stored."""
        ...

    def empty(self) -> bool:
        """Whether nothing has been stored yet."""
        ...


class BatchCompressedKVCache(_BaseCache):  # type: ignore[misc]
    """A drop-in for mlx-lm's `BatchKVCache`.

    Attributes:
        rows: the sequences.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows: list[Any] = list(rows)
        self._remaining: list[int] | None = None  # tokens of each row still to come in a padded prompt
        self._last: tuple[BatchView, str] | None = None  # what the last step attended to, where layers share it

    def counts(self, length: int) -> list[int]:
        """Of `length` tokens of the next pass, how many are each row's own; the rest is padding on the right."""
        return [min(length, left) for left in self._remaining or [length] * len(self.rows)]

    @property
    def offset(self) -> mx.array:
        """Tokens seen by each row, int32 [B]."""
        return mx.array([row.offset for row in self.rows], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys [B, H, L, Dk] and values [B, H, L, Dv], without the padding that `prepare` announced."""
        check_seam()
        length = keys.shape[2]
        counts = self.counts(length)
        regions = [
            row.append(keys[i : i + 1, :, :count], values[i : i + 1, :, :count]) if count else None
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True))
        ]
        if self._remaining is not None:
            self._remaining = [left - count for left, count in zip(self._remaining, counts, strict=True)]
        view = BatchView(regions, counts, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        self._last = (view, dtype_name(keys.dtype)) if any(row.spec.shared for row in self.rows) else None
        return handles(view, keys.dtype)

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Handles of what the last step attended to, for later layers that share it.

        Raises:
            UnsupportedModelError: no layer was known to share this cache.
        """
        if self._last is None:
            raise UnsupportedModelError(
                "a layer reads the batch of another layer, which the cache was not planned for. Make the caches with "
                "mlx_tq.make_prompt_cache on this model."
            )
        view, dtype = self._last
        return handles(view, dtype_of(dtype))

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce a prompt padded on the right: `lengths` are the tokens of each row.

        Raises:
            ConfigError: padding on the left, which rows here never have.
        """
        if left_padding is not None and max(left_padding) > 0:
            raise ConfigError(f"left padding {left_padding} cannot be stored; pad a batch's prompts on the right.")
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ConfigError(f"right padding {right_padding} needs the rows' lengths.")
            self._remaining = list(lengths)

    def finalize(self) -> None:
        """End a padded prompt."""
        self._remaining = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        """None for one token and "causal" for more: rows have no padding, and each knows its own length.

        Raises:
            ConfigError: a sliding window on a layer that stores everything.
        """
        if window_size is not None:
            raise ConfigError(
                f"a batch on a compressed cache was asked for a sliding window of {window_size} tokens, which its rows "
                "do not have. Run the sequences one at a time."
            )
        return None if N == 1 else "causal"

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the rows of these indices, in this order."""
        self.rows = [self.rows[int(i)] for i in np.array(batch_indices)]

    def extend(self, other: "BatchCompressedKVCache") -> None:
        """Add the rows of another batch."""
        self.rows += other.rows

    def extract(self, idx: int) -> Any:
        """A copy of one row."""
        return self.rows[idx].fork()

    @classmethod
    def merge(cls, caches: Sequence[Row]) -> "BatchCompressedKVCache":
        """A batch of copies of `caches`."""
        return cls([cache.fork() for cache in caches])

    def is_trimmable(self) -> bool:
        """The last tokens of every row can be dropped."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens of each row; returns the largest number dropped."""
        return max((row.trim(n) for row in self.rows), default=0)

    def size(self) -> int:
        """Tokens stored of the row that has most."""
        return max((row.size() for row in self.rows), default=0)

    def empty(self) -> bool:
        """Nothing has been stored in any row."""
        return all(row.empty() for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, those that rows share once."""
        return sum({id(array): array.nbytes for row in self.rows for array in row.arrays()}.values())

    @property
    def state(self) -> tuple[Any, ...]:
        """The states of the rows, their classes, and the tokens of a padded prompt still to come.

        mlx-lm reads it at each step of a prompt, so that what rows share is not copied for it.
        """
        about = {"classes": [type(row).__name__ for row in self.rows], "remaining": self._remaining}
        return *(row.state_in_place for row in self.rows), json.dumps(about)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        *rows, text = state
        about = json.loads(text)
        self.rows = [getattr(native, name).from_state(row) for name, row in zip(about["classes"], rows, strict=True)]
        self._remaining = about["remaining"]
        self._last = None
