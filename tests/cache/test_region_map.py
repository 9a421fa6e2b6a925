"""Where tokens are, by plain numbers: every position is in exactly one region, and trims lead back."""

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.cache.region_map import SCALE_READY, RegionMap, RegionSizes
from mlx_tq.config import BLOCK

SIZES = st.builds(
    RegionSizes, sinks=st.sampled_from([0, 1, 4, 32, 70]), window=st.integers(1, 100), normalize=st.booleans()
)


def evicted_map(sizes, length, seed=0):
    """A map of which about half of the packed positions were evicted, and those that are left."""
    packed = sizes.packed_until(length)
    kept = np.flatnonzero(np.random.default_rng(seed).random(packed) < 0.5)
    kept = kept[kept >= sizes.sinks]
    return RegionMap.empty(sizes).grown_to(length).with_packed(kept, packed), kept


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
    if packed > sizes.sinks:
        assert sizes.full_capacity(packed, length) >= sizes.sinks + length - packed + BLOCK
    else:
        assert sizes.full_capacity(packed, length) >= length


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=SIZES, length=st.integers(0, 500), later=st.integers(0, 100), seed=st.integers(0, 9))
def test_positions_rows_and_missing_ones(sizes, length, later, seed):
    regions, kept = evicted_map(sizes, length, seed)
    regions = regions.grown_to(length + later)
    floor = sizes.packed_until(length)
    stored = [*range(min(sizes.sinks, length + later)), *kept.tolist(), *range(floor, length + later)]
    assert regions.positions.tolist() == sorted(dict.fromkeys(stored))
    behind_sinks = [position for position in stored if position >= sizes.sinks]
    for position in {sizes.sinks, floor, max(floor, length + later // 2)}:
        assert regions.stored_before(position) == bisect_left(behind_sinks, position)
    missing = set(range(sizes.sinks, floor)) - set(kept.tolist())
    assert regions.evicted == len(missing)
    assert regions.missing(sizes.sinks, length + later).tolist() == sorted(missing)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=SIZES, length=st.integers(0, 500), trimmed=st.integers(0, 500), seed=st.integers(0, 9))
def test_a_trimmed_map_has_the_positions_before_its_end(sizes, length, trimmed, seed):
    regions, _ = evicted_map(sizes, length, seed)
    end = max(0, length - trimmed)
    shorter = regions.trimmed_to(end)
    assert shorter.positions.tolist() == [position for position in regions.positions.tolist() if position < end]
    assert sizes.sinks <= shorter.originals <= max(sizes.sinks, end)


def test_after_a_trim_no_position_of_the_window_may_be_missing():
    sizes = RegionSizes(sinks=4, window=24)
    assert [sizes.needed_from(length) for length in (0, 28, 59, 60, 124)] == [4, 4, 4, 36, 100]


@pytest.mark.parametrize("window_start", [4, 36])
def test_sinks_and_window_share_a_buffer(window_start):
    regions = RegionMap.empty(RegionSizes(sinks=4, window=24))
    assert [regions.full_index(position, window_start) for position in (0, 3)] == [0, 3]
    assert [regions.full_index(window_start + n, window_start) for n in range(3)] == [4, 5, 6]


def test_the_block_that_is_being_packed_keeps_its_mean():
    """Although all of its tokens were evicted: the next ones are packed less the same mean."""
    regions = RegionMap(RegionSizes(sinks=0, window=1), 300, 0, evicted=140, floor=160, kept=np.arange(20))
    assert regions.mean_blocks(160).tolist() == [0, 1]
    assert regions.mean_blocks(300).tolist() == [0, 1, 2]
