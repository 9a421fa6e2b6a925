"""How each layer of a model is stored, decided and said before anything is generated."""

import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_tq.cache.sharing import whole_steps
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.config import BLOCK, COLD, Budget, EvictConfig, KVConfig, parse_budget
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import ModelFacts, SlotFacts
from mlx_tq.kernels.arguments import can_run
from mlx_tq.policies.calibration import Calibration, QueryStats
from mlx_tq.policies.policy import CalibratedPolicy
from mlx_tq.policies.rope import Rope, find_pairs, learn_rope
from mlx_tq.prompt_cache.allocation import Allocation
from mlx_tq.prompt_cache.eviction import EvictionPlan
from mlx_tq.prompt_cache.footprint import Departures, fp16_bytes, layer_footprint, layer_layout

# What layers are promoted to where low-bit keys would hurt.
_PROMOTED = "q8"


@dataclass(frozen=True)
class LayerPlan:
    """How one plain KV cache is stored.

    Attributes:
        slot: the cache and its sizes.
        spec: its storage.
        note: why it differs from the configuration, or "".
        rope: of the layer, where an eviction policy needs its queries.
        queries: their statistics, where a file gave them.
    """

    slot: SlotFacts
    spec: CacheSpec
    note: str
    rope: Rope | None = None
    queries: QueryStats | None = None

    @property
    def has_kernels(self) -> bool:
        """The GPU kernels have all formats at these sizes; else mlx's operations decode what attention reads."""
        return not self.spec.cold and can_run(layer_layout(self.slot, self.spec))

    def nbytes(self, tokens: int, batch: int = 1, left: Departures | None = None) -> int:
        """Bytes of the arrays that hold `tokens` tokens, unused capacity included; at most, where others have left."""
        return batch * layer_footprint(self.slot, self.spec, tokens, left).allocated

    @property
    def row_bytes(self) -> int:
        """Of a packed token and KV head; of two formats the smaller."""
        layout = layer_layout(self.slot, self.spec)
        if not self.spec.cold:
            return layout.nbytes
        return min(layout.nbytes, self.spec.cold_layout(layout, dtype_of(self.slot.dtype)).nbytes)

    def shared_nbytes(self, tokens: int) -> int:
        """Bytes that a copy of a cache of `tokens` tokens need not have of its own; see `cache.sharing`."""
        if self.spec.cold:
            return 0
        rows = whole_steps(self.spec.packed_until(tokens) - self.spec.sinks)
        return self.slot.heads * rows * layer_layout(self.slot, self.spec).nbytes

    def fp16_nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the same tokens at 16 bits, whatever the model's type is."""
        return batch * fp16_bytes(self.slot, tokens)


@dataclass(frozen=True)
class Plan:
    """How a model's caches are stored.

    Attributes:
        model_type: mlx-lm's name of the architecture.
        config: what was asked for.
        classes: class name of each of the model's own caches; those not in `layers` are kept as they are.
        layers: the compressed ones.
        native_caches: makes a fresh list of the model's own caches.
        eviction: what evicting caches agree on, or None where all tokens stay.
        allocation: what the formats are worth, where they were chosen by `mean_bits`.
        ranks: that have parts of the model; heads and bytes are this rank's.
    """

    model_type: str
    config: KVConfig
    classes: list[str]
    layers: list[LayerPlan]
    native_caches: Callable[[], list[Any]]
    eviction: EvictionPlan | None = None
    allocation: Allocation | None = None
    ranks: Ranks = ALONE

    @property
    def recalls(self) -> bool:
        """What leaves is archived, and comes back when it is asked for."""
        return self.eviction is not None and self.eviction.config.recalls

    @property
    def is_blind(self) -> bool:
        """Eviction learns from the text that it reads, because what questions look for is not known of the model."""
        policy = None if self.eviction is None else self.eviction.config.policy
        looks_up = isinstance(policy, CalibratedPolicy) and policy.uses_auto_calibration
        return looks_up and any(layer.queries is None for layer in self.layers)

    def live(self, tokens: int) -> int:
        """Of `tokens` tokens, how many are stored at most before a forward pass."""
        return tokens if self.eviction is None else self.eviction.most(tokens, self.config.latest)

    def left(self, tokens: int) -> Departures | None:
        """What is known of those that are not."""
        evicts = self.eviction is not None and self.live(tokens) < tokens
        return Departures(tokens, self.eviction.config.policy.granularity) if evicts else None  # type: ignore[union-attr]

    def nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the compressed layers after `tokens` tokens, those that were evicted left out."""
        return sum(layer.nbytes(self.live(tokens), batch, self.left(tokens)) for layer in self.layers)

    def peak_nbytes(self, tokens: int) -> int:
        """Bytes of them while an answer is made after `tokens` tokens: with all that may have come back."""
        recalled = 0 if self.eviction is None else self.eviction.recall_tokens(tokens)
        stored = min(tokens, self.live(tokens) + recalled)
        left = self.left(tokens) if stored < tokens else None
        return sum(layer.nbytes(stored, left=left) for layer in self.layers)

    def shared_nbytes(self, tokens: int, most: int) -> int:
        """Bytes that copies of caches of `tokens` tokens hold once, as long as none leaves of `most` tokens."""
        return sum(layer.shared_nbytes(tokens) for layer in self.layers) if self.live(most) == most else 0

    def fp16_nbytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the same layers at 16 bits."""
        return sum(layer.fp16_nbytes(tokens, batch) for layer in self.layers)


def make_plan(
    facts: ModelFacts,
    config: KVConfig,
    native_caches: Callable[[], list[Any]],
    calibration: Calibration | None = None,
) -> Plan:
    """Decide the storage of each plain KV cache.

    Args:
        facts: of the model.
        config: what is asked for.
        native_caches: makes a fresh list of the model's own caches.
        calibration: of the model, from a file; one that the policy looked up is left out where it does not fit.

    Raises:
        ConfigError: a head size that a configured format cannot take, or an eviction that the model cannot meet.
        UnsupportedModelError: a model whose tokens the eviction policy cannot score; the message names it.
    """
    typical = statistics.median(slot.key_norm for slot in facts.slots)
    count = len(facts.slots)
    layers = []
    for number, slot in enumerate(facts.slots):
        key, value = chosen = config.formats_of(number, count)
        note = ""
        if min(number, count - 1 - number) < config.boundary:
            key, value, note = _promote(key), _promote(value), "boundary layer"
        elif config.outlier and slot.key_norm > config.outlier * typical:
            key, note = _promote(key), f"key norm {slot.key_norm:.1f} is {slot.key_norm / typical:.1f}x the median"
        if (key, value) == chosen:
            note = ""
        spectral = any(get_format(part).keys_only for part in key.split(COLD))
        pairs = _rope_pairs(facts, slot) if spectral else None
        if config.normalize and get_format(key.split(COLD)[0]).bits < 16 and not spectral:
            pairs, why = _known_pairs(slot)
            note = "; ".join(filter(None, [note, why]))
        spec = CacheSpec.for_layer(config, slot.index, key, value, shared=slot.shared, pairs=pairs)
        try:
            layout = spec.layout(slot.key_dim, slot.value_dim, dtype_of(slot.dtype))
            if spec.cold:
                spec.cold_layout(layout, dtype_of(slot.dtype))
        except ConfigError as error:
            raise ConfigError(f"layer {slot.index} of {facts.model_type}: {error}") from error
        layers.append(LayerPlan(slot, spec, note))
    plan = Plan(facts.model_type, config, facts.classes, layers, native_caches, ranks=facts.ranks)
    return plan if config.evict is None else _with_eviction(plan, facts, config.evict, calibration)


def _rope_pairs(facts: ModelFacts, slot: SlotFacts) -> tuple[tuple[int, int], ...]:
    """The two dims of each pair that the RoPE of a layer turns: half or interleaved, all dims or some."""
    if slot.rope is None:
        raise UnsupportedModelError(
            f"keys of {facts.model_type} cannot be stored by their RoPE pairs: in layer {slot.index}, {slot.no_rope}. "
            "Use q8 or tq4."
        )
    first, second = np.array(learn_rope(slot.rope, slot.key_dim).pairs).tolist()
    return tuple(zip(first, second, strict=True))


def unasked(plan: Plan) -> Plan:
    """The plan of caches whose first tokens come without their queries, which says so."""
    why = "keys not weighted: their queries are not known"
    return replace(
        plan,
        layers=[
            replace(layer, note="; ".join(filter(None, [layer.note, why]))) if layer.spec.normalize else layer
            for layer in plan.layers
        ],
    )


def _known_pairs(slot: SlotFacts) -> tuple[tuple[tuple[int, int], ...] | None, str]:
    """The pairs of a layer by which its keys are weighted; or None, and why they are not."""
    if slot.nearby_rope is None:
        return None, f"keys not weighted: {slot.no_rope}"
    try:
        first, second = np.array(find_pairs(slot.nearby_rope, slot.key_dim).pairs).tolist()
    except UnsupportedModelError as error:
        return None, f"keys not weighted: {error}"
    return tuple(zip(first, second, strict=True)), ""


def _with_eviction(plan: Plan, facts: ModelFacts, config: EvictConfig, calibration: Calibration | None) -> Plan:
    name = facts.model_type
    if facts.counts_keys:
        raise UnsupportedModelError(
            f"{name} takes positions from the number of keys it fetched, which eviction changes. Use --kv-evict none."
        )
    policy, source = config.policy, ""
    if len(plan.layers) < policy.min_layers:
        raise ConfigError(
            f"the policy {policy} needs {policy.min_layers} compressed layers, and {name} has {len(plan.layers)}. "
            "Skip fewer of them, or take another policy."
        )
    if isinstance(policy, CalibratedPolicy):
        ropes = learn_ropes(facts)
        source = f"the first {policy.warmup:,} tokens"
        found: list[QueryStats | None] = [None] * len(ropes)
        if calibration is not None and (policy.file or calibration.fits(ropes)):
            found = list(calibration.check(ropes, covariance=policy.needs_covariance))
            source = policy.file or f"questions and text ({calibration.path})"
        elif policy.uses_auto_calibration:
            source += ", blind to what a question will ask for"
        layers = [
            replace(layer, rope=rope, queries=queries)
            for layer, rope, queries in zip(plan.layers, ropes, found, strict=True)
        ]
        plan = replace(plan, layers=layers)
    budget = budget_in_tokens(plan, config, facts.positions)
    return replace(plan, eviction=EvictionPlan(config, budget, len(plan.layers), facts.positions, source))


def learn_ropes(facts: ModelFacts) -> list[Rope]:
    """The RoPE of each layer; layers with the same module share what was learned.

    Raises:
        UnsupportedModelError: TriAttention cannot score with one, which the message names.
    """
    learned: dict[int, Rope] = {}
    for slot in facts.slots:
        if slot.rope is None:
            raise UnsupportedModelError(
                f"{facts.model_type} cannot be scored by TriAttention: in layer {slot.index}, {slot.no_rope}. Use "
                "another policy, such as --kv-evict knorm, or --kv-evict none."
            )
        if id(slot.rope) not in learned:
            try:
                learned[id(slot.rope)] = learn_rope(slot.rope, slot.key_dim)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{facts.model_type}, layer {slot.index}: {error}") from error
    return [learned[id(slot.rope)] for slot in facts.slots]


def budget_in_tokens(plan: Plan, config: EvictConfig, positions: int | None = None) -> Budget:
    """The budget with bytes turned into the tokens that they hold at any length, counting what gathers before a round.

    Of bytes each rank has its share.

    Args:
        plan: of the layers.
        config: with the budget.
        positions: that the model allows, where that is known.

    Raises:
        ConfigError: the bytes do not hold sinks, window and one round.
    """
    budget = parse_budget(config.budget)
    if budget.nbytes is None:
        return budget
    own = budget.nbytes // plan.ranks.size
    gathers = config.policy.trigger + BLOCK
    least = plan.config.sinks + plan.config.latest + 1
    left = Departures(positions, config.policy.granularity)

    def most(tokens: int) -> int:
        return sum(layer.nbytes(tokens + gathers, left=left) for layer in plan.layers)

    if most(least) > own:
        raise ConfigError(
            f"a budget of {own:,} bytes is below the {most(least):,} that sinks "
            f"{plan.config.sinks}, window {plan.config.window} and a round of {gathers} tokens take. Raise the budget."
        )
    per_token = sum(layer.slot.heads * layer.row_bytes for layer in plan.layers)
    enough = least + (own - most(least)) // per_token
    return Budget(tokens=max(least, bisect_right(range(enough + 1), own, lo=least, key=most) - 1))


def _promote(name: str) -> str:
    least = min(get_format(part).bits for part in name.split(COLD))
    return name if least >= get_format(_PROMOTED).bits else _PROMOTED
