"""Watch real calls on their way: every function is called through and nothing is replaced."""

from contextlib import contextmanager
from dataclasses import dataclass

from mlx_tq.cache import batch, handles
from mlx_tq.prompt_cache.passes import compressed_caches


@dataclass
class Seen:
    """What attention did: calls over a packed body, in the model's type, and arrays that were decoded in full."""

    few: int = 0
    many: int = 0
    materialized: int = 0


def watch(monkeypatch):
    """Count from now on."""
    seen = Seen()
    few, many, together = handles.attend, handles.prefill, batch.attend_batch
    materialize = handles.Handle.materialize

    def spy_few(queries, regions, **kwargs):
        seen.few += regions.packed_tokens > 0
        return few(queries, regions, **kwargs)

    def spy_many(queries, regions, **kwargs):
        seen.many += regions.packed_tokens > 0
        return many(queries, regions, **kwargs)

    def spy_together(queries, regions, **kwargs):
        seen.few += sum(row.packed_tokens > 0 for row in regions)
        return together(queries, regions, **kwargs)

    def spy_materialize(self):
        seen.materialized += 1
        return materialize(self)

    monkeypatch.setattr(handles, "attend", spy_few)
    monkeypatch.setattr(handles, "prefill", spy_many)
    monkeypatch.setattr(batch, "attend_batch", spy_together)
    monkeypatch.setattr(handles.Handle, "materialize", spy_materialize)
    return seen


@contextmanager
def rounds_of(model):
    """Note where each pass of `model` begins that finds tokens gone, and which: a list of pairs, which grows."""
    rounds, gone, kind = [], set(), type(model)

    class Watched(kind):
        def __call__(self, tokens, cache=None, **options):
            if ours := compressed_caches(cache or []):
                new = set(range(ours[0].offset)) - set(ours[0].positions.tolist()) - gone
                gone.update(new)
                rounds.extend([(ours[0].offset, sorted(new))] if new else [])
            return kind.__call__(self, tokens, cache=cache, **options)

    model.__class__ = Watched
    try:
        yield rounds
    finally:
        model.__class__ = kind
