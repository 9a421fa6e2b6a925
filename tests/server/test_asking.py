"""What questions bring back to the rows of a batch, and looks while its answers are made."""

import mlx.core as mx
from cli.tools import facts
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_tq import compressed, make_prompt_cache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.server import asking
from mlx_tq.server.asking import Asking
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.jobs import Job, Piece, Quoted, Start, Started
from mlx_tq.session.looks import Looks
from mlx_tq.session.recall import question_of, read, recall
from mlx_tq.session.transcript import Rehydration

from .engines import GREEDY, LIMITS, make_engine, outcome, serve

CONFIG = KVConfig("q8", "tq4", sinks=16, window=64, evict=EvictConfig("recency:trigger=32", 160, recall=96))
ENDLESS = make_logits_processors({0: -100.0, 2: -100.0})  # the end-of-text tokens of the embedded model
STEP = LIMITS["prefill_step_size"]
TOKENS = CONFIG.evict.recall_every + 8  # one look; when the next one comes depends on how long it took


def asked(loaded, code=417295, lines=40):
    text, question = facts(lines, code)
    return loaded[1].encode(f"{text}\n{question}")


def job_of(ids):
    return Job(Prompt(ids, [ids], ["user"]), TOKENS, GREEDY, ENDLESS)


def alone(loaded, ids):
    """Tokens of the answer as `mlx_tq.generate` makes it, and what its looks brought."""
    model, tokenizer = loaded
    caches = make_prompt_cache(model, CONFIG)
    document, question = question_of(tokenizer, ids)
    with compressed(model):
        read(model, caches, document, STEP)
        looks = Looks(caches, recall(model, caches, question, STEP))
        looks.begin()
        read(model, caches, question[:-1], STEP)
        tokens, options = [], {"prompt_cache": caches, "max_tokens": TOKENS, "logits_processors": ENDLESS}
        for token, _ in generate_step(mx.array(question[-1:]), model, **options):
            tokens.append(token)
            if len(tokens) < TOKENS:
                looks.token()
    looks.end()
    return tokens, looks


def test_answers_of_a_batch_look_as_they_do_alone(loaded, monkeypatch):
    """Each with its own queries into its own archive; what came is said with the last token."""
    heard = {}
    listen = Asking.listen

    def spied(self, running, batch, uid):
        listen(self, running, batch, uid)
        heard[running.job] = running.looks

    monkeypatch.setattr(Asking, "listen", spied)
    prompts = [asked(loaded), asked(loaded, 860312, 64)]
    jobs = [job_of(ids) for ids in prompts]
    engine = make_engine(loaded, CONFIG)
    total = 0
    for ids, job, events in zip(prompts, jobs, serve(engine, jobs), strict=True):
        tokens, looks = alone(loaded, ids)
        assert "".join(event.text for event in events if isinstance(event, Piece)) == loaded[1].decode(tokens).lstrip()
        assert (heard[job].count, looks.count) == (1, 1)
        assert heard[job].positions == looks.positions != []
        brought = events[-1].recalled
        assert brought == heard[job].brought()
        assert brought.positions == looks.brought().positions
        total += len(brought.positions)
    assert engine._metrics.registry.get_sample_value("mlx_tq_recalled_tokens_total") == total
    assert heard[jobs[0]].positions != heard[jobs[1]].positions


def test_a_quotation_has_what_did_not_come_as_rows(loaded):
    """It is made when the rows are back, stands before the words, is held, and is told to the session."""
    tokenizer, engine, told = loaded[1], make_engine(loaded, CONFIG), []
    quotation = Rehydration([(20, 24)], ["trees and a gate"], tokenizer.encode("trees and a gate"))
    begun = job_of(asked(loaded)[:-8])
    begun.start = Start(None, 0)

    def turn(left, words):
        def quote(live, rows):
            told.append((live, rows))
            return quotation

        before = tokenizer.encode("\n\n")
        ids = [*before, *tokenizer.encode(words)]
        job = Job(Prompt([*left.tokens, *ids], [left.tokens, ids], ["assistant", "user"]), 8, GREEDY, [])
        job.start = Start(left.caches, len(left.tokens), len(before), quote=quote, reserve=len(quotation.ids))
        return job, len(left.tokens), ids

    async def go_on():
        found = [await begun.left.get()]
        for words in ("What is the access code?", f"{facts(16, 5)[0]}\nWhat is the access code?"):
            job, start, ids = turn(found[-1], words)
            engine.submit(job)
            events = await outcome(job)
            found.append(await job.left.get())
            assert [event.tokens for event in events if isinstance(event, Quoted)] == [len(quotation.ids)]
            assert isinstance(events[0], Started)
            left, at = found[-1], start + found[-1].at
            assert left.quoted == quotation
            assert left.tokens[: at + len(quotation.ids)] == [*left.tokens[:start], *ids[: left.at], *quotation.ids]
            assert left.tokens[at + len(quotation.ids) :][: len(ids) - left.at] == ids[left.at :]
            said = events[-1].recalled
            live, rows = told[-1]
            assert rows == len(said.meaning) == 0
            assert {*said.positions} <= {*live.tolist()}
            assert said.positions
            assert {*live.tolist()} < {*range(at)}
            kept = sequence_in(left.caches)
            assert kept.held is None, "the answer is complete"
            yield left.at, len(ids)

    async def both():
        return [each async for each in go_on()]

    _, ((first, _), (second, length)) = serve(engine, [begun], both)
    assert first == len(tokenizer.encode("\n\n"))
    long = [*tokenizer.encode("\n\n"), *tokenizer.encode(f"{facts(16, 5)[0]}\nWhat is the access code?")]
    question = question_of(tokenizer, long)[1]
    assert second == length - len(question), "of a long turn the document was read first"


def test_a_quotation_stays_while_the_answer_is_made(loaded, monkeypatch):
    """Eviction takes none of it, which it would have."""
    spans, original = [], asking.hold

    monkeypatch.setattr(asking, "hold", lambda caches, span: (spans.append(span), original(caches, span)))
    tokenizer, engine = loaded[1], make_engine(loaded, CONFIG)
    quoted = tokenizer.encode("The gate of house 3 is red.")
    begun = job_of(asked(loaded)[:-8])
    begun.start = Start(None, 0)

    async def go_on():
        left = await begun.left.get()
        ids = tokenizer.encode("\n\nWhat is the access code?")
        job = Job(
            Prompt([*left.tokens, *ids], [left.tokens, ids], ["assistant", "user"]), TOKENS + 160, GREEDY, ENDLESS
        )
        quotation = Rehydration([(0, 9)], ["x"], quoted)
        job.start = Start(left.caches, len(left.tokens), 1, quote=lambda *_: quotation, reserve=len(quoted))
        engine.submit(job)
        await outcome(job)
        return len(left.tokens) + 1, await job.left.get()

    _, (at, left) = serve(engine, [begun], go_on)
    assert spans == [PositionRange(at, at + len(quoted))]
    live = left.caches[0].positions.tolist()
    assert {*range(at, at + len(quoted))} <= {*live}
    assert not {at - 32, at + len(quoted) + 32} <= {*live}
