"""Which neighbours should come back with a block: how often all evidence of a question is back, by rule.

Texts and questions are those of the recall grid; nothing is answered. A rule says on which sides the neighbours of each
of the best blocks come too: on none, on both, on the side of the block's best token, or on the other.

python -m benchmarks.recall.bench_neighbours --models embedded,smollm2
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.named_models import NAMES, named_model, survey_models
from benchmarks.recall.arms import inside
from benchmarks.recall.bench_grid import asked_of
from benchmarks.recall.bench_recall import STEP, read
from benchmarks.recall.scenes import config, frame, planted
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.prompt_cache import recall as search
from mlx_tq.prompt_cache.archive import Extent
from mlx_tq.prompt_cache.passes import sequence_layers
from mlx_tq.prompt_cache.recall import choose
from mlx_tq.session.recall import recall

RULES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "none": lambda side: (),
    "both": lambda side: (-1, 1),
    "towards the best token": lambda side: (side,),
    "away from it": lambda side: (-side,),
}
# Of each model: kinds of questions, tokens, questions a text, texts.
CELLS = {
    "embedded": [("trained", tokens, 8, 3) for tokens in (2000, 3500)],
    "smollm2": [(kind, 1000, 4, 6) for kind in ("plain", "several")],
}
BUDGETS = ("50%", "25%", "10%")


def there(model: Any, caches: list[Any], ids: list[int], rule: Callable[[int], tuple[int, ...]]) -> np.ndarray:
    """The positions that are live or back for a question, by a rule."""
    caches = copy.deepcopy(caches)

    def by_rule(ranked: Any, beside: Sequence[tuple[int]], sinks: int, most: int) -> list[Extent]:
        return choose(ranked, [rule(side) for (side,) in beside], sinks, most)

    with mock.patch.object(search, "choose", by_rule):
        recall(model, caches, ids, STEP)
    return sequence_layers(caches)[0].positions


def cells(name: str) -> Iterator[dict[str, Any]]:
    """How many questions have all their evidence, by kind, tokens, budget and rule."""
    model, tokenizer = named_model(name)
    around = frame(tokenizer, "")
    for (kind, tokens, needles, texts), budget in product(CELLS[name], BUDGETS):
        whole, asked = dict.fromkeys(RULES, 0), 0
        for seed in range(texts):
            rng = random.Random(seed)
            made = planted(tokenizer, around.head, kind, tokens, needles, rng)
            spans = made.evidence()
            caches = make_prompt_cache(model, config("q8", "tq4", [span for each in spans for span in each], budget))
            with compressed(model):
                read(model, caches, made.ids)
                for needle, evidence in zip(made.hidden.needles, spans, strict=True):
                    asked += 1
                    ids = asked_of(tokenizer, around, needle).ids
                    for label, rule in RULES.items():
                        found = there(model, caches, ids, rule)
                        whole[label] += all(inside(found, span) == span[1] - span[0] for span in evidence)
        yield {"model": NAMES[name], "tokens": tokens, "kind": kind, "budget": budget, "asked": asked, "whole": whole}


if __name__ == "__main__":
    survey_models(
        __doc__.partition("\n")[0],
        "benchmarks.recall.bench_neighbours",
        "recall_neighbours.json",
        cells,
    )
