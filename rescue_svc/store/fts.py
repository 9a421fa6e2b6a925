"""BM25 over the words of a session, in one contentless FTS5 table per session.

So sessions share no word statistics, and deleting a session is one DROP TABLE. `secure_delete` turns that into zeroed
pages on every SQLite, including those before FTS5's own secure-delete option (3.42).
"""

import sqlite3

from rescue_svc.store.plain_words import plain_words
from rescue_svc.store.records import Session

MAX_TERMS = 64
# FTS5 scores about a million postings per second. A query may score this many, or a sixteenth of the session if that is
# more; beyond that its most frequent words, which say least, are left out.
MIN_POSTINGS = 2048
POSTINGS_SHARE = 16

# Text arrives as plain words, in which ascii splits only at spaces; porter lets "evicted" find "evicts".
TOKENIZER = "porter ascii"


def max_postings(spans: int, share: int = POSTINGS_SHARE) -> int:
    """Return how many postings a query may score in a session of this size."""
    return max(MIN_POSTINGS, spans // share)


def table_name(session: int) -> str:
    return f"words_{session:d}"


def create(connection: sqlite3.Connection, session: int) -> None:
    connection.execute(
        f"CREATE VIRTUAL TABLE {table_name(session)} USING fts5(text, content='', tokenize='{TOKENIZER}')"
    )


def add(connection: sqlite3.Connection, session: int, span: int, text: str) -> None:
    words = " ".join(plain_words(text))
    connection.execute(f"INSERT INTO {table_name(session)} (rowid, text) VALUES (?, ?)", (span, words))  # noqa: S608


def drop(connection: sqlite3.Connection, session: int) -> None:
    connection.execute(f"DROP TABLE IF EXISTS {table_name(session)}")


def is_whole(connection: sqlite3.Connection, session: int) -> bool:
    name = table_name(session)
    try:
        connection.execute(f"INSERT INTO {name} ({name}) VALUES ('integrity-check')")  # noqa: S608
    except sqlite3.DatabaseError:
        return False
    return True


def search(
    connection: sqlite3.Connection, session: Session, query: str, limit: int, excluded: set[int], common: dict[str, int]
) -> dict[int, float]:
    """Return up to `limit` span ids with their BM25 score (higher is better), best first, without `excluded`.

    `common` caches lower bounds of the postings of frequent words across calls. FTS5 fixes k1 = 1.2 and b = 0.75.
    """
    terms = _rarest_terms(connection, session.id, query, max_postings(session.spans), common)
    if not terms:
        return {}
    name = table_name(session.id)
    # With a LIMIT SQLite keeps the best in a heap; FTS5's ORDER BY rank sorts every hit.
    rows = connection.execute(
        f"SELECT rowid, bm25({name}) AS score FROM {name} WHERE {name} MATCH ? ORDER BY score, rowid LIMIT ?",  # noqa: S608
        (" OR ".join(terms), limit + len(excluded)),
    ).fetchall()
    return dict([(span, -score) for span, score in rows if span not in excluded][:limit])


def _rarest_terms(
    connection: sqlite3.Connection, session: int, query: str, most: int, common: dict[str, int]
) -> list[str]:
    """Return the words of a query as quoted FTS5 strings, the rarest first, until `most` postings are spent."""
    name = table_name(session)
    words = list(dict.fromkeys(plain_words(query)))[:MAX_TERMS]
    # The count stops at the limit, so that a word in every span costs no more than one that just fits.
    count = f"SELECT count(*) FROM (SELECT 1 FROM {name} WHERE {name} MATCH ? LIMIT {most:d})"  # noqa: S608
    counted = []
    for word in words:
        postings = min(common.get(word, 0), most)
        if postings < most:
            postings = connection.execute(count, (f'"{word}"',)).fetchone()[0]
            if postings == most:
                common[word] = most
        counted.append((postings, f'"{word}"'))
    terms: list[str] = []
    spent = 0
    for postings, term in sorted(counted):
        if not postings:
            continue
        spent += postings
        if terms and spent > most:
            break
        terms.append(term)
    return terms
