"""The kernels at both ends of each threshold: other cuts of the same work, and no other answer."""

import pytest
from cache.tunables import EXTREMES, FORMATS, check
from simulated import simulated


@pytest.mark.parametrize("context", [150, 700])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("name", "value"), EXTREMES)
def test_no_threshold_changes_an_answer(name, value, formats, context):
    with simulated():
        check(name, value, formats, context)
