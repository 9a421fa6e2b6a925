"""A session is made in one thread and used in others, as web frameworks do; its answers are the same."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from mlx_tq import KVConfig, Session
from mlx_tq.config import PROFILES
from mlx_tq.prompt_cache.layer_group import cache_parts

SMALL = KVConfig(key="q8", value="q8", sinks=16, window=32)
QUESTIONS = ("The access code is 417295.", "What is the access code?", "Say it once more.")


def say(session, text):
    return "".join(session.respond(text))


def here(session):
    return [say(session, text) for text in QUESTIONS]


def a_thread_each(session):
    """And between them the thread that made the session."""
    answers = []
    for number, text in enumerate(QUESTIONS):
        if number == 1:
            answers.append(say(session, text))
            continue
        thread = Thread(target=lambda text=text: answers.append(say(session, text)))
        thread.start()
        thread.join()
    return answers


def an_executor(session):
    with ThreadPoolExecutor(3) as pool:
        return [pool.submit(say, session, text).result() for text in QUESTIONS]


def asyncio_to_thread(session):
    async def turns():
        return [await asyncio.to_thread(say, session, text) for text in QUESTIONS]

    return asyncio.run(turns())


def a_thread_a_piece(session):
    """Starlette and Gradio take each piece of a generator in whatever thread of a pool is free."""

    def answer(text):
        pieces, said = session.respond(text), []
        while True:
            with ThreadPoolExecutor(1) as pool:
                piece = pool.submit(next, pieces, None).result()
            if piece is None:
                return "".join(said)
            said.append(piece)

    return [answer(text) for text in QUESTIONS]


@pytest.mark.parametrize("turns", [a_thread_each, an_executor, asyncio_to_thread, a_thread_a_piece])
@pytest.mark.parametrize("config", [PROFILES["off"], SMALL], ids=["mlx-lm's cache", "compressed"])
def test_a_session_works_in_other_threads(exact, config, turns, tmp_path):
    expected = here(Session(*exact, config, max_tokens=12))
    with Session(*exact, config, max_tokens=12) as session:
        assert turns(session) == expected
        saved = Thread(target=session.save, args=[tmp_path / "chat.safetensors"])
        saved.start()
        saved.join()
        session.load(tmp_path / "chat.safetensors")
        assert session.stats.tokens == len(session.ids)
        assert all(part.state for part in cache_parts(session.cache))


def test_sessions_of_one_model_answer_side_by_side(exact):
    expected = here(Session(*exact, SMALL, max_tokens=12))
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(lambda: here(Session(*exact, SMALL, max_tokens=12))) for _ in range(3)]
        assert [answer.result() for answer in answers] == [expected] * 3


def test_a_seed_makes_the_same_answers(exact):
    from mlx_lm.sample_utils import make_sampler

    said = [
        say(Session(*exact, SMALL, max_tokens=12, sampler=make_sampler(2.0), seed=seed), "Hello") for seed in (7, 7, 8)
    ]
    assert said[0] == said[1] != said[2]


_ENDS = """
import threading, mlx_tq
session = mlx_tq.Session(*mlx_tq.load(), max_tokens=4)
for _ in range(3):
    thread = threading.Thread(target=lambda: print("".join(session.respond("Hello"))))
    thread.start()
    thread.join()
answer = session.respond("Hello")
next(answer)
"""


def test_a_program_ends_well_with_a_session_left_open_in_the_middle_of_an_answer():
    """mlx keeps streams in each thread that computes; a program that ended before one of them had was aborted."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
