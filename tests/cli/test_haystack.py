import re

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cli.haystack import NEEDLE, QUESTION, Verdict, build_case, judge_answer
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.models import embedded_path

TEXT = load_text()
TOKENIZER = load_tokenizer(embedded_path())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("PURPLE ELEPHANT 7742", Verdict.PASS),
        ("It is PURPLE ELEPHANT 7742.", Verdict.PASS),
        ("Purple Elephant 7742", Verdict.TITLE_CASE),
        ("purple elephant 7742", Verdict.PARTIAL_WORD),
        ("PURPLE ELEPHANT 7743", Verdict.PARTIAL_WORD),
        ("PURPLE ELEPHANT 77421", Verdict.PARTIAL_WORD),
        ("PURPLE ELEPHANTS 7742", Verdict.PARTIAL_NUMBER),
        ("PURPLE TIGER 7742", Verdict.PARTIAL_NUMBER),
        ("PURPLE TIGER 17742", Verdict.FAIL),
        ("", Verdict.FAIL),
        (QUESTION, Verdict.FAIL),
        (NEEDLE, Verdict.FAIL),
    ],
)
def test_verdicts(answer, expected):
    assert judge_answer(answer, "PURPLE ELEPHANT 7742") is expected


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(400, 3000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    sinks=st.sampled_from([0, 16, 32, 100]),
    window=st.sampled_from([0, 1, 64, 100]),
    chat=st.booleans(),
)
def test_the_needle_lies_where_the_case_says_and_is_packed_when_the_question_comes(
    tokens, depth, seed, sinks, window, chat
):
    case = build_case(TOKENIZER, TEXT, tokens=tokens, depth=depth, seed=seed, sinks=sinks, window=window, chat=chat)
    assert len(case.ids) == tokens
    assert TOKENIZER.decode(case.ids[slice(*case.needle)]) == f" The secret code word is {case.answer}."
    assert QUESTION in TOKENIZER.decode(case.ids[case.question :])
    assert QUESTION not in TOKENIZER.decode(case.ids[: case.question])
    assert TOKENIZER.decode(case.ids).count(case.answer) == 1

    cache = CompressedKVCache(CacheSpec.for_layer(KVConfig(sinks=sinks, window=window), 0, "q8", "q8"))
    for start in range(0, case.question, 512):
        row = mx.ones((1, 1, min(512, case.question - start), 16))
        cache.append(row, row)
    cache.stop_learning()  # no queries ask with these
    packed = cache.positions[sinks : sinks + cache.packed_tokens]
    assert set(range(*case.needle)) <= set(packed)


def test_depth_moves_the_needle_and_seeds_differ_and_repeat():
    starts = [build_case(TOKENIZER, TEXT, tokens=2000, depth=d, seed=1).needle[0] for d in (0, 0.25, 0.5, 0.75, 1)]
    assert starts == sorted(set(starts))
    assert starts[0] < 250 < 900 < starts[2] < 1100 < 1600 < starts[-1]
    cases = [build_case(TOKENIZER, TEXT, tokens=500, depth=0.5, seed=s, sinks=32, window=64) for s in (1, 2, 3, 1)]
    assert len({case.answer for case in cases[:3]}) == 3
    assert len({tuple(case.ids[:20]) for case in cases[:3]}) == 3
    assert cases[0] == cases[3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 1.5}, "depth is 1.5; it must be from 0"),
        ({"tokens": 200}, "take at least"),
        ({"tokens": 20}, "take at least"),
        ({"text": "Too short. Far too short."}, "Give a longer text"),
        ({"text": ""}, "Give a longer text"),
    ],
)
def test_impossible_cases_are_refused(changes, words):
    options = {"text": TEXT, "tokens": 500, "depth": 0.5, "seed": 0, **changes}
    with pytest.raises(ConfigError, match=words) as error:
        build_case(TOKENIZER, options.pop("text"), **options)
    if least := re.search(r"at least (\d+) tokens", str(error.value)):  # the remedy works
        assert build_case(TOKENIZER, TEXT, tokens=int(least[1]), depth=0.5, seed=0).answer
