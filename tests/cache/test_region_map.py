"""Where tokens are, in plain numbers: the arithmetic of regions against a set of positions, through any history."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.cache.region_map import SCALE_READY, RegionMap, RegionSizes
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import BLOCK

SIZES = st.builds(
    RegionSizes, sinks=st.sampled_from([0, 1, 4, 32, 70]), window=st.integers(1, 100), normalize=st.booleans()
)
STEPS = st.lists(
    st.tuples(st.just("grow"), st.integers(1, 150))
    | st.tuples(st.just("evict"), st.integers(0, 9))
    | st.tuples(st.just("trim"), st.one_of(st.integers(1, 40), st.integers(1, 400))),
    max_size=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=SIZES, length=st.integers(0, 500))
def test_tokens_older_than_the_window_are_packed_in_blocks(sizes, length):
    packed = sizes.packed_until(length)
    assert packed == sizes.sinks or (packed % BLOCK == 0 and packed > sizes.sinks)
    assert length - packed >= sizes.window or packed == sizes.sinks
    is_ready = not sizes.normalize or length >= SCALE_READY + BLOCK
    assert not is_ready or length - packed < sizes.window + BLOCK or packed == sizes.sinks
    assert sizes.packed_until(length + 1) >= packed
    # A trim of up to a block finds the originals of whatever is then unpacked.
    assert all(sizes.packed_until(length - n) >= sizes.originals_from(packed) for n in range(min(length, BLOCK) + 1))
    room = sizes.full_capacity(packed, length)
    assert room >= (sizes.sinks + length - packed + BLOCK if packed > sizes.sinks else length)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes=SIZES, steps=STEPS)
def test_a_map_is_a_set_of_positions(sizes, steps):
    sinks, regions, live, floor = sizes.sinks, RegionMap.empty(sizes), set(), 0
    for step, number in steps:
        length = regions.length
        packed = regions.packed_until(length)
        if step == "grow":
            regions = regions.grown_to(length + number)
            live |= set(range(length, length + number))
        elif step == "trim":
            regions = regions.trimmed_to(max(0, length - number))
            live = {position for position in live if position < regions.length}
            floor = min(floor, regions.length)
        else:
            evicted = set(np.flatnonzero(np.random.default_rng(number).random(packed) < number / 9).tolist())
            live -= {position for position in evicted if position >= sinks}
            kept = [position for position in range(sinks, packed) if position in live]
            regions, floor = regions.with_packed(np.array(kept, np.int64), packed), packed
        check(regions, live, floor)


def check(regions, live, floor):
    """Compare a map with the positions that are stored and the end of the packed region at the last round."""
    sinks, length = regions.sizes.sinks, regions.length
    packed, last = regions.packed_until(length), max(sinks, length)
    missing = sorted(set(range(sinks, length)) - live)
    assert regions.positions.tolist() == sorted(live)
    assert regions.evicted == len(missing)
    assert regions.missing(sinks, length).tolist() == missing
    middle = (sinks + last) // 2
    assert regions.missing(middle, length).tolist() == [position for position in missing if position >= middle]
    counts = [regions.stored_before(position) for position in range(sinks, last + 1)]
    assert counts == np.cumsum([0, *(position in live for position in range(sinks, last))]).tolist()
    assert sinks <= regions.originals <= max(sinks, packed)
    assert regions.full_index(sinks - 1, packed) == sinks - 1
    assert [regions.full_index(packed + n, packed) for n in range(3)] == [sinks, sinks + 1, sinks + 2]
    # A block of keys has a mean for as long as a token of it is packed; also, if all were evicted, while it is packed.
    blocks = {number: range(sinks + number * MEAN_TOKENS, sinks + (number + 1) * MEAN_TOKENS) for number in range(15)}
    is_known = {n: any(p in live for p in block if p < packed) for n, block in blocks.items()}
    is_open = {n: block.stop > max(floor if missing else 0, sinks) for n, block in blocks.items()}
    wanted = [n for n, block in blocks.items() if block.start < packed and (is_known[n] or is_open[n])]
    assert regions.mean_blocks(packed).tolist() == wanted


def test_after_a_trim_no_position_of_the_window_may_be_missing():
    sizes = RegionSizes(sinks=4, window=24)
    assert [sizes.needed_from(length) for length in (0, 28, 59, 60, 124)] == [4, 4, 4, 36, 100]
