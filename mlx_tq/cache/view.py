"""What a cache hands to attention: a snapshot of its regions, and the handles that stand for its keys and values.

mlx-lm's models pass whatever `update_and_fetch` returned straight to `scaled_dot_product_attention`. A handle looks
like an array as far as they look (shape, dtype), and the seam in `dispatch` finds the snapshot behind it.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
from mlx_lm.models import base

from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.evict import taps
from mlx_tq.kernels import phases
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.masks import Mask
from mlx_tq.kernels.prefill import prefill


class View(Protocol):
    """Keys and values as attention sees them."""

    def key_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dk]."""
        ...

    def value_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv]."""
        ...

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, Hq, L, Dk], the last L tokens of the view: [B, Hq, L, Dv]."""
        ...

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys and values in logical order, in the model's type."""
        ...


class Observer(Protocol):
    """What wants to see the queries that attend to a view, as they were before RoPE."""

    @property
    def due(self) -> bool:
        """It has not seen those of this step."""
        ...

    def observe(self, call: taps.Turned, row: int, count: int) -> list[mx.array]:
        """Take in the first `count` queries of a row of the batch; returns arrays to be computed with the step."""
        ...


@dataclass(frozen=True)
class Regions:
    """`prefix | body | tail` of one forward pass.

    Attributes:
        rows: packed body, uint32 [B, H, capacity, W], or None while it is empty.
        body: tokens in the body.
        layout: of the rows.
        keys, values: prefix and tail in the model's type, [B, H, T, D].
        prefix: how many of the T come before the body.
        earlier: where a block leaves the tail in the middle of a step of a few tokens, how many queries came before
            that, and the regions that they see. Each query then sees what it would have seen alone.
        pending: arrays of the cache that this step computes; attention waits for them, so that one layer's tokens are
            compressed before the next layer makes its own.
        observer: sees the queries of this step.
    """

    rows: mx.array | None
    body: int
    layout: RowLayout
    keys: mx.array
    values: mx.array
    prefix: int
    earlier: "tuple[int, Regions] | None" = None
    pending: tuple[mx.array, ...] = ()
    observer: Observer | None = None

    def _shape(self, array: mx.array) -> tuple[int, ...]:
        batch, heads, tokens, dim = array.shape
        return batch, heads, tokens + self.body, dim

    def key_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dk]."""
        return self._shape(self.keys)

    def value_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv]."""
        return self._shape(self.values)

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, Hq, L, Dk], the last L tokens: [B, Hq, L, Dv]."""
        if self.observer is not None and self.observer.due:
            seen = self.observer.observe(before_rope(queries), 0, queries.shape[2])
            return replace(self, observer=None, pending=(*self.pending, *seen)).attend(queries, scale, mask, sinks)
        if self.earlier is None:
            out = self._attend(queries, scale, mask, sinks)
        else:
            count, regions = self.earlier
            first, rest = queries[:, :, :count], queries[:, :, count:]
            first_mask = rest_mask = mask
            if isinstance(mask, mx.array):
                mask = mx.broadcast_to(mask, mx.broadcast_shapes(mask.shape, (queries.shape[2], self.key_shape()[2])))
                first_mask = mask[..., :count, : regions.key_shape()[2]]
                rest_mask = mask[..., count:, :]
            outputs = [
                regions.attend(first, scale, first_mask, sinks),
                self._attend(rest, scale, rest_mask, sinks),
            ]
            out = mx.concatenate(outputs, axis=2)
        return mx.depends(out, list(self.pending)) if self.pending else out

    def _attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        if self.rows is None or self.body == 0:
            return mx.fast.scaled_dot_product_attention(
                queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks
            )
        run = attend if queries.shape[2] <= phases.current().few else prefill
        return run(
            queries,
            self.rows,
            self.body,
            self.layout,
            self.keys,
            self.values,
            prefix=self.prefix,
            scale=scale,
            mask=mask,
            sinks=sinks,
        )

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys and values in logical order, in the model's type."""
        if self.rows is None or self.body == 0:
            return self.keys, self.values
        rows = self.rows[..., : self.body, :]
        keys = self._splice(self.keys, self.layout.key, self.layout.keys(rows))
        return keys, self._splice(self.values, self.layout.value, self.layout.values(rows))

    def _splice(self, full: mx.array, codec: Codec, body: Encoded) -> mx.array:
        decoded = codec.decode(body).astype(full.dtype)
        return mx.concatenate([full[:, :, : self.prefix], decoded, full[:, :, self.prefix :]], axis=2)


def before_rope(queries: mx.array) -> taps.Turned:
    """The call of RoPE that returned these queries.

    Raises:
        UnsupportedModelError: none did.
    """
    call = taps.find(queries)
    if call is None:
        raise UnsupportedModelError(
            "eviction is calibrated on queries before RoPE, and those of this layer came from no RoPE that is tapped. "
            "Run the model inside `with mlx_tq.attention(model):`, or use another policy, such as knorm."
        )
    return call


class Handle:
    """Stands for the keys or the values of a view."""

    def __init__(self, view: View, dtype: mx.Dtype, *, is_key: bool) -> None:
        self.view = view
        self.dtype = dtype
        self._is_key = is_key

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, H, S, D]."""
        return self.view.key_shape() if self._is_key else self.view.value_shape()

    @property
    def ndim(self) -> int:
        """Always 4."""
        return 4

    def astype(self, dtype: mx.Dtype) -> "Handle":
        """The same view; attention computes in fp32 and returns the queries' type anyway."""
        return Handle(self.view, dtype, is_key=self._is_key)

    def materialize(self) -> mx.array:
        """The decoded array."""
        keys, values = self.view.materialize()
        return (keys if self._is_key else values).astype(self.dtype)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(
            f"the model reads .{name} of the keys or values that it fetched from a compressed cache; only their shape "
            "and dtype are there. Use --kv-profile off for this model."
        )


def check_seam() -> None:
    """Raise where a model would hand these handles to mlx-lm's own attention, which cannot read them.

    Raises:
        ConfigError: no `mlx_tq.attention` context is open.
    """
    if base.scaled_dot_product_attention.__module__ == base.__name__:
        raise ConfigError(
            "a compressed cache is used outside of its attention. Run the model inside `with mlx_tq.attention(model):`."
        )


def handles(view: View, dtype: mx.Dtype) -> tuple[Handle, Handle]:
    """The pair that `update_and_fetch` returns."""
    return Handle(view, dtype, is_key=True), Handle(view, dtype, is_key=False)
