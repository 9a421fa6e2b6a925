"""A deterministic embedder without a model: words and letter triples hashed to signed places of a vector.

For tests, and for machines without a model. It knows spelling, not meaning. After Weinberger et al.,
"Feature hashing for large scale multitask learning" (2009).
"""

import re
import zlib
from pathlib import Path

import numpy as np

from rescue_svc.embed.types import Vectors


class HashingEmbedder:
    """Signed feature hashing of words and of the letter triples in them."""

    model = "hashing-1"
    dim = 384
    floor: float | None = None  # measured in benchmarks/rescue: every floor loses what answers

    def __init__(self, model_path: Path | None = None) -> None:
        del model_path  # it needs none

    def embed(self, texts: list[str]) -> Vectors:
        """Return one unit vector a text, [N, 384]; a text without words is the zero vector."""
        matrix = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(matrix, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                for feature in (word, *(f"#{word[i : i + 3]}" for i in range(len(word) - 2))):
                    code = zlib.crc32(feature.encode())
                    row[code % self.dim] += 1.0 if code & 0x80000000 else -1.0
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        matrix /= np.maximum(norms, np.finfo(np.float32).tiny)
        return matrix
