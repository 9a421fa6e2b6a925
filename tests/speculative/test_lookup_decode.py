"""Prompt lookup changes the speed of an answer and nothing else."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from smollm2 import needs_smollm2
from zoo import ARCHITECTURES, build

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.cache.layer import cache_parts
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.layer_group import cache_offsets
from mlx_tq.speculative.draft_gate import DraftGate
from mlx_tq.speculative.lookup_decode import stream_with_lookup
from mlx_tq.speculative.prompt_lookup import PromptLookup

CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32)
TEXT = "The access code for Victor is 0707. " * 6 + "The"
TOKENS = 40  # with the prompt, more than fit into the window: blocks are packed while drafts are verified
FACTS = f"Item 3 weighs 20 grams. The secret code word is velvet. {TEXT} What is the secret code word?"


def make_caches(model, config):
    return mlx_lm_cache(model) if config is None else make_prompt_cache(model, config)


def plain(model, tokenizer, prompt, config=CONFIG, seed=0, tokens=TOKENS, **options):
    mx.random.seed(seed)
    with compressed_attention(model):
        caches = make_caches(model, config)
        parts = stream_generate(model, tokenizer, prompt, max_tokens=tokens, prompt_cache=caches, **options)
        return [part.token for part in parts], mx.random.uniform().item()


def recall(prompt, said):
    """Return a conversation in which the answer was given before, with some tokens that differ."""
    return [*prompt[-3:], *(token + (number % 9 == 8) for number, token in enumerate(said)), *prompt]


def looked_up(model, tokenizer, prompt, ids, config=CONFIG, seed=0, tokens=TOKENS, gate=None, **options):
    """Return the tokens, the next random number, and the lookup in a conversation of tokens `ids`."""
    lookup = PromptLookup(ids, gate)
    mx.random.seed(seed)
    with compressed_attention(model):
        caches = make_caches(model, config)
        options |= {"prompt_cache": caches, "max_tokens": tokens}
        said = [part.token for part in stream_with_lookup(model, tokenizer, prompt, lookup, **options)]
        assert set(cache_offsets(caches)) == {len(prompt) + len(said)}
        return said, mx.random.uniform().item(), lookup


def penalties():
    return make_logits_processors({7: -1.0}, 1.05, 20)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(CONFIG, {}, marks=pytest.mark.full),
        (CONFIG, {"sampler": make_sampler(0.7, top_p=0.9)}),
        pytest.param(None, {"sampler": make_sampler(0.7)}, marks=pytest.mark.full),
        pytest.param(CONFIG, {"logits_processors": penalties()}, marks=pytest.mark.full),
        pytest.param(None, {"kv_bits": 8, "quantized_kv_start": 20}, marks=pytest.mark.full),
        (None, {"kv_bits": 2, "quantized_kv_start": 110}),
    ],
    ids=["greedy", "sampled", "mlx-lm's cache", "penalties", "quantized", "quantized while it answers"],
)
def test_same_answer_and_same_random_numbers_as_without(exact, config, options):
    model, tokenizer = exact
    prompt = tokenizer.encode(TEXT)
    said, number = plain(model, tokenizer, prompt, config, **options)
    drafted, drawn, lookup = looked_up(model, tokenizer, prompt, recall(prompt, said), config, **options)
    assert (drafted, drawn) == (said, number)
    assert lookup.drafted > lookup.accepted > len(said) / 3


def test_an_answer_that_is_left_early_keeps_the_tokens_that_were_read(exact):
    model, tokenizer = exact
    prompt, ends = tokenizer.encode(TEXT), set()
    said, _ = plain(model, tokenizer, prompt)
    with compressed_attention(model):
        for count in range(9, 14):
            caches, lookup = make_prompt_cache(model, CONFIG), PromptLookup(recall(prompt, said), None)
            options = {"prompt_cache": caches, "max_tokens": TOKENS}
            with closing(stream_with_lookup(model, tokenizer, prompt, lookup, **options)) as parts:
                read = [next(parts) for _ in range(count)]
            assert [part.token for part in read] == said[:count]
            assert set(cache_offsets(caches)) == {len(prompt) + count}
            ends.add(read[-1].from_draft)
    assert ends == {True, False}  # in the middle of a draft, and outside


@pytest.mark.parametrize("length", [pytest.param(3, marks=pytest.mark.full), 30])
def test_drafts_go_on_when_a_sliding_window_is_full(exact, length):
    tokenizer = exact[1]
    model = build("gemma3_text")
    assert ARCHITECTURES["gemma3_text"].config["sliding_window"] == 16
    prompt = [*range(3, 3 + length)]
    said, _ = plain(model, tokenizer, prompt, None)
    drafted, _, lookup = looked_up(model, tokenizer, prompt, recall(prompt, said), None)
    assert drafted == said
    assert lookup.drafted > lookup.accepted > 10


@pytest.mark.parametrize("config", [CONFIG, None], ids=["compressed", "mlx-lm's cache"])
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.full)])
def test_states_are_set_back_when_a_draft_is_rejected(exact, name, config):
    """In layers of their own, and next to keys and values in one layer."""
    model, prompt, ends = build(name), [5 + i * i % 90 for i in range(60)], []
    said, _ = plain(model, exact[1], prompt, config)
    lookup = PromptLookup(recall(prompt, said), None)
    for stream in (stream_generate, partial(stream_with_lookup, lookup=lookup)):
        caches = make_caches(model, config)
        with compressed_attention(model):
            parts = [*stream(model, exact[1], prompt, max_tokens=TOKENS, prompt_cache=caches)]
        assert [part.token for part in parts] == said
        ends.append([entry for part in cache_parts(caches) if isinstance(part, ArraysCache) for entry in part.cache])
    assert lookup.drafted > lookup.accepted > len(said) / 3
    assert all(mx.allclose(*pair, atol=1e-4) for pair in zip(*ends, strict=True))


def say(session, text):
    return "".join(session.respond(text))


def test_a_session_drafts_by_default(exact):
    with Session(*exact, CONFIG, max_tokens=16) as session:
        for _ in range(2):
            say(session, FACTS)
        assert max(turn.drafted_tokens for turn in session.turns) > 0


@pytest.mark.full
def test_turns_of_a_seeded_session_are_the_same_with_and_without(exact):
    model, tokenizer = exact
    answers = {}
    for mode in ("off", "auto", "on"):
        options = {"seed": 3, "max_tokens": 24, "sampler": make_sampler(0.3), "prompt_lookup": mode}
        with Session(model, tokenizer, CONFIG, **options) as session:
            answers[mode] = [say(session, FACTS) for _ in range(3)], session.ids
            drafted = [turn.drafted_tokens for turn in session.turns]
            assert (max(drafted) > 0) == (mode != "off")
            assert all(turn.accepted_tokens <= turn.drafted_tokens for turn in session.turns)
    assert answers["auto"] == answers["on"] == answers["off"]


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("llama", replace(CONFIG, evict=EvictConfig("recency", 128, "off")), "an eviction round cannot be undone"),
        ("plamo3", PROFILES["off"], "the model's prefill sees windows of 17 tokens, and its decode steps of 16"),
        ("phi3small", PROFILES["off"], "the model's block-sparse attention"),
    ],
)
def test_caches_that_cannot_drop_a_draft(exact, name, config, reason):
    model = build(name)
    with pytest.raises(ConfigError, match=f"prompt lookup is on, but .*{reason}.*Choose auto"):
        Session(model, exact[1], config, prompt_lookup="on")
    with Session(model, exact[1], config, prompt_lookup="auto") as session:
        blocker = session.lookup_mode.blocker(model, session.cache)
        assert blocker is not None
        assert reason in blocker


def test_an_unknown_mode(exact):
    with pytest.raises(ConfigError, match="prompt_lookup"):
        Session(*exact, prompt_lookup="maybe")


def test_the_gate_learns_while_it_answers(exact):
    model, tokenizer = exact
    gate, prompt = DraftGate(), tokenizer.encode(TEXT)
    said, _ = plain(model, tokenizer, prompt)
    assert looked_up(model, tokenizer, prompt, recall(prompt, said), gate=gate)[0] == said
    assert gate.acceptance(8) > 0.5
    assert gate.cost(8) != DraftGate().cost(8)


@pytest.mark.full
@needs_smollm2
def test_fifty_prompts_of_smollm2():
    """The same tokens as greedy decoding in float32, with drafts wherever text repeats."""
    model, tokenizer = load("smollm2", dtype="float32")
    text, drafted = load_text(), 0
    for number in range(50):
        question = ("Repeat this text", "Summarize this text", "Correct this text", "Continue this text")[number % 4]
        message = f"{question}:\n{text[number * 700 :][: 150 + 20 * number]}"
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)
        options = {"config": PROFILES["balanced"], "tokens": 48}
        said, _, lookup = looked_up(model, tokenizer, prompt, prompt, **options)
        assert said == plain(model, tokenizer, prompt, **options)[0], number
        drafted += lookup.drafted
    assert drafted > 500
