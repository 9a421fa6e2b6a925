"""What of a conversation is quoted."""

import numpy as np

from mlx_tq import RescueConfig
from mlx_tq.session.plain_text import PlainText
from mlx_tq.session.recall import Named
from mlx_tq.session.transcript import Transcript


def test_what_is_live_is_not_quoted_and_the_rest_within_the_limit(embedded):
    """A range of which a token is missing is quoted whole."""
    tokenizer = embedded[1]
    transcript = Transcript(PlainText(tokenizer), None, RescueConfig(), "session", 200)
    transcript.read(tokenizer.encode("The garden of every house has seven trees and a gate. " * 8))
    live = np.array([*range(10, 30), *range(41, 50)])
    named = [(12, 20), (40, 50), (60, 70)]
    assert transcript.quoted(Named(tuple(named), 200), live).ranges == named[1:]
    taken = 200 - len(transcript.quoted(Named(((60, 70),), 200), live).ids)
    assert transcript.quoted(Named(((60, 70),), 200), live, less=taken).ranges == named[2:]
    assert transcript.quoted(Named(((60, 70),), 200), live, less=taken + 1).ranges == []
