"""Whether a floor under a block's worth would keep back what nobody asked for: what questions about nothing bring back.

Each text is asked what it was asked in the recall grid, then about a fact of the same kind that is not in it, then for
something that has to do with no text. Of each question the worth of the best block, and the tokens that come back.

python -m benchmarks.recall.bench_floor --models embedded,smollm2
"""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.named_models import NAMES, named_model, survey_models
from benchmarks.recall.arms import inside
from benchmarks.recall.bench_grid import asked_of
from benchmarks.recall.bench_recall import STEP
from benchmarks.recall.needles import KINDS, Needle
from benchmarks.recall.scenes import Scene, frame, readings
from mlx_tq.session.recall import recall

BUDGET = "25%"
FOUND, ABSENT, NOTHING = "what left", "a fact that is not there", "nothing of a text"
REQUESTS = (
    "Thank you, that helps a lot.",
    "Write two lines about the sea.",
    "What is seven times eight?",
    "Please say that again in French.",
    "Tell me a joke about cats.",
    "How are you today?",
)
# Of each model: kinds of questions, tokens, questions a text, texts.
CELLS = {
    "embedded": [("trained", 2000, 8, 3)],
    "smollm2": [(kind, 1000, 4, 6) for kind in ("plain", "several", "paraphrased", "decoys")] + [("plain", 2000, 4, 6)],
}


def absent(kind: str, made: Scene, count: int) -> list[Needle]:
    """Questions of the same kind about what a text does not hold."""
    asked = {needle.question for needle in made.hidden.needles}
    others = (needle for seed in range(100, 120) for needle in KINDS[kind](random.Random(seed), count).needles)
    return list({needle.question: needle for needle in others if needle.question not in asked}.values())[:count]


def answers(model: Any, tokenizer: Any, kind: str, tokens: int, needles: int, texts: int) -> Iterator[dict[str, Any]]:
    """What each question of each text finds."""
    around = frame(tokenizer, "")
    for made, caches in readings(model, tokenizer, kind, tokens, needles, texts, BUDGET):
        asked = [(FOUND, needle, spans) for needle, spans in zip(made.hidden.needles, made.evidence(), strict=True)]
        asked += [(ABSENT, needle, []) for needle in absent(kind, made, needles)]
        asked += [(NOTHING, Needle((), request, ("",)), []) for request in REQUESTS]
        for about, needle, spans in asked:
            found = recall(model, copy.deepcopy(caches), asked_of(tokenizer, around, needle).ids, STEP)
            back = np.array(found.positions)
            right = any(inside(back, span) for span in spans)
            yield {"about": about, "worth": round(found.ranked[0].score, 4), "right": right, "back": len(back)}


def cells(name: str) -> Iterator[dict[str, Any]]:
    """Of each kind of questions and each subject what was found."""
    model, tokenizer = named_model(name)
    for kind, tokens, needles, texts in CELLS[name]:
        found = list(answers(model, tokenizer, kind, tokens, needles, texts))
        for about in (FOUND, ABSENT, NOTHING):
            rows = [{k: row[k] for k in ("worth", "right", "back")} for row in found if row["about"] == about]
            yield {"model": NAMES[name], "tokens": tokens, "kind": kind, "about": about, "found": rows}


if __name__ == "__main__":
    survey_models(__doc__.partition("\n")[0], "benchmarks.recall.bench_floor", "recall_floor.json", cells)
