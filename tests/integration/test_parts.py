"""Of the caches in a CacheList, those that attention reads are compressed, and the others stay mlx-lm's own."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache
from zoo import build

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cli.screen import plan_dict, show_plan
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import model_facts
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.recording import record_attention
from mlx_tq.session.compaction import compact_prompt_cache

CONFIG = KVConfig(key="q8", value="tq4", sinks=4, window=24)
COMPUTES = r"the model computes with its keys \(minimax_m3_vl\.py: scores = q\.astype.+\)"


@pytest.fixture(scope="module")
def model():
    return build("minimax_m3_vl")


def parts_of(model):
    facts = model_facts(model)
    return [(slot.index, slot.part) for slot in facts.slots], [(part.index, part.part) for part in facts.uncompressed]


def test_a_part_that_the_model_computes_with_stays_as_it_is(model):
    assert parts_of(model) == ([(0, 0), (1, 0), (2, 0)], [(1, 1), (2, 1)])
    kinds = [[type(part) for part in cache.caches] for cache in make_prompt_cache(model, CONFIG)]
    assert kinds == [[CompressedKVCache], *[[CompressedKVCache, KVCache]] * 2]


def test_a_part_that_only_later_tokens_need_stays_as_it_is():
    """The selection begins beyond the tokens of the probe, as in models of real size."""
    model = build("minimax_m3_vl", index_topk_blocks=8)
    assert parts_of(model) == ([(0, 0), (1, 0), (2, 0)], [(1, 1), (2, 1)])
    assert {part.reason for part in model_facts(model).uncompressed} == {"attention never sees its keys"}


def test_a_part_that_is_never_written_takes_no_bytes():
    class WithUnusedParts(type(build("minimax_m3_vl"))):
        def make_cache(self):
            return [CacheList(KVCache(), KVCache()) for _ in self.layers]

    model = build("minimax_m3_vl")
    model.__class__ = WithUnusedParts
    for layer in model.layers:
        layer.self_attn.is_sparse_attn = False
    assert [part.token_nbytes for part in model_facts(model).uncompressed] == [0, 0, 0]


def test_a_model_none_of_whose_parts_fit_is_refused():
    model = build("minimax_m3_vl")

    def computes(x, mask=None, cache=None):
        keys, values = cache[0].update_and_fetch(*(mx.zeros((1, 2, x.shape[1], 64)) for _ in range(2)))
        return x + (keys + values).sum()

    computes.is_sparse_attn = True
    for layer in model.layers:
        layer.self_attn = computes
    with pytest.raises(UnsupportedModelError, match="cannot run on a compressed cache: it computes with the keys"):
        model_facts(model)


def test_a_plan_says_which_parts_stay_and_why(model, capsys):
    plan, tokens = plan_caches(model, CONFIG), 1000
    show_plan(plan, tokens)
    text = " ".join(capsys.readouterr().err.split())
    assert "1-2 unchanged" in text
    assert "part 1: the model computes with its keys" in text
    parts = plan_dict(plan, tokens)["uncompressed"]
    assert [(part["index"], part["part"], part["nbytes"]) for part in parts] == [
        (1, 1, 1024 * 64 * 4),
        (2, 1, 1024 * 64 * 4),
    ]


def test_nothing_is_evicted_or_compacted_next_to_a_part_that_keeps_all(model):
    evicts = KVConfig(sinks=4, window=24, evict=EvictConfig("knorm", 128, recall="auto"))
    refusal = rf"minimax_m3_vl cannot evict tokens: part of its cache .* \({COMPUTES}\)\. Use --kv-evict none\."
    with pytest.raises(UnsupportedModelError, match=refusal):
        make_prompt_cache(model, evicts)
    ids = [i % 160 for i in range(300)]
    caches = make_prompt_cache(model, CONFIG)
    with compressed_attention(model):
        mx.eval(model(mx.array([ids]), cache=caches))
        with pytest.raises(ConfigError, match=rf"keeps all of them \({COMPUTES}\)\. Drop --compact\."):
            compact_prompt_cache(model, None, caches, ids, 0.5)


def test_attention_of_the_parts_in_a_plan_is_recorded(model):
    recorded = record_attention(model, [i % 160 for i in range(80)], 8)
    assert [step.keys.shape for step in recorded] == [(1, 2, 80, 64)] * 3
    assert [isinstance(step.mask, mx.array) and step.mask.shape for step in recorded[1:]] == [(1, 4, 8, 80)] * 2
