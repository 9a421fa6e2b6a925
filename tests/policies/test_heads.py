"""The policy `heads`: which heads are retrieval heads, for which budget, and what streaming heads evict."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from mlx_tq.cli.screen import describe_tokens
from mlx_tq.config import EvictConfig, KVConfig, parse_budget
from mlx_tq.errors import ConfigError
from mlx_tq.models import fingerprint
from mlx_tq.policies import Heads
from mlx_tq.policies.heads import LEAST_WINDOW, MOST_WINDOW, divide_heads
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.measurements import HeadScores, find_head_scores, head_scores_path, save_measurements
from mlx_tq.prompt_cache.statistics import cache_stats, predict_stats
from mlx_tq.session.restore import prefill

SCORES = ((0.9, 0.1), (0.2, 0.3), (0.8, 0.7))  # of three layers with two heads each
TOKENS = np.random.default_rng(5).integers(0, 160, 900).tolist()


def test_the_highest_scores_keep_all_tokens():
    division = divide_heads(SCORES, 0.5 + 0.5 * 0.1, 2000, 64, 96, 136)
    assert (division.retrieval_heads, division.window) == ([(0,), (), (0, 1)], 136)
    assert division.share(6, 2000) == pytest.approx(0.55)
    assert divide_heads(SCORES, 1.0, 2000, 64, 96, None).retrieval_heads == [(0, 1), (0, 1), (0, 1)]
    assert divide_heads(SCORES, 0.1, 2000, 64, 96, 136).retrieval_heads == [(), (), ()]


@pytest.mark.parametrize("tokens", [1000, 4000, 30_000])
@pytest.mark.parametrize("share", [0.3, 0.4, 0.6])
def test_no_more_than_the_budget_is_kept(tokens, share):
    scores = np.random.default_rng(0).random((30, 3)).tolist()
    division = divide_heads(scores, share, tokens, 64, 96, None)
    assert LEAST_WINDOW <= division.window <= MOST_WINDOW
    assert share - 1 / 90 < division.share(90, tokens) <= share


def test_what_cannot_be_kept_is_named():
    with pytest.raises(ConfigError, match=r"20% of 1,000 tokens is less than the 364 that every head holds"):
        divide_heads(SCORES, 0.2, 1000, 64, 96, 300)
    with pytest.raises(ConfigError, match=r"heads:window=64 is below the 96 last .* Raise it, or lower --kv-window"):
        divide_heads(SCORES, 0.5, 1000, 64, 96, 64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": 4096}, "the budget is 4096. Write 40%"),
        ({"budget": "2GB"}, "the budget is 2GB. Write 40%"),
        ({"budget": "40%", "key": "tq4~tq3"}, "Use one key format"),
        ({"budget": "40%@0"}, "invalid budget '40%@0'"),
        ({"budget": "4096@9"}, "invalid budget '4096@9'"),
        ({"budget": "40%@4096", "policy": "knorm"}, "only the policy heads takes.* Write 40%"),
    ],
)
def test_configurations_that_do_not_fit(changes, says):
    changes = {"policy": "heads", "key": "q8", **changes}
    with pytest.raises(ConfigError, match=says):
        KVConfig(key=changes["key"], evict=EvictConfig(changes["policy"], changes["budget"]))


def test_a_budget_names_a_length():
    assert parse_budget("40%@4096")[1:] == (0.4, None, 4096)
    assert str(EvictConfig("heads:window=256").policy) == "heads:window=256"


@pytest.fixture(scope="module")
def model():
    """A model with several KV heads, of which some are retrieval heads."""
    return build("llama")


@pytest.fixture
def scored(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = head_scores_path(fingerprint(model))
    path.parent.mkdir()
    slots = plan_caches(model, KVConfig()).layers
    rng = np.random.default_rng(1)
    scores = tuple(tuple(rng.random(layer.slot.heads).tolist()) for layer in slots)
    save_measurements(path, HeadScores(scores, 100))
    return scores


def config(budget="50%@800", recall="off", policy="heads:window=96"):
    return KVConfig(
        key="q8", value="tq4", sinks=4, window=24, normalize=False, evict=EvictConfig(policy, budget, recall)
    )


def read(model, caches, start, stop, step=64):
    with compressed_attention(model):
        prefill(model, caches, TOKENS[start:stop], step)
        logits = model(mx.array([[3]]), cache=copy.deepcopy(caches))
        mx.eval(logits)
    return logits


def test_without_scores_the_remedy_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_head_scores(fingerprint(model)) is None
    with pytest.raises(ConfigError, match=r"Run mlx_tq\.calibrate --heads with this model once"):
        make_prompt_cache(model, config())


def test_heads_hold_what_was_planned(model, scored):
    plan = plan_caches(model, config())
    caches = build_caches(plan)
    read(model, caches, 0, 800)
    ranked = sorted((score for layer in scored for score in layer), reverse=True)
    threshold = ranked[plan.division.num_retrieval - 1]
    held = 0
    for layer, scores in zip(caches, scored, strict=True):
        positions = layer.positions if isinstance(layer.positions, list) else [layer.positions] * len(scores)
        for score, of_head in zip(scores, positions, strict=True):
            held += len(of_head)
            if score >= threshold:
                assert len(of_head) == 800
            else:
                expected = np.concatenate([np.arange(32), np.arange(800 - 96, 800)])
                assert np.isin(expected, of_head).all()
                assert len(of_head) <= 32 + 96 + 2 * 64  # a round comes before a pass
    with compressed_attention(model):
        prefill(model, caches, [3], 1)
    assert sum(layer.nbytes for layer in caches) <= plan.nbytes(801)
    assert sum(layer.nbytes for layer in caches) >= 0.95 * plan.nbytes(801)


def test_copies_files_and_trims_go_on_alike(model, scored, tmp_path):
    import mlx_tq

    plan = plan_caches(model, config())
    caches = build_caches(plan)
    read(model, caches, 0, 700)
    mlx_tq.save_prompt_cache(tmp_path / "x.safetensors", caches, model=model, config=plan.config)
    loaded = mlx_tq.load_prompt_cache(tmp_path / "x.safetensors", model=model).caches
    twins = copy.deepcopy(caches)
    expected = read(model, caches, 700, 800)
    for other in (loaded, twins):
        assert mx.array_equal(read(model, other, 700, 800), expected)
        assert layer_group_of(other).stats.rounds == layer_group_of(caches).stats.rounds > 0


def test_statistics_are_those_of_streaming_heads(model, scored):
    """What the archive takes of a token is what was predicted, but for the numbers that say which mean a row has."""
    plan = plan_caches(model, config(recall="auto"))
    caches = build_caches(plan)
    read(model, caches, 0, 800)
    stats, predicted = cache_stats(caches, plan), predict_stats(plan, 800)
    assert stats.by_head
    assert predicted.by_head
    assert stats.archived > 400
    expected = predicted.archived_nbytes / predicted.archived
    assert stats.archived_nbytes / stats.archived == pytest.approx(expected, rel=0.05)
    assert describe_tokens(stats).startswith("Tokens of streaming heads: ")


def test_nothing_is_lost_for_a_rescue_service(model, scored):
    caches = make_prompt_cache(model, config())
    read(model, caches, 0, 800)
    sequence = layer_group_of(caches)
    assert len(sequence.evicted) > 400
    assert len(sequence.lost) == 0


def test_evicted_rows_come_back(model, scored):
    caches = make_prompt_cache(model, config(recall="auto"))
    read(model, caches, 0, 800)
    sequence, layers = layer_group_of(caches), [layer for layer in compressed_caches(caches) if layer.evicts]
    before = [layer.packed_rows()[0][:, :, : layer.packed_tokens] for layer in layers]
    blocks = sequence.archived[2:5]
    assert sequence.recall(layers, blocks) == sum(len(block.positions) for block in blocks) > 0
    read(model, caches, 800, 801)
    positions = np.concatenate([block.positions for block in blocks])
    assert all(np.isin(positions, layer.packed_positions).all() for layer in layers)
    sequence.drop_recalled(layers)
    after = [layer.packed_rows()[0][:, :, : layer.packed_tokens] for layer in layers]
    assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_policy_of_heads_scores_by_age():
    class Tokens:
        positions = np.array([0, 31, 32, 100])

    assert Heads().score(Tokens).tolist() == [np.inf, np.inf, 32.0, 100.0]
