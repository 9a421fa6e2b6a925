"""BM25 over a session's words: PostgreSQL's text search finds and counts them, the formula is ours.

PostgreSQL has no BM25, and its own `ts_rank` knows nothing of how rare a word is. But of one word and equal weights it
is (1 + 1/4 + ... + 1/n^2) / (pi^2 / 6) where the word stands n times, which tells n: the rest of that series is nearly
1 / (n + 1/2).
"""

import re
import unicodedata

import psycopg

from rescue_svc.store import budget

K1, B = 1.2, 0.75  # as FTS5 has them
_WORD = re.compile(r"[^\W_]+")

_SEARCH = """
    WITH asked AS (
        SELECT lexeme, quote_literal(lexeme)::tsquery AS term
        FROM unnest(tsvector_to_array(to_tsvector('words', %(question)s))) AS lexeme
        WHERE lexeme <> ALL(%(left_out)s) AND lexeme = coalesce(%(only)s, lexeme)
    ), posting AS MATERIALIZED (
        SELECT lexeme, id, length, round(1 / (1.644934066848 * (1 - rank)) - 0.5) AS count
        FROM asked, LATERAL (
            SELECT id, length, ts_rank('{{1,1,1,1}}', words, term)::float8 AS rank
            FROM spans_{session:d} WHERE words @@ term LIMIT %(most)s) AS found
    ), counted AS (
        SELECT lexeme, count(*) AS spans FROM posting GROUP BY lexeme
    ), rarest AS (
        SELECT lexeme, spans FROM (
            SELECT lexeme, spans, sum(spans) OVER (ORDER BY spans, lexeme) AS spent FROM counted) AS summed
        WHERE spent <= %(most)s OR spent = spans
    ), scored AS (
        SELECT posting.id, sum(
            greatest(1e-6, ln((greatest(s.spans - rarest.spans, 0) + 0.5) / (rarest.spans + 0.5)))
            * count * {k1_1} / (count + {k1} * ({not_b} + {b} * length * s.spans / greatest(s.words, 1)))) AS score
        FROM posting JOIN rarest USING (lexeme), sessions AS s
        WHERE s.id = {session:d} AND NOT (posting.id = ANY(%(excluded)s))
        GROUP BY posting.id ORDER BY score DESC, posting.id LIMIT %(limit)s
    )
    SELECT tsvector_to_array(to_tsvector('words', %(question)s)), (SELECT count(*) FROM counted),
        ARRAY(SELECT lexeme FROM counted WHERE spans >= %(most)s),
        ARRAY(SELECT id FROM scored ORDER BY score DESC, id), ARRAY(SELECT score FROM scored ORDER BY score DESC, id)"""


def plain(text: str) -> list[str]:
    """Return the words of a text in lower case and without diacritics."""
    lower = text.lower()
    if not lower.isascii():
        lower = "".join(c for c in unicodedata.normalize("NFD", lower) if not unicodedata.combining(c))
    return _WORD.findall(lower)


def search(
    connection: psycopg.Connection,
    session: int,
    spans: int,
    query: str,
    limit: int,
    excluded: set[int],
    common: dict[str, int],
) -> dict[int, float]:
    """Return up to `limit` span ids with their BM25 score (higher is better), best first.

    `spans` is the size of the session; `excluded` ids are passed over. `common` remembers, from call to call, stems
    that stand in at least so many spans: a session only grows. Those that cost the whole budget are looked at only
    where there is nothing else.
    """
    most = budget.postings(spans)
    values: dict[str, object] = {
        "question": " ".join(list(dict.fromkeys(plain(query)))[: budget.MAX_TERMS]),
        "excluded": list(excluded),
        "limit": limit,
        "left_out": [stem for stem, least in common.items() if least >= most],
        "only": None,
        "most": most,
    }

    def run() -> tuple[list[str], int, list[str], list[int], list[float]]:
        row = connection.execute(
            _SEARCH.format(session=session, k1=K1, k1_1=K1 + 1, b=B, not_b=1 - B), values
        ).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM has one; this tells the type checker
        return row

    asked, found, saturated, ids, scores = run()
    common.update(dict.fromkeys(saturated, most))
    too_common = [stem for stem in asked if common.get(stem, 0) >= most]
    if too_common and found == len(saturated):  # no word is rarer: one of them, wherever it stands
        values |= {"left_out": [], "only": too_common[0], "most": None}
        *_, ids, scores = run()
    return dict(zip(ids, scores, strict=True))
