"""Inner-product search over (id, vector) pairs: FAISS, or NumPy if FAISS is not installed."""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from rescue_svc.errors import SettingsError
from rescue_svc.store import IndexName, Vectors

Ids = npt.NDArray[np.int64]

# Beyond this an exact scan is too slow for a query: vectors are clustered into cells, of which a query searches some.
FLAT_LIMIT = 100_000
# One cell in this many is searched: recall against the exact scan is measured in benchmarks/rescue.
CELLS_SEARCHED = 8
VECTORS_PER_CELL = 64  # training on more takes longer and gives the same recall


class FaissEngine:
    """FAISS: flat up to FLAT_LIMIT vectors, then cells (IVF), which still delete and exclude correctly.

    An engine is not safe to change while it is searched: its owner holds a lock.
    """

    name: IndexName = "faiss"

    def __init__(self, dim: int) -> None:
        import faiss  # may be missing, then NumPy is used

        self._faiss: Any = faiss
        # One thread per search: there are many searches at once, and starting threads costs more than a small scan.
        faiss.omp_set_num_threads(1)
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self._ids: set[int] = set()

    def add(self, ids: Ids, vectors: Vectors) -> None:
        was_flat = len(self) <= FLAT_LIMIT
        self._index.add_with_ids(vectors, ids)
        self._ids.update(ids.tolist())
        if was_flat and len(self) > FLAT_LIMIT:
            ids = self._faiss.vector_to_array(self._index.id_map)
            vectors = self._index.reconstruct_batch(ids)
            cells = int(len(ids) ** 0.5)
            inner = self._faiss.index_factory(vectors.shape[1], f"IVF{cells},Flat", self._faiss.METRIC_INNER_PRODUCT)
            inner.nprobe = max(1, cells // CELLS_SEARCHED)
            inner.train(vectors[:: max(1, len(vectors) // (cells * VECTORS_PER_CELL))])
            inner.make_direct_map()  # `similarities` reads single vectors
            self._index = self._faiss.IndexIDMap2(inner)
            self._index.add_with_ids(vectors, ids)

    def search(self, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` ids, best first, for a unit query [D]."""
        if not len(self):
            return {}
        params = None
        if excluded:
            batch = self._faiss.IDSelectorBatch(np.fromiter(excluded, np.int64))
            selector = self._faiss.IDSelectorNot(batch)
            params = self._faiss.SearchParameters(sel=selector)
            inner = self._faiss.downcast_index(self._index.index)
            if isinstance(inner, self._faiss.IndexIVF):
                params = self._faiss.SearchParametersIVF(sel=selector, nprobe=inner.nprobe)
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
        return bytes(self._faiss.serialize_index(self._index))

    @classmethod
    def from_bytes(cls, data: bytes, dim: int) -> "FaissEngine":
        engine = cls(dim)
        engine._index = engine._faiss.deserialize_index(np.frombuffer(data, np.uint8))
        engine._ids = set(engine._faiss.vector_to_array(engine._index.id_map).tolist())
        return engine


class NumpyEngine:
    """The same results from one matrix product."""

    name: IndexName = "numpy"

    def __init__(self, dim: int) -> None:
        self._ids: Ids = np.zeros(0, np.int64)
        self._vectors: Vectors = np.zeros((0, dim), np.float32)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        self._ids = np.concatenate([self._ids, ids])
        self._vectors = np.concatenate([self._vectors, vectors])

    def search(self, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        similarity = self._vectors @ query
        if excluded:
            similarity[np.isin(self._ids, np.fromiter(excluded, np.int64))] = -np.inf
        best = np.argsort(-similarity, kind="stable")[:limit]
        return {int(self._ids[i]): float(similarity[i]) for i in best if similarity[i] > -np.inf}

    def similarities(self, query: Vectors, ids: list[int]) -> dict[int, float]:
        rows = np.flatnonzero(np.isin(self._ids, np.array(ids, np.int64)))
        return dict(zip(self._ids[rows].tolist(), (self._vectors[rows] @ query).tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._ids)

    def to_bytes(self) -> bytes:
        return self._ids.astype("<i8").tobytes() + self._vectors.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dim: int) -> "NumpyEngine":
        engine = cls(dim)
        count = len(data) // (8 + 4 * dim)
        engine._ids = np.frombuffer(data, "<i8", count).astype(np.int64)
        engine._vectors = np.frombuffer(data, "<f4", offset=8 * count).reshape(count, dim).astype(np.float32)
        return engine


Engine = FaissEngine | NumpyEngine
ENGINES: dict[IndexName, type[Engine]] = {"faiss": FaissEngine, "numpy": NumpyEngine}


def choose_engine(setting: str) -> IndexName:
    """Return the engine to use; raise SettingsError if faiss is requested but not installed."""
    if setting == "numpy":
        return "numpy"
    try:
        import_module("faiss")  # now, so that the first query does not wait for it
    except ImportError:
        if setting == "faiss":
            fault = "index=faiss, but faiss is not installed; `pip install faiss-cpu`, or use index=numpy"
            raise SettingsError(fault) from None
        return "numpy"
    return "faiss"
