"""Watch real calls on their way: every function is called through and nothing is replaced."""

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_tq.cache import view
from mlx_tq.cache.compressed import CompressedKVCache


@dataclass
class Seen:
    """What attention did: calls over a packed body, in the model's type, and arrays that were decoded in full."""

    few: int = 0
    many: int = 0
    materialized: int = 0
    calls: list = field(default_factory=list)  # view, queries, scale, mask, sinks, output


def watch(monkeypatch):
    """Count from now on."""
    seen = Seen()
    few, many = view.attend, view.prefill
    attend, materialize = view.Regions.attend, view.Handle.materialize

    def spy_few(queries, rows, body, *args, **kwargs):
        seen.few += body > 0
        return few(queries, rows, body, *args, **kwargs)

    def spy_many(queries, rows, body, *args, **kwargs):
        seen.many += body > 0
        return many(queries, rows, body, *args, **kwargs)

    def spy_attend(self, queries, scale, mask, sinks):
        out = attend(self, queries, scale, mask, sinks)
        seen.calls.append((self, queries, scale, mask, sinks, out))
        return out

    def spy_materialize(self):
        seen.materialized += 1
        return materialize(self)

    monkeypatch.setattr(view, "attend", spy_few)
    monkeypatch.setattr(view, "prefill", spy_many)
    monkeypatch.setattr(view.Regions, "attend", spy_attend)
    monkeypatch.setattr(view.Handle, "materialize", spy_materialize)
    return seen


class DecodedCache(KVCache):
    """Stores like a compressed cache, and hands the model the decoded arrays, for mlx's own attention."""

    def __init__(self, spec):
        super().__init__()
        self.stored = CompressedKVCache(spec)

    def update_and_fetch(self, keys, values):
        handles = self.stored.update_and_fetch(keys, values)
        self.offset = self.stored.offset
        self.keys, self.values = (handle.materialize() for handle in handles)
        mx.eval(self.keys, self.values)
        return self.keys, self.values

    def keys_and_values(self):
        return self.keys, self.values
