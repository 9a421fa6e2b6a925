"""Truncation and flipped bytes in every file: a typed error or a right rebuild, no crash, no silently wrong data.

In this process, with real SQLite and FAISS files: a crash of either ends the test run.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.errors import StoreDamagedError, StoreUnavailableError
from rescue_svc.index import Residents
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, Store, copies, files

TYPED = (StoreDamagedError, StoreUnavailableError)
CAPS = Caps(10**6, 10**6, 10**4)
EMBEDDER = HashingEmbedder()
TEXTS = {
    f"s{number}": [
        f"session {number} keeps fact {n * 37 % 101} about the {word}" for n in range(12) for word in ("fox", "owl")
    ]
    for number in range(3)
}
QUESTION = "which fact about the owl?"


def open_all(folder: Path) -> tuple[Store, Residents]:
    store = Store(folder, CAPS)
    return store, Residents(store, "faiss", EMBEDDER.model, EMBEDDER.dim, 2**30)


def close_all(store: Store, residents: Residents) -> None:
    residents.save_all()
    store.close()


def embed_pending(store: Store) -> None:
    while spans := store.pending(EMBEDDER.model, 0, 64):
        store.store_vectors(EMBEDDER.model, spans, EMBEDDER.embed([span.text for span in spans]))


def answers(store: Store, residents: Residents) -> dict[str, object]:
    """All that a client could learn: every span, and both rankings of a question."""
    vector = EMBEDDER.embed([QUESTION])[0]
    learned: dict[str, object] = {}
    for session in sorted(store.sessions(), key=lambda s: s.name):
        texts = {span.id: (span.text, span.start, span.stop, span.layer, span.score) for span in store.spans(session)}
        by_words = {texts[i]: round(score, 9) for i, score in store.bm25(session, QUESTION, 100, set()).items()}
        by_meaning = {
            texts[i]: round(s, 5) for i, s in residents.current(session.id).search(vector, 100, set()).items()
        }
        learned[session.name] = (sorted(texts.values()), by_words, by_meaning)
    return learned


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A closed data directory with index files, and what it answers."""
    folder = tmp_path_factory.mktemp("pristine") / "data"
    store, residents = open_all(folder)
    for name, texts in TEXTS.items():
        store.write(name, [NewSpan(n, n + 1, -1, n / 7, text) for n, text in enumerate(texts)])
    embed_pending(store)
    expected = answers(store, residents)
    close_all(store, residents)
    assert len(list((folder / "index").iterdir())) == 3
    backup = folder.with_name("backup")
    copies.backup(folder, backup)
    return folder, backup, expected


def damage(path: Path, rng: random.Random) -> str:
    """Cut the file short, or change one or two of its bytes."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.25:
        length = rng.randrange(len(data))
        path.write_bytes(data[:length])
        return f"{path.name} cut to {length}"
    places = [rng.randrange(len(data)) for _ in range(rng.randint(1, 2))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.name} flipped at {places}"


def test_damage_is_found(pristine, tmp_path, scale):
    folder, backup, expected = pristine
    rng = random.Random(f"damage-{scale}")
    outcomes = {"error": 0, "rebuilt": 0}
    for cycle in range(1000 * scale):
        work = tmp_path / "work"
        shutil.copytree(backup if cycle % 4 == 3 else folder, work)
        targets = [work / files.DATABASE, work / files.SEAL, *sorted(work.glob("index/*.index"))]
        what = damage(rng.choice(targets if cycle % 2 else targets[:1]), rng)
        try:
            store, residents = open_all(work)
            embed_pending(store)
            learned = answers(store, residents)
            close_all(store, residents)
        except TYPED:
            outcomes["error"] += 1
        else:
            assert learned == expected, what
            outcomes["rebuilt"] += 1
        shutil.rmtree(work)
    assert min(outcomes.values()) > 100 * scale, outcomes  # both happened, so the damage did hit


def test_damage_after_a_crash_is_found(pristine, tmp_path, scale):
    """Without a seal only the rows' own checks stand: spans and cosines are right or an error."""
    folder, _, expected = pristine
    rng = random.Random(f"crash-{scale}")
    for _ in range(100 * scale):
        work = tmp_path / "work"
        shutil.copytree(folder, work)
        files.seal_open(work)
        what = damage(work / files.DATABASE, rng)
        try:
            store, residents = open_all(work)
            embed_pending(store)
            learned = answers(store, residents)
            close_all(store, residents)
        except TYPED:
            pass
        else:
            assert {n: (a[0], a[2]) for n, a in learned.items()} == {n: (a[0], a[2]) for n, a in expected.items()}, what
        shutil.rmtree(work)


def test_a_rebuild_keeps_what_is_whole(pristine, tmp_path, scale):
    folder, _, expected = pristine
    rng = random.Random(f"rebuild-{scale}")
    all_spans = {name: set(answer[0]) for name, answer in expected.items()}
    kept = 0
    for _ in range(100 * scale):
        work = tmp_path / "work"
        shutil.copytree(folder, work)
        damage(work / files.DATABASE, rng)
        try:
            found = copies.rebuild(work)
        except TYPED:
            pass
        else:
            store, residents = open_all(work)
            spans = {name: set(answer[0]) for name, answer in answers(store, residents).items()}
            assert all(some <= all_spans[name] for name, some in spans.items())
            assert sum(map(len, spans.values())) == found.spans
            lost = sum(map(len, all_spans.values())) - found.spans
            assert found.complete == (found.set_aside is None)
            assert lost == 0 or found.set_aside.exists()
            close_all(store, residents)
            kept += found.spans
        shutil.rmtree(work)
    assert kept > 50 * scale * sum(map(len, TEXTS.values()))


def test_a_rebuild_that_finds_nothing_does_not_send_to_itself(tmp_path):
    Store(tmp_path, CAPS).close()
    with (tmp_path / files.DATABASE).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(StoreDamagedError, match="to begin with an empty store") as found:
        copies.rebuild(tmp_path)
    assert "mlx-tq-rescue rebuild" not in str(found.value)
    assert not list(tmp_path.glob("*.rebuilding*"))


def test_a_bad_index_file_is_renamed_and_built_again(pristine, tmp_path):
    folder, _, expected = pristine
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    index = work / "index" / "1.index"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    store, residents = open_all(work)
    assert answers(store, residents) == expected
    (aside,) = work.glob("index/1.index.bad-*")
    assert aside.read_bytes() == content
    close_all(store, residents)
    assert np.array_equal(
        np.frombuffer(index.read_bytes(), np.uint8), np.frombuffer((folder / "index/1.index").read_bytes(), np.uint8)
    )
