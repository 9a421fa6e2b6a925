"""BM25 over a session's words: PostgreSQL's text search finds and counts them, and the formula is computed here.

PostgreSQL has no BM25, and its `ts_rank` ignores how rare a word is. But for one word and equal weights it is
(1 + 1/4 + ... + 1/n^2) / (pi^2 / 6), where n is the number of occurrences. This yields n, because the rest of that
series is nearly 1 / (n + 1/2).
"""

import psycopg

from rescue_svc.store import Session, fts, plain_words

K1, B = 1.2, 0.75  # as in FTS5
POSTINGS_SHARE = 32  # half of SQLite's, because words are counted, and then scored, in the rows of the table

_SEARCH = """
    WITH asked AS MATERIALIZED (
        SELECT lexeme, quote_literal(lexeme)::tsquery AS term
        FROM unnest(tsvector_to_array(to_tsvector('words', %(question)s))) AS lexeme
        WHERE lexeme <> ALL(%(left_out)s) AND lexeme = coalesce(%(only)s, lexeme)
    ), counted AS MATERIALIZED (
        SELECT lexeme, term, found FROM asked, LATERAL (
            SELECT count(*)::float8 AS found FROM (
                SELECT FROM spans_{session:d} WHERE words @@ term LIMIT %(most)s) AS first) AS sums WHERE found > 0
    ), session AS MATERIALIZED (
        SELECT spans::float8 AS spans, spans::float8 / greatest(words, 1) AS spans_a_word FROM sessions
        WHERE id = {session:d}
    ), rarest AS MATERIALIZED (
        SELECT term, greatest(1e-6, ln((greatest(spans - found, 0) + 0.5) / (found + 0.5))) AS idf
        FROM (SELECT term, found, sum(found) OVER (ORDER BY found, lexeme) AS spent FROM counted) AS summed, session
        WHERE spent <= %(most)s OR spent = found
    ), posting AS (
        SELECT id, idf, length * spans_a_word AS length,
            round(1 / (1.644934066848::float8 * (1 - ts_rank('{{1,1,1,1}}', words, term)::float8)) - 0.5::float8)
                AS count
        FROM rarest, session, spans_{session:d} WHERE words @@ term
    ), scored AS (
        SELECT id, sum(idf * count * {k1_1}::float8 / (count + {k1}::float8 * ({not_b}::float8 + {b}::float8 * length)))
            AS score
        FROM posting WHERE NOT (id = ANY(%(excluded)s)) GROUP BY id ORDER BY score DESC, id LIMIT %(limit)s
    )
    SELECT tsvector_to_array(to_tsvector('words', %(question)s)), (SELECT count(*) FROM counted),
        ARRAY(SELECT lexeme FROM counted WHERE found >= %(most)s),
        ARRAY(SELECT id FROM scored ORDER BY score DESC, id), ARRAY(SELECT score FROM scored ORDER BY score DESC, id)"""


def search(
    connection: psycopg.Connection, session: Session, query: str, limit: int, excluded: set[int], common: dict[str, int]
) -> dict[int, float]:
    """Return up to `limit` span ids with their BM25 score (higher is better), best first, without `excluded`.

    `common` caches lower bounds of the postings of frequent stems across calls. A stem that exceeds the limit by itself
    is searched only if there is no other.
    """
    most = fts.max_postings(session.spans, POSTINGS_SHARE)
    values: dict[str, object] = {
        "question": " ".join(list(dict.fromkeys(plain_words(query)))[: fts.MAX_TERMS]),
        "excluded": list(excluded),
        "limit": limit,
        "left_out": [stem for stem, least in common.items() if least >= most],
        "only": None,
        "most": most,
    }

    statement = _SEARCH.format(session=session.id, k1=K1, k1_1=K1 + 1, b=B, not_b=1 - B)
    ((stems, found_count, saturated, ids, scores),) = connection.execute(statement, values).fetchall()
    common.update(dict.fromkeys(saturated, most))
    too_common = [stem for stem in stems if common.get(stem, 0) >= most]
    if too_common and found_count == len(saturated):  # no word is rarer: use the longest, likely the most specific
        values |= {"left_out": [], "only": too_common[-1], "most": None}
        ((*_, ids, scores),) = connection.execute(statement, values).fetchall()
    return dict(zip(ids, scores, strict=True))
