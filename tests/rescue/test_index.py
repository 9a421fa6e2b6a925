"""Index engines: exact search, cells for large sessions, and snapshots."""

import numpy as np
import pytest

from rescue_svc.index import engines, remove_snapshots
from rescue_svc.index.engines import FaissEngine

DIM = 32


def unit(count, seed):
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("excluded", [set(), {10, 11, 12}, set(range(10, 400))])
def test_search_is_exact(excluded):
    vectors, query = unit(400, 1), unit(1, 2)[0]
    engine = FaissEngine(DIM)
    assert (engine.search(query, 8, set()), engine.similarities(query, [1])) == ({}, {})
    engine.add(np.arange(10, 210), vectors[:200])
    engine.add(np.arange(210, 410), vectors[200:])
    order = [int(i) + 10 for i in np.argsort(-(vectors @ query)) if int(i) + 10 not in excluded]
    results = engine.search(query, 8, excluded)
    assert list(results) == order[:8]
    assert list(results.values()) == pytest.approx([float(vectors[i - 10] @ query) for i in order[:8]], abs=1e-6)
    again = FaissEngine.from_bytes(engine.to_bytes(), DIM)
    assert again.search(query, 8, excluded) == results
    assert len(again) == 400
    assert again.similarities(query, [10, 409, 9999]) == pytest.approx(
        {10: float(vectors[0] @ query), 409: float(vectors[399] @ query)}, abs=1e-6
    )


def test_large_sessions_are_searched_in_cells(monkeypatch):
    monkeypatch.setattr(engines, "FLAT_LIMIT", 2000)
    vectors = unit(3000, 3)
    engine = FaissEngine(DIM)
    engine.add(np.arange(2000), vectors[:2000])
    nearest = np.argsort(-(vectors[:2000] @ vectors[2999]))[:100].tolist()
    assert list(engine.search(vectors[2999], 100, set())) == nearest  # a search of some cells would miss many
    engine.add(np.arange(2000, 2500), vectors[2000:2500])
    engine.add(np.arange(2500, 3000), vectors[2500:])
    engine = FaissEngine.from_bytes(engine.to_bytes(), DIM)
    for i in (0, 1999, 2000, 2999):
        assert engine.search(vectors[i], 1, set()) == {i: pytest.approx(1, abs=1e-5)}
        assert i not in engine.search(vectors[i], 1, {i})
        assert engine.similarities(vectors[i], [i]) == {i: pytest.approx(1, abs=1e-5)}
    assert len(engine) == 3000


def test_a_snapshot_answers_like_its_index(start_service):
    service = start_service()
    service.write_and_embed("s", ("a fig", 0, 5), ("a plum", 10, 15))
    assert service.ready()["index"] == "faiss"
    before = service.retrieve("s", "plum", hybrid_alpha=1)
    assert before["chunks"][0]["text"] == "a plum"
    service.hibernate("s")
    assert service.retrieve("s", "plum", hybrid_alpha=1) == before


def test_only_snapshots_are_removed_from_the_folder_of_indexes(tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    ours = ["1.index", "2.index", "2.index.partial", "2.index.bad-17", "12.index"]
    theirs = ["2024.txt", "thesis.index", "2.index.html", "notes"]
    for name in ours + theirs:
        (folder / name).write_text(name)
    remove_snapshots(tmp_path, 2)
    assert {file.name for file in folder.iterdir()} == {"1.index", "12.index", *theirs}
    remove_snapshots(tmp_path, keep={1})
    assert {file.name for file in folder.iterdir()} == {"1.index", *theirs}
