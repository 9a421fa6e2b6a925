"""A deterministic embedder without a model, for tests and for machines without one. It knows spelling, not meaning.

It hashes words and letter trigrams to signed vector components. After Weinberger et al., "Feature hashing for large
scale multitask learning" (2009).
"""

import re
import zlib
from pathlib import Path

import numpy as np

from rescue_svc.embed.embedder import Vectors, normalize_rows


class HashingEmbedder:
    model = "hashing-1"
    dim = 384
    floor: float | None = None  # measured in benchmarks/rescue: every floor loses relevant spans

    def __init__(self, model_path: Path | None = None) -> None:
        pass

    def embed(self, texts: list[str]) -> Vectors:
        """Return a unit vector for each text, [N, 384]; a text without words gets the zero vector."""
        matrix = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(matrix, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                for feature in (word, *(f"#{word[i : i + 3]}" for i in range(len(word) - 2))):
                    code = zlib.crc32(feature.encode())
                    row[code % self.dim] += 1.0 if code & 0x80000000 else -1.0
        return normalize_rows(matrix)
