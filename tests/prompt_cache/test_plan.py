"""The plan of a model's caches: which layers differ from the configuration and why, and what cannot be planned."""

import copy
import re
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import same_bits
from mlx_lm.models import cache as native
from zoo import build

from mlx_tq.cli.model_calibration import calibrate_on_text, save_queries
from mlx_tq.cli.screen import show_plan, stderr
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError, UnsupportedModelError
from mlx_tq.models import fingerprint
from mlx_tq.prompt_cache.build import adopt_caches, build_caches
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.measurements import calibration_path, make_folder
from mlx_tq.prompt_cache.plan import without_queries

REGIONS = {"sinks": 4, "window": 24}
SMALL = KVConfig(key="tq4", value="tq4", **REGIONS)
TOKENS = np.random.default_rng(5).integers(0, 160, 200).tolist()
FOUR_LAYERS = build("smollm3")


def formats(plan):
    return [(layer.spec.key, layer.spec.value) for layer in plan.layers]


def read(model, caches, *chunks):
    start, logits = 0, []
    for chunk in chunks:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return logits


def evicting(policy="triattention:warmup=64:trigger=8:granularity=1", budget=80, **changes):
    evict = EvictConfig(policy, budget)
    return KVConfig(**{"key": "fp16", "value": "fp16", **REGIONS, "evict": evict, **changes})


# Layers that are stored otherwise.


@pytest.fixture(scope="module")
def loud():
    """A model the keys of whose layer 2 are ten times as long."""
    model = build("smollm3")
    model.layers[2].self_attn.k_proj.weight *= 10
    return model


def test_an_outlier_layer_keeps_its_keys_at_q8(loud):
    plan = plan_caches(loud, SMALL)
    assert formats(plan) == [("tq4", "tq4"), ("tq4", "tq4"), ("q8", "tq4"), ("tq4", "tq4")]
    norms = [layer.slot.key_norm for layer in plan.layers]
    assert norms[2] > 5 * norms[1]
    assert [bool(layer.note) for layer in plan.layers] == [False, False, True, False]
    assert plan.layers[2].note.startswith(f"key norm {norms[2]:.1f} is ")
    assert plan.layers[2].note.endswith("x the median")
    assert [cache.spec for cache in build_caches(plan)] == [layer.spec for layer in plan.layers]
    for outlier, key in ((0, "tq4"), (1e6, "tq4"), (3.0, "q8")):  # the limit is the user's
        assert plan_caches(loud, KVConfig(key="tq4", value="tq4", outlier=outlier)).layers[2].spec.key == key
    normed = build("qwen3")
    normed.layers[1].self_attn.k_norm.weight = normed.layers[1].self_attn.k_norm.weight * 100
    assert formats(plan_caches(normed, KVConfig(key="tq3", value="tq2", outlier=1.5)))[1] == ("q8", "tq2")


@pytest.mark.parametrize(("boundary", "promoted"), [(0, []), (1, [0, 3]), (2, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_boundary_layers(boundary, promoted):
    plan = plan_caches(FOUR_LAYERS, KVConfig(key="tq4", value="tq3", boundary=boundary))
    assert formats(plan) == [("q8", "q8") if number in promoted else ("tq4", "tq3") for number in range(4)]
    assert [layer.note for layer in plan.layers] == ["boundary layer" if n in promoted else "" for n in range(4)]


def test_nothing_is_promoted_to_fewer_bits(loud):
    """And layers of two formats are promoted whole."""
    plan = plan_caches(loud, KVConfig(key="fp16", value="tq2", boundary=1))
    assert formats(plan) == [("fp16", "q8"), ("fp16", "tq2"), ("fp16", "tq2"), ("fp16", "q8")]
    assert [layer.note for layer in plan.layers] == ["boundary layer", "", "", "boundary layer"]
    for key, wanted in (("q8", ["q8"] * 4), ("tq4~spectral8", ["q8", "tq4~spectral8", "tq4~spectral8", "q8"])):
        plan = plan_caches(FOUR_LAYERS, KVConfig(key=key, value="q8", boundary=1))
        assert [layer.spec.keys for layer in plan.layers] == wanted
    assert {layer.spec.keys for layer in plan_caches(FOUR_LAYERS, KVConfig("fp16~q8", boundary=1)).layers} == {
        "fp16~q8"
    }


def test_boundaries_and_seeds_are_counted_over_plain_layers():
    plan = plan_caches(build("gemma3_text"), KVConfig(key="tq4", value="tq4", boundary=1))
    assert [layer.slot.index for layer in plan.layers] == [1, 3]
    assert formats(plan) == [("q8", "q8")] * 2
    seeds = [each.seed for layer in plan.layers for each in (layer.spec.key_options, layer.spec.value_options)]
    assert seeds == [1042, 1043, 3042, 3043]


# Formats by layer, and spectral ones.


@pytest.mark.parametrize("key", ["spectral16+turbo4+spectral8+q8", "q8~spectral8+tq4+tq4~tq2+fp16~tq4"])
def test_a_schedule_gives_each_layer_its_format(key, tmp_path, capsys):
    config = KVConfig(key=key, value="tq4", recent=32, **REGIONS)
    plan = plan_caches(FOUR_LAYERS, config)
    wanted = key.replace("turbo", "tq").split("+")
    assert [layer.spec.keys for layer in plan.layers] == wanted
    assert all(not layer.note for layer in plan.layers)
    slow = [any(part in name for part in ("~", "spectral")) for name in wanted]
    assert [layer.has_kernels for layer in plan.layers] == [not each for each in slow]
    show_plan(plan, 190)
    shown = capsys.readouterr().err
    assert all(name in shown for name in wanted)
    assert ("The first of two key formats is for the most recent 32 packed tokens" in shown) == ("~" in key)
    with compressed_attention(FOUR_LAYERS):
        caches = make_prompt_cache(FOUR_LAYERS, config)
        mx.eval(FOUR_LAYERS(mx.array([TOKENS[:190]]), cache=caches))
        save_prompt_cache(tmp_path / "x.safetensors", caches, model=FOUR_LAYERS, config=config)
        loaded = load_prompt_cache(tmp_path / "x.safetensors", model=FOUR_LAYERS, config=config).caches
        logits = [FOUR_LAYERS(mx.array([TOKENS[190:]]), cache=each) for each in (caches, loaded)]
    assert mx.array_equal(*logits)
    assert mx.isfinite(logits[0]).all()


def test_sizes_are_compared_from_the_first_compressed_token_on(capsys):
    plan = plan_caches(FOUR_LAYERS, SMALL)
    for tokens, columns in ((plan.compressed_from - 1, 1), (plan.compressed_from, 2)):
        show_plan(plan, tokens)
        shown = capsys.readouterr().err
        assert len(re.findall(r"[\d.]+ [kM]?B", shown)) == columns, shown


def test_a_long_note_leaves_the_figures_legible(capsys, monkeypatch):
    """A terminal of 80 columns holds the table; the note of a layer takes further lines."""
    plan = plan_caches(build("deepseek_v2"), SMALL)
    monkeypatch.setattr(stderr, "width", 80)
    show_plan(plan, 1000)
    shown = capsys.readouterr().err
    head, row = shown.splitlines()[1:3]
    assert head.split() == ["layers", "keys", "values", "bytes", "float32", "cache"]
    assert row.split()[:3] == ["0-1", "tq4", "tq4"]
    assert "…" not in shown
    assert max(map(len, shown.splitlines()[:5])) <= 80 < len(plan.layers[0].note)


@pytest.mark.parametrize("name", ["llama", "glm4", "gpt_neox"])
def test_spectral_keys_go_by_the_pairs_of_the_models_rope(name, tmp_path):
    """Half of the dims apart, or neighbors, and only those that RoPE turns; through a run and a file."""
    model, config = build(name), KVConfig(key="spectral8", value="q8", **REGIONS)
    for layer in plan_caches(model, config).layers:
        pairs = layer.spec.key_options.pairs
        apart = 1 if name == "glm4" else len(pairs)
        assert all(second == first + apart for first, second in pairs)
        assert 2 * len(pairs) == {"llama": 64, "glm4": 32, "gpt_neox": 16}[name]
    with compressed_attention(model):
        caches = make_prompt_cache(model, config)
        read(model, caches, 90)
        save_prompt_cache(tmp_path / "x.safetensors", caches, model=model, config=config)
        loaded = load_prompt_cache(tmp_path / "x.safetensors", model=model, config=config).caches
        assert mx.array_equal(read(model, caches, 5, 25)[1], read(model, loaded, 5, 25)[1])
    assert same_bits([cache.state for cache in caches], [cache.state for cache in loaded])


def test_formats_that_a_model_cannot_have(embedded):
    with pytest.raises(UnsupportedModelError, match="keys of stablelm cannot be stored by their RoPE pairs: in layer "):
        plan_caches(build("stablelm"), KVConfig(key="spectral8"))
    with pytest.raises(ConfigError, match="layer 0 of qwen3: tq35 learns from keys as they first came"):
        plan_caches(embedded[0], KVConfig(key="tq4~tq35"))
    with pytest.raises(ConfigError, match="key names 2 formats, and the model has 4 layers to store"):
        plan_caches(FOUR_LAYERS, KVConfig(key="spectral8+tq4"))
    with pytest.raises(ConfigError, match="needs 3 compressed layers, and llama has 2"):
        plan_caches(build("llama"), evicting("published:skip_layers=2"))
    with pytest.raises(ConfigError, match="format 'tq9' is unknown"):
        KVConfig(key="q8+tq9")
    with pytest.raises(ConfigError, match=r"value is 'spectral8', which is for keys only: it keeps .* RoPE pairs"):
        KVConfig(value="spectral8")


# Eviction.

REFUSED = {
    "deepseek_v2": "in layer 0, RoPE rotates only a part of each query, which is joined to the rest afterwards",
    "minicpm3": "as in MLA",
    "jamba": "in layer 1, its attention has no RoPE",
    "muse_spark": "in layer 1, its attention has no RoPE",
    "talkie": "in layer 0, its keys are rotated, but by no module",
    "cohere2": "in layer 1, queries are not what RoPE returned: they skip it",
    "ministral3": "in layer 1, .* or are scaled, normed or cast afterwards",
    "hunyuan_v1_dense": "scaled, normed or cast",
    "phi": "scaled, normed or cast",
    "internlm3": r"changes its frequencies with the position \(dynamic NTK\)",
    "afm7": "takes positions from the number of keys",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_queries_tell_nothing_are_refused_by_name(name):
    """And left as they were; policies without queries take them."""
    model = build(name)
    modules = {id(module): dict(module) for module in model.modules()}
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{REFUSED[name]}.*(Use|another policy)"):
        plan_caches(model, evicting())
    assert {id(module): dict(module) for module in model.modules()} == modules
    plan_caches(model, evicting(evict=None))
    if name != "afm7":
        with compressed_attention(model):
            caches = make_prompt_cache(model, evicting("knorm:trigger=8:granularity=1"))
            read(model, caches, 70, 33, 40, 1)
        assert layer_group_of(caches).stats.rounds > 0


def test_statistics_replace_the_warm_up(tmp_path):
    model, path = build("qwen3_next"), str(tmp_path / "stats.safetensors")
    save_queries(model, path, calibrate_on_text(model, TOKENS[:104]))
    config = evicting(f"triattention:trigger=8:granularity=1:calibration={path}")
    with compressed_attention(model):
        plan = plan_caches(model, config)
        assert plan.eviction.source == path
        caches, online = (
            build_caches(plan),
            make_prompt_cache(model, evicting("triattention:warmup=100:trigger=8:granularity=1")),
        )
        read(model, caches, 70, 33, 40)
        read(model, online, 70, 34, 39)
    assert layer_group_of(caches).stats.rounds > 0
    (given,), (found,) = (layer_group_of(each).calibrators.values() for each in (caches, online))
    for one, other in zip(given.stats.arrays(), found.stats.arrays(), strict=True):
        assert mx.allclose(one, other, atol=1e-5)
    with pytest.raises(CacheFormatError, match="made with another model"):
        plan_caches(build("qwen3_next", seed=1), config)
    changed = build("qwen3_next")
    for layer in changed.layers:
        if not layer.is_linear:
            layer.self_attn.rope.base = 500.0
    with pytest.raises(CacheFormatError, match="another RoPE than layer 0"):
        plan_caches(changed, config)
    make_folder(kept := calibration_path(fingerprint(model)))
    shutil.copy(path, kept)  # where it is looked up; what does not fit is as if it was not there
    for policy, misfits in (("triattention", True), ("published:ema=0.1", False)):
        plans = [plan_caches(each, evicting(policy)) for each in (model, changed)]
        assert [plan.calibrates_on_prompt for plan in plans] == [False, misfits]
        assert (plans[0].eviction.source == f"questions and text ({kept})") == (policy == "triattention")
    assert plan_caches(model, evicting("expected_attention")).calibrates_on_prompt  # of which the file says nothing


def test_a_budget_of_bytes():
    model = build("llama")
    plan = plan_caches(model, evicting(budget="700KB", key="q8", value="tq4"))
    assert plan.nbytes(plan.eviction.budget.tokens + 8 + 32) <= 700_000
    assert all(plan.nbytes(tokens) <= 700_000 for tokens in range(1000, 4097, 7)), "as long as the model allows"
    with pytest.raises(ConfigError, match=r"a budget of 1,000 bytes is below the .* Raise the budget"):
        plan_caches(model, evicting(budget="1KB"))


# Keys that cannot be weighted.


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", ""),
        ("phi", ""),  # casts queries that RoPE turned
        ("internlm3", ""),  # dynamic NTK, whose pairs are as steady as any
        ("deepseek_v2", "keys not weighted: RoPE rotates only a part of each query, which is joined to the rest"),
        ("jamba", "keys not weighted: its attention has no RoPE"),
        ("nanochat", "keys not weighted: its keys are rotated, but by no module"),
    ],
)
def test_a_plan_says_which_keys_are_not_weighted(name, why):
    plan = plan_caches(build(name), SMALL)
    assert all(layer.note.startswith(why) and bool(layer.note) == bool(why) for layer in plan.layers)
    assert all((layer.spec.key_options.pairs is None) == bool(why) for layer in plan.layers)
    assert all(
        layer.note.endswith("keys not weighted: their queries are not known") for layer in without_queries(plan).layers
    )
    for plain in (replace(SMALL, normalize=False), replace(SMALL, key="fp16")):
        assert not any(layer.note or layer.spec.normalize for layer in plan_caches(build(name), plain).layers)


# Caches that mlx-lm made.


@pytest.mark.parametrize("length", [3, 100])
def test_caches_of_mlx_lm_are_adopted(length):
    """What they hold is stored as if it had been read; the model's other caches stay."""
    model = build("falcon_h1")
    plain = native.make_prompt_cache(model)
    read(model, plain, length)
    caches = adopt_caches(plan_caches(model, evicting()), copy.deepcopy(plain))
    assert {cache.offset for cache in compressed_caches(caches)} == {length}
    with compressed_attention(model):
        ids = mx.array([TOKENS[length : length + 20]])
        assert mx.allclose(model(ids, cache=caches), model(ids, cache=plain), atol=1e-3)
    theirs = native.make_prompt_cache(build("gemma3_text"))
    with pytest.raises(CacheFormatError, match=r"the saved caches are \['KVCache', 'RotatingKVCache'\]; llama has "):
        adopt_caches(plan_caches(build("llama"), SMALL), theirs)
