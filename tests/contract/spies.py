"""Watch real calls on their way: every function is called through and nothing is replaced."""

from collections import Counter
from contextlib import contextmanager

import mlx.core as mx

from mlx_tq.cache import batch, view
from mlx_tq.prompt_cache.layer_group import compressed_caches


def run(model, caches, tokens, chunks, before=lambda start: None):
    """Return the logits of all passes; `before` is called with the position at which each begins."""
    start, logits = 0, []
    for chunk in chunks:
        before(start)
        logits.append(model(mx.array([tokens[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return mx.concatenate(logits, axis=1).astype(mx.float32)


def watch(monkeypatch):
    """Count calls of attention that read packed rows, and arrays that are decoded in full."""
    calls = Counter()

    def spy(owner, name, counted=lambda *_: 1):
        function = getattr(owner, name)

        def call(first, *regions, **options):
            calls[name] += counted(*regions)
            return function(first, *regions, **options)

        monkeypatch.setattr(owner, name, call)

    spy(view, "attend", lambda regions: regions.packed_tokens > 0)
    spy(view, "prefill", lambda regions: regions.packed_tokens > 0)
    spy(batch, "attend_batch", lambda regions: sum(row.packed_tokens > 0 for row in regions))
    spy(view.Handle, "materialize")
    return calls


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
