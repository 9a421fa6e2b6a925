"""Plain BM25 without a database: shows first that the collections and the measures are read right."""

import math
import re
from collections import Counter, defaultdict

K1, B = 1.2, 0.75


class PlainBM25:
    """Robertson's BM25 with the idf that is never negative; each word of the query counts once."""

    def __init__(self, documents: dict[int, str]) -> None:
        self._lengths = {}
        self._postings: dict[str, dict[int, int]] = defaultdict(dict)
        for document, text in documents.items():
            words = re.findall(r"\w+", text.lower())
            self._lengths[document] = len(words)
            for word, count in Counter(words).items():
                self._postings[word][document] = count
        self._mean = sum(self._lengths.values()) / len(self._lengths)

    def rank(self, query: str, limit: int) -> list[int]:
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(re.findall(r"\w+", query.lower())):
            postings = self._postings.get(word, {})
            idf = math.log(1 + (len(self._lengths) - len(postings) + 0.5) / (len(postings) + 0.5))
            for document, count in postings.items():
                norm = 1 - B + B * self._lengths[document] / self._mean
                scores[document] += idf * count * (K1 + 1) / (count + K1 * norm)
        return [d for d, _ in sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]]
