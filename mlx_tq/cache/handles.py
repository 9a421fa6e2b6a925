"""What a cache hands to attention: a snapshot of its regions, and the handles that stand for its keys and values.

mlx-lm's models pass whatever `update_and_fetch` returned straight to `scaled_dot_product_attention`. A handle looks
like an array as far as they look (shape, dtype), and `seam.attention` finds the snapshot behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base

from mlx_tq.cache.links import Hear, Observer
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Mask, Regions


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

    @property
    def wants_queries(self) -> bool:
        """Somebody has not seen the queries of this step, as they were before RoPE."""
        ...

    def observed(self, queries: mx.array, rope: Any) -> "View":
        """The same view, once queries [B, Hq, L, D] that `rope` turned have been shown to whoever wants them."""
        ...


@dataclass(frozen=True)
class StepView:
    """What the tokens of one forward pass attend to.

    Attributes:
        regions: the cache's tokens, those of the pass among them.
        earlier: where a block leaves the tail in the middle of a step of a few tokens, how many queries came before
            that, and what they see. Each query then sees what it would have seen alone.
        pending: arrays of the cache that this step computes; attention waits for them, so that one layer's tokens are
            compressed before the next layer makes its own.
        observer: sees the queries of this step.
        told: takes in these queries as attention has them, after RoPE, where the cache has to know; returns arrays that
            it computes from them.
        hear: is told the same queries, and the scale of scores.
    """

    regions: Regions
    earlier: "tuple[int, StepView] | None" = None
    pending: tuple[mx.array, ...] = ()
    observer: Observer | None = None
    told: Callable[[mx.array], list[mx.array]] | None = None
    hear: Hear | None = None

    def _shape(self, array: mx.array) -> tuple[int, ...]:
        batch, heads, _, dim = array.shape
        return batch, heads, self.tokens, dim

    @property
    def tokens(self) -> int:
        """All that the last query sees."""
        return self.regions.tokens

    def key_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dk]."""
        return self._shape(self.regions.full_keys)

    def value_shape(self) -> tuple[int, ...]:
        """[B, H, S, Dv]."""
        return self._shape(self.regions.full_values)

    @property
    def wants_queries(self) -> bool:
        """The observer has not seen the queries of this step."""
        return self.observer is not None and self.observer.due

    def observed(self, queries: mx.array, rope: Any) -> "StepView":
        """The same view, whose observer has seen queries [1, Hq, L, D] as they were before `rope`."""
        if self.observer is None or not self.observer.due:
            return self
        return replace(self, observer=None, pending=(*self.pending, *self.observer.observe(queries, rope)))

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, Hq, L, Dk], the last L tokens: [B, Hq, L, Dv]."""
        if self.hear is not None:
            self.hear(queries, scale)
        if self.earlier is None:
            out = self._attend(queries, scale, mask, sinks)
        else:
            count, view = self.earlier
            first, rest = queries[:, :, :count], queries[:, :, count:]
            first_mask = rest_mask = mask
            if isinstance(mask, mx.array):
                mask = mx.broadcast_to(mask, mx.broadcast_shapes(mask.shape, (queries.shape[2], self.tokens)))
                first_mask = mask[..., :count, : view.tokens]
                rest_mask = mask[..., count:, :]
            outputs = [
                view.attend(first, scale, first_mask, sinks),
                self._attend(rest, scale, rest_mask, sinks),
            ]
            out = mx.concatenate(outputs, axis=2)
        pending = self.awaited(queries)
        return mx.depends(out, pending) if pending else out

    def awaited(self, queries: mx.array) -> list[mx.array]:
        """Arrays that attention of queries [B, Hq, L, Dk] waits for; the cache takes the queries in."""
        return [*self.pending, *(self.told(queries) if self.told else ())]

    def _attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        regions = self.undivided()
        run = attend if regions.packed_tokens and queries.shape[2] <= thresholds.current().packed_queries else prefill
        return run(queries, regions, scale=scale, mask=mask, sinks=sinks)

    def undivided(self) -> Regions:
        """All tokens as one body between sinks and tail."""
        return self.regions

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys and values in logical order, in the model's type."""
        return self.undivided().decode()


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
        """The number of axes, 4."""
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
        ConfigError: no `mlx_tq.compressed` context is open.
    """
    if base.scaled_dot_product_attention.__module__ == base.__name__:
        raise ConfigError(
            "a compressed cache is used outside of its attention. Run the model inside "
            "`with mlx_tq.compressed(model):`."
        )


def handles(view: View, dtype: mx.Dtype) -> tuple[Handle, Handle]:
    """The pair that `update_and_fetch` returns."""
    return Handle(view, dtype, is_key=True), Handle(view, dtype, is_key=False)
