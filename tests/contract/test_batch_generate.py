"""mlx-lm's batch generation on compressed caches: each prompt gets the tokens that it gets alone."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step
from zoo import build

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache

CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32)
TOKENS = 9
PACKS = 160  # tokens, when the first block behind the 136 that weights of keys need is older than the window


@pytest.fixture(scope="module")
def alone(exact, prompts):
    """What each prompt generates on a compressed cache of its own."""
    lengths = sorted(map(len, prompts))
    assert lengths[0] + TOKENS < lengths[1] < PACKS < lengths[2], "one reaches the body while it generates"
    with compressed(exact[0], CONFIG):
        found = [[part.token for part in stream_generate(*exact, each, max_tokens=TOKENS)] for each in prompts]
    assert len({tuple(tokens) for tokens in found}) == len(prompts)
    return found


def without_end(tokens, tokenizer):
    return [token for token in tokens if token not in tokenizer.eos_token_ids]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"prefill_step_size": 64, "completion_batch_size": 2, "prefill_batch_size": 2},
    ],
)
def test_a_batch_is_each_alone(exact, prompts, alone, options):
    model, tokenizer = exact
    with compressed(model, CONFIG):
        out = batch_generate(
            model, tokenizer, prompts, max_tokens=TOKENS, return_token_ids=True, return_prompt_caches=True, **options
        )
    wanted = [without_end(tokens, tokenizer) for tokens in alone]
    assert out.token_ids == wanted
    for caches, prompt in zip(out.caches, prompts, strict=True):
        assert {type(cache) for cache in caches} == {CompressedKVCache}
        assert all(cache.offset >= len(prompt) for cache in caches)
        assert all(cache.packed_tokens > 0 for cache in caches) == (caches[0].offset >= PACKS)


def test_continuing_from_the_caches_of_a_batch(exact, prompts, alone):
    """A second turn on the caches that a batch returned is that on caches of one's own."""
    model, tokenizer = exact
    first = 4
    with compressed(model, CONFIG):
        options = {"return_prompt_caches": True, "return_token_ids": True}
        out = batch_generate(model, tokenizer, prompts, max_tokens=first, **options)
        rest = [[tokens[len(ids)]] for tokens, ids in zip(alone, out.token_ids, strict=True)]
        assert [tokens[:first] for tokens in alone] == out.token_ids
        again = batch_generate(model, tokenizer, rest, prompt_caches=out.caches, max_tokens=4, **options)
    for tokens, more in zip(alone, again.token_ids, strict=True):
        ends = without_end(tokens, tokenizer)
        assert more == ends[first + 1 : first + 5]


def test_rows_join_and_leave_while_others_generate(exact, prompts, alone):
    model, tokenizer = exact
    got = {}
    with compressed(model, CONFIG):
        generator = BatchGenerator(model, max_tokens=TOKENS, stop_tokens=[[t] for t in tokenizer.eos_token_ids])
        uids = generator.insert(prompts[:2])
        for turn in range(2 * TOKENS):
            if turn == 1:
                uids += generator.insert(prompts[2:])
            if turn == 3:
                removed = generator.remove([uids[1]], return_prompt_caches=True)
            for response in generator.next_generated():
                if response.finish_reason != "stop":
                    got.setdefault(response.uid, []).append(response.token)
        assert generator._generation_batch.prompt_cache == [] or all(
            isinstance(cache, BatchCompressedKVCache) for cache in generator._generation_batch.prompt_cache
        )
        generator.close()
    for place, uid in enumerate(uids):
        wanted = without_end(alone[place], tokenizer)
        assert got[uid] == (wanted if place != 1 else wanted[: len(got[uid])])
    caches, tokens = removed[uids[1]]
    assert all(cache.offset == len(tokens) for cache in caches)


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "gemma4_text", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt_oss", "falcon_h1"))],
)
def test_hybrid_and_sliding_models(name):
    """Compressed layers batch beside mlx-lm's own batches of recurrent and sliding layers."""
    model, tokenizer, alone = build(name), SimpleNamespace(eos_token_ids=[], decode=str), []
    lengths = (70, 20, PACKS - 4)  # the last one packs while it generates
    ids = [[(7 * i * i + (3 + 2 * row) * i) % 160 for i in range(n)] for row, n in enumerate(lengths)]
    with compressed(model, CONFIG):
        for prompt in ids:
            options = {"max_tokens": TOKENS, "prompt_cache": make_prompt_cache(model, CONFIG)}
            alone.append([token for token, _ in generate_step(mx.array(prompt), model, **options)])
        assert batch_generate(model, tokenizer, ids, max_tokens=TOKENS, return_token_ids=True).token_ids == alone
