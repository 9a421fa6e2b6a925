"""A session with a store says what one without says, and its first prompt is not read twice."""

import mlx.core as mx

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.cli.haystack import load_text
from mlx_tq.prefix_cache.folder import Folder

SMALL = KVConfig(key="q8", value="q8", sinks=16, window=32)


def talk(exact, store=None):
    """Two turns; returns what was said, how many tokens of each prompt were stored, and what progress told."""
    told = []
    with Session(*exact, SMALL, max_tokens=6, prefill_step_size=128, store=store) as session:
        said = ["".join(session.respond(load_text()[:1200], progress=lambda *at: told.append(at)))]
        said.append("".join(session.respond("Go on.")))
        assert session.cache[0].offset == len(session.ids)
        return said, [turn.cached_tokens for turn in session.turns], told, session.turns[0].prompt_tokens


def test_the_first_prompt_of_a_second_session_is_there(exact, tmp_path):
    plain, *_ = talk(exact)
    said, stored, _, _ = talk(exact, str(tmp_path))
    again, found, told, prompt = talk(exact, Folder(tmp_path))
    assert plain == said == again
    assert (stored, found) == ([0, 0], [prompt - 1, 0])
    assert told[0] == (prompt - 1, prompt)
    assert told[-1] == (prompt, prompt)


def test_an_answer_looks_into_the_archive_of_a_prompt_that_was_stored(exact, tmp_path):
    """The restored caches are others than those that the session began with."""
    evict = EvictConfig("recency:granularity=32:trigger=32", 128, recall=64)
    config = KVConfig(key="q8", value="q8", sinks=16, window=32, evict=evict)
    word = exact[1].encode("the")[-1]
    found = []
    for _ in range(2):
        with Session(
            *exact,
            config,
            max_tokens=config.evict.recall_every + 1,
            prefill_step_size=64,
            store=str(tmp_path),
            sampler=lambda _: mx.array([word]),
        ) as session:
            assert len(list(session.respond(load_text()[:800]))) >= config.evict.recall_every
            found.append(session.turns[0])
    assert not found[0].cached_tokens
    assert found[1].cached_tokens >= 64
    assert found[0].looks == found[1].looks == 1
    assert found[0].recalled == found[1].recalled != ()
