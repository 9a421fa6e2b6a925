"""Which layers a look into the archive needs, and what a digest of each block would lose: where the evidence ranks.

The scenes are those of bench_recall. Of each question all layers' scores of blocks are kept: from the keys, and from
the bounding box of a block's keys (Quest, Tang et al. 2024), as packed keys are rotated and as the model has them. Then
blocks are ranked by some layers: all, every other one, halves, and few that were chosen one by one, for each seed by
the others. The rank under a digest says how many blocks a look would have to read exactly after it.

python -m benchmarks.recall.bench_layers --model smollm2 --tokens 1000 --budgets 300 --seeds 1,2,3
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from benchmarks.recall.bench_recall import BLOCK, COLOURS, STEP, Given, read, scene, survey
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.codec.normalization import KeyNormalization, decode, decode_rotated
from mlx_tq.config import KVConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.kernels.recall_score import grouped, recall_score
from mlx_tq.policies import EvictConfig
from mlx_tq.prompt_cache import recall as search
from mlx_tq.prompt_cache.recall import DECIDED, Asked, Question, Scored, looking, rank, singled_out
from mlx_tq.session import recall as conversation
from mlx_tq.session.recall import recall, release

MOST = 4  # layers that are chosen
WAYS = ("keys", "box, rotated", "box", "every other query", "the other queries")
_FEW = ("every other", "middle half")  # layers, with fewer queries too


@dataclass(frozen=True)
class Look:
    """One question: logarithms of `powers` [layers, L, blocks] by each of WAYS, and which blocks hold evidence."""

    tokens: int
    seed: int
    budget: int
    scores: dict[str, np.ndarray]
    evidence: np.ndarray

    @property
    def text(self) -> tuple[int, int, int]:
        """What it is asked of, as it was read."""
        return self.tokens, self.seed, self.budget

    def place(self, layers: Sequence[int], way: str = "keys") -> int:
        """The rank of the best block with evidence, by what these layers make of it."""
        scores = self.scores[way][list(layers)]
        worth = singled_out(np.exp(scores - scores.max()).sum(axis=0))
        return int((worth > worth[self.evidence].max()).sum())

    def deciding(self, layers: Sequence[int]) -> list[int]:
        """Those of these layers that made the most of the best blocks."""
        scores = self.scores["keys"][list(layers)]
        best = np.argsort(-singled_out(np.exp(scores).sum(axis=0)), kind="stable")[:DECIDED]
        return sorted({layers[i] for i in scores[:, :, best].max(axis=1).argmax(axis=0).tolist()})


def powers(weights: np.ndarray, count: int) -> np.ndarray:
    """Of `count` tokens' logarithms of weights [H, G L, n] that of their fourth powers' sum over heads [L, n]."""
    fourth = 4 * weights.reshape(-1, count, weights.shape[-1])
    most = fourth.max(axis=0)
    found: np.ndarray = most + np.log(np.exp(fourth - most).sum(axis=0))
    return found


def box_weights(asked: mx.array, keys: mx.array, starts: Sequence[int], live: np.ndarray) -> np.ndarray:
    """Of each block the largest weight that a key inside its box could have beside what is live: [H, N, n], logarithms.

    Args:
        asked: queries [H, N, D].
        keys: as asked, [H, S, D].
        starts: first key of each block.
        live: log-sum-exp of what is live, [H, N].
    """
    low, high = (mx.array(end.reduceat(np.array(keys), starts, axis=1)) for end in (np.minimum, np.maximum))
    bounds = mx.maximum(asked, 0) @ high.swapaxes(-1, -2) + mx.minimum(asked, 0) @ low.swapaxes(-1, -2)
    return np.array(bounds) - live[..., None]


def scores_of(asked: Asked, words: np.ndarray, means: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """One layer's `powers` by each of WAYS."""
    layer, queries, live = asked
    _, layout, known = layer.body()
    normalization = None
    if known is not None:
        which = mx.array(np.repeat(np.arange(len(sizes)), sizes), mx.int32)
        normalization = KeyNormalization(known.scale, mx.array(means.swapaxes(0, 1))[None], which)
    keys = layout.split_keys(mx.array(words)[None])
    asking = grouped(queries, len(words), layout, normalization)
    found = recall_score(asking, keys, layout, normalization, sizes)
    total = np.logaddexp(live, np.array(found.total))
    count = queries.shape[2]
    exact = powers(np.array(found.each) - total[..., None], count)
    starts, heads = np.cumsum([0, *sizes[:-1]]), words.shape[0]
    packed = asking[0], decode_rotated(layout.key, keys, normalization)[0]
    plain = queries.reshape(heads, -1, queries.shape[-1]), decode(layout.key, keys, normalization)[0]
    boxes = [powers(box_weights(*pair, starts, live), count) for pair in (packed, plain)]
    return [exact, *boxes, *(exact[::-1][first::2] for first in (0, 1))]  # the last token's first


def looks(model: Any, tokenizer: Any, args: argparse.Namespace, tokens: int, seed: int, budget: int) -> list[Look]:
    """One for each code of a scene that has left."""
    made, found = scene(tokenizer, tokens, seed), []
    blocks = "+".join(sorted({str(p // BLOCK) for start, stop in made.spans for p in range(start, stop)}))
    evict = EvictConfig(Given(first=blocks), budget, "auto")
    with compressed(model):
        caches = make_prompt_cache(model, KVConfig(args.key, args.value, sinks=32, window=64, evict=evict))
        read(model, caches, made.ids)
        for colour, span in zip(COLOURS, made.spans, strict=False):
            question = f"\nWhat is the access code of the {colour} gate? Answer with the number only.<|im_end|>\n"
            ids = tokenizer.encode(question + "<|im_start|>assistant\n", add_special_tokens=False)
            seen: dict[str, Any] = {}

            def ranked(question: Question, ranks: Ranks, seen: dict[str, Any] = seen) -> list[Scored]:
                question.archive.settle()
                extents = question.extents
                sizes = [len(extent.positions) for extent in extents]
                each = [
                    scores_of(asked, *question.archive.keys(extents, number), sizes)
                    for number, asked in question.asked.items()
                ]
                seen.update(each=each, extents=extents)
                return rank(question, ranks)

            with mock.patch.object(search, "rank", ranked), mock.patch.object(conversation, "looking", range):
                recall(model, caches, ids, STEP)
            release(caches)
            evidence = np.array([np.any((e.positions >= span[0]) & (e.positions < span[1])) for e in seen["extents"]])
            scores = {way: np.stack(rows) for way, rows in zip(WAYS, zip(*seen["each"], strict=True), strict=True)}
            if evidence.any():  # and not live still
                found.append(Look(tokens, seed, budget, scores, evidence))
    return found


def chosen(found: Sequence[Look], layers: int) -> list[int]:
    """Up to MOST layers, each the one with which the evidence ranks best beside those before it."""
    taken: list[int] = []
    for _ in range(min(MOST, layers)):
        rest = [layer for layer in range(layers) if layer not in taken]
        taken.append(min(rest, key=lambda layer: sum(look.place([*taken, layer]) for look in found)))
    return taken


def by_layers(found: Sequence[Look]) -> dict[str, list[int]]:
    """Ranks of the evidence, by the layers that look and what they read."""
    count = len(found[0].scores["keys"])
    every = range(count)
    sets = {"all": every, "every other": every[::2], "every fourth": every[::4]}
    sets |= {"middle half": looking(count), "third quarter": range(count // 2, -(-3 * count // 4))}
    sets |= {"first half": every[: count // 2], "second half": every[count // 2 :]}
    ranks = {name: [look.place(layers) for look in found] for name, layers in sets.items()}
    ranks |= {f"layer {layer}": [look.place([layer]) for look in found] for layer in every}
    ranks |= {f"all, {way}": [look.place(every, way) for look in found] for way in WAYS[1:]}
    ranks |= {f"{name}, {way}": [look.place(sets[name], way) for look in found] for name in _FEW for way in WAYS[3:]}
    pairs = [(a, b) for a, b in permutations(found, 2) if a.text == b.text]
    decided = [(look, other.deciding(looking(count))) for look, other in pairs]
    ranks["of the middle half, those that decided another question"] = [look.place(layers) for look, layers in decided]
    seeds = {look.seed for look in found}
    if len(seeds) > 1:
        best = {seed: chosen([look for look in found if look.seed != seed], count) for seed in seeds}
        for size in range(1, MOST + 1):
            ranks[f"{size} chosen"] = [look.place(best[look.seed][:size]) for look in found]
    return ranks


def summed_up(found: Sequence[Look]) -> dict[str, Any]:
    """Ranks of the evidence, which are shown too."""
    ranks = by_layers(found)
    for name, places in ranks.items():
        first = sum(place == 0 for place in places)
        print(f"{name}: first in {first} of {len(places)}, worst {max(places)} of {found[0].evidence.size}")
    deciding = [len(look.deciding(looking(len(look.scores["keys"])))) for look in found]
    return {"blocks": [look.evidence.size for look in found], "ranks": ranks, "deciding": deciding}


if __name__ == "__main__":
    survey(
        "python -m benchmarks.recall.bench_layers",
        __doc__.partition("\n")[0],
        "300",
        "recall_layers.json",
        looks,
        summed_up,
    )
