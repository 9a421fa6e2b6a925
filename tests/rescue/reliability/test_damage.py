"""Truncated and changed files give a typed error or a correct rebuild, with real SQLite and FAISS files."""

import random
import shutil
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.errors import StoreDamagedError, StoreUnavailableError
from rescue_svc.store import NewSpan, copies, files

from ..harness import open_store

TYPED = (StoreDamagedError, StoreUnavailableError)
EMBEDDER = HashingEmbedder()
TEXTS = {
    f"s{number}": [
        f"session {number} keeps fact {n * 37 % 101} about the {word}" for n in range(12) for word in ("fox", "owl")
    ]
    for number in range(3)
}
SPANS = sum(map(len, TEXTS.values()))
QUESTION = "which fact about the owl?"


@contextmanager
def opened(folder: Path):
    """Open a store with its indexes; close it unless something is raised."""
    store, index = open_store(EMBEDDER.model, EMBEDDER.dim, data_dir=folder)
    while store.embed_next(EMBEDDER.model, 64, lambda spans: EMBEDDER.embed([span.text for span in spans])):
        pass
    yield store, index
    index.save_all()
    store.close()


def answers(folder: Path) -> dict[str, object]:
    """Return all that a client could read from these files: every span, and both rankings of a question."""
    vector = EMBEDDER.embed([QUESTION])[0]
    results: dict[str, object] = {}
    with opened(folder) as (store, index):
        for session in sorted(store.sessions(), key=lambda s: s.name):
            texts = {s.id: (s.text, s.start, s.stop, s.layer, s.score) for s in store.spans(session)}
            by_words = store.bm25(session, QUESTION, 100, set())
            by_meaning = index.search(session.id, vector, 100, set())
            results[session.name] = (
                sorted(texts.values()),
                {texts[i]: round(score, 9) for i, score in by_words.items()},
                {texts[i]: round(score, 5) for i, score in by_meaning.items()},
            )
    return results


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Return a closed data folder with index files, a backup of it, and what both answer."""
    folder = tmp_path_factory.mktemp("pristine") / "data"
    with opened(folder) as (store, _):
        for name, texts in TEXTS.items():
            store.write(name, [NewSpan(n, n + 1, -1, n / 7, text) for n, text in enumerate(texts)])
    expected = answers(folder)
    assert len(list((folder / "index").iterdir())) == 3
    backup = folder.with_name("backup")
    copies.backup(folder, backup)
    return folder, backup, expected


@pytest.fixture
def copy(tmp_path):
    """Return a function that copies a folder over the previous copy."""

    def copy(folder: Path) -> Path:
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        return shutil.copytree(folder, tmp_path / "work")

    return copy


def damage(path: Path, rng: random.Random) -> str:
    """Truncate the file, or change one or two of its bytes."""
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


def test_damage_is_detected(pristine, copy, times):
    """After a crash, without a seal, only the rows' checksums protect spans and cosines."""
    folder, backup, expected = pristine
    rng = random.Random("damage-1")
    errors = 0
    for cycle in range(times(1200)):
        work, crashed = copy(backup if cycle % 4 == 3 else folder), cycle % 6 == 5
        targets = [work / files.DATABASE, work / files.SEAL, *sorted(work.glob("index/*.index"))]
        if crashed:
            files.seal_open(work)
        what = damage(rng.choice(targets if cycle % 2 and not crashed else targets[:1]), rng)
        try:
            results = answers(work)
        except TYPED:
            errors += 1
        else:
            parts = (0, 2) if crashed else (0, 1, 2)
            for name, answer in expected.items():
                assert [results[name][part] for part in parts] == [answer[part] for part in parts], what
    assert times(120) < errors < times(1080)


@pytest.fixture
def changed(pristine, copy):
    """Return a function that changes a row without breaking SQLite's own structure, as after a crash."""

    def changed(statement):
        work = copy(pristine[0])
        files.seal_open(work)
        with closing(files.connect(work / files.DATABASE)) as database:
            database.execute("PRAGMA foreign_keys = OFF")
            assert database.execute(f"UPDATE {statement} = 3").rowcount == 1
        return work

    return changed


CHANGES = [
    *(
        (f"spans SET {change} WHERE id", "span 3 of session s0")
        for change in ("layer = 1", "score = 9.0", "start = 0", "stop = 99", "seal = 0")
    ),
    ("texts_1 SET text = 'a lie' WHERE id", "span 3 of session s0"),
    ("spans SET session = 99 WHERE id", "rows refer to a session or span that does not exist"),
    ("sessions SET spans = 23 WHERE id", "session s2 should have 23 spans and has 24"),
    ("sessions SET text_bytes = 1 WHERE id", "session s2 should have"),
]


@pytest.mark.parametrize(("statement", "says"), CHANGES)
def test_a_changed_row_is_detected(opening, changed, statement, says):
    with pytest.raises(StoreDamagedError, match=says):
        opening(data_dir=changed(statement))


@pytest.mark.parametrize(
    "change",
    [
        "vectors_1 SET vector = zeroblob(length(vector))",
        "vectors_1 SET vector = x'00'",
        "embeddings SET seal = 0",
        "embeddings SET model = 'else'",
    ],
)
def test_a_changed_vector_is_computed_again(pristine, changed, change):
    work = changed(f"{change} WHERE span")
    shutil.rmtree(work / "index")
    assert answers(work) == pristine[2]


def test_a_rebuild_keeps_intact_rows(pristine, copy, times):
    folder, _, expected = pristine
    rng = random.Random("rebuild-1")
    all_spans, total = {name: set(answer[0]) for name, answer in expected.items()}, 0
    for _ in range(times(200)):
        work = copy(folder)
        damage(work / files.DATABASE, rng)
        try:
            rebuilt = copies.rebuild(work)
        except TYPED:
            continue
        spans = {name: set(answer[0]) for name, answer in answers(work).items()}
        assert all(some <= all_spans[name] for name, some in spans.items())
        assert sum(map(len, spans.values())) == rebuilt.spans
        assert rebuilt.spans == SPANS or rebuilt.damaged_file.exists()
        total += rebuilt.spans
    assert total > times(100) * SPANS


def test_a_rebuild_reports_what_it_kept(pristine, copy, changed):
    assert copies.rebuild(copy(pristine[0])) == copies.Rebuilt(SPANS, SPANS, lost=0)
    assert copies.rebuild(changed("embeddings SET seal = 0 WHERE span")).vectors == SPANS - 1
    work = changed("spans SET layer = 1 WHERE id")
    before = (work / files.DATABASE).read_bytes()
    rebuilt = copies.rebuild(work)
    assert rebuilt == copies.Rebuilt(SPANS - 1, SPANS - 1, lost=1, damaged_file=rebuilt.damaged_file)
    assert rebuilt.damaged_file.read_bytes() == before


def test_an_empty_rebuild_does_not_recommend_a_rebuild(tmp_path):
    open_store(data_dir=tmp_path)[0].close()
    with (tmp_path / files.DATABASE).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(StoreDamagedError, match="to start with an empty store") as raised:
        copies.rebuild(tmp_path)
    assert "mlx-tq-rescue rebuild" not in str(raised.value)
    assert not list(tmp_path.glob("*.rebuilding*"))


def test_a_damaged_index_file_is_renamed_and_rebuilt(pristine, copy):
    folder, _, expected = pristine
    index = copy(folder) / "index" / "1.index"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    assert answers(index.parents[1]) == expected
    (aside,) = index.parent.glob("1.index.bad-*")
    assert aside.read_bytes() == content
    assert index.read_bytes() == (folder / "index/1.index").read_bytes()
