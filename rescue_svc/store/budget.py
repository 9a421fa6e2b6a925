"""How much of a question the search by words looks at: its words, rarest first, until they cost too much."""

MAX_TERMS = 64
# FTS5 scores about a million postings a second. A query may touch this many, or a sixteenth of the session if that is
# more; its commonest words, which say least, are left out beyond that.
MIN_POSTINGS = 2048
POSTINGS_SHARE = 16


def postings(spans: int, share: int = POSTINGS_SHARE) -> int:
    """Return how many postings a query of a session of this size may touch: one for so many spans, or the least."""
    return max(MIN_POSTINGS, spans // share)
