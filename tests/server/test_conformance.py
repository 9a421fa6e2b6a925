"""Forty requests of the official client are answered as OpenAI documents, or the docs say why not."""

import json
from pathlib import Path

import pytest

from benchmarks.server.requests import REQUESTS, outcome

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "server_conformance.json"


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.name)
def test_answers_match_the_recorded_conformance(server, request_):
    as_documented, seen = outcome(request_, server.openai)
    assert as_documented or request_.why, seen
    (row,) = [row for row in json.loads(RECORDED.read_text())["rows"] if row["request"] == request_.name]
    assert row["ours"] == {"as_documented": as_documented, "seen": seen}
    assert (row["documented"], row["why"]) == (request_.documented, "" if as_documented else request_.why)


def test_there_are_forty():
    assert len(REQUESTS) == len({request.name for request in REQUESTS}) == 40
