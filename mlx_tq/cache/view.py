"""Views of a cache, which attention reads, and the handles that stand for its keys and values.

mlx-lm's models pass whatever `update_and_fetch` returned straight to `scaled_dot_product_attention`. A handle looks
like an array as far as they look (shape, dtype), and the patched attention finds the view behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base

from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.by_head import attend_by_group, attend_by_head
from mlx_tq.kernels.execution_record import DECODE, PREFILL, SHORT_PASSES, run_in_phase
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Mask, Regions, refuse_different_heads


class QueryListener:
    """Receives the queries of one forward pass of one layer: the first ones, as later layers may share its keys.

    Before RoPE, `receive` gets queries [1, Hq, L, D] and the RoPE module that rotates them; else queries as attention
    has them, the scale of its scores, and its attention-sink logits. It returns arrays that are to be computed with
    the pass.
    """

    def __init__(self, receive: Callable[..., list[mx.array]], *, before_rope: bool = False) -> None:
        self.before_rope, self.is_due = before_rope, True
        self._receive = receive

    def notify(self, queries: mx.array, *context: Any) -> list[mx.array]:
        if not self.is_due:
            return []
        self.is_due = False
        return self._receive(queries, *context)


class View(Protocol):
    """Keys and values as attention sees them."""

    @property
    def wants_queries(self) -> bool:
        """True if a listener still needs this pass's pre-RoPE queries."""
        ...

    def key_shape(self) -> tuple[int, ...]: ...  # [B, H, S, Dk]

    def value_shape(self) -> tuple[int, ...]: ...  # [B, H, S, Dv]

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "View":
        """Show queries [B, Hq, L, D] to the listeners that need them before `rope` rotates them."""
        ...

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Return attention [B, Hq, L, Dv] of queries [B, Hq, L, Dk], which are the last L tokens of the view."""
        ...

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decode keys and values in logical order and the model's dtype."""
        ...


@dataclass(frozen=True)
class StepView:
    """A view of the tokens that those of one forward pass attend to."""

    regions: Regions  # the tokens of the cache, including those of the pass
    # If a block is packed in the middle of a short pass, the number of queries before that, and their view: each query
    # sees what it would have seen alone.
    earlier: "tuple[int, StepView] | None" = None
    # Arrays that the cache computes in this pass. Attention waits for them, so that one layer's tokens are compressed
    # before the next layer makes its own.
    pending: tuple[mx.array, ...] = ()
    listeners: tuple[QueryListener, ...] = ()  # that receive the queries of this pass

    @property
    def tokens(self) -> int:
        return self.regions.tokens

    def key_shape(self) -> tuple[int, ...]:
        return self._shape(self.regions.full_keys)

    def value_shape(self) -> tuple[int, ...]:
        return self._shape(self.regions.full_values)

    def _shape(self, array: mx.array) -> tuple[int, ...]:
        batch, heads, _, dim = array.shape
        return batch, heads, self.tokens, dim

    @property
    def wants_queries(self) -> bool:
        return any(listener.before_rope and listener.is_due for listener in self.listeners)

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "StepView":
        return replace(self, pending=(*self.pending, *self._notify(queries, rope, before_rope=True)))

    def notify(self, queries: mx.array, scale: float, sinks: mx.array | None) -> list[mx.array]:
        """Show queries [B, Hq, L, Dk] to the listeners; return the arrays that attention has to wait for."""
        return [*self.pending, *self._notify(queries, scale, sinks, before_rope=False)]

    def _notify(self, queries: mx.array, *context: Any, before_rope: bool) -> list[mx.array]:
        listeners = [listener for listener in self.listeners if listener.before_rope == before_rope]
        return [array for listener in listeners for array in listener.notify(queries, *context)]

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        if self.earlier is None:
            out = self._attend(queries, scale, mask, sinks)
        else:
            count, view = self.earlier
            first_mask = rest_mask = mask
            if isinstance(mask, mx.array):
                mask = mx.broadcast_to(mask, mx.broadcast_shapes(mask.shape, (queries.shape[2], self.tokens)))
                first_mask, rest_mask = mask[..., :count, : view.tokens], mask[..., count:, :]
            first = view.attend(queries[:, :, :count], scale, first_mask, sinks)
            rest = self._attend(queries[:, :, count:], scale, rest_mask, sinks)
            out = mx.concatenate([first, rest], axis=2)
        pending = self.notify(queries, scale, sinks)
        return mx.depends(out, pending) if pending else out

    def _attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        regions = self.merged_regions()
        if regions.groups and isinstance(mask, mx.array):
            refuse_different_heads("the model masks tokens by an array")
        group = queries.shape[1] // regions.full_keys.shape[1]
        most = thresholds.current(queries.shape[3], group).packed_queries
        length = queries.shape[2]
        is_short = regions.packed_tokens > 0 and length <= most
        run, run_by_head = (attend, attend_by_head) if is_short else (prefill, attend_by_group)
        phase = DECODE if length == 1 else SHORT_PASSES if is_short else PREFILL
        run = run_by_head if regions.groups else run
        return run_in_phase(phase, run, queries, regions, scale=scale, mask=mask, sinks=sinks)

    def merged_regions(self) -> Regions:
        """Return all tokens with a single packed region."""
        return self.regions

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self.merged_regions().decode()


class Handle:
    """Stands for the keys or the values of a view, [B, H, S, D]."""

    ndim = 4

    def __init__(self, view: View, dtype: mx.Dtype, *, is_key: bool) -> None:
        self.view = view
        self.dtype = dtype
        self._is_key = is_key

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.key_shape() if self._is_key else self.view.value_shape()

    def astype(self, dtype: mx.Dtype) -> "Handle":
        """Return the same view; attention computes in fp32 and returns the dtype of the queries anyway."""
        return Handle(self.view, dtype, is_key=self._is_key)

    def materialize(self) -> mx.array:
        keys, values = self.view.materialize()
        return (keys if self._is_key else values).astype(self.dtype)

    def take(self, index: mx.array) -> mx.array:
        """Return the latents of some tokens, [B, 1, k] -> [B, 1, k, R], decoded."""
        take: Callable[[mx.array], mx.array] | None = getattr(self.view, "take", None)
        return self.__getattr__("take") if take is None else take(index)  # type: ignore[return-value]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(
            f"the model reads .{name} of the keys or values that it fetched from a compressed cache; only their shape "
            "and dtype are there. Use --kv-profile off for this model."
        )


def make_handles(view: View, dtype: mx.Dtype) -> tuple[Handle, Handle]:
    """Return the pair that `update_and_fetch` returns."""
    return Handle(view, dtype, is_key=True), Handle(view, dtype, is_key=False)


def check_attention_is_patched() -> None:
    """Raise ConfigError if the model would hand the handles to mlx-lm's own attention, which cannot read them."""
    if base.scaled_dot_product_attention.__module__ == base.__name__:
        raise ConfigError(
            "a compressed cache is used outside of its attention. Run the model inside "
            "`with mlx_tq.compressed(model):`."
        )
