"""How each layer of a model is stored, decided and shown before anything is generated."""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_tq.cache.packed_rows import whole_steps
from mlx_tq.cache.region_map import SCALE_READY
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.config import BLOCK, COLD, Budget, EvictConfig, KVConfig, parse_budget
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import ModelFacts, SlotFacts, UncompressedPart
from mlx_tq.kernels.arguments import can_run
from mlx_tq.policies.calibration import SKIP, Calibration, QueryStats
from mlx_tq.policies.heads import Division, Heads, divide_heads
from mlx_tq.policies.policy import CalibratedPolicy
from mlx_tq.policies.rope import Rope, find_pairs, learn_rope
from mlx_tq.prompt_cache.allocation import Allocation, promote, without_sorting
from mlx_tq.prompt_cache.layer_bytes import (
    Evicted,
    RegionBytes,
    cold_layout,
    headwise_bytes,
    layer_bytes,
    layer_layout,
    native_cache_bytes,
    native_capacity,
)
from mlx_tq.prompt_cache.layer_group import EvictionPlan
from mlx_tq.prompt_cache.measurements import HeadScores
from mlx_tq.prompt_cache.transient import activation_nbytes, attention_nbytes, compression_nbytes, selection_nbytes

_LATENT_NOTE = "MLA: latents in the key format, RoPE parts of keys in the value format"


@dataclass(frozen=True)
class LayerPlan:
    """How one plain KV cache is stored."""

    slot: SlotFacts
    spec: CacheSpec
    note: str  # why it differs from the configuration, or ""
    rope: Rope | None = None  # of the layer, if an eviction policy needs its queries
    queries: QueryStats | None = None  # from a file
    evicts: bool = True  # whether it takes part in eviction: else all of its heads keep all tokens

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU kernels have all formats at these sizes; else attention reads decoded rows."""
        return not self.spec.cold and can_run(layer_layout(self.slot, self.spec))

    @property
    def row_nbytes(self) -> int:
        """Bytes of a packed token and KV head; with two key formats, in the smaller."""
        layout = layer_layout(self.slot, self.spec)
        return min(layout.nbytes, cold_layout(self.slot, self.spec).nbytes) if self.spec.cold else layout.nbytes

    def shared_nbytes(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens that copies of a cache share; see `PackedRows.shareable`."""
        if self.spec.cold:
            return 0
        rows = whole_steps(self.spec.packed_until(tokens) - self.spec.sinks)
        return self.slot.heads * rows * layer_layout(self.slot, self.spec).nbytes

    def native_nbytes(self, tokens: int) -> int:
        """Return the bytes that mlx-lm's own cache of this layer allocates for `tokens` tokens."""
        return native_cache_bytes(self.slot, tokens)


@dataclass(frozen=True)
class Plan:
    """How a model's caches are stored."""

    model_type: str  # mlx-lm's name of the architecture
    config: KVConfig
    classes: list[str]  # of all of the model's own caches; those not in `layers` are kept as they are
    layers: list[LayerPlan]
    native_caches: Callable[[], list[Any]]  # makes a new list of the model's own caches
    eviction: EvictionPlan | None = None  # None if caches keep all tokens
    division: Division | None = None  # of the heads, if the policy evicts by head
    allocation: Allocation | None = None  # the bits and the loss of formats that `mean_bits` chose
    ranks: Ranks = ALONE  # processes that have parts of the model; heads and bytes are this rank's
    name: str = ""  # of the model, as users know it
    activations: int = 0  # numbers that a token's pass through one layer keeps at once
    uncompressed: tuple[UncompressedPart, ...] = ()  # plain KV caches that stay mlx-lm's own

    @property
    def recalls(self) -> bool:
        """Whether evicted tokens are archived and can be recalled."""
        return self.eviction is not None and self.eviction.config.recalls

    @property
    def calibrates_on_prompt(self) -> bool:
        """Whether eviction learns from the prompt alone, as no calibration of the model is known."""
        policy = None if self.eviction is None else self.eviction.config.policy
        looks_up = isinstance(policy, CalibratedPolicy) and policy.uses_auto_calibration
        return looks_up and any(layer.queries is None for layer in self.layers)

    @property
    def warmup(self) -> int:
        """Tokens of the prompt before which no eviction round runs, as their queries calibrate the policy."""
        policy: Any = None if self.eviction is None else self.eviction.config.policy
        calibrates = isinstance(policy, CalibratedPolicy) and any(layer.queries is None for layer in self.layers)
        return SKIP + policy.warmup if calibrates else 0

    def live(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are stored before a forward pass, at most."""
        if self.eviction is None or tokens < self.warmup:
            return tokens
        return self.eviction.max_live(tokens, self.config)

    # Bytes. Everything that reports or reserves memory goes through `bytes_at`.

    def layers_at(self, tokens: int, extra: int = 0, recalled: int = 0) -> list[RegionBytes]:
        """Return the bytes of each compressed layer after `tokens` tokens, region by region.

        They are exact while nothing is evicted, else an upper bound for the budget, `recalled` and `extra` live tokens.
        """
        live, evicted = self.live(tokens), None
        if self.eviction is not None and live < tokens:
            evicted = Evicted(tokens, self.eviction.config.policy.granularity, recalled)
        stored = min(tokens, max(live, self.live(tokens - extra)) + extra + recalled)
        if self.division is not None:
            return [self._headwise_bytes(layer, tokens, stored, evicted) for layer in self.layers]
        return [layer_bytes(layer.slot, layer.spec, stored, evicted) for layer in self.layers]

    def _headwise_bytes(self, layer: LayerPlan, tokens: int, stored: int, evicted: Evicted | None) -> RegionBytes:
        if not layer.evicts:
            return layer_bytes(layer.slot, layer.spec, tokens)
        return headwise_bytes(layer.slot, layer.spec, tokens, stored, evicted)

    def kept_share(self, tokens: int) -> float:
        """Return the share of the rows of `tokens` tokens that is kept, at most."""
        if self.division is None:
            return self.live(tokens) / tokens
        return self.division.share(self.heads, tokens)

    @property
    def heads(self) -> int:
        """KV heads of all compressed layers and ranks together."""
        return self.ranks.size * sum(layer.slot.heads for layer in self.layers)

    def bytes_at(self, tokens: int, extra: int = 0, recalled: int = 0) -> RegionBytes:
        """Return the sum of `layers_at`, and of what stays uncompressed and grows with the tokens."""
        total = sum(self.layers_at(tokens, extra, recalled), RegionBytes())
        return replace(total, allocated=total.allocated + self.uncompressed_nbytes(tokens))

    def uncompressed_nbytes(self, tokens: int) -> int:
        """Return the bytes of the plain KV caches that stay mlx-lm's own after prefilling `tokens` tokens."""
        return native_capacity(tokens) * sum(part.token_nbytes for part in self.uncompressed)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of plain KV caches, compressed or not, after `tokens` tokens, before the next pass."""
        return self.bytes_at(tokens).allocated

    def peak_nbytes(self, tokens: int, step: int = 1) -> int:
        """Return the upper bound on the bytes during passes of at most `step` tokens, at any length up to `tokens`.

        Caches are included, and what a pass takes temporarily; weights are not.
        """
        return self.cache_peak_nbytes(tokens, step) + self.transient_nbytes(tokens, step)

    def transient_nbytes(self, tokens: int, step: int, rows: int = 1) -> int:
        """Return the upper bound on the bytes that a pass of `step` tokens takes temporarily, without the caches.

        `rows` are sequences that are prefilled in one batch.
        """
        recalled = 0 if self.eviction is None else self.eviction.max_recalled(tokens)
        stored = min(tokens, self.live(max(0, tokens - step)) + step + recalled)
        if self.division is not None and self.division.num_retrieval:
            stored = tokens
        slots, selecting = [layer.slot for layer in self.layers], {part.index for part in self.uncompressed}
        layers = (
            attention_nbytes(slot, stored, step, rows, compressed=True)
            + compression_nbytes(slot, stored, step, rows)
            + (selection_nbytes(slot, stored, step) if slot.index in selecting else 0)
            for slot in slots
        )
        return max(layers) + activation_nbytes(slots, self.activations, rows * min(step, tokens))

    def cache_peak_nbytes(self, tokens: int, step: int = 1) -> int:
        """Return the upper bound on the caches' bytes at any length up to `tokens`, after passes of at most `step`.

        It includes the recalled tokens. Rows that copies share are in buffers that may be longer; see `shareable`.
        """
        recalled = 0 if self.eviction is None else self.eviction.max_recalled(tokens)
        lengths = {length for length in self._local_peaks(tokens, step) if 0 <= length <= tokens}
        return max(self.bytes_at(length, step, recalled).allocated for length in lengths)

    def _local_peaks(self, tokens: int, step: int) -> set[int]:
        """Return `tokens` and the lengths where the byte count can drop afterwards.

        Those are the end of each block, the token at which the key scale is learned, and the first eviction round.
        Later blocks count only near the end: only a round frees more there than is added, up to two blocks.
        """
        peaks = {tokens, SCALE_READY + BLOCK - 1, self.warmup + step - 1}
        for sinks, window in {(layer.spec.sinks, layer.spec.window) for layer in self.layers}:
            settled = max(sinks + window, SCALE_READY) + 4 * BLOCK
            last = tokens - (tokens - window) % BLOCK - 1
            peaks |= {last - BLOCK, last, *range((window - 1) % BLOCK, settled, BLOCK)}
        return peaks

    def shared_nbytes(self, tokens: int, total: int) -> int:
        """Return the bytes of the first `tokens` tokens that copies share while they grow to `total` tokens."""
        return sum(layer.shared_nbytes(tokens) for layer in self.layers) if self.live(total) == total else 0

    def native_nbytes(self, tokens: int) -> int:
        """Return the bytes that mlx-lm's own caches allocate for `tokens` tokens in place of `nbytes`."""
        return self.uncompressed_nbytes(tokens) + sum(layer.native_nbytes(tokens) for layer in self.layers)

    @property
    def native_dtype(self) -> str:
        """Type of mlx-lm's own caches."""
        return self.layers[0].slot.dtype

    @property
    def compressed_from(self) -> int:
        """Fewest tokens of which any are packed."""
        return min(layer.spec.first_packed for layer in self.layers)


def make_plan(
    facts: ModelFacts,
    config: KVConfig,
    native_caches: Callable[[], list[Any]],
    calibration: Calibration | None = None,
    head_scores: HeadScores | None = None,
) -> Plan:
    """Decide the storage of each plain KV cache.

    A `calibration` that the policy looked up is ignored if it does not fit the model. `head_scores` are those of a
    policy that evicts by head.
    """
    typical = statistics.median(slot.key_norm for slot in facts.slots)
    count = len(facts.slots)
    indexed = {part.index for part in facts.uncompressed}
    layers = []
    for number, slot in enumerate(facts.slots):
        key, value, *notes = choose_formats(config, number, count, slot.key_norm, typical)
        key, why = without_sorting(slot, key)
        notes.append(why)
        if slot.latent:
            value = promote(value)
            notes.append(_LATENT_NOTE)
        needs_pairs = any(get_format(part).needs_pairs for part in key.split(COLD))
        pairs = _rope_pairs(facts, slot) if needs_pairs else None
        if config.normalize and get_format(key.split(COLD)[0]).bits < 16 and not needs_pairs and not slot.latent:
            pairs, why = _weighting_pairs(slot)
            notes.append(why)
        kinds = {"shared": slot.shared, "latent": slot.latent, "indexed": slot.latent and slot.index in indexed}
        spec = CacheSpec.for_layer(config, slot.index, key, value, pairs=pairs, **kinds)
        try:
            if slot.latent and spec.cold:
                raise ConfigError(f"its latents are stored in one format, and the key {key} names two. Use {spec.key}.")
            layer_layout(slot, spec)
            if spec.cold:
                cold_layout(slot, spec)
        except ConfigError as error:
            raise ConfigError(f"layer {slot.index} of {facts.model_type}: {error}") from error
        layers.append(LayerPlan(slot, spec, _join(notes)))
    plan = Plan(
        facts.model_type,
        config,
        facts.classes,
        layers,
        native_caches,
        ranks=facts.ranks,
        name=facts.name,
        activations=facts.activations,
        uncompressed=facts.uncompressed,
    )
    return plan if config.evict is None else _with_eviction(plan, facts, config.evict, calibration, head_scores)


def choose_formats(
    config: KVConfig, number: int, count: int, norm: float = 1.0, typical: float = 1.0
) -> tuple[str, str, str]:
    """Return the key and value formats of layer `number` of `count`, and why they differ from the configuration.

    `norm` is the layer's key norm, `typical` the median over the layers.
    """
    key, value = chosen = config.formats_of(number, count)
    note = ""
    if min(number, count - 1 - number) < config.boundary:
        key, value, note = promote(key), promote(value), "boundary layer"
    elif config.outlier and norm > config.outlier * typical:
        key, note = promote(key), f"key norm {norm:.1f} is {norm / typical:.1f}x the median"
    return key, value, "" if (key, value) == chosen else note


def _join(notes: Sequence[str]) -> str:
    """Join notes, of which some may be empty."""
    return "; ".join(filter(None, notes))


def _rope_pairs(facts: ModelFacts, slot: SlotFacts) -> tuple[tuple[int, int], ...]:
    """Return the two dims of each pair that the RoPE of a layer rotates."""
    if slot.rope is None:
        raise UnsupportedModelError(
            f"keys of {facts.model_type} cannot be stored by their RoPE pairs: in layer {slot.index}, {slot.no_rope}. "
            "Use q8 or tq4."
        )
    return _dim_pairs(learn_rope(slot.rope, slot.key_dim))


def _dim_pairs(rope: Rope) -> tuple[tuple[int, int], ...]:
    first, second = np.array(rope.pairs).tolist()
    return tuple(zip(first, second, strict=True))


def without_queries(plan: Plan) -> Plan:
    """Note in a plan that the first tokens come without their queries, so that keys are not weighted."""
    why = "keys not weighted: their queries are not known"
    return replace(
        plan,
        layers=[
            replace(layer, note=_join([layer.note, why])) if layer.spec.normalize else layer for layer in plan.layers
        ],
    )


def _weighting_pairs(slot: SlotFacts) -> tuple[tuple[tuple[int, int], ...] | None, str]:
    """Return the RoPE pairs by which the keys of a layer are weighted, or None and why they are not."""
    if slot.nearby_rope is None:
        return None, f"keys not weighted: {slot.no_rope}"
    try:
        return _dim_pairs(find_pairs(slot.nearby_rope, slot.key_dim)), ""
    except UnsupportedModelError as error:
        return None, f"keys not weighted: {error}"


def _with_eviction(
    plan: Plan,
    facts: ModelFacts,
    config: EvictConfig,
    calibration: Calibration | None,
    head_scores: HeadScores | None,
) -> Plan:
    name = facts.model_type
    if facts.counts_keys:
        raise UnsupportedModelError(
            f"{name} takes positions from the number of keys it fetched, which eviction changes. Use --kv-evict none."
        )
    if facts.uncompressed:
        raise UnsupportedModelError(
            f"{name} cannot evict tokens: part of its cache stays uncompressed and keeps them all "
            f"({facts.uncompressed[0].reason}). Use --kv-evict none."
        )
    policy, source = config.policy, ""
    if len(plan.layers) < policy.min_layers:
        raise ConfigError(
            f"the policy {policy} needs {policy.min_layers} compressed layers, and {name} has {len(plan.layers)}. "
            "Skip fewer of them, or use another policy."
        )
    if isinstance(policy, CalibratedPolicy):
        ropes = learn_ropes(facts)
        source = f"the first {policy.warmup:,} tokens"
        queries: list[QueryStats | None] = [None] * len(ropes)
        if calibration is not None and (policy.file or calibration.fits(ropes)):
            queries = list(calibration.check(ropes, covariance=policy.needs_covariance))
            source = policy.file or f"questions and text ({calibration.path})"
        elif policy.uses_auto_calibration:
            source += " (no calibration file: evicts without knowledge of later questions)"
        layers = [
            replace(layer, rope=rope, queries=stats)
            for layer, rope, stats in zip(plan.layers, ropes, queries, strict=True)
        ]
        plan = replace(plan, layers=layers)
    if isinstance(policy, Heads):
        if any(layer.slot.latent for layer in plan.layers):
            raise UnsupportedModelError(
                f"{name} caches latents, which all heads share, but the policy {policy} keeps different tokens for "
                "each head. Use another policy, such as --kv-evict knorm, or --kv-evict none."
            )
        plan = _divide_heads(plan, policy, parse_budget(config.budget), facts.positions, head_scores)
        assert plan.division is not None  # noqa: S101 - tells the type checker: it was made in the line above
        budget = Budget(tokens=plan.division.first + plan.division.window - policy.trigger)
    else:
        budget = budget_in_tokens(plan, config, facts.positions)
    evicting = sum(layer.evicts for layer in plan.layers)
    num_retrieval = 0 if plan.division is None else plan.division.num_retrieval
    return replace(plan, eviction=EvictionPlan(config, budget, evicting, facts.positions, source, num_retrieval))


def _divide_heads(
    plan: Plan, policy: Heads, budget: Budget, positions: int | None, head_scores: HeadScores | None
) -> Plan:
    """Choose the retrieval heads of the whole model, of which each rank has its own."""
    name, ranks = plan.name or plan.model_type, plan.ranks
    length = budget.length or positions
    if length is None:
        raise ConfigError(
            f"{name} names no context length, so a budget of {budget.share:.0%} of its rows is unknown. Write the "
            f"length, as in {budget.share:.0%}@8192."
        )
    if head_scores is None:
        raise ConfigError(
            f"{policy} needs to know which KV heads of {name} need all tokens, which is not measured yet. Run "
            "mlx_tq.calibrate --heads with this model once, or use another policy."
        )
    counts = [layer.slot.heads * ranks.size for layer in plan.layers]
    if [len(layer) for layer in head_scores.scores] != counts:
        raise ConfigError(
            f"the scores of heads are of a model with {[len(layer) for layer in head_scores.scores]} KV heads; {name} "
            f"has {counts}. Run mlx_tq.calibrate --heads with this model."
        )
    # Streaming heads hold the first tokens, and those that wait for a round.
    first = max(plan.config.sinks, policy.sinks) + policy.granularity + policy.trigger - 1
    least = max(plan.config.window, 1) + 2 * BLOCK
    division = divide_heads(head_scores.scores, budget.share or 1.0, length, first, least, policy.window)
    layers = []
    for layer, chosen in zip(plan.layers, division.retrieval_heads, strict=True):
        before = ranks.rank * layer.slot.heads  # heads of the ranks before this one
        retrieval_heads = tuple(head - before for head in chosen if 0 <= head - before < layer.slot.heads)
        if len(retrieval_heads) == layer.slot.heads:
            layers.append(replace(layer, evicts=False))
        else:
            spec = replace(
                layer.spec, retrieval_heads=retrieval_heads, head_sinks=policy.sinks, head_window=division.window
            )
            layers.append(replace(layer, spec=spec))
    return replace(plan, layers=layers, division=division)


def learn_ropes(facts: ModelFacts) -> list[Rope]:
    """Return the RoPE of each layer; raise UnsupportedModelError if TriAttention cannot score with one."""
    learned: dict[tuple[int, bool], Rope] = {}
    for slot in facts.slots:
        if slot.rope is None:
            raise UnsupportedModelError(
                f"{facts.model_type} cannot be scored by TriAttention: in layer {slot.index}, {slot.no_rope}. Use "
                "another policy, such as --kv-evict knorm, or --kv-evict none."
            )
        if (key := (id(slot.rope), slot.is_rope_fused)) not in learned:
            try:
                learned[key] = replace(learn_rope(slot.rope, slot.key_dim), is_fused=slot.is_rope_fused)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{facts.model_type}, layer {slot.index}: {error}") from error
    return [learned[id(slot.rope), slot.is_rope_fused] for slot in facts.slots]


def budget_in_tokens(plan: Plan, config: EvictConfig, positions: int | None = None) -> Budget:
    """Convert a budget in bytes to the tokens that it holds at any length, with those that gather before a round.

    Each rank has its share of bytes. `positions` are those that the model allows, if known.
    """
    budget = parse_budget(config.budget)
    if budget.nbytes is None:
        return budget
    available = budget.nbytes // plan.ranks.size
    gathering = config.policy.trigger + BLOCK
    fewest = plan.config.sinks + plan.config.num_protected + 1
    evicted = Evicted(positions, config.policy.granularity)

    def nbytes(tokens: int) -> int:
        stored = tokens + gathering
        return sum(layer_bytes(layer.slot, layer.spec, stored, evicted).allocated for layer in plan.layers)

    if nbytes(fewest) > available:
        raise ConfigError(
            f"a budget of {available:,} bytes is below the {nbytes(fewest):,} that sinks {plan.config.sinks}, window "
            f"{plan.config.window} and a round of {gathering} tokens take. Raise the budget."
        )
    per_token = sum(layer.slot.heads * layer.row_nbytes for layer in plan.layers)
    upper = fewest + (available - nbytes(fewest)) // per_token
    return Budget(tokens=max(fewest, bisect_right(range(upper + 1), available, lo=fewest, key=nbytes) - 1))
