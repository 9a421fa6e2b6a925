"""Several answers to one prompt, which is read once; and answers that the request begins."""

from dataclasses import replace

import pytest
from cli.tools import facts

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.jobs import Job, Piece, Started

from .conftest import ENDLESS
from .engines import CONFIG, GREEDY, make_engine, make_job, serve

ASKED = "The access code is 417295. What is the access code?"


def with_others(job, count):
    """The job with so many more answers, as the service makes them."""
    job.others = [replace(job, index=1 + n, others=[]) for n in range(count)]
    for other in job.others:
        other.events = job.events
    return job


def texts(events, count):
    said = [""] * count
    for event in events:
        if isinstance(event, Piece):
            said[event.index] += event.text
    return said


def test_each_choice_is_what_its_seed_says_alone_and_the_prompt_is_read_once(server):
    options = {"temperature": 3, "max_tokens": 8, "logit_bias": ENDLESS}
    alone = [server.chat(ASKED, seed=seed, **options).choices[0].message.content for seed in (5, 6, 7)]
    assert len(set(alone)) == 3
    asked = "Read me once. " + ASKED
    before = server.metrics()
    answer = server.chat(asked, n=3, seed=5, **options)
    read = server.metrics()["mlx_tq_read_tokens_total"] - before["mlx_tq_read_tokens_total"]
    assert read <= answer.usage.prompt_tokens
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 24
    again = server.chat(ASKED, n=3, seed=5, **options)
    assert [choice.message.content for choice in again.choices] == alone
    streamed = ["", "", ""]
    for chunk in server.chat(ASKED, n=3, seed=5, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == alone
    texts = server.openai.completions.create(model="default_model", prompt="The sky", n=2, seed=1, **options).choices
    assert texts[0].text != texts[1].text


def test_several_prompts_are_each_what_they_say_alone(server):
    """Their answers side by side, also several to each and of token ids; nothing of them all where one is refused."""
    complete = server.openai.completions.create
    options = {"model": "default_model", "max_tokens": 6, "temperature": 3, "seed": 4, "logit_bias": ENDLESS}
    prompts = ["The sky is", "One two three", "The sky is blue, and"]
    alone = [[choice.text for choice in complete(prompt=prompt, n=2, **options).choices] for prompt in prompts]
    every = [text for each in alone for text in each]
    answer = complete(prompt=prompts, n=2, **options)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == every
    single = [complete(prompt=prompt, **options).usage for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(usage.prompt_tokens for usage in single)
    assert answer.usage.completion_tokens == 36
    streamed = [""] * 6
    for chunk in complete(prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert (streamed, chunk.usage.completion_tokens) == (every, 36)
    ids = [[300, 301, 302], [303, 304]]
    both = [complete(prompt=each, **options).choices[0].text for each in ids]
    assert [choice.text for choice in complete(prompt=ids, **options).choices] == both
    for refused in ([], ["a", ""], [[1], [10**9]], ["a"] * 129):
        assert server.post("/v1/completions", prompt=refused).json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("recall", [pytest.param("off", marks=pytest.mark.full), 96])
def test_choices_over_caches_that_lose_tokens(loaded, recall):
    """Also where rows come back for the question; greedy choices are all what one alone says."""
    evict = EvictConfig("recency:granularity=16:trigger=32", 160, recall=recall)
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=evict)
    text, question = facts(40, 417295)
    said = [{"role": "user", "content": f"{text}\n\n{question}"}]
    ids = loaded[1].apply_chat_template(said, add_generation_prompt=True)

    def run(count):
        job = with_others(Job(Prompt(ids, [ids], ["user"]), 8, GREEDY, []), count - 1)
        (events,) = serve(make_engine(loaded, config, prompt_cache_size=0), [job])
        assert sum(isinstance(event, Started) for event in events) == 1
        return texts(events, count)

    (alone,) = run(1)
    assert ("417295" in alone) == (recall == 96)
    assert run(3) == [alone] * 3


def test_choices_take_their_places_in_the_batch(loaded):
    """Two more do not fit beside one of two that run; a prompt of one token is nothing to read."""
    engine = make_engine(loaded, CONFIG, concurrency=2)
    running = []
    step = engine._step

    def look():
        step()
        running.append(len(engine._running))

    engine._step = look
    jobs = [make_job(20, max_tokens=6), with_others(make_job(1, max_tokens=6, seed=2), 1)]
    _, both = serve(engine, jobs)
    assert max(running) == 2
    assert sum(1 for event in both if isinstance(event, Piece) and event.finish) == 2
    assert texts(both, 2)[0] == texts(both, 2)[1]


def test_an_answer_that_is_begun_goes_on(server):
    """As the template shows answers; nothing begun is nothing to go on from."""
    for begun, rest in (("4172", "95"), ("", "417295"), (None, "417295")):
        message = {"role": "assistant", "content": begun}
        assert server.chat(ASKED, message).choices[0].message.content == rest
    stream = server.chat(ASKED, {"role": "assistant", "content": "417"}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "295"
    whole = server.chat(ASKED, max_tokens=1).usage.prompt_tokens
    assert server.chat(ASKED, {"role": "assistant", "content": "4172"}).usage.prompt_tokens == whole + 4


@pytest.mark.parametrize("asked", [{"n": 2}, {"begun": "4"}])
def test_sessions_go_on_behind_one_whole_answer(server, asked):
    messages = [{"role": "user", "content": ASKED}]
    if "begun" in asked:
        messages.append({"role": "assistant", "content": asked.pop("begun")})
    response = server.http.post(
        "/v1/chat/completions", json={"messages": messages, **asked}, headers={"X-Session-Id": "one"}
    )
    assert (response.status_code, "X-Session-Id" in response.json()["error"]["message"]) == (400, True)
