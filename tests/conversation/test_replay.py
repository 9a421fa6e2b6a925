"""Twenty turns up to the last position: what was said is what full attention says with the same tokens hidden."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from contract.spies import rounds_of
from mlx_lm.models.cache import KVCache

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.commands.needles.haystack import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.models import load

# Packed tokens in the model's own type, so that only the order of float32 sums differs.
EVICT = EvictConfig("triattention:warmup=64:trigger=16:granularity=16", 112, "off")
EXACT = KVConfig(key="fp16", value="fp16", prefix=16, window=32, evict=EVICT)
TURNS = 20
SAID = 6  # tokens of an answer
AROUND = 20  # tokens of a turn beside its text
BUDGETS = 7  # the position limit, in budgets


class Hidden(KVCache):
    """Shows each query what its row of a matrix says."""

    visible = np.zeros((0, 0), bool)

    def make_mask(self, N, return_array=False, window_size=None):
        return mx.array(self.visible[self.offset : self.offset + N, : self.offset + N])


def replay(model, ids, rounds):
    """Log-probabilities behind each token when evicted positions are masked from the pass on in which they left."""
    visible = np.tri(len(ids), dtype=bool)
    for start, positions in rounds:
        visible[start:, positions] = False
    kind = type("Replay", (Hidden,), {"visible": visible})
    logits = model(mx.array([ids]), cache=[kind() for _ in model.layers])[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("budget", [112, pytest.param(512, marks=pytest.mark.full)])
def test_twenty_turns_are_a_replay_under_the_same_masks(budget):
    """512 tokens of budget lead to the 3,584th position."""
    model, tokenizer = load()  # one of its own: what a model says of itself is read once
    model.set_dtype(mx.float32)
    model.args.max_position_embeddings = limit = BUDGETS * budget
    heard = []  # log-probabilities behind each token that was read or said, before the next

    def sampler(logprobs):
        heard.append((session.cache[0].offset, np.array(logprobs[0].astype(mx.float32))))
        return mx.argmax(logprobs, axis=-1)

    config = replace(EXACT, evict=replace(EXACT.evict, budget=budget))
    sizes, said, warned = [], [], []
    options = {"sampler": sampler, "prefill_step_size": 48, "warn": warned.append}
    with rounds_of(model) as rounds, Session(model, tokenizer, config, **options) as session:
        text = load_text()
        for turn in range(TURNS):
            tokens = (0.97 * limit - len(session.ids)) / (TURNS - turn) - AROUND
            "".join(session.respond(text[turn * 400 :][: int(2 * tokens)], max_tokens=SAID))
            said.append(session.turns[-1].generation_tokens)
            sizes.append(session.stats.nbytes)
            gone = sorted(int(position) for _, positions in rounds for position in positions)
            live = np.delete(np.arange(len(session.ids)), gone)
            assert all(np.array_equal(layer.positions, live) for layer in session.cache)
            assert {layer.offset for layer in session.cache} == {len(session.ids)}
        "".join(session.respond("And then?", max_tokens=-1))
        assert 0.9 * limit < len(session.ids) <= limit
        with pytest.raises(ConfigError, match=f"a context of {limit:,} tokens|the model has {limit:,} positions"):
            list(session.respond(text[:2000]))
        ids = session.ids
    assert any(f"of the model's {limit:,} positions" in warning for warning in warned)
    assert len(rounds) > TURNS / 2
    assert len(gone) > (BUDGETS - 3) * budget
    assert max(sizes[TURNS // 2 :]) <= max(sizes[: TURNS // 2])
    expected = replay(model, ids, rounds)
    plain = replay(model, ids, [])
    ours = {at: logprobs for at, logprobs in heard if at <= len(ids)}
    places = sorted(ours)
    assert len(places) > sum(said)
    error = np.abs(np.stack([ours[at] for at in places]) - expected[np.array(places) - 1]).max()
    assert error < 2e-3
    assert np.abs(expected - plain)[np.array(places) - 1].max() > 0.1  # eviction is felt
