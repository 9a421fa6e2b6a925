"""Inner-product search over (id, vector) pairs with FAISS."""

from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from rescue_svc.store import Vectors

Ids = npt.NDArray[np.int64]

# Beyond this an exact scan is too slow for a query: vectors are clustered into cells, of which a query searches some.
FLAT_LIMIT = 100_000
# One cell in this many is searched: recall against the exact scan is measured in benchmarks/rescue.
CELLS_SEARCHED = 8
VECTORS_PER_CELL = 64  # training on more takes longer and gives the same recall


class FaissEngine:
    """A flat index up to FLAT_LIMIT vectors, then cells (IVF), which still exclude correctly.

    An engine is not safe to change while it is searched: its owner holds a lock.
    """

    def __init__(self, dim: int) -> None:
        # One thread per search: many searches run concurrently, and starting threads costs more than a small scan.
        faiss.omp_set_num_threads(1)
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self._ids: set[int] = set()

    def add(self, ids: Ids, vectors: Vectors) -> None:
        was_flat = len(self) <= FLAT_LIMIT
        self._index.add_with_ids(vectors, ids)
        self._ids.update(ids.tolist())
        if was_flat and len(self) > FLAT_LIMIT:
            ids = faiss.vector_to_array(self._index.id_map)
            vectors = self._index.reconstruct_batch(ids)
            cells = int(len(ids) ** 0.5)
            inner = faiss.index_factory(vectors.shape[1], f"IVF{cells},Flat", faiss.METRIC_INNER_PRODUCT)
            inner.nprobe = max(1, cells // CELLS_SEARCHED)
            inner.train(vectors[:: max(1, len(vectors) // (cells * VECTORS_PER_CELL))])
            inner.make_direct_map()  # `similarities` reads single vectors
            self._index = faiss.IndexIDMap2(inner)
            self._index.add_with_ids(vectors, ids)

    def search(self, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` ids, best first, for a unit query [D]."""
        if not len(self):
            return {}
        params = None
        if excluded:
            batch = faiss.IDSelectorBatch(np.fromiter(excluded, np.int64))
            selector = faiss.IDSelectorNot(batch)
            params = faiss.SearchParameters(sel=selector)
            inner = faiss.downcast_index(self._index.index)
            if isinstance(inner, faiss.IndexIVF):
                params = faiss.SearchParametersIVF(sel=selector, nprobe=inner.nprobe)
        similarity, ids = self._index.search(query[None], min(limit, len(self)), params=params)
        return {int(i): float(s) for i, s in zip(ids[0], similarity[0], strict=True) if i >= 0}

    def similarities(self, query: Vectors, ids: list[int]) -> dict[int, float]:
        indexed = [i for i in ids if i in self._ids]
        if not indexed:
            return {}
        vectors = self._index.reconstruct_batch(np.array(indexed, np.int64))
        return dict(zip(indexed, (vectors @ query).tolist(), strict=True))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def to_bytes(self) -> bytes:
        return bytes(faiss.serialize_index(self._index))

    @classmethod
    def from_bytes(cls, data: bytes, dim: int) -> "FaissEngine":
        engine = cls(dim)
        engine._index = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        engine._ids = set(faiss.vector_to_array(engine._index.id_map).tolist())
        return engine
