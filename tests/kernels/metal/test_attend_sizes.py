"""Every combination of tokens, batch, query heads and new tokens, which are data to a few texts: in the full run."""

from itertools import product

import pytest
from attention_cases import LONG_RUN_PEAK, PARAMETERS, run_case
from covering import covering
from simulated import attend_in_all_orders

BODIES = (*PARAMETERS["body"], 4096)
TEXTS = (
    {"dims": (48, 64), "key": "tq3", "value": "tq4", "dtype": "float32"},
    {"dims": (64, 48), "key": "q8", "value": "tq2", "dtype": "bfloat16"},
    {"dims": (80, 48), "key": "fp16", "value": "q8", "dtype": "float16"},
)
REST = covering({name: PARAMETERS[name] for name in ("prefix", "recent", "mask", "sinks")})


@pytest.mark.full
@pytest.mark.parametrize("groups", PARAMETERS["groups"])
@pytest.mark.parametrize("body", BODIES)
def test_error_is_at_most_twice_the_reference(body, groups):
    for number, (batch, length) in enumerate(product(PARAMETERS["batch"], PARAMETERS["length"])):
        case = {**TEXTS[number % len(TEXTS)], **REST[number % len(REST)]}
        case |= {"body": body, "groups": groups, "batch": batch, "length": length}
        run_case(attend_in_all_orders(short=4096 * (number % 2)), case, seed=number, peak=LONG_RUN_PEAK)
