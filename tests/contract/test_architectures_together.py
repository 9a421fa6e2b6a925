"""Batches, drafts and losses of all architectures: what runs is what a sequence gets alone, else it is refused."""

from importlib import import_module

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as native
from zoo import ARCHITECTURES, build

from contract import spies
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.batch_probe import batch_facts
from mlx_tq.prompt_cache.compressed import compressed, compressed_attention, make_prompt_cache
from mlx_tq.speculative.lookup_decode import LookupDecoder
from mlx_tq.speculative.lookup_mode import LookupMode
from mlx_tq.speculative.prompt_lookup import PromptLookup

generate = import_module("mlx_lm.generate")  # whose functions are patched by name
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32)
CHUNKS = [166, 40, 1, 5, 8, 1]
LENGTHS = (70, 20, 156, 5)  # the third packs a block while it generates
TOKENS = 9
BLOCKED = ("plamo3", "phi3small")  # several tokens do not get the logits of one at a time
BUILT = [name for name, arch in ARCHITECTURES.items() if arch.buildable]
QUICK = {"lfm2", "bailing_moe_linear"}
# Mean KL of the logits, in nats. Where attention is sharp, or experts are near a tie, a tiny random model loses more.
LIMITS = {"q8": 3e-6, "tq4": 7e-4}
SHARP = {
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gemma3n",
    "nemotron",
    "qwen2_moe",
    "afm7",
    "olmo2",
    "hunyuan",
    "bitnet",
    "olmo_hybrid",
    "phimoe",
    "minimax_m3_vl",  # experts and blocks of keys: if it takes all of both, it loses no more than others
}
# An indexer selects 16 tokens. Without one, these lose no more than others.
DENSE = {"deepseek_v32", "glm_moe_dsa"}
SHARP_LIMITS = {"q8": 5e-4, "tq4": 2e-2}


def cases(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in names]


def ids(length, seed=0):
    return [(7 * i * i + (3 + 2 * seed) * i) % 160 for i in range(length)]


def configs(name):
    return [PROFILES["off"], *([CONFIG] if ARCHITECTURES[name].servable else [])]


def batch(model, prompts):
    """Return the tokens of each prompt from mlx-lm's batch generator."""
    generator = BatchGenerator(model, max_tokens=TOKENS, stop_tokens=[])
    tokens = {uid: [] for uid in generator.insert(prompts)}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return list(tokens.values())


@pytest.mark.parametrize("name", cases(BUILT))
def test_a_batch_is_each_alone_or_refused(name):
    model, prompts = build(name), [ids(length, seed) for seed, length in enumerate(LENGTHS)]
    for config in configs(name):
        with compressed(model, config):
            options = {"max_tokens": TOKENS}
            alone = [[token for token, _ in generate_step(mx.array(prompt), model, **options)] for prompt in prompts]
            make = None if config.is_off else lambda config=config: make_prompt_cache(model, config)
            facts = batch_facts(model, make)
            if facts.refusal or facts.padding_refusal:
                with pytest.raises(
                    (UnsupportedModelError, ValueError), match=r"one at a time|does not yet support batching"
                ):
                    batch(model, prompts)
            else:
                assert batch(model, prompts) == alone


def is_blocked(name, config, *, keeps_states):
    """Whether drafts are refused: a state cannot go back, or an indexer numbers the latents of a pass."""
    is_indexed, stuck = name in DENSE and not config.is_off, {"Y"} if keeps_states else {"A", "Y"}
    return name in BLOCKED or is_indexed or bool(set(ARCHITECTURES[name].layers) & stuck)


@pytest.mark.parametrize("name", cases(BUILT))
def test_drafts_change_nothing_or_are_refused(name):
    """Prompt and answer are longer than the sliding windows of the zoo, of 16 tokens."""
    model, other = build(name), build("llama", seed=1, vocab_size=ARCHITECTURES[name].config["vocab_size"])
    prompt = mx.array(ids(20))
    for config in configs(name):
        with compressed(model, config):
            plain = [token for token, _ in generate_step(prompt, model, max_tokens=40)]
            for draft in (other, build(name)):  # guesses that are mostly wrong, and its own
                steps = generate.speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=40)
                if is_blocked(name, config, keeps_states=False):
                    with pytest.raises(UnsupportedModelError, match="speculative decoding is not supported"):
                        next(steps)
                else:
                    drafted = list(steps)
                    assert [token for token, _, _ in drafted] == plain
                    assert draft is other or sum(is_drafted for *_, is_drafted in drafted) > 10


@pytest.mark.parametrize("name", cases(BUILT))
def test_lookup_changes_nothing_or_is_refused(name):
    model, prompt = build(name), ids(20)
    for config in configs(name):
        with compressed(model, config):
            caches = native.make_prompt_cache(model)
            reason = LookupMode("on").blocker(model, caches)
            assert bool(reason) == is_blocked(name, config, keeps_states=True)
            if reason:
                continue
            plain = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=40)]
            # A conversation in which the answer was given before, with some other tokens.
            said = [token if number % 9 else 7 for number, token in enumerate(plain, start=1)]
            lookup = PromptLookup([*prompt, *said, *prompt], None)
            found = [
                token for token, *_ in LookupDecoder(model, lookup, caches, max_tokens=40).tokens(mx.array(prompt))
            ]
            assert found == plain
            assert lookup.accepted > 10


@pytest.mark.parametrize("name", cases(name for name in BUILT if ARCHITECTURES[name].servable and name not in DENSE))
def test_what_formats_lose(name):
    check_loss(build(name, spread=False), SHARP_LIMITS if name in SHARP else LIMITS)


def test_loss_without_expert_and_block_selection():
    check_loss(build("minimax_m3_vl", spread=False, num_experts_per_tok=4, index_topk_blocks=100), LIMITS)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(DENSE))
def test_loss_when_the_indexer_selects_all_tokens(name):
    check_loss(build(name, spread=False, index_topk=4096), LIMITS)


def check_loss(model, limits):
    plain = spies.run(model, native.make_prompt_cache(model), ids(sum(CHUNKS)), CHUNKS)
    for kind, limit in limits.items():
        with compressed_attention(model):
            caches = make_prompt_cache(model, KVConfig(key=kind, value=kind, sinks=16, window=32))
            packed = spies.run(model, caches, ids(sum(CHUNKS)), CHUNKS)
        expected, found = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (plain, packed))
        assert (mx.exp(expected) * (expected - found)).sum(axis=-1).mean() <= limit
