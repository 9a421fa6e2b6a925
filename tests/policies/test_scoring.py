"""Scores against their formulas, in float64 from the angles by which a RoPE really rotates."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import rope_utils

from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.codec.formats.base import CodecOptions
from mlx_tq.codec.normalization import KeyNormalization, compute_key_scale, decode_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.kernels.score import score
from mlx_tq.policies import PackedLayer, PackedTokens, Published, TriAttention, parse_policy
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.policies.rope import OFFSETS, learn_rope
from mlx_tq.policies.triattention import query_spread, virtual_query

DIM = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0}


def f32(x):
    return mx.array(np.asarray(x, np.float32))


def make_rope(dims=DIM, traditional=False, scaling=None):
    return rope_utils.initialize_rope(dims, 10000.0, traditional, scaling, 4096)


ROPES = {
    "half": make_rope(),
    "interleaved": make_rope(traditional=True),
    "partial": make_rope(dims=16),
    "partial interleaved": make_rope(dims=32, traditional=True),
    "llama3": make_rope(scaling={"rope_type": "llama3", **LLAMA3}),
    "yarn": make_rope(scaling=YARN),
    "linear": make_rope(scaling={"rope_type": "linear", "factor": 4.0}),
    "proportional": make_rope(scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25}),
}
PAIRS = {
    "half": [(f, f + 32) for f in range(32)],
    "interleaved": [(2 * f, 2 * f + 1) for f in range(32)],
    "partial": [(f, f + 8) for f in range(8)],
    "partial interleaved": [(2 * f, 2 * f + 1) for f in range(16)],
    "proportional": [(f, f + 32) for f in range(8)],
}


def angles(module, pairs, position):
    """Return cos + i sin of each pair at a position, with the module's gain, from rotated unit vectors: complex [F]."""
    rotated = np.array(module(mx.eye(DIM)[None, :, None], offset=position), np.float64)[0, :, 0]
    first, second = np.array(pairs).T
    return rotated[first, first] + 1j * rotated[first, second]


def as_complex(x, pairs):
    first, second = np.array(pairs).T
    return x[..., first] + 1j * x[..., second]


@pytest.mark.parametrize("name", ROPES)
def test_three_forms_of_one_score(name):
    """The explicit sum, the virtual query and un-roped keys agree to 1e-5 of ||c|| ||K||."""
    module, rng, last = ROPES[name], np.random.default_rng(0), 700
    pairs = PAIRS.get(name, PAIRS["half"])
    unrotated = sorted(set(range(DIM)) - {dim for pair in pairs for dim in pair})
    center, keys = rng.standard_normal(DIM), rng.standard_normal((40, DIM))
    positions = rng.integers(0, last, 40)
    rotated = [
        module(f32(key[None, None, None]), offset=int(position)) for key, position in zip(keys, positions, strict=True)
    ]
    roped = np.array(mx.concatenate(rotated), np.float64)[:, 0, 0]
    room = 1e-5 * np.linalg.norm(center) * np.linalg.norm(roped, axis=1)

    rope = learn_rope(module, DIM)
    assert list(map(tuple, np.array(rope.pairs).T.tolist())) == pairs
    assert rope.unrotated.tolist() == unrotated
    assert np.allclose(
        query_spread(rope, QueryStats(mx.zeros((1, DIM)), mx.ones((1, len(pairs))))), rope.gain, rtol=1e-5
    )
    assert np.allclose(rope.gain, getattr(module, "mscale", 1.0), rtol=1e-5)
    query = np.array(virtual_query(rope, f32(center), last), np.float64)
    by_query = roped @ query

    turns = np.mean([angles(module, pairs, last + o) for o in OFFSETS], axis=0)
    c, k = as_complex(center, pairs), as_complex(roped, pairs)
    a, b = c.real * k.real + c.imag * k.imag, c.imag * k.real - c.real * k.imag
    explicit = (a * turns.real - b * turns.imag).sum(axis=1) + roped[:, unrotated] @ center[unrotated]
    assert np.all(np.abs(by_query - explicit) <= room)

    back = np.stack([angles(module, pairs, int(p)) for p in positions])
    raw = as_complex(keys, pairs)
    unroped = (c * turns * np.conj(raw * back)).real.sum(axis=1) + keys[:, unrotated] @ center[unrotated]
    assert np.all(np.abs(by_query - unroped) <= room)


@pytest.mark.parametrize("limit", [4096, 131072])
def test_dynamic_frequencies_are_refused(limit):
    module = rope_utils.initialize_rope(DIM, 10000.0, False, {"rope_type": "dynamic", "factor": 6.0}, limit)
    with pytest.raises(UnsupportedModelError, match=r"DynamicNTKScalingRoPE changes its frequencies"):
        learn_rope(module, DIM)
    rope, center = learn_rope(lambda x, offset=0: x, DIM), mx.ones(DIM)  # no RoPE: all counts, and nothing scatters
    assert np.allclose(virtual_query(rope, center, 10), center, atol=1e-6)
    assert not mx.any(virtual_query(rope, center, 10, unrotated=False))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("name", "key"), [*(("half", key) for key in format_names()), ("interleaved", "tq4"), ("partial", "tq4")]
)
def test_scores_of_packed_keys(name, key, normalized):
    """Against float64 on the decoded keys; rows behind the packed tokens are never read."""
    dim = 128 if key.startswith("tbq") else DIM
    module = rope_utils.initialize_rope(dim // (4 if name == "partial" else 1), 1e4, name == "interleaved", None, 4096)
    rope, rng = learn_rope(module, dim), np.random.default_rng(2)
    codecs = [get_format(f).codec(dim, CodecOptions(), mx.float32) for f in (key, "q8")]
    layout = RowLayout(*codecs)
    keys = f32(rng.standard_normal((2, 3, 50, dim)))
    scale = compute_key_scale(mx.abs(keys).mean(axis=2), mx.abs(keys).max(axis=2), np.array(rope.pairs).T.tolist())
    means = mx.array(rng.standard_normal((2, 3, 1, dim)).astype(np.float16))
    normalization = KeyNormalization(scale, means) if normalized else None
    rows = layout.encode(keys, keys, normalization).rows
    rows = mx.concatenate([rows, mx.full((2, 3, 6, rows.shape[-1]), 0xFFFFFFFF, mx.uint32)], axis=2)
    queries = rng.standard_normal((3, 2, dim)).astype(np.float32)
    weights = rng.random((3, 2, rope.pairs.shape[1])).astype(np.float32)
    scores = np.array(score(rows, 50, layout, mx.array(queries), mx.array(weights), rope.pairs, normalization))
    decoded = np.array(decode_keys(layout.key, layout.keys(rows[:, :, :50]), normalization), np.float64)
    lengths = np.abs(as_complex(decoded, np.array(rope.pairs).T))
    expected = np.einsum("hgd,bhsd->bhgs", queries, decoded) + np.einsum("hgf,bhsf->bhgs", weights, lengths)
    assert scores.shape == (2, 3, 2, 50)
    assert np.abs(scores - expected).max() < 1e-4


def pack(keys, rope, stats, length):
    codec = get_format("fp16").codec(keys.shape[-1], CodecOptions(), mx.float32)
    layout = RowLayout(codec, codec)
    rows = layout.encode(keys, keys).rows
    return PackedTokens([PackedLayer(rows, layout, None, rope, stats)], np.arange(keys.shape[2]), length, 0)


def test_dims_that_rope_leaves_alone():
    """With partial RoPE, scores predict the mean of later logits; without those dims they do not."""
    rng, tokens, dim = np.random.default_rng(3), 300, DIM
    module = make_rope(dims=16)
    rope = learn_rope(module, dim)
    center = rng.standard_normal(dim)
    queries = center + 0.3 * rng.standard_normal((200, dim))
    keys = module(f32(rng.standard_normal((1, 1, tokens, dim))))
    later = module(f32(queries[None, None]), offset=tokens)
    logits = np.array(later[0, 0] @ keys[0, 0].T).mean(axis=0)
    lengths = np.abs(as_complex(queries, PAIRS["partial"])).mean(axis=0)
    stats = QueryStats(f32(queries.mean(axis=0, keepdims=True)), mx.array(lengths[None]).astype(mx.float32))
    packed = pack(keys, rope, stats, tokens)

    def agreement(**changes):
        scores = Published(**changes).score(packed)
        return np.corrcoef(np.argsort(np.argsort(scores)), np.argsort(np.argsort(logits)))[0, 1]

    assert agreement(score_unrotated_dims=True) > 0.95
    assert agreement() < 0.7  # by default


def test_aggregations():
    """Two KV heads of two query heads each, scored by hand from the heads' own scores."""
    rng, tokens = np.random.default_rng(4), 60
    rope = learn_rope(make_rope(), DIM)
    keys = f32(rng.standard_normal((1, 2, tokens, DIM)))
    stats = QueryStats(f32(rng.standard_normal((4, DIM))), f32(2 * rng.random((4, 32))))
    packed = pack(keys, rope, stats, 100)

    def of_heads(stats):
        queries = np.array(virtual_query(rope, stats.center, 99), np.float64)
        weights = np.array(query_spread(rope, stats), np.float64)
        lengths = np.abs(as_complex(np.array(keys, np.float64)[0], PAIRS["half"]))
        group = len(queries) // 2
        return np.stack(
            [np.array(keys[0, h // group]) @ queries[h] + lengths[h // group] @ weights[h] for h in range(len(queries))]
        )

    scores = of_heads(stats)
    logits = np.exp(scores / DIM**0.5)
    norms = np.linalg.norm(np.array(keys[0], np.float64), axis=-1).repeat(2, axis=0)  # the keys are values too
    weight = (logits / logits.sum(axis=1, keepdims=True) * norms).mean(axis=0)
    assert np.allclose(TriAttention().score(packed), weight, rtol=1e-4)
    normed = (scores - scores.mean(axis=1, keepdims=True)) / scores.std(axis=1, keepdims=True)
    paper = normed.reshape(2, 2, tokens).max(axis=1).mean(axis=0)
    assert np.allclose(Published(aggregation="paper").score(packed), paper, atol=1e-4)
    pooled = QueryStats(*(x.reshape(2, 2, -1).mean(axis=1) for x in (stats.center, stats.amplitude)))
    v3 = of_heads(pooled).sum(axis=0)
    assert np.allclose(Published(aggregation="v3").score(packed), v3, atol=1e-3)
    assert np.allclose(Published(evict="highest").score(packed), -weight, rtol=1e-4)


def test_expected_attention():
    """The softmax over tokens of mu K / sqrt(D) + K^T Cov K / 2 D, times the norm of the value, by hand."""
    rng, tokens, heads = np.random.default_rng(6), 50, 4
    queries = 0.5 * rng.standard_normal((heads, 300, DIM)) + rng.standard_normal((heads, 1, DIM))
    keys = f32(rng.standard_normal((1, 2, tokens, DIM)))  # the values too
    parts = (queries.mean(axis=1), np.ones((heads, 32)), queries.swapaxes(1, 2) @ queries / 300)
    stats = QueryStats(*(f32(part) for part in parts))
    packed = pack(keys, learn_rope(make_rope(), DIM), stats, 100)
    turns = [np.array(make_rope()(mx.eye(DIM)[None, :, None], offset=99 + o), np.float64)[0, :, 0] for o in OFFSETS]
    expected = []
    for head, each in enumerate(queries):
        mean = np.mean([each.mean(axis=0) @ turn for turn in turns], axis=0)
        covariance = np.mean([turn.T @ np.cov(each.T, bias=True) @ turn for turn in turns], axis=0)
        k = np.array(keys, np.float64)[0, head // 2]
        weights = np.exp(k @ mean / DIM**0.5 + ((k @ covariance) * k).sum(axis=1) / (2 * DIM))
        expected.append(weights / weights.sum() * np.linalg.norm(k, axis=1))
    assert np.allclose(parse_policy("expected_attention").score(packed), np.mean(expected, axis=0), rtol=1e-3)


def test_the_first_layers_can_be_skipped():
    rng = np.random.default_rng(7)
    rope = learn_rope(make_rope(), DIM)
    draws = (rng.standard_normal((3, 2, DIM)), 2 * rng.random((3, 2, 32)), rng.standard_normal((3, 1, 2, 40, DIM)))
    centers, amplitudes, keys = (f32(draw) for draw in draws)
    alone = [pack(keys[i], rope, QueryStats(centers[i], amplitudes[i]), 60) for i in range(3)]
    packed = replace(alone[0], layers=[layer for one in alone for layer in one.layers])
    scores = [TriAttention().score(one) for one in alone]
    assert np.allclose(TriAttention().score(packed), sum(scores) / 3)
    assert np.allclose(Published(skip_layers=1).score(packed), (scores[1] + scores[2]) / 2)
    assert np.allclose(Published(skip_layers=2).score(packed), scores[2])


def test_baselines():
    rng = np.random.default_rng(5)
    size = np.exp(rng.standard_normal(40))
    keys = f32(rng.standard_normal((1, 1, 40, DIM)) * size[:, None])
    packed = pack(keys, None, None, 60)
    norms = np.linalg.norm(np.array(keys)[0, 0], axis=-1)
    assert np.argsort(parse_policy("knorm").score(packed)).tolist() == np.argsort(-norms).tolist()
    assert np.argsort(parse_policy("recency").score(packed)).tolist() == list(range(40))
    streaming = parse_policy("streaming").score(packed)
    assert np.argsort(streaming, kind="stable").tolist() == [*range(4, 40), *range(4)]
    random = parse_policy("random")
    assert np.array_equal(random.score(packed), random.score(packed))
    other = parse_policy("random:seed=1").score(packed)
    assert not np.array_equal(random.score(packed), other)
