"""Every turn is stored: after a restart, a kill or a cancellation, at most the last turn is prefilled again."""

import signal
import time
from dataclasses import replace

import pytest
from cli.tools import zoo_model

from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import BLOCKS, Folder
from mlx_tq.server.job import PrefillProgress

from .conftest import ENDLESS, question
from .engines import job_of, make_engine, make_job, outcome, random_ids, run_job, serve, text_of, tokens_of
from .test_cached_prompts import counts
from .test_cached_prompts import text_of as reply_of


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "store")


def cached_tokens(loaded, store, ids):
    """Return how many tokens of a prompt a new engine restores."""
    return serve(make_engine(loaded, folder=store), [job_of(ids)])[0][0].cached_tokens


def next_turn(events, ids):
    """Return the prompt of the turn after a job's, and how many tokens of it the job's caches hold."""
    told = [*ids, *tokens_of(events)]
    return [*told, *random_ids(25, seed=len(ids))], len(told)


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(name, marks=pytest.mark.full) for name in ("embedded", "llama", "gemma3_text"))],
)
def test_the_next_turn_continues_after_the_answer(name, loaded, store, tmp_path):
    """In a new engine as in the one that gave the answer."""
    loaded = loaded if name == "embedded" else load(zoo_model(tmp_path / name, name))

    async def talk():
        ids, turns, told = random_ids(300), [], 0
        for _ in range(3):
            events = await run_job(engine, job_of(ids, max_tokens=40, logprobs=0))
            turns.append((ids, told, text_of(events)))
            ids, told = next_turn(events, ids)
        return turns

    engine = make_engine(loaded)
    for ids, told, text in serve(engine, [], talk)[1]:
        (events,) = serve(make_engine(loaded, folder=store), [job_of(ids, max_tokens=40, logprobs=0)])
        assert (events[0].cached_tokens, text_of(events)) == (told, text)
    turns = sorted(store.checkpoints().values(), key=lambda summary: len(summary.tokens))
    longest = turns[-1].block_keys
    assert all(summary.block_keys == longest[: len(summary.block_keys)] for summary in turns), "rows are never replaced"
    assert sum(record.path.parent.name == BLOCKS for record in store.records()) == len(longest)


def test_a_prompt_that_is_stored_to_its_last_token_is_answered(store, tmp_path):
    """Its last token begins the answer. The first prompt is too short to be stored before its answer ends."""
    loaded = load(zoo_model(tmp_path / "qwen3_next", "qwen3_next"))
    ids = random_ids(20)
    (events,) = serve(make_engine(loaded, folder=store), [job_of(ids, max_tokens=40, logprobs=0)])
    told = [*ids, *tokens_of(events)]
    assert max(len(summary.tokens) for summary in store.checkpoints().values()) == len(told)
    again, other = serve(make_engine(loaded, folder=store), [job_of(told), job_of(random_ids(50, seed=3))])
    assert again[0].cached_tokens < len(told)
    assert again[-1].finish_reason
    assert other[-1].finish_reason


@pytest.mark.full
def test_an_answer_that_is_cut_off_is_stored(loaded, store):
    """By its client, and by the end of the server."""
    prompts = [random_ids(300), random_ids(300, seed=2)[1:]]
    engine = make_engine(loaded, folder=store)

    async def then():
        jobs = [job_of(ids, max_tokens=400) for ids in prompts]
        engine.submit(*jobs)
        for job in jobs:
            for _ in range(100):
                await job.events.get()
        engine.cancel(jobs[0])
        await run_job(engine, job_of(random_ids(20, seed=3)[1:]))

    serve(engine, [], then)
    lengths = sorted((len(summary.tokens) for summary in store.checkpoints().values()), reverse=True)
    assert min(lengths[:2]) > 350
    for ids in prompts:
        summary = max(
            (s for s in store.checkpoints().values() if s.tokens[:299].tolist() == ids[:299]),
            key=lambda s: len(s.tokens),
        )
        assert cached_tokens(loaded, store, [*summary.tokens.tolist(), 5]) == len(summary.tokens)


@pytest.mark.full
@pytest.mark.parametrize("turns", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_conversation_survives_kills(start, tmp_path, turns):
    """Each turn is answered by a new server, which is killed while it answers another request."""
    path, messages, before = tmp_path / "store", [], 0
    for turn in range(turns):
        server = start("--prefill-step-size", "64", "--prefix-cache", path)
        text = question(4, 100_000 + turn) if turn else question(12, 593_847)
        messages.append({"role": "user", "content": text})
        answer = server.chat(*messages)
        length, cached = counts(answer)
        assert cached >= before - 32, "what the last turn's server had stored"
        before = length
        messages.append({"role": "assistant", "content": reply_of(answer)})
        stream = server.chat(*messages, {"role": "user", "content": question(8, turn)}, stream=True)
        time.sleep(0.05 * (turn % 7))
        server.stop(signal.SIGKILL)
        stream.close()
    longest = max(Folder(path).checkpoints().values(), key=lambda summary: len(summary.tokens))
    for summary in Folder(path).checkpoints().values():
        count = len(summary.tokens)
        if summary.tokens.tolist() == longest.tokens[:count].tolist():
            assert summary.block_keys == longest.block_keys[: len(summary.block_keys)]
    assert Folder(path).check()[1] == 0


# As templates that leave earlier reasoning out: what opens the answer is not shown again.
FORGETFUL = """\
{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}\
{% if add_generation_prompt %}<assistant>Hm, let me think about it.{% endif %}"""


def wait_until_idle(server):
    while server.http.get("/status").json()["models"][0]["status"]["running"]:
        time.sleep(0.05)


@pytest.mark.parametrize("name", [pytest.param("embedded", marks=pytest.mark.full), "qwen3_next"])
def test_the_next_prompt_is_prefilled_ahead(name, start, folder, tmp_path):
    """Also by a model with states, which cannot go back to where a prompt diverges."""
    model = folder if name == "embedded" else zoo_model(tmp_path / name, name)
    server = start("--chat-template", FORGETFUL, model=model)
    talk = [{"role": "user", "content": question(8, 593_847)}]
    first = server.chat(*talk, max_tokens=50, logit_bias=ENDLESS)
    wait_until_idle(server)
    talk += [{"role": "assistant", "content": reply_of(first)}, {"role": "user", "content": "Why?"}]
    length, cached = counts(server.chat(*talk, max_tokens=4))
    assert length - 32 < cached
    assert cached > counts(first)[0] + 20, "the answer, too"
    assert server.metrics()["mlx_tq_prompt_tokens_total"] == counts(first)[0] + length


def test_a_request_ends_what_is_prefilled_ahead(loaded):
    """What it has prefilled stays; while a request runs, nothing is prefilled ahead."""
    engine, ids = make_engine(loaded), random_ids(3000)
    ahead, other, request = job_of(ids, only_prefills=True), job_of(random_ids(500, seed=3)[1:]), job_of([5, 6, 7, 8])

    async def then():
        engine.prefill_ahead(ahead)
        while not isinstance(await ahead.events.get(), PrefillProgress):
            pass
        engine.submit(request)
        engine.prefill_ahead(replace(other, only_prefills=True))
        await outcome(request)
        await run_job(engine, job_of([8, 7, 6, 5]))
        return engine.estimate(ids)["cached_tokens"], engine.estimate(other.prompt.ids)["cached_tokens"]

    cached, cached_other = serve(engine, [], then)[1]
    assert 0 < cached < len(ids) - 1
    assert cached_other == 0
    assert ahead.cancelled.is_set()


def test_what_is_prefilled_ahead_takes_no_place_in_the_queue(loaded):
    engine, ids = make_engine(loaded, queue=1), random_ids(500)

    async def then():
        engine.prefill_ahead(job_of(ids, only_prefills=True))
        return await run_job(engine, make_job(20))

    assert serve(engine, [], then)[1][-1].finish_reason
