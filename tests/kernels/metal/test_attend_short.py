"""attend_short.metal on the simulator: one kernel, as accurate as mx.fast attention over the decoded cache."""

from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    DIMS,
    DTYPES,
    PARAMETERS,
    assert_as_good_as_reference,
    expected,
    make_problem,
    random_sinks,
)
from covering import case_id, covering
from simulated import ORDERS, simulated

from mlx_tq.kernels import build, phases
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.phases import Phases

MASKS = (None, "causal", "array")
# What makes another text. Those of the normal run hold every value, and stand for every head size once.
TEXTS = {
    "dims": DIMS,
    "key": PARAMETERS["key"],
    "value": PARAMETERS["value"],
    "dtype": tuple(DTYPES),
    "sinks": (False, True),
    "mask": MASKS,
    "groups": (1, 2, 4, 7, 8, 16),
}
FEW_TEXTS = [
    {name: values[(i * (3 if name == "value" else 1)) % len(values)] for name, values in TEXTS.items()}
    for i in range(len(DIMS))
]
# What is data to a text.
SIZES = covering(
    {
        "body": (0, 1, 31, 32, 33, 97, 256, 257),
        "prefix": (0, 5, 128),
        "recent": (0, 6, 70),
        "batch": (1, 3),
        "length": PARAMETERS["length"],
    }
)
PEAK = 3.0  # of the largest error: see test_attend_gpu.py


def at_once(**how):
    """`_attend_gpu`, run on the simulator in one kernel."""

    def solve(*arguments, **options) -> mx.array:
        with simulated(**how) as counters, phases.using(replace(phases.current(), short=65536)):
            out = _attend_gpu(*arguments, **options)
        assert len(counters) == 1
        return out

    return solve


def check(text: dict, sizes: dict, seed: int, **how) -> None:
    case = {**text, **sizes}
    kind, with_sinks = case.pop("mask"), case.pop("sinks")
    problem = make_problem(**case, seed=seed)
    mask, sinks = kind, random_sinks(problem) if with_sinks else None
    if kind == "array":
        seen = np.random.default_rng(seed).random((case["length"], problem.tokens)) < 0.5
        seen[:, -1] = True
        mask = mx.array(seen)
    out = problem.solve(at_once(**how), mask, sinks)
    assert_as_good_as_reference(problem, out, mask, sinks, peak=PEAK)


@pytest.mark.parametrize("number", range(len(FEW_TEXTS)), ids=[case_id(text) for text in FEW_TEXTS])
def test_error_is_at_most_twice_the_reference(number):
    for i, sizes in enumerate(SIZES[number :: len(FEW_TEXTS)]):
        check(FEW_TEXTS[number], sizes, seed=number, order=ORDERS[i % len(ORDERS)])


def test_the_normal_run_holds_every_value():
    for name, values in TEXTS.items():
        assert {text[name] for text in FEW_TEXTS} == set(values)


def test_under_sanitizers():
    text = {
        "dims": (80, 192),
        "key": "tq3",
        "value": "tq4",
        "dtype": "bfloat16",
        "sinks": True,
        "mask": None,
        "groups": 7,
    }
    check(text, {"body": 97, "prefix": 5, "recent": 6, "batch": 1, "length": 1}, seed=1, sanitize=True)


@pytest.mark.parametrize("window", [2, 40, 1000])
def test_windows_and_padding(window):
    """Ranges of each query as data; in the second batch row the last query sees nothing."""
    problem = make_problem(body=161, prefix=5, recent=20)
    places = np.arange(problem.tokens - 3, problem.tokens)
    first = np.maximum(places - window + 1, np.array((7, 60))[:, None])
    ranges = np.stack([first, np.broadcast_to(places + 1, first.shape)], axis=-1).astype(np.int32)
    ranges[1, 2] = 50
    token = np.arange(problem.tokens)
    seen = (token >= ranges[..., :1]) & (token < ranges[..., 1:])
    found = np.array(at_once()(**problem.arguments, visible=mx.array(ranges)))
    seen[1, 2, 0] = True  # that the reference sees something
    truth = expected(problem, mx.array(seen[:, None]))
    assert np.array_equal(found[1, :, 2], np.zeros_like(found[1, :, 2]))
    truth[1, :, 2] = 0
    assert np.allclose(found, truth, atol=2e-3)


@pytest.mark.parametrize(("short", "names"), [(111, ["attend_short"]), (110, ["attend", "merge"])])
def test_the_threshold_counts_all_tokens(short, names):
    problem = make_problem()
    assert problem.tokens == 111
    called = []

    def run(kernel, *, output_shapes, output_dtypes, **call):
        called.append(kernel.name)
        return [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

    with simulated(), mock.patch.object(build, "run", run), phases.using(Phases(short=short)):
        problem.solve(_attend_gpu)
    assert called == names
