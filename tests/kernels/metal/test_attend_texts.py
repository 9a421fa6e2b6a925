"""Every text of attend.metal and merge.metal that two formats, a size of heads and a type need: in the full run.

The product of all parameters would have millions of cases. These are a covering array instead: every four of dims, key,
value and dtype occur, and every three values of any parameters. test_attend_sizes.py has the product of the sizes.
"""

import pytest
from attention_cases import PARAMETERS, run_case
from covering import covering
from simulated import in_all_orders

from mlx_tq.kernels.attend import _attend_gpu

MASKS = {"mask": (None, "causal", "bool", "additive")}
TEXT = ("dims", "key", "value", "dtype")
PARTS = 50


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_error_is_at_most_twice_the_reference(part):
    cases = covering(PARAMETERS | MASKS, ways=3, whole=TEXT)
    for number in range(part, len(cases), PARTS):
        run_case(in_all_orders(_attend_gpu), cases[number], seed=number, peak=3.0)
