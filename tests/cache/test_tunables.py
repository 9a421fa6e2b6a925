"""What may be tuned is speed alone: at both ends of its range, no threshold changes what a token sees."""

import pytest

from cache.tunables import EXTREMES, FORMATS, check


@pytest.mark.parametrize("context", [150, pytest.param(1100, marks=pytest.mark.full)])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("name", "value"), EXTREMES)
def test_no_threshold_changes_an_answer(name, value, formats, context):
    check(name, value, formats, context)
