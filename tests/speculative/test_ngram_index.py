"""The index finds what a search of the whole text finds."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_tq.speculative.ngram_index import Match, NgramIndex

SMALL_TEXTS = st.lists(st.integers(0, 2), max_size=60)  # few different tokens, so that much repeats


def search(ids):
    """Return the longest of the latest 16 places that follow the last 3 tokens; of equal ones the latest."""
    best = None
    places = [place for place in range(3, len(ids)) if ids[place - 3 : place] == ids[-3:]]
    for place in places[::-1][:16]:
        agreement = next((n for n in range(3, 32) if n == place or ids[place - 1 - n] != ids[-1 - n]), 32)
        if best is None or agreement > best.agreement:
            best = Match(place, agreement)
    return best


@given(SMALL_TEXTS)
def test_the_longest_agreement_is_found(ids):
    index = NgramIndex(ids[: len(ids) // 2])
    for token in ids[len(ids) // 2 :]:
        index.append(token)
    assert index.longest_match() == search(ids)


def test_what_follows_repeats_behind_the_end():
    index = NgramIndex([7, 1, 2, 3, 4, 1, 2, 3])
    match = index.longest_match()
    assert match == Match(4, 3)
    assert index.following(match.position, 6) == [4, 1, 2, 3, 4, 1]
