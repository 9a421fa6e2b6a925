"""Kernels at both ends of each threshold: the work is divided differently, the result is the same."""

import pytest
from cache.tunables import EXTREMES, FORMATS, check

from kernels.metal.simulated import simulated


@pytest.mark.parametrize("context", [150, 700])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("name", "value"), EXTREMES)
def test_thresholds_do_not_change_results(name, value, formats, context):
    with simulated():
        check(name, value, formats, context)
