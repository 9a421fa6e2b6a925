"""Run a model over text whose older keys and values are rounded by formulas, in a cache that stays in floats.

All tokens of a text are one pass. Its queries come in steps, and those of a step read three regions: sinks, rounded
rows, and a full-precision window that begins at least WINDOW tokens before the step. Rounding sees a whole text, so
formulas can use blocks of tokens; rows of incomplete blocks are not read rounded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.integration.patches import patch_attention
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.policies.rope import learn_rope
from mlx_tq.prompt_cache.measurements import kl_divergence
from mlx_tq.prompt_cache.recording import WatchedCache

SINKS, WINDOW, STEP, BLOCK = 32, 64, 128, 128
LEARNED = 128  # first tokens, from which the package learns the scale of keys; no row is rounded before the next step
_LOGIT_ROWS = 256  # rows of logits in memory at once


@dataclass(frozen=True)
class LayerRows:
    """What a layer caches of some texts, and the queries that read it."""

    number: int  # of the layer among those that are compressed
    index: int  # in the model's list of caches, which gives the seeds of the package's rotations
    pairs: np.ndarray  # dims that RoPE rotates together, int [2, F]
    queries: mx.array  # [B, Hq, T, D]
    keys: mx.array  # [B, H, T, D]
    values: mx.array  # [B, H, T, D]

    @property
    def stop(self) -> int:
        """Return the position before which rows are read rounded."""
        return rounded_until(self.keys.shape[2] // STEP)


Rounding = Callable[[LayerRows], mx.array]  # returns rows [SINKS, stop) of keys or values


@dataclass(frozen=True)
class Formula:
    """A way to round keys and values."""

    name: str
    keys: Rounding
    values: Rounding
    bits: Callable[[int, int], tuple[float, float]]  # of KV heads and head dim: stored bits of a key and of a value
    tail: float = 0.0  # mean number of tokens that wait in full precision until their block is complete


def rounded_until(step: int) -> int:
    """Return the position before which the queries of a step read rounded rows."""
    return step * STEP - WINDOW if step * STEP > LEARNED else SINKS


def round_blocks(rows: mx.array, stop: int, quantize: Callable[[mx.array], mx.array]) -> mx.array:
    """Round rows [SINKS, stop) of [B, H, T, D] block by block, [B, H, n, BLOCK, D]; the first block is shorter."""
    batch, heads, _, dim = rows.shape
    start = STEP - WINDOW
    first = quantize(rows[:, :, None, SINKS:start]).reshape(batch, heads, -1, dim)
    rest = quantize(rows[:, :, start:stop].reshape(batch, heads, -1, BLOCK, dim)).reshape(batch, heads, -1, dim)
    return mx.concatenate([first, rest], axis=2)


def attend_in_steps(rows: LayerRows, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attend causally, each step of queries to rounded rows and to the exact ones around them."""
    length, outputs = rows.keys.shape[2], []
    for start in range(0, length, STEP):
        stop, middle = min(start + STEP, length), rounded_until(start // STEP)
        parts = [
            mx.concatenate([exact[:, :, :SINKS], found[:, :, : middle - SINKS], exact[:, :, middle:stop]], axis=2)
            for exact, found in ((rows.keys, keys), (rows.values, values))
        ]
        mask = mx.arange(stop)[None] <= mx.arange(start, stop)[:, None]
        queries = rows.queries[:, :, start:stop]
        outputs.append(mx.fast.scaled_dot_product_attention(queries, *parts, scale=scale, mask=mask))
    return mx.concatenate(outputs, axis=2)


class Reader:
    """A model, and texts [B, T] that it reads in one pass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.slots = model_facts(model).slots
        self.pairs = [np.array(learn_rope(slot.rope, slot.key_dim).pairs) for slot in self.slots]

    def hidden(self, ids: mx.array, attend: Callable[[LayerRows, float], mx.array]) -> mx.array:
        """Return the states before the head, [B, T, E]; `attend` replaces attention in the layers to compress."""
        caches = native_caches(self.model)
        for number, slot in enumerate(self.slots):
            caches[slot.index] = WatchedCache(partial(self._attend, attend, number))
        with patch_attention():
            states: mx.array = self.model.model(ids, cache=caches)
            mx.eval(states)
        return states

    def _attend(
        self,
        attend: Callable[[LayerRows, float], mx.array],
        number: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        *_: Any,  # a causal mask and no sinks
    ) -> mx.array:
        index = self.slots[number].index
        return attend(LayerRows(number, index, self.pairs[number], queries, keys, values), scale)

    def exact(self, ids: mx.array) -> mx.array:
        return self.hidden(ids, attend_exactly)

    def rounded(self, ids: mx.array, formula: Formula) -> mx.array:
        def attend(rows: LayerRows, scale: float) -> mx.array:
            output = attend_in_steps(rows, formula.keys(rows), formula.values(rows), scale)
            mx.eval(output)
            return output

        return self.hidden(ids, attend)

    def log_probabilities(self, states: mx.array) -> mx.array:
        """Return the log-probabilities of states [N, E], [N, V]."""
        head = getattr(self.model, "lm_head", None) or self.model.model.embed_tokens.as_linear
        logits = head(states).astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # type: ignore[no-any-return]

    def compare(self, exact: mx.array, others: Sequence[mx.array]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the divergence of each scored token of some passes from the exact one, and whether both agree."""
        found: list[list[np.ndarray]] = [[] for _ in others]
        for text, start in _logit_parts(exact):
            part = slice(start, start + _LOGIT_ROWS)
            reference = self.log_probabilities(exact[text, part])
            best = reference.argmax(axis=-1)
            for number, states in enumerate(others):
                other = self.log_probabilities(states[text, part])
                agrees = best == other.argmax(axis=-1)
                found[number].append(np.array(mx.stack([kl_divergence(reference, other), agrees]), np.float64))
        joined = (np.concatenate(parts, axis=1) for parts in found)
        return [(kld, agrees) for kld, agrees in joined]


def attend_exactly(rows: LayerRows, scale: float) -> mx.array:
    return mx.fast.scaled_dot_product_attention(rows.queries, rows.keys, rows.values, scale=scale, mask="causal")


def _logit_parts(states: mx.array) -> Iterator[tuple[int, int]]:
    """Yield text and first row of the parts whose logits are computed together; the first step is not scored."""
    for text in range(states.shape[0]):
        for start in range(STEP, states.shape[1], _LOGIT_ROWS):
            yield text, start
