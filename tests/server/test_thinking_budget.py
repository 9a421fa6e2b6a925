"""Reasoning ends with its budget, by a line that leads to an answer, and the answer follows."""

import mlx.core as mx
import pytest

from mlx_tq.server.thinking_budget import ThinkingBudget

from .test_messages import TOOL, tokenizer  # noqa: F401 - a fixture
from .test_tool_calls import scripted_server

START, END, BRIDGE = [1], [8, 9], [6, 7, 8, 9]
THOUGHT = "I add two and two, and two and two, and two and two again."
HI = {"messages": [{"role": "user", "content": "hi"}]}


def generated(wanted, budget, start):
    """Return what comes out when a model wants these tokens."""
    processor, out = ThinkingBudget(budget, start, END, BRIDGE), []
    for token in wanted:
        logits = mx.where(mx.arange(16) == token, 5.0, 0.0)[None]
        out.append(int(processor(mx.array([3, 3, *out]), logits).argmax()))
    return out


@pytest.mark.parametrize(
    ("start", "wanted", "expected"),
    [
        ([], [2, 2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 6, 7, 8, 9, 2]),
        (START, [1, 2, 2, 2, 2, 2, 2, 2], [1, 2, 2, 6, 7, 8, 9, 2]),
        ([], [2, 8, 9, 4, 5, 4, 5, 4], [2, 8, 9, 4, 5, 4, 5, 4]),
        (START, [4, 5, 4, 5, 4, 5, 4, 5], [4, 5, 4, 5, 4, 5, 4, 5]),
    ],
    ids=["open", "opened", "ended", "none"],
)
def test_tokens(start, wanted, expected):
    assert generated(wanted, 3, start) == expected


@pytest.fixture(scope="module")
def thoughtful(loaded, tokenizer):  # noqa: F811
    mark = [token for part in ("<", "/think>") for token in loaded[1].encode(part)]
    with pytest.MonkeyPatch.context() as patch:
        # The embedded model has no token for the mark, which the fixture adds to the vocabulary.
        patch.setattr(type(tokenizer), "think_end_tokens", mark)
        with scripted_server(loaded, tokenizer, "--chat-template-args", '{"enable_thinking": true}') as server:
            yield server


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"max_tokens": 900}, ""),
        ({"max_tokens": 900, "thinking": {"type": "enabled", "budget_tokens": 8}}, "so I answer now."),
        pytest.param({"max_tokens": 60}, "so I answer now.", marks=pytest.mark.full),
        ({"max_tokens": 60, "tools": [TOOL]}, "so I call a tool or answer now."),
    ],
)
def test_answers(thoughtful, body, line):
    """What the model would have gone on with becomes its answer here."""
    message = thoughtful.answer(f"{THOUGHT}</think>It is 4.", **HI, **body)["choices"][0]["message"]
    if line:
        assert message["reasoning"].endswith(f"I have thought long enough, {line}\n")
        assert message["reasoning"][:10] == THOUGHT[:10]
        assert message["content"]
    else:
        assert (message["reasoning"], message["content"]) == (THOUGHT, "It is 4.")
