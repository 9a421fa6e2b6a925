"""Mistakes put into the kernels' text on purpose: each is caught, by a report or by a difference."""

import tomllib
from functools import partial
from pathlib import Path

import pytest
from cases import make_problem, random, random_mask
from checks import attends, compacts, dequantizes, encodes, flags, recalls, rotates, scores, some_rows
from simulated import ORDERS
from test_attend_batch import check as check_rows
from test_attend_batch import problems, together

from metal_sim.run import SimulationError


def cache(body: int, **changed):
    """Keys of 80 dims, values of 128: one is rotated in blocks, and codes of three bits span words."""
    case = {"dims": (80, 128), "key": "tq3", "rule": "matched", "body": body, "batch": 1, "length": 1, "sink_tokens": 2}
    return make_problem(**case | changed)


def attention(key: str, value_dim: int, mask="causal", body=100, **changed):
    """3 query heads of 2 queries, the first of which does not see the last token."""
    sizes = {
        "dims": (80, value_dim),
        "key": key,
        "value": "tq3",
        "body": body,
        "groups": 3,
        "length": 2,
        "sink_tokens": 34,
    }
    return make_problem(**sizes | changed, recent=3, dtype="float32", mask=mask, sinks=True).asked(scale=0.2)


def asking_much(dim: int, length=14, **changed):
    return make_problem((dim, 64), 50, 1, 3, length, key="tq3", rule="matched", **changed)


def attends_together(rows, **how):
    check_rows(rows, together(rows, **how))


UNEVEN = {"lengths": ((97, 6), (0, 3), (161, 30)), "key": "tq4", "value": "tq4", "dtype": "float32"}
BLOCKS = (5, 38)
NORMALIZED = {"normalized": "gaps", "batch": 2}
# Each check, and on what.
CHECKS = {
    "encoded": partial(encodes, cache(5)),
    "encoded_wide": partial(encodes, cache(25, wide=True)),
    "encoded_q8": partial(encodes, cache(25, key="q8", value="q8", wide=True)),
    # Two lanes find the best predecessor of a group of 4 bits, and each lane those of two groups of 2.
    "searched": partial(encodes, cache(3, key="tcq4", value="tcq2", rule="unbiased")),
    "searched_3": partial(encodes, cache(3, key="tcq3", value="tcq3")),
    "decoded": partial(dequantizes, cache(5)),
    "decoded_rings": partial(dequantizes, cache(5, key="tcq3", value="tcq2")),
    "rotated": partial(rotates, random((5, 80), "float32"), inverse=True),
    # Two tiles of queries; blocks of 64 tokens, the last one of 36, and one of 39.
    "attended": partial(attends, attention("tq3", 112)),
    # Beside a mask for each query of each head and batch row.
    "masked": partial(attends, attention("tq3", 112, random_mask("additive", (2, 6, 2, 139), "float32"))),
    # The same in one kernel: of eight simdgroups, four attend to packed tokens, two to others, and two to none.
    "attended_at_once": partial(attends, attention("tq4", 192), short=1000),
    "attended_rings": partial(attends, attention("tcq3", 112, value="tcq2")),
    "batched": partial(attends_together, problems(**UNEVEN)),
    "batched_mixed": partial(attends_together, problems(**UNEVEN, normalized="mixed")),
    "scored": partial(scores, cache(7, batch=2), turned=2),
    # 42 queries are six tiles, of which four are asked at once; blocks are shorter and longer than what a lane takes.
    "recalled": partial(recalls, asking_much(80), BLOCKS),
    # Two tiles at once, of three, over 16 keys.
    "recalled_wide": partial(recalls, asking_much(192, length=7), BLOCKS),
    "compacted": partial(compacts, some_rows(20), [0, 3, *range(6, 19)]),
    # The same of normalized keys.
    "encoded_normalized": partial(encodes, cache(25, **NORMALIZED)),
    "flagged": partial(flags, "q8", "bfloat16", True),
    "flagged_fp16": partial(flags, "fp16", "float16", True),
    "decoded_normalized": partial(dequantizes, cache(25, **NORMALIZED)),
    # Of 100 tokens a few share a mean: several in each 32, and of two blocks.
    "attended_gaps": partial(attends, attention("tq3", 112, normalized="gaps")),
    "attended_blocks": partial(attends, attention("tq4", 64, body=300, normalized="blocks"), short=1000),
    "scored_normalized": partial(scores, cache(7, **NORMALIZED), turned=2),
    "recalled_normalized": partial(recalls, asking_much(80, normalized="gaps"), BLOCKS),
    "queries_divided": partial(
        rotates, random((2, 4, 3, 80), "float32"), normalization=cache(9, **NORMALIZED).normalization
    ),
}
MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
CASES = [(check, wrong) for check, mutants in MUTANTS.items() for wrong in mutants]


@pytest.mark.parametrize(("check", "wrong"), CASES, ids=[wrong for _, wrong in CASES])
def test_mutant_is_caught(check, wrong):
    (old, new), texts = MUTANTS[check][wrong], []

    def edit(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    with pytest.raises((AssertionError, SimulationError)):  # noqa: PT012  whichever order it is
        for order in ORDERS:
            CHECKS[check](order=order, edit=edit)
    assert any(old in text for text in texts), "the text has changed; so must the mutant"


@pytest.mark.parametrize("check", CHECKS)
def test_unchanged_kernel_passes(check):
    assert check in MUTANTS
    for order in ORDERS:
        CHECKS[check](order=order)
