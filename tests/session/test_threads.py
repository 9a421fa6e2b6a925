"""A session that is used in several threads gives the same answers."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
from cli.tools import environment
from mlx_lm.sample_utils import make_sampler

from mlx_tq import KVConfig, Session
from mlx_tq.cache.layer import cache_parts
from mlx_tq.config import PROFILES

SMALL = KVConfig(key="q8", value="q8", sinks=16, window=32)
QUESTIONS = ("The access code is 417295.", "What is the access code?", "Say it once more.")


def say(session, text):
    return "".join(session.respond(text))


def converse(session):
    return [say(session, text) for text in QUESTIONS]


def run_in_thread(target):
    thread = Thread(target=target)
    thread.start()
    thread.join()


def alternating_threads(session):
    answers = []
    for text, run in zip(QUESTIONS, (run_in_thread, lambda call: call(), run_in_thread), strict=True):
        run(lambda text=text: answers.append(say(session, text)))
    return answers


def asyncio_to_thread(session):
    async def turns():
        return [await asyncio.to_thread(say, session, text) for text in QUESTIONS]

    return asyncio.run(turns())


def a_thread_per_piece(session):
    """Starlette and Gradio take each piece of a generator in any thread of a pool."""

    def respond(text):
        pieces, answer = session.respond(text), []
        while True:
            with ThreadPoolExecutor(1) as pool:
                piece = pool.submit(next, pieces, None).result()
            if piece is None:
                return "".join(answer)
            answer.append(piece)

    return [respond(text) for text in QUESTIONS]


@pytest.mark.parametrize(
    "turns",
    [
        *(pytest.param(way, marks=pytest.mark.full) for way in (alternating_threads, asyncio_to_thread)),
        a_thread_per_piece,
    ],
)
@pytest.mark.parametrize(
    "config",
    [pytest.param(PROFILES["off"], marks=pytest.mark.full), SMALL],
    ids=["mlx-lm's cache", "compressed"],
)
def test_a_session_works_in_other_threads(exact, config, turns, tmp_path):
    expected = converse(Session(*exact, config, max_tokens=12))
    with Session(*exact, config, max_tokens=12) as session:
        assert turns(session) == expected
        run_in_thread(lambda: session.save(tmp_path / "chat.safetensors"))
        session.load(tmp_path / "chat.safetensors")
        assert session.stats.tokens == len(session.ids)
        assert all(part.state for part in cache_parts(session.cache))


def test_sessions_of_one_model_answer_side_by_side(exact):
    expected = converse(Session(*exact, SMALL, max_tokens=12))
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(lambda: converse(Session(*exact, SMALL, max_tokens=12))) for _ in range(2)]
        assert [answer.result() for answer in answers] == [expected] * 2


def test_a_seed_makes_the_same_answers(exact):
    options = {"max_tokens": 12, "sampler": make_sampler(20.0)}  # at 2, many answers are "OK"
    answers = [say(Session(*exact, SMALL, seed=seed, **options), "Hello") for seed in (7, 7, 8, None, None)]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 4


_ENDS = """
import threading, mlx_tq
session = mlx_tq.Session(*mlx_tq.load(dtype="float32"), max_tokens=4)
for _ in range(3):
    thread = threading.Thread(target=lambda: print("".join(session.respond("Hello"))))
    thread.start()
    thread.join()
answer = session.respond("Hello")
next(answer)
"""


@pytest.mark.full
def test_a_program_may_end_during_an_answer():
    """mlx keeps streams in each thread that computes; without care such a program is aborted at its end."""
    words = [sys.executable, "-c", _ENDS]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
