"""Every text of attend.metal, merge.metal and attend_short.metal that a pair of formats needs: in the full run.

The product of all parameters would have millions of cases. These are a covering array instead: every four of dims, key,
value and dtype occur, and every three values of any parameters. test_attend_sizes.py has the product of the sizes.
"""

import pytest
from attention_cases import LONG_RUN_PEAK, PARAMETERS, run_case
from covering import covering
from simulated import attend_in_all_orders

# Beside all sizes, those that hold one or two query rows in a lane: other texts, which few of all sizes need.
FEW = {"groups": (1, 2), "length": (1, 2), "body": (33, 97)}
ALL = PARAMETERS | {"mask": (None, "causal", "bool", "additive"), "short": (0, 4096)}
TEXT = ("dims", "key", "value", "dtype")
PARTS = 40


def run(cases, part):
    for number in range(part, len(cases), PARTS):
        case = dict(cases[number])
        run_case(attend_in_all_orders(case.pop("short")), case, seed=number, peak=LONG_RUN_PEAK)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_error_is_at_most_twice_the_reference(part):
    run(covering(ALL, ways=3, whole=TEXT), part)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_few_query_rows(part):
    run(covering(ALL | FEW, ways=3), part)
