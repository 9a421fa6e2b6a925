"""Fill data directories without a service: texts with words by Zipf's law, and random unit vectors."""

import itertools
import random
from pathlib import Path

import numpy as np

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, Pending, SqliteStore, Store, Vectors

WORDS_A_SPAN = 60
CAPS = Caps(10**7, 10**7, 10**4)
VOCABULARY = 30_000
_weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(VOCABULARY)))
_words = [f"w{rank}" for rank in range(VOCABULARY)]


def text(rng: random.Random, words: int = WORDS_A_SPAN) -> str:
    """Return words as frequent as in natural language: the commonest stands in nearly every span."""
    return " ".join(rng.choices(_words, cum_weights=_weights, k=words))


def fill(directory: Path, session: str, spans: int) -> None:
    store = SqliteStore(directory, CAPS)
    grow(store, session, 0, spans)
    store.close()


def grow(store: Store, session: str, first: int, last: int) -> None:
    rng, generator = random.Random(last), np.random.default_rng(last)
    for start in range(first, last, 1000):
        numbers = range(start, min(start + 1000, last))
        store.write(session, [NewSpan(10 * n, 10 * n + 9, -1, 0.0, text(rng)) for n in numbers])

    def vectors(waiting: list[Pending]) -> Vectors:
        made = generator.standard_normal((len(waiting), HashingEmbedder.dim)).astype(np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    while store.embed_next(HashingEmbedder.model, 1000, vectors):
        pass
