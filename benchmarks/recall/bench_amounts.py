"""How much should come back: what is answered by how many tokens a question may have back.

Texts and questions are those of the recall grid. More tokens bring more of the evidence, and more that misleads.

python -m benchmarks.recall.bench_amounts
"""

import argparse
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recall.arms import answer, inside
from benchmarks.recall.bench_grid import asked_of
from benchmarks.recall.bench_look import NAMES, RESULTS, named_model
from benchmarks.recall.bench_recall import STEP, read
from benchmarks.recall.parts import Part
from benchmarks.recall.scenes import config, frame, planted
from mlx_tq import compressed, make_prompt_cache
from mlx_tq.conversation.recall import recall
from mlx_tq.sequence.passes import sequence_layers

KEY, VALUE, BUDGET = "q8", "tq4", "25%"
AMOUNTS = (32, 64, 96, 128, 192, 256)
# Of an answer whose log-probability is taken; the embedded model answers as it was trained.
OPENINGS = {"embedded": "", "smollm2": "The answer is"}
# Model, kind of questions, tokens, questions a text, texts.
CELLS = (
    ("embedded", "trained", 2000, 8, 3),
    ("smollm2", "plain", 1000, 4, 6),
    ("smollm2", "paraphrased", 1000, 4, 6),
    ("smollm2", "several", 1000, 4, 6),
    ("smollm2", "plain", 2000, 4, 6),
)


def rows(model: Any, tokenizer: Any, name: str, kind: str, tokens: int, needles: int, seed: int) -> Iterator[Any]:
    """Of one text: a row for each question and amount."""
    around, rng = frame(tokenizer, OPENINGS[name]), random.Random(seed)
    made = planted(tokenizer, around.head, kind, tokens, needles, rng)
    caches = make_prompt_cache(model, config(KEY, VALUE, [span for each in made.evidence() for span in each], BUDGET))
    read(model, caches, made.ids)
    for number, (needle, spans) in enumerate(zip(made.hidden.needles, made.evidence(), strict=True)):
        asked = asked_of(tokenizer, around, needle)
        for amount in AMOUNTS:
            answering = copy.deepcopy(caches)
            recall(model, answering, asked.ids, STEP, amount)
            there = sequence_layers(answering)[0].positions
            right, likely = answer(model, tokenizer, answering, asked)
            yield {
                "model": NAMES[name],
                "tokens": tokens,
                "kind": kind,
                "text": seed,
                "needle": number,
                "amount": amount,
                "whole": all(inside(there, span) == span[1] - span[0] for span in spans),
                "right": right,
                "log": round(likely, 3),
            }


def main() -> None:
    """Measure what is not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / "recall_amounts.json")
    args = parser.parse_args()
    settings = {"budget": BUDGET, "amounts": [*AMOUNTS], "openings": OPENINGS}
    part = Part(args.json, {"key": KEY, "value": VALUE, "settings": settings})
    pieces = [(*cell, seed) for *cell, texts in CELLS for seed in range(texts)]
    loaded: tuple[str | None, Any, Any] = (None, None, None)
    for number, (name, *cell) in enumerate(pieces):
        if number in part.done:
            continue
        if loaded[0] != name:
            loaded = (name, *named_model(name))
        _, model, tokenizer = loaded
        with compressed(model):
            part.add(number, list(rows(model, tokenizer, name, *cell)))


if __name__ == "__main__":
    main()
