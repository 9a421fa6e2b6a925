"""Prompts of hybrids continue from the nearest states, which are stored on a grid, exact or at 8 bits."""

import signal

import pytest
from cli.tools import zoo_model

from mlx_tq.cache.recurrent_states import EXACT, Q8, StateStorage
from mlx_tq.errors import ConfigError
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prompt_cache.memory import state_nbytes

from .conftest import ENDLESS, question
from .engines import job_of, make_engine, metric, random_ids, run_job, serve, text_of
from .test_cached_prompts import counts
from .test_cached_prompts import text_of as text_of_reply

PROMPT = random_ids(600)
DIVERGING = [*PROMPT[:430], *random_ids(60, seed=5)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return load(zoo_model(tmp_path_factory.mktemp("models") / "qwen3_5", "qwen3_5"))


def talk(engine, *prompts):
    """Return the cached tokens and the text of each prompt's answer, one after the other."""

    async def then():
        events = [await run_job(engine, job_of(ids, max_tokens=20)) for ids in prompts]
        return [(event[0].cached_tokens, text_of(event)) for event in events]

    return serve(engine, [], then)[1]


@pytest.mark.parametrize("place", ["memory", pytest.param("disk", marks=pytest.mark.full)])
def test_a_prompt_that_diverges_continues_from_the_grid(hybrid, place, tmp_path):
    states, folder = StateStorage(step=128), Folder(tmp_path / "store") if place == "disk" else None

    def answers(*prompts):
        return talk(make_engine(hybrid, folder=folder, states=states), *prompts)

    if place == "memory":
        (_, cached) = answers(PROMPT, DIVERGING)
    else:
        answers(PROMPT)
        assert sorted(len(summary.tokens) for summary in folder.checkpoints().values())[:5] == [128, 256, 384, 512, 599]
        ((cached),) = answers(DIVERGING)
    assert cached == (384, talk(make_engine(hybrid), DIVERGING)[0][1]), "the answer is that without a cache"


@pytest.mark.full
def test_the_default_grid_is_sparse(hybrid):
    """And prompts without states in their caches do not need one."""
    assert [cached for cached, _ in talk(make_engine(hybrid), PROMPT, DIVERGING)] == [0, 0]


@pytest.mark.full
def test_small_states_have_a_finer_grid(tmp_path):
    """Of a model with no states but the inputs of convolutions."""
    loaded, prompt = load(zoo_model(tmp_path / "lfm2", "lfm2")), random_ids(800)
    diverging = [*prompt[:700], *random_ids(60, seed=5)]
    assert [cached for cached, _ in talk(make_engine(loaded), prompt, diverging)] == [0, 512]
    with pytest.raises(ConfigError, match="state format q8 saves nothing"):
        make_engine(loaded, states=StateStorage(Q8))


@pytest.mark.full
def test_keys_and_values_are_stored_once(hybrid):
    """A finer grid takes more states, and no more keys and values."""
    nbytes = []
    for step in (2048, 64):
        engine = make_engine(hybrid, states=StateStorage(step=step))
        talk(engine, PROMPT)
        nbytes.append(metric(engine, "prompt_cache_bytes"))
        assert metric(engine, "prompt_cache_entries") == 1
    assert nbytes[1] - nbytes[0] == len(range(64, len(PROMPT) - 1, 64)) * state_nbytes(hybrid[0], EXACT)


@pytest.mark.full
def test_stored_states_at_8_bits_answer_alike_and_take_a_quarter(hybrid):
    next_turn, results, nbytes = [*PROMPT, *random_ids(30, seed=9)], [], []
    for name in (EXACT, Q8):
        engine = make_engine(hybrid, states=StateStorage(name, 128))
        results.append(talk(engine, PROMPT, next_turn))
        nbytes.append(metric(engine, "prompt_cache_bytes"))
    (exact, (cached, text)), (q8, (cached_q8, text_q8)) = results
    assert exact == q8, "which no stored states began"
    assert cached == cached_q8 == len(PROMPT) - 1
    assert text == talk(make_engine(hybrid), next_turn)[0][1]
    assert text[:8] == text_q8[:8]
    saved = state_nbytes(hybrid[0], EXACT) - state_nbytes(hybrid[0], Q8)
    assert nbytes[0] - nbytes[1] == 8 * saved, "on the grid, where the answers begin, and at their ends"


@pytest.mark.full
def test_a_conversation_survives_a_kill(start, tmp_path):
    """With states at 8 bits: the next server continues from the last turn."""
    model, talk = zoo_model(tmp_path / "qwen3_5", "qwen3_5"), [{"role": "user", "content": question(8, 593_847)}]
    flags = ("--prefix-cache", tmp_path / "store", "--state-format", "q8", "--prefill-step-size", "64")
    server = start(*flags, model=model)
    first = server.chat(*talk, max_tokens=50, logit_bias=ENDLESS)
    stream = server.chat(*talk, {"role": "user", "content": question(8, 1)}, stream=True)
    server.stop(signal.SIGKILL)
    stream.close()
    talk += [{"role": "assistant", "content": text_of_reply(first)}, {"role": "user", "content": "Why?"}]
    server = start(*flags, model=model)
    assert counts(server.chat(*talk, max_tokens=4))[1] >= counts(first)[0] - 8, (
        "the prompt, but for what begins answers"
    )
