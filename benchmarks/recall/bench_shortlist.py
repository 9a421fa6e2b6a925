"""What is lost where a few layers list the blocks of a large archive that the others weigh, by how long that list is.

Texts and questions are those of the recall grid; nothing is answered. Each question is asked in every way of the same
cache: all layers weigh everything, or the scouts do and the others a list, beside which some blocks stand for the rest
in sums of weights, or none; or only the latter half of the layers looks, the third quarter of the model's.

python -m benchmarks.recall.bench_shortlist --models embedded,smollm2,gemma-3-270m.gguf
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.named_models import ALL_NAMES, GEMMA, named_model, survey_models
from benchmarks.recall.arms import inside
from benchmarks.recall.bench_grid import asked_of
from benchmarks.recall.bench_recall import STEP
from benchmarks.recall.scenes import frame, readings
from mlx_tq.distributed.group import Ranks
from mlx_tq.prompt_cache import recall as search
from mlx_tq.prompt_cache.recall import STANDS_FOR, Look, Question, look
from mlx_tq.session.recall import recall

BUDGET, EVERYTHING, NONE = "10%", 1 << 40, 1 << 40
# Tokens of the list, and for how many of the rest one stands.
WAYS = {
    "all": (EVERYTHING, STANDS_FOR),
    "all, third quarter": (EVERYTHING, STANDS_FOR),
    "2,048": (2048, STANDS_FOR),
    "1,024": (1024, STANDS_FOR),
    "512": (512, STANDS_FOR),
    "512, none for the rest": (512, NONE),
}
# Of each model: kinds of questions, tokens, questions a text, texts.
CELLS = {
    "embedded": [("trained", tokens, 8, 3) for tokens in (2000, 3500)],
    "smollm2": [
        *((kind, 2000, 4, 6) for kind in ("plain", "several", "paraphrased", "decoys")),
        *((kind, 7500, 8, 3) for kind in ("plain", "several", "decoys")),
    ],
    GEMMA: [("continued", 8000, 8, 3)],
}


def judged(found: Look, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Whether the best block holds evidence, whether all that left of it comes, and what comes."""
    best, chosen = found.ranked[0].extent, found.chosen
    archived = [sum(inside(piece.extent.positions, span) for piece in found.ranked) for span in spans]
    back = [sum(inside(extent.positions, span) for extent in chosen) for span in spans]
    first = any(inside(best.positions, span) > 0 for span in spans)
    return {"first": first, "whole": archived == back, "chosen": {int(extent.positions[0]) for extent in chosen}}


def asked(model: Any, tokenizer: Any, kind: str, tokens: int, needles: int, texts: int) -> Iterator[dict[str, Any]]:
    """What each way finds for each question, and how many tokens are archived."""
    around = frame(tokenizer, "")
    for made, caches in readings(model, tokenizer, kind, tokens, needles, texts, BUDGET):
        for needle, spans in zip(made.hidden.needles, made.evidence(), strict=True):
            seen: dict[str, Any] = {}

            def looked(question: Question, ranks: Ranks, seen: dict[str, Any] = seen, spans: Any = spans) -> Look:
                question.archive.settle()
                for way, (size, others) in WAYS.items():
                    latter = len(question.asked) // 2 if way.endswith("quarter") else 0
                    asking = question._replace(asked=dict([*question.asked.items()][latter:]))
                    with mock.patch.object(search, "SHORTLIST", size), mock.patch.object(search, "STANDS_FOR", others):
                        seen[way] = judged(look(asking, ranks), spans)
                seen["archived"] = sum(len(extent.positions) for extent in question.extents)
                return look(question, ranks)

            with mock.patch("mlx_tq.prompt_cache.layer_group.look", looked):
                recall(model, copy.deepcopy(caches), asked_of(tokenizer, around, needle).ids, STEP)
            yield seen


def cells(name: str) -> Iterator[dict[str, Any]]:
    """By kind, tokens and way: of how many questions the evidence is first, comes whole, and the same blocks come."""
    model, tokenizer = named_model(name)
    for kind, tokens, needles, texts in CELLS[name]:
        found = list(asked(model, tokenizer, kind, tokens, needles, texts))
        archived = round(float(np.mean([each["archived"] for each in found])))
        for way in WAYS:
            row = {"model": ALL_NAMES[name], "tokens": tokens, "kind": kind, "archived": archived, "listed": way}
            row |= {
                "asked": len(found),
                **{what: sum(each[way][what] for each in found) for what in ("first", "whole")},
            }
            yield row | {"same": sum(each[way]["chosen"] == each["all"]["chosen"] for each in found)}


if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    survey_models(about, "benchmarks.recall.bench_shortlist", "recall_shortlist.json", cells, CELLS)
