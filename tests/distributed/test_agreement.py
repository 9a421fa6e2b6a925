"""All ranks evict the same tokens and recall the same blocks; one that does not is detected in that round."""

import math
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from cli.tools import facts

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.distributed.group import ALONE, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.errors import ConfigError, RankError
from mlx_tq.models import load
from mlx_tq.models.load import divide
from mlx_tq.prompt_cache import layer_group as sequences
from mlx_tq.prompt_cache import recall
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import evicting_layers, layer_group_of
from mlx_tq.prompt_cache.recall import blocks_of_ranges

from .together import run

CONFIG = KVConfig(key="q8", value="tq4", sinks=4, window=24)


def calls():
    """Return what each collective returns on this rank."""
    ranks = join()
    rank = ranks.rank
    told = [ranks.broadcast(lambda: {"of": rank, "text": "ü" * 3}), ranks.broadcast_when_ready(lambda: [rank])]
    told += [ranks.broadcast(lambda: None), ranks.run_on_first(lambda: {rank}) == ({0} if rank == 0 else None)]
    for asked in (ranks.broadcast, ranks.run_on_first):
        try:
            asked(_refuse)
        except (ConfigError, RankError) as error:
            told.append(str(error))
    same = np.arange(4)
    ranks.check_equal("the same", same)
    with pytest.raises(RankError) as differing:
        ranks.check_equal("what they have", same + (rank == 2))
    numbers = np.array([rank + 0.1, -rank])
    chosen = ranks.broadcast_tokens(mx.array([7 + rank], mx.uint32)).item()
    flags = ranks.any([False, rank == 1])
    rows = ranks.gather(np.full((1, 2), rank, np.float32)).tolist()
    numbers = ranks.mean(numbers).tolist(), ranks.max(numbers).tolist(), ranks.min(rank + 3)
    common = [ranks.largest_common(lambda most, own=own: max(n for n in own if n <= most), 99) for own in had(rank)]
    assert common == [max(set.intersection(*each)) for each in zip(*map(had, range(3)), strict=True)]
    return told, ranks.gather_json("r" * rank), str(differing.value), numbers, chosen, flags, rows


def had(rank):
    """Return sets of numbers of a rank, all with 0."""
    rng = np.random.default_rng(rank)
    return [{0, *rng.integers(1, 99, count).tolist()} for count in (0, 1, 20, 40, 80) for _ in range(4)]


def _refuse():
    raise ConfigError("no such file.")


@pytest.mark.full
def test_collectives_return_the_same_on_all_ranks(tmp_path):
    done = run(tmp_path, 3, calls)
    told, collected, differing, (mean, most, least), chosen, flags, rows = done[0].value
    assert [each.value for each in done] == [done[0].value] * 3, [each.err for each in done]
    assert told == [{"of": 0, "text": "üüü"}, [0], None, True, "no such file.", "no such file."]
    assert collected == ["", "r", "rr"]
    assert differing.startswith("the 3 ranks disagree on what they have: rank 2 differs from the others. ")
    assert np.allclose(mean, [1.1, -1])
    assert (most, least) == ([2.1, 0], 3)
    assert (chosen, flags, rows) == (7, [False, True], [[0, 0], [1, 1], [2, 2]])


CALIBRATED = ":warmup=64:calibration=text"
POLICIES = ["knorm", f"triattention{CALIBRATED}", f"expected_attention{CALIBRATED}", "random"]


def random_model(rng, size, vocabulary=160):
    """Make a random llama with some KV heads for each rank; equal generators give equal models."""
    module = import_module("mlx_lm.models.llama")
    heads, groups = size * int(rng.integers(1, 3)), int(rng.integers(1, 3))
    sizes = {"hidden_size": 64, "intermediate_size": 32 * size, "num_hidden_layers": int(rng.integers(1, 4))}
    heads = {"num_attention_heads": heads * groups, "num_key_value_heads": heads, "head_dim": 32}
    args = module.ModelArgs(
        model_type="llama", rms_norm_eps=1e-5, vocab_size=vocabulary, max_position_embeddings=4096, **sizes, **heads
    )
    mx.random.seed(int(rng.integers(2**31)))
    model = module.Model(args)
    mx.eval(model.parameters())
    return model


def rounds(needed, seed, differing=()):
    """Return the positions after each of `needed` rounds or exchanges of random models, and what other choices led to.

    For each of `differing`, from that round on of a model: the round of the choice, that of the error, and the error.
    """
    ranks, rng, found, caught = join(), np.random.default_rng(seed), [], []
    wrong = list(differing)
    recall.SHORTLIST = 128  # so few are archived
    while len(found) < needed or wrong:
        model = random_model(rng, ranks.size)
        divide(model, ranks)
        policy = f"{rng.choice(POLICIES)}:trigger=8:granularity={rng.choice([1, 8, 32])}"
        evict = EvictConfig(policy, int(rng.integers(60, 150)), recall=64 if rng.random() < 0.5 else "off")
        config = replace(CONFIG, normalize=bool(rng.random() < 0.3), evict=evict)
        caches = build_caches(plan_caches(model, config))
        tokens = rng.integers(0, 160, 600)
        with choosing(wrong[0] if wrong else math.inf, ranks.rank == 1) as began, compressed_attention(model):
            try:
                read(model, caches, tokens, found)
            except RankError as error:
                wrong.pop(0)
                caught.append((began[-1], layer_group_of(caches).stats.rounds, str(error)))
    return found, caught


def read(model, caches, tokens, found):
    """Read, and search the archive between passes, with other layers on each rank, as while decoding."""
    sequence = layer_group_of(caches)
    sequence.capture_queries(range(max(1, len(caches) - sequence.ranks.rank)), rounds=True)
    for start in range(0, len(tokens), 20):
        before = sequence.stats.rounds
        mx.eval(model(mx.array(tokens[start : start + 20])[None], cache=caches))
        if sequence.stats.rounds > before:
            found.append(caches[0].positions.tobytes())
        if sequence.archived and start % 3 == 0:
            layers = evicting_layers(caches)
            sequence.replace_recalled(layers, sequence.search_archive(layers, 20, 64, include_recalled=True).blocks)
            found.append(caches[0].positions.tobytes())


@contextmanager
def choosing(number, differs):
    """From a round on, evict other blocks than were selected, if that is possible and this rank `differs`."""
    select, numbers, began = sequences.select, count(), []

    def other(scores, *args):
        own, others = select(scores, *args), select(-scores, *args)
        if (round_number := next(numbers)) < number or np.array_equal(own, others):
            return own
        began.append(round_number)
        return others if differs else own

    sequences.select = other
    try:
        yield began
    finally:
        sequences.select = select


@pytest.mark.parametrize(
    ("size", "needed"), [(2, 40), *(pytest.param(size, 1000, marks=pytest.mark.full) for size in (2, 3, 4))]
)
def test_ranks_evict_the_same_and_one_that_differs_is_detected_in_that_round(tmp_path, size, needed):
    differing = list(range(0, 9, 1 if needed == 1000 else 8))
    done = run(tmp_path, size, rounds, needed, size, differing)
    assert all(each.value for each in done), [each.err for each in done]
    found, caught = done[0].value
    assert [each.value for each in done[1:]] == [done[0].value] * (size - 1)
    assert len(found) >= needed
    assert len(set(found)) > needed / 2
    assert len(caught) == len(differing)
    assert all(began == rounds >= number for number, (began, rounds, _) in zip(differing, caught, strict=True))
    assert all("disagree on the evicted tokens: rank 1 " in message for *_, message in caught)


def losing():
    """Return what was recalled, and what is archived in the end, if only the second rank loses a block on its disk."""
    ranks, rng, found = join(), np.random.default_rng(0), []
    model = random_model(rng, ranks.size)
    divide(model, ranks)
    evict = EvictConfig("recency:trigger=8", 120, recall=64)
    caches = build_caches(plan_caches(model, replace(CONFIG, evict=evict)))
    with compressed_attention(model):
        for _ in range(30):
            mx.eval(model(mx.array(rng.integers(0, 160, 20))[None], cache=caches))
        sequence, layers = layer_group_of(caches), evicting_layers(caches)

        def lose(number):
            if ranks.rank == 1:
                sequence.archived[number].delete()

        first, other = (block.positions for block in sequence.archived[:2])
        lose(0)
        sequence.forget_lost_blocks()
        spans = tuple((int(positions[0]), int(positions[-1])) for positions in (first, other))
        sequence.recall(layers, blocks_of_ranges(sequence.archived, spans, layers[0].positions, 64))
        found.append(sequence.recalled.tolist())
        lose(0)
        sequence.drop_recalled(layers)
    found.append([block.positions.tolist() for block in sequence.archived])
    assert found[0] == other.tolist()
    assert first.tolist() not in found[1]
    assert other.tolist() in found[1], "it was in the cache, so it is archived again"
    return found


@pytest.mark.full
def test_a_block_that_one_rank_lost_is_lost_to_all(tmp_path):
    done = run(tmp_path, 2, losing)
    assert done[0].value
    assert done[1].value == done[0].value, [each.err for each in done]


def logits(dtype):
    """Return logits of a text of which half is evicted, from this rank or from one process: float32 [steps, V]."""
    ranks = join() if is_launched() else ALONE
    model, tokenizer = load(dtype=dtype, ranks=ranks)
    ids = tokenizer.encode("".join(facts(60)))
    evict = EvictConfig("knorm:trigger=32:granularity=1", "50%", recall="off")
    config = replace(CONFIG, value="q8", sinks=16, evict=evict)  # a code that rounding changes is a small step there
    caches, found = build_caches(plan_caches(model, config)), []
    with compressed_attention(model):
        for start in range(0, len(ids), 64):
            made = model(mx.array(ids[start : start + 64])[None], cache=caches)
            found.append(np.array(made[0, -1].astype(mx.float32)))
    assert layer_group_of(caches).stats.rounds > 3
    return np.stack(found)


@pytest.mark.full
def test_ranks_differ_from_one_process_by_rounding(tmp_path):
    """In float32 they hardly differ, in bfloat16 by no more than bfloat16 differs from float32."""
    exact, rounded = (run(tmp_path / dtype, 1, logits, dtype)[0].value for dtype in ("float32", "bfloat16"))
    ours = {dtype: run(tmp_path / f"two {dtype}", 2, logits, dtype) for dtype in ("float32", "bfloat16")}
    for first, second in ours.values():
        assert np.array_equal(first.value, second.value), (first.err, second.err)
    one, two, bfloat16 = (each - exact for each in (ours["float32"][0].value, ours["bfloat16"][0].value, rounded))
    assert np.abs(one).max() < 1e-3
    assert np.square(two).mean() < 4 * np.square(bfloat16).mean()
