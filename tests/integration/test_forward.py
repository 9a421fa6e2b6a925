"""The door: each forward pass of a model shows its whole cache list first; afterwards the class is as it was."""

import threading
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.llama import Model as Llama
from zoo import build

from mlx_tq import compressed, make_prompt_cache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.integration import rope_hooks
from mlx_tq.integration.forward import door
from mlx_tq.integration.known_models import model_facts
from mlx_tq.prompt_cache.passes import before_pass, sequence_in

KEEPS = KVConfig(key="q8", value="tq4", sinks=4, window=24)
EXACT = KVConfig(
    key="fp16", value="fp16", sinks=4, window=24, evict=EvictConfig("knorm:trigger=8:granularity=1", budget=60)
)
EVICTS = KVConfig(
    "q8", "tq4", sinks=4, window=24, normalize=False, evict=EvictConfig("knorm:trigger=8:granularity=1", budget=60)
)
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(120)]
PROMPT = mx.array([TOKENS])


class Noted:
    """What a door of one's own was told; it tells the caches on, as `compressed` does."""

    def __init__(self):
        self.passes = []

    def __call__(self, caches, count):
        self.passes.append((list(caches), count))
        return before_pass(caches, count)


@pytest.fixture(autouse=True)
def restored():
    """Every test leaves the class as it found it."""
    before = vars(Llama)["__call__"]
    yield
    assert vars(Llama)["__call__"] is before


def own_caches(passes):
    """The one list of caches that all passes had: the same objects, in the same order."""
    (caches,) = {tuple(map(id, caches)) for caches, _ in passes}
    return caches


def test_generation():
    model, noted = build("llama"), Noted()
    with compressed(model, EVICTS), door(model, noted):
        caches = make_prompt_cache(model, EVICTS)
        assert len(list(generate_step(PROMPT[0], model, max_tokens=5, prompt_cache=caches, prefill_step_size=64))) == 5
    assert own_caches(noted.passes) == tuple(map(id, caches))
    assert [count for _, count in noted.passes] == [64, 55, 1, 1, 1, 1, 1, 1]


def test_batch_generation():
    """Each pass has a cache for every layer, with a row for every prompt that is not done."""
    model, rows = build("llama"), []

    def note(caches, count):
        rows.append([len(layer.rows) for layer in caches])
        return before_pass(caches, count)

    model_facts(model)
    with compressed(model, EVICTS), door(model, note):
        tokenizer = SimpleNamespace(eos_token_ids=[], decode=str)
        prompts = [TOKENS[:90], TOKENS[20:50], TOKENS[:70]]
        batch_generate(model, tokenizer, prompts, max_tokens=[4, 2, 4])
    assert all(len(each) == len(model.layers) and len(set(each)) == 1 for each in rows)
    assert {each[0] for each in rows} == {2, 3}


class Vision(nn.Module):
    """As models of vision are made: a language model inside, which somebody may call by itself."""

    def __init__(self):
        super().__init__()
        self.language_model = build("llama")
        self.args = self.language_model.args

    @property
    def layers(self):
        return self.language_model.layers

    def __call__(self, tokens, cache=None):
        return self.language_model(tokens, cache=cache)


def test_a_part_of_a_model_that_is_called_by_itself():
    """A cache that keeps all needs nobody; one that evicts would miss its round, and says so before it is changed."""
    model = Vision()
    with compressed(model):
        for part in (model.language_model, model.language_model.model):
            evicts, keeps = (make_prompt_cache(model, config) for config in (EVICTS, KEEPS))
            with pytest.raises(CacheFormatError, match=r"been announced .* Call the model itself, not one of its"):
                part(PROMPT, cache=evicts)
            assert all(cache.empty() for cache in evicts)
            mx.eval(part(PROMPT, cache=keeps), model(PROMPT, cache=evicts))
            assert {cache.offset for cache in (*evicts, *keeps)} == {120}
            with pytest.raises(CacheFormatError, match="without having been announced"):
                part(PROMPT[:, :1], cache=evicts)
    with compressed(model.language_model):  # the door of the part itself
        mx.eval(model(PROMPT, cache=make_prompt_cache(model, EVICTS)))


def test_caches_are_found_however_they_are_passed():
    model, noted = build("llama"), Noted()
    with door(model, noted):
        caches = make_prompt_cache(model, KVConfig(key="fp16", value="fp16"))
        mx.eval(
            model(PROMPT, caches), model(inputs=PROMPT[:, :3], cache=caches), model(PROMPT), model(PROMPT, cache=None)
        )
    assert [(each == caches, count) for each, count in noted.passes] == [(True, 120), (True, 3)]


def test_the_newest_context_serves():
    model, outer, inner = build("llama"), Noted(), Noted()
    caches = make_prompt_cache(model, KVConfig(key="fp16", value="fp16"))
    with door(model, outer):
        with door(model, inner):
            model(PROMPT[:, :1], cache=caches)
        model(PROMPT[:, :2], cache=caches)
    model(PROMPT[:, :3], cache=caches)
    assert ([count for _, count in inner.passes], [count for _, count in outer.passes]) == ([1], [2])


def test_each_thread_has_its_models_door():
    """Two models of one class, in threads whose contexts end in the order in which they began."""
    models = [build("llama"), build("llama", seed=1)]
    noted, failed = [Noted(), Noted()], []
    both, first_left = threading.Barrier(2, timeout=60), threading.Event()

    def work(turn):
        try:
            with door(models[turn], noted[turn]):
                both.wait()
                caches = make_prompt_cache(models[turn], KVConfig(key="fp16", value="fp16"))
                for _ in range(turn + 1):
                    mx.eval(models[turn](PROMPT[:, : turn + 1], cache=caches))
                if turn:
                    assert first_left.wait(timeout=60)
                    models[1](PROMPT[:, :7], cache=caches)
            first_left.set()
        except BaseException as error:  # noqa: BLE001 - a thread's failure is the test's
            failed.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [[count for _, count in each.passes] for each in noted] == [[1], [2, 2, 7]]


class Inherits(Llama):
    """Without a `__call__` of its own."""


def test_a_class_that_inherits_its_call():
    model = build("llama")
    model.__class__ = Inherits
    noted, caches = Noted(), make_prompt_cache(model, KVConfig(key="fp16", value="fp16"))
    with door(model, noted):
        assert "__call__" in vars(Inherits)
        model(PROMPT, cache=caches)
        build("llama")(PROMPT)  # its base is another class, and passes through
    assert "__call__" not in vars(Inherits)
    assert len(noted.passes) == 1


@pytest.mark.parametrize("watched", [True, False])
def test_queries_are_remembered_where_somebody_asked(watched):
    """And dropped at the end of the pass."""
    model, seen = build("llama"), []
    with compressed(model), door(model, lambda caches, count: watched):
        attention = model.layers[1].self_attn

        def spy(x, mask=None, cache=None):
            out = type(attention).__call__(attention, x, mask, cache)
            seen.append(len(rope_hooks.outputs()))
            return out

        model.layers[1].self_attn = spy
        model(PROMPT, cache=make_prompt_cache(model, KVConfig(key="fp16", value="fp16")))
        assert not rope_hooks.outputs()
    assert seen == [4 if watched else 0]


def test_a_model_in_one_shard():
    """`model.shard` for a group of one leaves a model that passes its door."""
    model = build("llama")
    plain = model(PROMPT)
    group = mx.distributed.init()
    if group.size() != 1:
        pytest.skip("a group of several processes; this test is about one")
    model.shard(group)
    with compressed(model):
        caches = make_prompt_cache(model, EXACT)
        assert mx.allclose(model(PROMPT, cache=caches), plain, atol=1e-4)
        model(PROMPT, cache=caches)
    assert sequence_in(caches).stats.rounds == 1
