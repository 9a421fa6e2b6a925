"""The interface of an embedder. Another package adds one through the entry-point group `mlx_tq.embedders`."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


def normalize_rows(vectors: Vectors) -> Vectors:
    """Return the rows [N, D] scaled to length 1; a row of zeros stays as it is."""
    matrix: Vectors = np.array(vectors, np.float32)
    matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return matrix


class Embedder(Protocol):
    """Turns texts into unit vectors. The child process builds it with the setting `model_path`.

    An embedder that treats queries differently from texts also has a method `embed_queries`.
    """

    model: str  # identity of the vectors: those of another model are not compared with them
    dim: int
    floor: float | None  # cosine below which a span is unrelated to a query; None if there is no such value

    def __init__(self, model_path: Path | None) -> None: ...

    def embed(self, texts: list[str]) -> Vectors:
        """Return a unit vector for each text, [N, D]."""
