"""Data directories of a given size, filled without a service: texts of Zipf's words, and random unit vectors."""

import itertools
import random
from pathlib import Path

import numpy as np

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, SqliteStore

WORDS_A_SPAN = 60
VOCABULARY = 30_000
_weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(VOCABULARY)))
_words = [f"w{rank}" for rank in range(VOCABULARY)]


def text(rng: random.Random, words: int = WORDS_A_SPAN) -> str:
    """Return words as frequent as in natural language: the commonest stands in nearly every span."""
    return " ".join(rng.choices(_words, cum_weights=_weights, k=words))


def fill(directory: Path, session: str, spans: int) -> None:
    """Write a session of this many spans with a vector each, and close the directory cleanly."""
    rng, generator = random.Random(spans), np.random.default_rng(spans)
    store = SqliteStore(directory, Caps(10**7, 10**7, 10**4))
    for first in range(0, spans, 1000):
        numbers = range(first, min(first + 1000, spans))
        store.write(session, [NewSpan(10 * n, 10 * n + 9, -1, 0.0, text(rng)) for n in numbers])
    last = 0
    while pending := store.pending(HashingEmbedder.model, last, 1000):
        vectors = generator.standard_normal((len(pending), HashingEmbedder.dim)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        store.store_vectors(HashingEmbedder.model, pending, vectors)
        last = pending[-1].span
    store.close()
