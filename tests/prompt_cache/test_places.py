"""Places in a file never overlap, and what is free is found again, however it was cut up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.prompt_cache.places import Places


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(1, 30), st.integers(-9, -1)), max_size=40))
def test_places_do_not_overlap_and_free_neighbours_are_one(steps):
    """A number above 0 takes so many bytes; one below gives back the place of that index."""
    places, taken = Places(100), []
    for step in steps:
        if step < 0:
            if taken:
                places.give_back(*taken.pop(-step % len(taken)))
            continue
        free = "".join("x" if any(a <= i < a + n for a, n in taken) else "." for i in range(100))
        start = places.take(step)
        assert start == (free.index("." * step) if "." * step in free else None)
        if start is not None:
            taken.append((start, step))
        assert places.used == sum(size for _, size in taken)
    for place in taken:
        places.give_back(*place)
    assert (places.used, places.take(101), places.take(100), places.take(1)) == (0, None, 0, None)
