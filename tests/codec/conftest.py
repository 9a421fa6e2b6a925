"""Codecs are tested as they run, compiled."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compiled(compiled):
    pass
