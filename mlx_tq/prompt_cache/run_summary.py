"""Summarizes what ran for an answer: the backend, kernels by phase, and layers that stayed in full precision."""

from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from mlx_tq.kernels import backend, execution_record
from mlx_tq.prompt_cache.plan import LayerPlan, Plan

_KEPT = "not a plain KV cache"


@dataclass(frozen=True)
class FullPrecision:
    layers: list[int]
    reason: str


@dataclass(frozen=True)
class RunSummary:
    """Names what ran since the model was loaded, and the layers of a context that are not compressed."""

    backend: str
    phases: dict[str, list[str]]
    full_precision: list[FullPrecision]

    @classmethod
    def of(cls, plan: Plan, tokens: int) -> "RunSummary":
        return cls(backend.describe(), execution_record.recorded(), _full_precision(plan, tokens))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        phases = [f"{phase}: {' + '.join(names)}" for phase, names in self.phases.items()]
        plain = [f"{_describe_layers(part.layers)} ({part.reason})" for part in self.full_precision]
        return "; ".join([f"ran on {self.backend}", *phases, f"in full precision: {', '.join(plain) or 'no layer'}"])


def _full_precision(plan: Plan, tokens: int) -> list[FullPrecision]:
    if tokens < plan.compressed_from:
        reason = f"compression starts at {plan.compressed_from:,} tokens"
        return [FullPrecision(list(range(len(plan.classes))), reason)]
    compressed = {layer.slot.index for layer in plan.layers}
    reasons = {index: f"{name}, {_KEPT}" for index, name in enumerate(plan.classes) if index not in compressed}
    reasons |= {layer.slot.index: reason for layer in plan.layers if (reason := _plain_parts(layer))}
    pairs = [(reason, index) for index, reason in reasons.items()]
    pairs += [(f"part {part.part} of their caches: {part.reason}", part.index) for part in plan.uncompressed]
    by_reason = groupby(sorted(pairs), key=itemgetter(0))
    return [FullPrecision([index for _, index in layers], reason) for reason, layers in by_reason]


def _plain_parts(layer: LayerPlan) -> str:
    """Return why keys or values are stored as they are."""
    parts = {"keys": layer.spec.keys, "values": layer.spec.value}
    plain = [part for part, name in parts.items() if name == "fp16"]
    return f"the format of {' and '.join(plain)} is fp16" if plain else ""


def _describe_layers(layers: list[int]) -> str:
    """Return layers as ranges, such as "layers 0-3, 5"."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(ranges)}"
