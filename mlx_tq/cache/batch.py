"""`BatchCompressedKVCache`: several sequences of different lengths, each stored and attended to as if alone.

Every row is a `CompressedKVCache` of its own, left-aligned: padding is dropped on append, so a row's blocks do not
depend on its neighbors, and rows join and leave the batch without a copy.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as native
import numpy as np
from mlx_lm.models.cache import _BaseCache

from mlx_tq.cache.view import Handle, StepView, check_attention_is_patched, make_handles
from mlx_tq.codec.formats.base import dtype_name, dtype_of
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend_batch
from mlx_tq.kernels.by_head import attend_batch_by_head
from mlx_tq.kernels.execution_record import DECODE, SHORT_PASSES, run_in_phase
from mlx_tq.kernels.regions import Mask


@dataclass(frozen=True)
class BatchView:
    """The views of all rows."""

    rows: list[StepView | None]  # None if a row got no token in this pass
    counts: list[int]  # the number of the L queries that are the row's own; the rest is padding on the right
    key_heads: tuple[int, int]  # H, Dk
    value_heads: tuple[int, int]

    def _longest(self, heads: tuple[int, int]) -> tuple[int, ...]:
        tokens = max((row.tokens for row in self.rows if row is not None), default=0)
        return len(self.rows), heads[0], tokens, heads[1]

    def _shape(self, heads: tuple[int, int]) -> tuple[int, ...]:
        """Return [B, H, S, D]; raise UnsupportedModelError if rows have different S."""
        rows = {(row and row.tokens, count) for row, count in zip(self.rows, self.counts, strict=True)}
        if len(rows) > 1:
            raise UnsupportedModelError(
                "the model reads the number of keys of a batch, which differs from row to row (in mlx-lm's own batches "
                "such a model gets positions wrong). Run the sequences one at a time."
            )
        return self._longest(heads)

    def key_shape(self) -> tuple[int, ...]:
        return self._shape(self.key_heads)

    def value_shape(self) -> tuple[int, ...]:
        return self._shape(self.value_heads)

    @property
    def wants_queries(self) -> bool:
        return any(row.wants_queries for row in self.rows if row is not None)

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "BatchView":
        rows = [
            row and row.notify_before_rope(queries[i : i + 1, :, :count], rope)
            for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True))
        ]
        return replace(self, rows=rows)

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Return attention of each row, zeros for padding: [B, Hq, L, Dk] -> [B, Hq, L, Dv].

        A decode step of all rows is one call; prompts, whose rows differ in length, are one call each.
        """
        if isinstance(mask, mx.array):
            raise ConfigError(
                "a batch on a compressed cache was given an attention mask of its own; rows here have no padding that "
                "such a mask could describe. Run the sequences one at a time."
            )
        length = queries.shape[2]
        if self._steps_together(queries):
            rows = [row for row in self.rows if row is not None]
            phase, regions = DECODE if length == 1 else SHORT_PASSES, [row.merged_regions() for row in rows]
            run = attend_batch_by_head if any(row.groups for row in regions) else attend_batch
            out = run_in_phase(phase, run, queries, regions, scale=scale, mask=mask, sinks=sinks)
            pending = [array for i, row in enumerate(rows) for array in row.notify(queries[i : i + 1], scale, sinks)]
            return mx.depends(out, pending) if pending else out
        outputs = []
        for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            padding = mx.zeros((1, queries.shape[1], length - count, self.value_heads[1]), queries.dtype)
            if row is None:
                outputs.append(padding)
                continue
            # One after another: mlx would otherwise compute the scores of all rows before their outputs.
            row_queries = mx.depends(queries[i : i + 1, :, :count], outputs[-1:])
            out = row.attend(row_queries, scale, mask, sinks)
            outputs.append(out if count == length else mx.concatenate([out, padding], axis=2))
        return mx.concatenate(outputs, axis=0)

    def _steps_together(self, queries: mx.array) -> bool:
        """Return whether all rows attend to packed tokens of like layouts with all their queries."""
        _, query_heads, length, dim = queries.shape
        return (
            length <= thresholds.current(dim, query_heads // self.key_heads[0]).packed_queries
            and all(row is not None and row.earlier is None for row in self.rows)
            and all(count == length for count in self.counts)
            and any(row.regions.packed_tokens for row in self.rows if row is not None)
            and len({id(row.regions.layout.unfitted) for row in self.rows if row is not None}) == 1
        )

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decode keys and values, padded on the right with zeros: [B, H, S, D] each."""
        keys, values = mx.zeros(self._longest(self.key_heads)), mx.zeros(self._longest(self.value_heads))
        for i, row in enumerate(self.rows):
            if row is not None:
                k, v = row.materialize()
                keys[i : i + 1, :, : k.shape[2]] = k
                values[i : i + 1, :, : v.shape[2]] = v
        return keys, values


class BatchCompressedKVCache(_BaseCache):  # type: ignore[misc]
    """A drop-in for mlx-lm's `BatchKVCache`; each of its `rows` is the `CompressedKVCache` of a sequence."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows: list[Any] = list(rows)
        self._remaining: list[int] | None = None  # tokens of each row still to come in a padded prompt
        self._last_view: tuple[BatchView, str] | None = None  # of the last pass and its dtype, if layers share it

    def counts(self, length: int) -> list[int]:
        """Return how many of the next `length` tokens are each row's own; the rest is padding on the right."""
        return [min(length, rest) for rest in self._remaining or [length] * len(self.rows)]

    @property
    def offset(self) -> mx.array:
        """Tokens seen by each row, int32 [B]."""
        return mx.array([row.offset for row in self.rows], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys [B, H, L, Dk] and values [B, H, L, Dv], without the padding that `prepare` announced."""
        check_attention_is_patched()
        counts = self.counts(keys.shape[2])
        views = self._append(keys, values, counts)
        view = BatchView(views, counts, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        self._last_view = (view, dtype_name(keys.dtype)) if any(row.spec.shared for row in self.rows) else None
        return make_handles(view, keys.dtype)

    def _append(self, keys: mx.array, values: mx.array, counts: Sequence[int]) -> list[Any]:
        """Append the first tokens of each row, as many as `counts` says; return their views, None of a row without."""
        views = [
            row.append(keys[i : i + 1, :, :count], values[i : i + 1, :, :count]) if count else None
            for i, (row, count) in enumerate(zip(self.rows, counts, strict=True))
        ]
        if self._remaining is not None:
            self._remaining = [rest - count for rest, count in zip(self._remaining, counts, strict=True)]
        return views

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Return handles of the last pass's view, for later layers that share it."""
        if self._last_view is None:
            raise UnsupportedModelError(
                "a layer reads the batch of another layer, which the cache was not planned for. Make the caches with "
                "mlx_tq.make_prompt_cache on this model."
            )
        view, dtype = self._last_view
        return make_handles(view, dtype_of(dtype))

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce a prompt padded on the right: `lengths` are the tokens of each row."""
        if left_padding is not None and max(left_padding) > 0:
            raise ConfigError(f"left padding {left_padding} cannot be stored; pad a batch's prompts on the right.")
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ConfigError(f"right padding {right_padding} needs the rows' lengths.")
            self._remaining = list(lengths)

    def finalize(self) -> None:
        """End a padded prompt."""
        self._remaining = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return None for one token and "causal" for more: rows have no padding, and each knows its own length."""
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
        self.rows += other.rows

    def extract(self, idx: int) -> Any:
        """Return a copy of one row."""
        return self.rows[idx].fork()

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "BatchCompressedKVCache":
        """Return a batch of copies of `caches`."""
        return cls([cache.fork() for cache in caches])

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens of each row; return the largest number dropped."""
        return max((row.trim(n) for row in self.rows), default=0)

    def size(self) -> int:
        """Return the number of stored tokens of the row that has most."""
        return max((row.size() for row in self.rows), default=0)

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; what rows share counts once."""
        return sum({id(array): array.nbytes for row in self.rows for array in row.arrays()}.values())

    @property
    def state(self) -> dict[str, Any]:
        """The states and classes of the rows, and the tokens of a padded prompt still to come.

        mlx-lm reads it at each step of a prompt, so shared rows are not copied for it.
        """
        classes = json.dumps([type(row).__name__ for row in self.rows])
        states = [row.state_in_place for row in self.rows]
        return {"rows": states, "classes": classes, "remaining": json.dumps(self._remaining)}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        names = json.loads(state["classes"])
        self.rows = [
            getattr(native, name).from_state(row) for name, row in zip(names, state.get("rows", []), strict=True)
        ]
        self._remaining = json.loads(state["remaining"])
        self._last_view = None
