"""KVCacheGraph, as published (aither-kvcache): blocks and five kinds of ties, and what they say should leave.

A node has a source, hits and when it was last used. Ties: a prefix that requests share, used together three times or
more, alike in meaning (cosine .8 and more, of hashed words), neighbors in a prompt, and live beside its copy on disk,
which a study of what leaves does not need. The report does not tell its weights; those here are ours.
"""

import math
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

IMPORTANCE = {"system": 1.0, "tool": 0.6, "user": 0.6, "assistant": 0.4, "generation": 0.2}
EVERY, STALE, RANKED = 0.5, 2.0, 256  # seconds between two rankings, of the oldest that is used, and blocks of one
TOGETHER, ALIKE, DIMS = 3, 0.8, 64
SHARED = 2  # requests with other continuations from which on a prefix counts as shared
FADES = 5.0  # seconds in which having been used is worth half: of 5, 20 and 300 the best on these traces


@dataclass
class Node:
    source: str
    place: int
    used: float
    hits: int = 0
    followed: set[bytes] = field(default_factory=set)  # the blocks that came behind it
    alike: int = 0
    often: int = 0  # others that it was used together with TOGETHER times or more
    together: Counter[bytes] = field(default_factory=Counter)


class KVCacheGraph:
    """The graph of the stored blocks; with `recent`, recent use counts, too, which the report does not say."""

    def __init__(self, *, recent: bool) -> None:
        self.nodes: dict[bytes, Node] = {}
        self._recent = recent
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []
        self._meanings = np.zeros((1024, DIMS), np.float32)

    def note(self, blocks, now):
        for place, block in enumerate(blocks):
            node = self.nodes.get(block.key)
            if node is None:
                node = self.nodes[block.key] = Node(block.source, place, now)
                node.alike = self._add(block)
            else:
                node.hits += 1
            node.used = now
            if place + 1 < len(blocks):
                node.followed.add(blocks[place + 1].key)
        ends = [block.key for block in (*blocks[:2], *blocks[-2:])]
        for key in ends:
            node = self.nodes[key]
            for other in ends:
                node.together[other] += other != key
                node.often += other != key and node.together[other] == TOGETHER

    def forget(self, key):
        if self.nodes.pop(key, None) is not None:
            row = self._rows.pop(key)
            self._meanings[row] = 0
            self._free.append(row)

    def _add(self, block):
        """Add a block and return how many others are alike in meaning."""
        vector = np.zeros(DIMS, np.float32)
        for word in block.text.split():
            code = zlib.crc32(word.encode())
            vector[code % DIMS] += 1 if code & 1024 else -1
        vector /= np.linalg.norm(vector) or 1
        found = int((self._meanings @ vector >= ALIKE).sum())
        row = self._free.pop() if self._free else len(self._rows)
        if row >= len(self._meanings):
            self._meanings = np.concatenate([self._meanings, np.zeros_like(self._meanings)])
        self._meanings[row], self._rows[block.key] = vector, row
        return found

    def is_protected(self, node):
        """Return True for system text, and for what several prompts continue from."""
        return node.source == "system" or len(node.followed) >= SHARED

    def suggest_eviction(self, count, now):
        """Return the least tied and least important blocks, first those to evict first; no protected ones."""
        scored = [(self._score(node, now), -node.place, key) for key, node in list(self.nodes.items())]
        scored.sort()
        return [key for score, _, key in scored[:count] if score < float("inf")]

    def _score(self, node, now):
        if self.is_protected(node):
            return float("inf")
        ties = 0.5 * len(node.followed) + 0.1 * node.alike + 0.5 * node.often
        score = IMPORTANCE[node.source] * (1 + math.log1p(node.hits) + math.log1p(ties))
        return score * 0.5 ** ((now - node.used) / FADES) if self._recent else score

    def suggest_prefetch(self, active, held, count):
        """Return blocks that came after or together with active ones and are not stored, most frequent first."""
        found: Counter[bytes] = Counter()
        for key in active:
            node = self.nodes.get(key)
            if node is not None:
                found.update({each: 1 for each in node.followed if each not in held})
                found.update({each: n for each, n in node.together.items() if each not in held and n >= TOGETHER})
        return [key for key, _ in found.most_common(count)]


class Advisor:
    """A thread that ranks twice a second and publishes the ranking by one reference."""

    def __init__(self, graph):
        self._graph, self._ranking, self._stop = graph, (0.0, []), threading.Event()
        self.busy = self.rankings = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join()

    def rank(self, now):
        self._ranking = (now, self._graph.suggest_eviction(RANKED, now))

    def candidates(self, now):
        """Return the ranking, or nothing if it is stale."""
        made, ranking = self._ranking
        return ranking if now - made <= STALE else []

    def _run(self):
        while not self._stop.wait(EVERY):
            started = time.thread_time()
            self.rank(time.monotonic())
            self.busy += time.thread_time() - started
            self.rankings += 1
