"""Twenty turns up to the last position equal full attention with the evicted positions masked."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from contract.spies import rounds_of
from mlx_lm.models.cache import KVCache

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.models import load

# Packed tokens in the model's own type, so that only the order of float32 sums differs.
EVICT = EvictConfig("triattention:warmup=64:trigger=16:granularity=16", 112, "off")
EXACT = KVConfig(key="fp16", value="fp16", sinks=16, window=32, evict=EVICT)
TURNS = 20
ANSWER = 6  # tokens of an answer
TEMPLATE = 20  # tokens that the template adds to a turn
BUDGETS = 7  # the position limit, in budgets


class Hidden(KVCache):
    """A cache whose mask hides evicted positions."""

    visible = np.zeros((0, 0), bool)

    def make_mask(self, N, return_array=False, window_size=None):
        return mx.array(self.visible[self.offset : self.offset + N, : self.offset + N])


def replay(model, ids, rounds):
    """Return log-probabilities after each token when evicted positions are masked from their eviction on."""
    visible = np.tri(len(ids), dtype=bool)
    for start, positions in rounds:
        visible[start:, positions] = False
    kind = type("Replay", (Hidden,), {"visible": visible})
    logits = model(mx.array([ids]), cache=[kind() for _ in model.layers])[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.full
@pytest.mark.parametrize("budget", [112, pytest.param(512, marks=pytest.mark.full)])
def test_twenty_turns_are_a_replay_under_the_same_masks(budget):
    model, tokenizer = load()  # with its own limits
    model.set_dtype(mx.float32)
    model.args.max_position_embeddings = limit = BUDGETS * budget
    seen = []  # position and log-probabilities of each sampled token

    def sampler(logprobs):
        seen.append((session.cache[0].offset, np.array(logprobs[0].astype(mx.float32))))
        return mx.argmax(logprobs, axis=-1)

    config = replace(EXACT, evict=replace(EXACT.evict, budget=budget))
    sizes, generated, warnings = [], [], []
    options = {"sampler": sampler, "prefill_step_size": 48, "warn": warnings.append}
    with rounds_of(model) as rounds, Session(model, tokenizer, config, **options) as session:
        text = load_text()
        for turn in range(TURNS):
            tokens = (0.97 * limit - len(session.ids)) / (TURNS - turn) - TEMPLATE
            "".join(session.respond(text[turn * 400 :][: int(2 * tokens)], max_tokens=ANSWER))
            generated.append(session.turns[-1].generation_tokens)
            sizes.append(session.stats.nbytes)
            evicted = sorted(int(position) for _, positions in rounds for position in positions)
            live = np.delete(np.arange(len(session.ids)), evicted)
            assert all(np.array_equal(layer.positions, live) for layer in session.cache)
            assert {layer.offset for layer in session.cache} == {len(session.ids)}
        "".join(session.respond("And then?", max_tokens=-1))
        assert 0.9 * limit < len(session.ids) <= limit
        with pytest.raises(ConfigError, match=f"a context of {limit:,} tokens|of the model's {limit:,} positions"):
            list(session.respond(text[:2000]))
        ids = session.ids
    assert any(f"of the model's {limit:,} positions" in warning for warning in warnings)
    assert len(rounds) > TURNS / 2
    assert len(evicted) > (BUDGETS - 3) * budget
    assert max(sizes[TURNS // 2 :]) <= max(sizes[: TURNS // 2])
    expected = replay(model, ids, rounds)
    plain = replay(model, ids, [])
    ours = {at: logprobs for at, logprobs in seen if at <= len(ids)}
    places = sorted(ours)
    assert len(places) > sum(generated)
    error = np.abs(np.stack([ours[at] for at in places]) - expected[np.array(places) - 1]).max()
    assert error < 2e-3
    assert np.abs(expected - plain)[np.array(places) - 1].max() > 0.1  # eviction matters
