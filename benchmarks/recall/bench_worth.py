"""What a block should be worth: where the evidence ranks by several rules, and what else would come back with it.

Texts and questions are those of the recall grid; nothing is answered. Of each rule the blocks that are worth at least a
part of the best one's worth would come back, up to four.

python -m benchmarks.recall.bench_worth --models embedded,smollm2
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.named_models import NAMES, named_model, survey_models
from benchmarks.recall.arms import inside
from benchmarks.recall.bench_grid import asked_of
from benchmarks.recall.bench_recall import STEP
from benchmarks.recall.scenes import frame, readings
from mlx_tq.distributed.group import Ranks
from mlx_tq.prompt_cache import recall as search
from mlx_tq.prompt_cache.recall import Question, Scored, rank, singled_out
from mlx_tq.session.recall import recall

BUDGET, MOST = "25%", 4
PARTS = (0.8, 0.7, 0.6, 0.5)
# Of each model: kinds of questions, tokens, questions a text, texts.
CELLS = {
    "embedded": [("trained", tokens, 8, 3) for tokens in (2000, 3500)],
    "smollm2": [(kind, 1000, 4, 6) for kind in ("plain", "several", "paraphrased", "decoys")] + [("plain", 2000, 4, 6)],
}


def by_head(layers: list[np.ndarray]) -> np.ndarray:
    """The largest weight under any head [L, N] of weights [H, G, L, N] by layer."""
    return np.stack([found.max(axis=(0, 1)) for found in layers]).max(axis=0)


def by_many(layers: list[np.ndarray]) -> np.ndarray:
    """Fourth powers of the weights under all heads, added up [L, N]."""
    return np.stack([(found**4).sum(axis=(0, 1)) for found in layers]).sum(axis=0)


def of_one_block(powers: np.ndarray) -> np.ndarray:
    """A block's share of the squares of all blocks' weights counts too, which "the access code" gives none [N]."""
    weights = np.power(powers, 0.25)
    best: np.ndarray = (weights**3 / np.sum(weights**2, axis=1, keepdims=True)).max(axis=0)
    return best


RULES: dict[str, Callable[[list[np.ndarray]], np.ndarray]] = {
    "largest weight": lambda layers: by_head(layers).max(axis=0),
    "many heads": lambda layers: np.power(by_many(layers), 0.25).max(axis=0),
    "many heads, of one block": lambda layers: of_one_block(by_many(layers)),
    "many heads, of one block and token": lambda layers: singled_out(by_many(layers)),
}


def judged(worth: np.ndarray, evidence: np.ndarray) -> dict[str, Any]:
    """Whether evidence is first, and by part of the best worth: whether all would come, and how much else.

    Args:
        worth: of the blocks [N].
        evidence: which of them hold each sentence [n, N].
    """
    order = np.argsort(-worth, kind="stable")
    found: dict[str, Any] = {"first": bool(evidence[:, order[0]].any())}
    for part in PARTS:
        come = [i for i in order[:MOST] if worth[i] >= part * worth[order[0]]]
        some = evidence[:, come].any(axis=1) | ~evidence.any(axis=1)  # what never left need not come
        found[str(part)] = [bool(some.all()), int((~evidence[:, come].any(axis=0)).sum())]
    return found


def asked(model: Any, tokenizer: Any, kind: str, tokens: int, needles: int, texts: int) -> Iterator[dict[str, Any]]:
    """What each rule makes of each question."""
    around = frame(tokenizer, "")
    for made, caches in readings(model, tokenizer, kind, tokens, needles, texts, BUDGET):
        for needle, spans in zip(made.hidden.needles, made.evidence(), strict=True):
            seen: dict[str, Any] = {}

            def ranked(question: Question, ranks: Ranks, seen: dict[str, Any] = seen) -> list[Scored]:
                question.archive.settle()
                layers = [np.exp(found) for found in search._log_weights(question)]
                seen.update(extents=question.extents, layers=layers)
                return rank(question, ranks)

            with mock.patch.object(search, "rank", ranked):
                recall(model, copy.deepcopy(caches), asked_of(tokenizer, around, needle).ids, STEP)
            evidence = np.array([[inside(e.positions, span) > 0 for e in seen["extents"]] for span in spans])
            if evidence.any():
                yield {rule: judged(worth(seen["layers"]), evidence) for rule, worth in RULES.items()}


def cells(name: str) -> Iterator[dict[str, Any]]:
    """By kind, tokens and rule: where the evidence is first, what would come of it, and what else."""
    model, tokenizer = named_model(name)
    for kind, tokens, needles, texts in CELLS[name]:
        found = list(asked(model, tokenizer, kind, tokens, needles, texts))
        for rule in RULES:
            parts = {str(part): [sum(each[rule][str(part)][i] for each in found) for i in (0, 1)] for part in PARTS}
            row = {"model": NAMES[name], "tokens": tokens, "kind": kind, "asked": len(found), "rule": rule}
            yield row | {"first": sum(each[rule]["first"] for each in found), "parts": parts}


if __name__ == "__main__":
    survey_models(__doc__.partition("\n")[0], "benchmarks.recall.bench_worth", "recall_worth.json", cells)
