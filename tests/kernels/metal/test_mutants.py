"""Mutants of the kernels' text: each must fail its check, by a report of the simulator or by a wrong result."""

import tomllib
from functools import partial
from pathlib import Path

import pytest

from kernels.cases import make_problem, random, random_mask, read_as_latents
from kernels.metal import checks
from kernels.metal import test_attend_batch as batches
from kernels.metal import test_by_head as by_head
from kernels.metal.simulated import ORDERS
from metal_sim.run import SimulationError


def cache(packed: int, **changes):
    """Keys of 80 dims, values of 128: one is rotated in blocks, and codes of three bits span words."""
    case = {"dims": (80, 128), "key": "tq3", "rule": "matched", "batch": 1, "length": 1, "sink_tokens": 2}
    return make_problem(**case | changes, packed=packed)


def attention(key: str, value_dim: int, mask="causal", packed=100, **changes):
    """3 query heads of 2 queries, the first of which does not see the last token."""
    case = {"dims": (80, value_dim), "key": key, "value": "tq3", "groups": 3, "length": 2, "sink_tokens": 34}
    problem = make_problem(**case | changes, packed=packed, recent=3, dtype="float32", mask=mask, sinks=True)
    return problem.replace(scale=0.2)


def many_queries(dim: int, length=14, **changes):
    return make_problem((dim, 64), 50, 1, 3, length, **{"key": "tq3", "rule": "matched", **changes})


def many_rows(**changes):
    case = {"dims": (64, 96), "key": "tq4", "value": "tq3", "groups": 6, "length": 3, "sink_tokens": 34, "batch": 1}
    return make_problem(**case | changes, packed=100, recent=5, dtype="float16", mask="causal", sinks=True)


def check_attend_batch(rows, **simulation):
    batches.check(rows, batches.attend_together(rows, **simulation))


UNEVEN = {"lengths": ((97, 6), (0, 3), (161, 30)), "key": "tq4", "value": "tq4", "dtype": "float32"}
BLOCKS = (5, 38)
SORTED = {"dims": (256, 64), "key": "stcq3", "seed": 3}
NORMALIZED = {"normalized": "gaps", "batch": 2}
CHECKS = {
    "encode": partial(checks.check_encode, cache(5)),
    "encode_wide_scales": partial(checks.check_encode, cache(25, wide=True)),
    "encode_q8": partial(checks.check_encode, cache(25, key="q8", value="q8", wide=True)),
    # Two lanes find the best predecessor of a group of 4 bits, and each lane those of two groups of 2.
    "encode_trellis": partial(checks.check_encode, cache(3, key="tcq4", value="tcq2", rule="unbiased")),
    "encode_trellis_3_bits": partial(checks.check_encode, cache(3, key="tcq3", value="tcq3")),
    # Each head has groups of 0 to 7 bits.
    "encode_sorted": partial(checks.check_encode, cache(16, **SORTED, rule="unbiased")),
    "encode_sorted_norms": partial(checks.check_encode, cache(25, **SORTED, rule="raw", wide=True)),
    "encode_normalized": partial(checks.check_encode, cache(25, **NORMALIZED)),
    "health": partial(checks.check_health, "q8", "bfloat16", True),
    "health_fp16": partial(checks.check_health, "fp16", "float16", True),
    "dequantize": partial(checks.check_dequantize, cache(5)),
    "dequantize_trellis": partial(checks.check_dequantize, cache(5, key="tcq3", value="tcq2")),
    "dequantize_sorted": partial(checks.check_dequantize, cache(16, **SORTED, normalized="gaps")),
    "dequantize_normalized": partial(checks.check_dequantize, cache(25, **NORMALIZED)),
    "wht": partial(checks.check_wht, random((5, 80), "float32"), inverse=True),
    "wht_normalized": partial(
        checks.check_wht, random((2, 4, 3, 80), "float32"), normalization=cache(9, **NORMALIZED).normalization
    ),
    # Two tiles of queries; blocks of 64 tokens, the last one of 36, and one of 39.
    "attend": partial(checks.check_attend, attention("tq3", 112)),
    # The mask differs between queries, heads and rows of the batch.
    "attend_masked": partial(
        checks.check_attend, attention("tq3", 112, random_mask("additive", (2, 6, 2, 139), "float32"))
    ),
    # One kernel: of eight simdgroups, four attend to packed tokens, two to full-precision tokens, and two to none.
    "attend_short": partial(checks.check_attend, attention("tq4", 192), short_tokens=1000),
    # A tile of eight query rows, for which two simdgroups share the work.
    "attend_team": partial(checks.check_attend, attention("tq4", 256, value="tq4", groups=4, normalized="gaps")),
    # 18 query rows of two heads, of three simdgroups; blocks of 64 and 36 packed tokens, and one of 39.
    "attend_matrix": partial(checks.check_attend, many_rows()),
    "attend_matrix_normalized": partial(checks.check_attend, many_rows(normalized="gaps", batch=2)),
    "attend_trellis": partial(checks.check_attend, attention("tcq3", 112, value="tcq2")),
    "attend_sorted": partial(
        checks.check_attend, attention("stcq3", 64, dims=(256, 64), value="tcq2", normalized="gaps")
    ),
    # Of 100 tokens a few share a mean: several in each 32, and of two blocks.
    "attend_gaps": partial(checks.check_attend, attention("tq3", 112, normalized="gaps")),
    "attend_blocks": partial(
        checks.check_attend, attention("tq4", 64, packed=300, normalized="blocks"), short_tokens=1000
    ),
    # Six query heads, one query; the parts that RoPE rotates lie between codes and scales of latents.
    "attend_latent": partial(
        checks.check_attend,
        read_as_latents(attention("tq4", 64, random_mask("additive", (2, 6, 1, 138), "float32"), value="q8", length=1)),
    ),
    "attend_batch": partial(check_attend_batch, batches.problems(**UNEVEN)),
    "attend_batch_mixed": partial(check_attend_batch, batches.problems(**UNEVEN, normalized="mixed")),
    # One head has 80 packed tokens, the other 33; no two neighbors share a mean.
    "attend_by_head": partial(by_head.check_counts, (80, 33), key="tq4", value="tq4", normalized="gaps"),
    "score": partial(checks.check_score, cache(7, batch=2), rotated=2),
    "score_normalized": partial(checks.check_score, cache(7, **NORMALIZED), rotated=2),
    "score_sorted": partial(checks.check_score, cache(16, **SORTED, normalized="gaps"), rotated=2),
    "recall_score_sorted": partial(checks.check_recall_score, many_queries(128, key="stcq3"), BLOCKS),
    # 42 queries are six tiles, of which four are scored at once; blocks are shorter and longer than 32 tokens.
    "recall_score": partial(checks.check_recall_score, many_queries(80), BLOCKS),
    # Two of three tiles at once, over 16 keys.
    "recall_score_wide": partial(checks.check_recall_score, many_queries(192, length=7), BLOCKS),
    "recall_score_normalized": partial(checks.check_recall_score, many_queries(80, normalized="gaps"), BLOCKS),
    "compact": partial(checks.check_compact, checks.random_rows(20), [0, 3, *range(6, 19)]),
}
MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
CASES = [(check, mutant) for check, mutants in MUTANTS.items() for mutant in mutants]


@pytest.mark.parametrize(("check", "mutant"), CASES, ids=[f"{check}: {mutant}" for check, mutant in CASES])
def test_mutant_is_caught(check, mutant):
    (old, new), texts = MUTANTS[check][mutant], []

    def edit(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    with pytest.raises((AssertionError, SimulationError)):  # noqa: PT012 - any order may catch it
        for order in ORDERS:
            CHECKS[check](order=order, edit=edit)
    assert any(old in text for text in texts), "the text has changed; so must the mutant"


@pytest.mark.parametrize("check", CHECKS)
def test_unchanged_kernel_passes(check):
    assert check in MUTANTS
    for order in ORDERS:
        CHECKS[check](order=order)
