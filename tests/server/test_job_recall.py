"""Recall in a batch: rows for questions, quotations for sessions, and searches while answers are decoded."""

import asyncio
from functools import partial

import mlx.core as mx
import pytest
from cli.tools import facts
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_tq import compressed_attention, make_prompt_cache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.server.job import Piece, Quoted, SessionStart, Started
from mlx_tq.session.restore import RecallDuringDecode, prefill, recall_rows, split_question
from mlx_tq.session.transcript import Quotation, sentence_at

from .conftest import ENDLESS as BIAS
from .engines import LIMITS, job_of, make_engine, metric, outcome, serve, text_of

CONFIG = KVConfig("q8", "tq4", sinks=16, window=64, evict=EvictConfig("recency:trigger=32", 160, recall=96))
ENDLESS = make_logits_processors({int(token): bias for token, bias in BIAS.items()})
STEP = LIMITS["prefill_step_size"]
TOKENS = CONFIG.evict.recall_every + 8  # one search; when the next one comes depends on how long it took


def prompt_ids(loaded, code=417295, lines=40):
    text, question = facts(lines, code)
    return loaded[1].encode(f"{text}\n{question}")


def generate_alone(loaded, ids):
    """Return the tokens that `mlx_tq.generate` would generate, and what was recalled meanwhile."""
    model, tokenizer = loaded
    caches = make_prompt_cache(model, CONFIG)
    document, question = split_question(tokenizer, ids)
    with compressed_attention(model):
        prefill(model, caches, document, STEP)
        sentences = partial(sentence_at, ids=ids, decode=tokenizer.decode)
        recalled = recall_rows(model, caches, question, STEP, passage_at=sentences)
        recall = RecallDuringDecode(caches, recalled, passage_at=sentences)
        recall.start()
        prefill(model, caches, question[:-1], STEP)
        tokens, options = [], {"prompt_cache": caches, "max_tokens": TOKENS, "logits_processors": ENDLESS}
        for token, _ in generate_step(mx.array(question[-1:]), model, **options):
            tokens.append(token)
            if len(tokens) < TOKENS:
                recall.count_token()
    recall.stop()
    assert recall.searches == 1
    assert recall.positions
    return tokens, recall.result()


@pytest.mark.full
def test_answers_of_a_batch_search_the_archive_as_they_do_alone(loaded):
    """One answer begins later. The last token reports what was recalled."""
    prompts = [prompt_ids(loaded), prompt_ids(loaded, 860312, 64)]
    engine, total = make_engine(loaded, CONFIG), []
    jobs = [job_of(ids, max_tokens=TOKENS, processors=ENDLESS) for ids in prompts]

    async def then():
        engine.submit(jobs[0])
        first = []
        while not (first and isinstance(first[-1], Piece)):
            first.append(await jobs[0].events.get())
        engine.submit(jobs[1])
        rest, *others = await asyncio.gather(*map(outcome, jobs))
        return [[*first, *rest], *others]

    for ids, events in zip(prompts, serve(engine, [], then)[1], strict=True):
        tokens, recalled = generate_alone(loaded, ids)
        assert text_of(events) == loaded[1].decode(tokens).lstrip()
        result = events[-1].recalled
        for name in ("by_attention", "archived", "is_partial"):
            assert getattr(result, name) == getattr(recalled, name)
        total.append(result.positions)
    assert metric(engine, "recalled_tokens_total") == sum(map(len, total))
    assert total[0] != total[1]


@pytest.fixture
def session(loaded):
    """Return an engine and the first job of a session, without its question."""
    first = job_of(prompt_ids(loaded)[:-8], max_tokens=TOKENS, processors=ENDLESS, session=SessionStart(None, 0))
    return make_engine(loaded, CONFIG), first


def turn_of(result, user_start, ids, quote, max_quotation, **fields):
    start = SessionStart(result.caches, len(result.tokens), user_start, quote=quote, max_quotation=max_quotation)
    return job_of(result.tokens, ids, session=start, **fields)


@pytest.mark.full
def test_a_quotation_repeats_no_recalled_row(loaded, session):
    """It follows the recall, precedes the user's text, and is reported to the session."""
    tokenizer, (engine, first), calls = loaded[1], session, []
    quotation = Quotation([(20, 24)], ["trees and a gate"], tokenizer.encode("trees and a gate"))
    before = tokenizer.encode("\n\n")

    def quote(live, recalled_tokens):
        calls.append((live, recalled_tokens))
        return quotation

    async def run_turn(result, words):
        ids = [*before, *tokenizer.encode(words)]
        job = turn_of(result, len(before), ids, quote, len(quotation.ids), max_tokens=8)
        engine.submit(job)
        events, start = await outcome(job), len(result.tokens)
        result = await job.session_result.get()
        assert isinstance(events[0], Started)
        assert [event.tokens for event in events if isinstance(event, Quoted)] == [len(quotation.ids)]
        index = result.quotation_start
        assert result.quotation == quotation
        assert result.tokens[start : start + index] == ids[:index]
        assert result.tokens[start + index :][: len(quotation.ids)] == quotation.ids
        assert result.tokens[start + index + len(quotation.ids) :][: len(ids) - index] == ids[index:]
        recalled, (live, recalled_by_search) = events[-1].recalled, calls[-1]
        assert recalled_by_search == len(recalled.by_search) == 0
        assert recalled.positions
        assert {*recalled.positions} <= {*live.tolist()} < {*range(start + index)}
        assert layer_group_of(result.caches).pinned is None, "the answer is complete"
        return result, index, ids

    async def then():
        result = await first.session_result.get()
        result, short_index, _ = await run_turn(result, "What is the access code?")
        return short_index, *(await run_turn(result, f"{facts(16, 5)[0]}\nWhat is the access code?"))[1:]

    _, (short_index, long_index, long_ids) = serve(engine, [first], then)
    assert short_index == len(before)
    question = split_question(tokenizer, long_ids)[1]
    assert long_index == len(long_ids) - len(question), "the document of a long turn comes before the quotation"


@pytest.mark.full  # it decodes hundreds of tokens
def test_a_quotation_is_not_evicted_while_the_answer_is_decoded(loaded, session):
    tokenizer, (engine, first) = loaded[1], session
    quoted = tokenizer.encode("The gate of house 3 is red.")
    quotation = Quotation([(0, 9)], ["x"], quoted)

    async def then():
        result = await first.session_result.get()
        ids = tokenizer.encode("\n\nWhat is the access code?")
        fields = {"max_tokens": TOKENS + 160, "processors": ENDLESS}
        job = turn_of(result, 1, ids, lambda *_: quotation, len(quoted), **fields)
        engine.submit(job)
        await outcome(job)
        return len(result.tokens) + 1, await job.session_result.get()

    _, (start, result) = serve(engine, [first], then)
    live = {*result.caches[0].positions.tolist()}
    assert {*range(start, start + len(quoted))} <= live
    assert not {start - 32, start + len(quoted) + 32} <= live
