"""What the server tells of its caches: how they are stored, and what a session's hold after an answer."""

from itertools import groupby
from typing import Any

from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.server.held import Held
from mlx_tq.server.jobs import Left
from mlx_tq.server.service import Service


def session_report(left: Left, held: Held, positions: int | None) -> dict[str, Any]:
    """What a session holds, and what came back to it for the turn, as an answer has it.

    The words that were quoted are the client's own: it has sent the whole conversation with this request.
    """
    quoted = zip(left.quoted.ranges, left.quoted.texts, strict=True)
    return {
        "positions": positions,
        "tokens": held.tokens,
        "live": held.tokens - held.evicted,
        "evicted": held.evicted,
        "archived": held.archived,
        "archived_bytes": held.archived_nbytes,
        "recalled": held.recalled,
        "recalled_by_meaning": held.by_meaning,
        "recall_ms": round(1000 * held.recall_seconds, 1),
        "rescued": len(left.quoted.ids),
        "bytes": held.nbytes,
        "fp16_bytes": held.fp16_nbytes,
        "quoted": [{"start": start, "stop": stop, "text": text} for (start, stop), text in quoted],
    }


def server_report(service: Service) -> dict[str, Any]:
    """The model, what holds where a request does not say, and how caches are stored; no path of this machine."""
    return {
        "model": service.name,
        "positions": service.positions,
        "temperature": service.sampling.temperature,
        "max_tokens": service.max_tokens,
        "sessions": service.sessions.limit,
        "rescue": service.sessions.rescues,
        "plan": None if service.plan is None else _plan(service.plan),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    alike = groupby(plan.layers, key=lambda layer: (layer.spec.keys, layer.spec.value))
    spec, eviction = plan.layers[0].spec, plan.eviction
    return {
        "layers": [{"count": len(list(layers)), "key": key, "value": value} for (key, value), layers in alike],
        "others": len(plan.classes) - len({layer.slot.index for layer in plan.layers}),
        "sinks": spec.sinks,
        "window": spec.window,
        "dtype": str(plan.layers[0].slot.dtype),
        "ranks": plan.ranks.size,
        "eviction": None
        if eviction is None
        else {
            "policy": eviction.config.policy.name,
            "budget": eviction.budget.tokens if eviction.budget.share is None else eviction.config.budget,
            "recall": eviction.config.recalls,
        },
    }
