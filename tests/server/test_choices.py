"""Several answers to one prompt, several prompts, and answers that the request begins."""

import pytest
from cli.tools import facts

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.server.job import Piece, Started

from .conftest import ENDLESS, QUESTION
from .engines import job_of, make_engine, make_job, record_gauge, serve, text_of, with_others
from .harness import text_of_stream


def test_choices_equal_single_answers_and_the_prompt_is_prefilled_once(server):
    options = {"temperature": 3, "max_tokens": 8, "logit_bias": ENDLESS}
    alone = [server.chat(QUESTION, seed=seed, **options).choices[0].message.content for seed in (5, 6, 7)]
    assert len(set(alone)) == 3
    before = server.metrics()
    answer = server.chat("Read me once. " + QUESTION, n=3, seed=5, **options)
    prefilled = server.metrics()["mlx_tq_prefill_tokens_total"] - before["mlx_tq_prefill_tokens_total"]
    assert prefilled <= answer.usage.prompt_tokens
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 24
    again = server.chat(QUESTION, n=3, seed=5, **options)
    assert [choice.message.content for choice in again.choices] == alone
    streamed = ["", "", ""]
    for chunk in server.chat(QUESTION, n=3, seed=5, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == alone
    texts = server.openai.completions.create(model="default_model", prompt="The sky", n=2, seed=1, **options).choices
    assert texts[0].text != texts[1].text


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-5])
def test_a_temperature_near_zero_chooses_the_likeliest_tokens(server, temperature):
    answers = server.chat(QUESTION, n=2, temperature=temperature, max_tokens=8).choices
    assert {choice.message.content for choice in answers} == {"417295"}


def test_several_prompts_equal_single_ones(server):
    complete = server.openai.completions.create
    options = {"model": "default_model", "max_tokens": 4, "temperature": 3, "seed": 4, "logit_bias": ENDLESS}
    prompts = ["The sky is", "One two three", "The sky is blue, and"]
    alone = [choice.text for prompt in prompts for choice in complete(prompt=prompt, n=2, **options).choices]
    answer = complete(prompt=prompts, n=2, **options)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == alone
    single = [complete(prompt=prompt, **options).usage for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(usage.prompt_tokens for usage in single)
    assert answer.usage.completion_tokens == 24
    streamed = [""] * 6
    for chunk in complete(prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert (streamed, chunk.usage.completion_tokens) == (alone, 24)
    ids = [[300, 301, 302], [303, 304]]
    both = [complete(prompt=prompt, **options).choices[0].text for prompt in ids]
    assert [choice.text for choice in complete(prompt=ids, **options).choices] == both
    assert server.post("/v1/completions", prompt=["a"] * 129).json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("recall", [pytest.param("off", marks=pytest.mark.full), 96])
def test_choices_with_eviction_and_recall(loaded, recall):
    evict = EvictConfig("recency:granularity=16:trigger=32", 160, recall=recall)
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=evict)
    message = {"role": "user", "content": "\n\n".join(facts(40, 417295))}
    ids = loaded[1].apply_chat_template([message], add_generation_prompt=True)

    def texts(count):
        job = with_others(job_of(ids, max_tokens=8), count - 1)
        (events,) = serve(make_engine(loaded, config, prompt_cache_bytes=0), [job])
        assert sum(isinstance(event, Started) for event in events) == 1
        return [text_of(events, index) for index in range(count)]

    (alone,) = texts(1)
    assert ("417295" in alone) == (recall == 96)
    assert texts(3) == [alone] * 3


def test_choices_count_against_the_concurrency(loaded, monkeypatch):
    """The second job's prompt has one token, so it needs no prefill."""
    engine = make_engine(loaded, concurrency=2)
    running = record_gauge(monkeypatch, engine.metrics.running)
    jobs = [make_job(20, max_tokens=6), with_others(make_job(1, max_tokens=6, seed=2), 1)]
    _, events = serve(engine, jobs)
    assert max(running) == 2
    assert sum(1 for event in events if isinstance(event, Piece) and event.finish_reason) == 2
    assert text_of(events, 0) == text_of(events, 1)


def test_a_partial_answer_is_continued(server):
    for start, rest in (("4172", "95"), ("", "417295"), (None, "417295")):
        message = {"role": "assistant", "content": start}
        assert server.chat(QUESTION, message).choices[0].message.content == rest
    assert text_of_stream(server.chat(QUESTION, {"role": "assistant", "content": "417"}, stream=True)) == "295"
    prompt_tokens = server.chat(QUESTION, max_tokens=1).usage.prompt_tokens
    assert server.chat(QUESTION, {"role": "assistant", "content": "4172"}).usage.prompt_tokens == prompt_tokens + 4
