"""Running answers keep a share of the time while other prompts are prefilled."""

import time

import pytest

from mlx_tq.server.decode_share import DecodeShare
from mlx_tq.server.job import Piece, Started

from .engines import make_engine, make_job, run_job, serve

STEP, PROMPT = 64, 640


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("prefill_seconds", [0.05, 2.0])
def test_answers_get_their_share_of_the_seconds(share, prefill_seconds):
    decode_seconds, shares = 0.03, DecodeShare(share)
    steps = {False: 0, True: 0}
    for _ in range(2000):
        prefills = shares.may_prefill(decodes=True)
        steps[prefills] += 1
        shares.count(decode_seconds + prefills * prefill_seconds, prefilled=prefills, decoded=True)
    decoding, prefilling = decode_seconds * sum(steps.values()), prefill_seconds * steps[True]
    least = decode_seconds / (decode_seconds + prefill_seconds)  # of a step with prefill
    assert decoding / (decoding + prefilling) == pytest.approx(max(share, least), abs=0.06)


def test_decoding_while_no_prompt_waits_is_no_credit():
    shares, prefills = DecodeShare(0.5), []
    for _ in range(1000):
        shares.count(0.05, prefilled=False, decoded=True)
    for _ in range(100):
        prefills.append(shares.may_prefill(decodes=True))
        shares.count(0.05 + prefills[-1], prefilled=prefills[-1], decoded=True)
    assert 4 <= sum(prefills) <= 6


def test_without_answers_every_step_prefills():
    shares = DecodeShare(0.5)
    shares.count(5.0, prefilled=True, decoded=True)
    assert not shares.may_prefill(decodes=True)
    assert shares.may_prefill(decodes=False)
    assert shares.may_prefill(decodes=True), "what was owed to an answer that has ended"
    shares.count(5.0, prefilled=True, decoded=False)
    assert shares.may_prefill(decodes=True)


@pytest.mark.full
@pytest.mark.parametrize(("share", "least", "most"), [(0, 1, 1.3), (0.5, 3, 1000)])
def test_an_answer_goes_on_while_a_prompt_is_prefilled(loaded, monkeypatch, share, least, most):
    """Tokens of the answer for each prefill step of the prompt."""
    model_class = type(loaded[0])
    forward = model_class.__call__

    def slow(model, tokens, *args, **options):
        time.sleep(0.001 * tokens.shape[1])
        return forward(model, tokens, *args, **options)

    monkeypatch.setattr(model_class, "__call__", slow)
    engine = make_engine(loaded, decode_share=share, prefill_step_size=STEP)
    endless = [lambda _, logits: logits.at[:, :4].add(-100.0)]  # the end of the text is among these tokens
    answer, later = make_job(20, max_tokens=400, processors=endless), make_job(PROMPT, seed=5, max_tokens=1)

    async def tokens_meanwhile():
        engine.submit(answer)
        while not isinstance(await answer.events.get(), Piece):
            pass
        assert isinstance((await run_job(engine, later))[0], Started)
        engine.cancel(answer)
        return answer.events.qsize()

    _, tokens = serve(engine, [], then=tokens_meanwhile)
    assert least <= tokens / (PROMPT / STEP + 1) <= most
