"""Recall for a question and while its answer is decoded: which blocks are reloaded, when, and for how long."""

import copy
from dataclasses import replace
from functools import partial
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from cli.tools import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from zoo import build

from mlx_tq import EvictConfig, KVConfig, compressed_attention, make_prompt_cache
from mlx_tq.config import BLOCK
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.layer_group import LayerGroup, evicting_layers, layer_group_of
from mlx_tq.prompt_cache.recall import MAX_QUESTION, QueryBuffer, positions_of, search_layers
from mlx_tq.session.restore import (
    SHORTEST_QUESTION,
    RecallDuringDecode,
    RecallResult,
    evict_before_question,
    live_positions,
    recall_rows,
    release,
    split_question,
)
from mlx_tq.session.transcript import sentence_at

MOST, EVERY = 96, 8
EVICT = EvictConfig("recency:granularity=16:trigger=16", 128, recall=MOST, recall_every=EVERY)
CONFIG = KVConfig(key="q8", value="tq4", sinks=16, window=32, evict=EVICT)
ROOMY = replace(CONFIG, evict=EvictConfig("recency:granularity=16:trigger=16", 500, recall=MOST))

DOCUMENT = "".join(f"House number {n} on Lime Street has a gate, a tree and {n} windows.\n" for n in range(60))
QUESTION = "Which of the four answers is right for the house that stands beside the river and has the largest gate?"
CHOICES = "\n".join(
    f"{letter}) the house with the {nth} gate" for letter, nth in zip("ABCDEFGH", range(8), strict=True)
)


def read(model, caches, ids, step=64):
    with compressed_attention(model):
        for start in range(0, len(ids), step):
            mx.eval(model(mx.array(ids[start : start + step])[None], cache=caches))


def caches_of(exact, config=CONFIG, lines=40):
    """Return caches that evicted most of a text, and the tokens of a question about it."""
    model, tokenizer = exact
    text, question = facts(lines)
    caches, ids = make_prompt_cache(model, config), tokenizer.encode(text)
    read(model, caches, ids, -(-len(ids) // 8))
    return caches, tokenizer.encode(question)


def decode(model, caches, recall, question, max_tokens):
    """Answer a question with recall, and yield the number of each token."""
    recall.start()
    with compressed_attention(model):
        steps = generate_step(mx.array(question), model, prompt_cache=caches, max_tokens=max_tokens)
        for number, _ in enumerate(steps):
            recall.count_token()
            yield number + 1


@pytest.mark.parametrize(
    ("before", "question"),
    [
        (DOCUMENT + "\n", f"{QUESTION}\n{CHOICES}"),
        (DOCUMENT + "\r\n", f"{QUESTION}\r\n{CHOICES}"),
        (DOCUMENT + "  \n", f"{QUESTION}\n{CHOICES}"),
        ("A paragraph.\n\n" + DOCUMENT, f"{QUESTION} {QUESTION}"),
    ],
    ids=["after an empty line", "lines of Windows", "a line of blanks", "no empty line near the end"],
)
def test_a_question_is_the_last_paragraph_or_else_the_last_line(exact, before, question):
    tokenizer = exact[1]
    ids = tokenizer.encode(before + question)
    document, found = split_question(tokenizer, ids)
    assert document + found == ids
    assert tokenizer.decode(found).lstrip() == question.replace("\r\n", tokenizer.decode(tokenizer.encode("\r\n")))


def test_a_question_has_at_least_32_tokens_of_a_prompt(exact):
    tokenizer = exact[1]
    assert len(split_question(tokenizer, tokenizer.encode(f"{DOCUMENT}\nWhich one?"))[1]) >= SHORTEST_QUESTION
    ids = tokenizer.encode(DOCUMENT.replace("\n", " "))
    assert len(split_question(tokenizer, ids)[1]) == SHORTEST_QUESTION
    assert split_question(tokenizer, ids[:3]) == (ids[:1], ids[1:3])


@pytest.mark.full
def test_the_last_256_tokens_of_a_long_message_search(exact):
    """They select what they select alone, and the message evicts no more, however long it is."""
    model, tokenizer = exact
    question = tokenizer.encode(facts(60)[1])
    long = [*tokenizer.encode("The history of the city. ")] * 100 + question
    assert len(long) > 2 * MAX_QUESTION
    results = []
    for message in (long, long[-MAX_QUESTION:]):
        caches, _ = caches_of(exact, ROOMY, 60)
        positions = recall_rows(model, caches, message, 128, limit=MOST).positions
        results.append((positions, layer_group_of(caches).stats.tokens))
        release(caches)
    assert results[0] == results[1]
    assert results[0][0]


def cut_facts(tokenizer):
    """Yield (lines, ids, sentence, edge) of texts in which an edge between blocks cuts the digits of the fact."""
    for lines in range(30, 90):
        ids = tokenizer.encode(facts(lines)[0])
        place = next(i for i in range(len(ids)) if "4172" in tokenizer.decode(ids[: i + 1]))
        sentence = sentence_at(place, ids, tokenizer.decode)
        assert tokenizer.decode(ids[sentence.start : sentence.stop]).strip() == "The access code is 417295."
        edge = CONFIG.sinks + -(-(place - 2 - CONFIG.sinks) // BLOCK) * BLOCK
        if edge < sentence.stop - 1:
            yield lines, ids, sentence, edge


@pytest.mark.parametrize("texts", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_sentence_is_recalled_whole_or_the_recall_is_partial(exact, texts):
    model, tokenizer = exact
    for lines, ids, sentence, _ in islice(cut_facts(tokenizer), texts):
        for limit in (BLOCK, MOST):
            caches, question = caches_of(exact, lines=lines)
            sentences = partial(sentence_at, ids=ids, decode=tokenizer.decode)
            recalled = recall_rows(model, caches, question, 128, limit, passage_at=sentences)
            is_live = np.isin(np.arange(*sentence), live_positions(caches, 0))
            assert is_live.any()
            assert (is_live.all(), recalled.is_partial) == ((False, True) if limit == BLOCK else (True, False))


@pytest.mark.parametrize("knows_text", [True, False])
def test_the_evicted_half_of_a_sentence_joins_its_live_half(exact, knows_text):
    """The question's words are in the live half, so the other half alone scores low."""
    model, tokenizer = exact
    lines, ids, sentence, edge = next(cut_facts(tokenizer))
    caches = make_prompt_cache(model, CONFIG)
    layer_group_of(caches).pinned = PositionRange(edge - BLOCK, edge)
    read(model, caches, ids, -(-len(ids) // 8))
    is_live = np.isin(np.arange(*sentence), live_positions(caches, 0))
    assert is_live.tolist() == [position < edge for position in range(*sentence)]
    options = {"passage_at": partial(sentence_at, ids=ids, decode=tokenizer.decode)} if knows_text else {}
    recalled = recall_rows(model, caches, tokenizer.encode(facts(lines)[1]), 128, BLOCK, **options)
    assert np.isin(np.arange(*sentence), live_positions(caches, 0)).all() == knows_text
    assert not recalled.is_partial


def test_the_first_round_does_not_wait_until_the_question_was_prefilled(exact):
    """The policy's statistics are complete in the middle of the question: what is evicted then was never scored."""
    model, tokenizer = exact
    text, question = facts(40)
    ids, asked = tokenizer.encode(text), tokenizer.encode(question)
    warmup = len(ids) + len(asked) // 2
    policy = f"published:calibration=text:score_unrotated_dims=on:warmup={warmup}:trigger=16"
    caches = make_prompt_cache(model, replace(CONFIG, evict=EvictConfig(policy, 200, recall=MOST)))
    read(model, caches, ids, -(-len(ids) // 8))
    sequence = layer_group_of(caches)
    assert not sequence.stats.rounds
    recalled = recall_rows(model, caches, asked, 128)
    stats = sequence.stats
    read(model, caches, asked)
    read(model, caches, [0])
    assert recalled.positions
    assert sequence.stats == stats
    assert all(calibrator.ready for calibrator in sequence.calibrators.values())


def test_a_loaded_cache_holds_the_round_before_the_question_too(exact, tmp_path):
    model, tokenizer = exact
    evict = EvictConfig("triattention:calibration=text:warmup=64:trigger=16", 200, recall=MOST)
    config = replace(CONFIG, evict=evict)
    caches, path = make_prompt_cache(model, config), tmp_path / "a.safetensors"
    read(model, caches, tokenizer.encode(facts(40)[0]))
    layer_group_of(caches).begin_pass(evicting_layers(caches), 0)  # only the question makes a round due
    save_prompt_cache(path, caches, model=model, config=config)
    rounds = []
    for each in (caches, load_prompt_cache(path, model=model).caches):
        before = layer_group_of(each).stats.rounds
        evict_before_question(each, 64)
        rounds.append((layer_group_of(each).stats.rounds - before, live_positions(each, 0).tolist()))
    assert rounds[0][0] == 1
    assert rounds[0] == rounds[1]


def test_the_latest_search_decides_what_is_recalled(exact, monkeypatch):
    """Blocks of the rescue service's search stay. All leave again, and each token is archived once."""
    model, _ = exact
    selections, search = [], LayerGroup.search_archive

    def spied(self, *arguments, **options):
        selections.append(search(self, *arguments, **options))
        return selections[-1]

    monkeypatch.setattr(LayerGroup, "search_archive", spied)
    caches, question = caches_of(exact)
    sequence, layers = layer_group_of(caches), evicting_layers(caches)
    block = sequence.archived[-1]
    sequence.recall(layers, [block])
    recall, searches, stays_alone = RecallDuringDecode(caches, RecallResult(search_blocks=(block,))), 0, False
    for _ in decode(model, caches, recall, question, 36):
        assert recall.searches == len(selections)
        if recall.searches > searches:
            searches, archived = recall.searches, len(positions_of(sequence.archived))
            selected = set(positions_of(selections[-1].blocks).tolist())
            assert sequence.recalled.tolist() == sorted(selected | set(block.positions.tolist()))
            assert selected <= set(layers[0].positions.tolist())
            assert 0 < len(selected) <= MOST
            stays_alone |= not set(block.positions.tolist()) <= selected
    recall.stop()
    assert searches
    assert stays_alone, "a search would have dropped it"
    assert recall.positions
    result = recall.result()
    assert (result.positions, result.search_blocks) == (sorted({*recall.positions}), (block,))
    assert result.archived == archived
    assert 0 < recall.seconds == result.seconds
    release(caches)
    evicted = set(range(layers[0].offset)) - set(layers[0].positions.tolist())
    assert sorted(p for block in sequence.archived for p in block.positions.tolist()) == sorted(evicted)
    assert not sequence.listeners(0, 0, 0)


@pytest.mark.full
def test_a_block_that_is_quoted_whole_is_not_reloaded(exact):
    recalled = []
    for quoted in ((), [(0, 10**6)], None):
        caches, question = caches_of(exact)
        spans = [(start + 1, start + BLOCK) for start in recalled[0][::BLOCK]] if quoted is None else quoted
        recall = RecallDuringDecode(caches, RecallResult(), quoted=spans)
        assert any(recall.searches for _ in decode(exact[0], caches, recall, question, 200))
        recalled.append(recall.positions)
    assert recalled[0]
    assert recalled[1:] == [[], recalled[0]]


@pytest.mark.full
@pytest.mark.parametrize(("per_token", "shortlist"), [(6, 64), (6, 2048), (10**9, 2048)])
def test_the_time_of_a_search_depends_on_counts_and_on_no_clock(exact, monkeypatch, per_token, shortlist):
    """The more a search scores, the later it comes, but not sooner than `recall_every`."""
    monkeypatch.setattr("mlx_tq.session.restore._SCORED_PER_TOKEN", per_token)
    monkeypatch.setattr("mlx_tq.prompt_cache.recall.SHORTLIST", shortlist)
    times = []
    for step in (0.0, 3600.0):
        clock = iter(np.arange(10_000) * step)
        monkeypatch.setattr("mlx_tq.session.restore.time.perf_counter", lambda clock=clock: next(clock))
        caches, question = caches_of(exact)
        recall = RecallDuringDecode(caches, RecallResult())
        archived, layers = len(positions_of(layer_group_of(caches).archived)), len(evicting_layers(caches))
        found = []
        for number in decode(exact[0], caches, recall, question, 120):
            found += [number] * (recall.searches - len(found))
        listed = min(archived, max(shortlist, 2 * MOST))
        assert (listed < archived) == (shortlist == 64)
        first = 1 if listed < archived else len(search_layers(layers))
        scored = first * archived + (len(search_layers(layers)) - first) * (listed + (archived - listed) // 16)
        wait = int(scored / layers / per_token)
        assert found[0] == max(EVERY, wait)
        assert (wait > EVERY) == (per_token == 6)
        times.append(found)
    assert times[0] == times[1]


def listening(exact, times=1):
    """Return caches that evicted most of a text and have read a question some times over, and its tokens."""
    caches, question = caches_of(exact)
    ids = question * times
    layer_group_of(caches).capture_queries(search_layers(len(evicting_layers(caches))), rounds=False)
    read(exact[0], caches, ids, len(ids))
    return caches, ids


def weights_of(caches, count):
    """Return each layer's weights of all positions for the last `count` tokens, had none been evicted: [Hq, L, S]."""
    twin = copy.deepcopy(caches)
    sequence, layers = layer_group_of(twin), evicting_layers(twin)
    sequence.recall(layers, sequence.archived)
    positions, weights_by_layer = layers[0].positions, {}
    for number, listener in layer_group_of(caches)._buffers.items():
        keys = np.array(layers[number].keys_and_values()[0].materialize().astype(mx.float32), np.float64)[0]
        queries = np.array(mx.concatenate(list(listener.passes), axis=2), np.float64)[0, :, -count:]
        logits = listener.scale * queries @ np.repeat(keys, len(queries) // len(keys), axis=0).swapaxes(1, 2)
        logits[:, positions > np.arange(layers[0].offset - count, layers[0].offset)[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights_by_layer[number] = weights / weights.sum(axis=-1, keepdims=True)
    assert np.array_equal(positions, np.arange(len(positions)))
    return weights_by_layer


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.full), 20])
def test_scores_of_blocks_against_float64(exact, times):
    """And the layer with the largest weights of each block. Also if the question's first tokens are packed already."""
    caches, ids = listening(exact, times)
    assert (len(ids) > 2 * CONFIG.window + BLOCK) == (times > 1)
    sequence, weights = layer_group_of(caches), weights_of(caches, len(ids))
    ranked = sequence.search_archive(evicting_layers(caches), len(ids), MOST).ranked
    powers = {
        number: np.stack([(each[..., piece.block.positions].max(axis=-1) ** 4).sum(axis=0) for piece in ranked], 1)
        for number, each in weights.items()
    }
    by_many = [[power**0.25 for power in token] for token in sum(powers.values())]
    worth = []
    for number, token in enumerate(by_many):
        squares = sum(each**2 for each in token)
        others = np.mean([other for at, other in enumerate(by_many) if at != number], axis=0)
        worth.append([max(0, each - mean) * each**2 / squares for each, mean in zip(token, others, strict=True)])
    assert np.allclose([piece.score for piece in ranked], np.max(worth, axis=0), rtol=1e-3)
    assert [piece.score for piece in ranked] == sorted((piece.score for piece in ranked), reverse=True)
    for place, piece in enumerate(ranked[:8]):
        assert piece.layer == max(powers, key=lambda number: powers[number][:, place].max())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(passes=st.lists(st.sampled_from([1, 7, 64, 255, 256, 512]), min_size=1, max_size=300))
def test_queries_are_kept_while_a_question_may_need_them(passes):
    """The latest 256, and no pass before these."""
    listener, ends = QueryBuffer(), np.cumsum(passes)
    for count, end in zip(passes, ends, strict=True):
        listener.append(mx.arange(int(end) - count, int(end))[None, None, :, None], 1.0, None)
    kept = np.concatenate([np.array(each).ravel() for each in listener.passes])
    assert kept.tolist() == list(range(int(ends[-1]) - len(kept), int(ends[-1])))
    assert len(kept) >= min(MAX_QUESTION, ends[-1])
    assert len(kept) - listener.passes[0].shape[2] < MAX_QUESTION


def test_of_layers_that_share_keys_only_the_first_is_listened_to():
    model = build("gemma4_text")
    caches = make_prompt_cache(model, CONFIG)
    sequence = layer_group_of(caches)
    sequence.capture_queries(range(len(evicting_layers(caches))), rounds=True)
    with compressed_attention(model):
        for count in (9, 1):
            mx.eval(model(mx.arange(count)[None], cache=caches))
    queries = [listener.passes for listener in sequence._buffers.values()]
    assert model.args.num_kv_shared_layers == 2
    assert [[each.shape[2] for each in passes] for passes in queries] == [[9, 1]] * len(queries)


def test_the_layers_that_decided_the_question_search_while_it_is_answered(exact):
    """Those of its eight best blocks; the others' queries are not kept."""
    caches, ids = listening(exact)
    sequence, layers = layer_group_of(caches), evicting_layers(caches)
    ranked = sequence.search_archive(layers, len(ids), MOST).ranked
    RecallDuringDecode(caches, RecallResult(ranked=tuple(ranked))).start()
    numbers = {number for number in range(len(layers)) if sequence.listeners(number, 0, 0)}
    assert numbers == {piece.layer for piece in ranked[:8]} < set(search_layers(len(layers)))
