"""Texts with planted sentences in a model's chat format, and configurations that evict them."""

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.recall.needles import KINDS, Hidden
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.policies import Policy

PREFIX, WINDOW, STEP = 32, 64, 128
# Sentences are planted between these depths: behind the sinks, and before what no round reaches any more.
FIRST, LAST = 0.12, 0.75


@dataclass(frozen=True)
class Given(Policy):
    """Evicts certain blocks first, and others at random."""

    name = "given"
    first: str = ""  # numbers of blocks, joined by +
    trigger: int = 64

    def score(self, body: Any) -> np.ndarray:
        blocks = body.positions // BLOCK
        scores = np.random.default_rng(body.round_number).random(int(blocks.max()) + 1)[blocks]
        return np.where(np.isin(blocks, [int(part) for part in self.first.split("+")]), -1.0, scores)


@dataclass(frozen=True)
class Frame:
    """The text before and after a text and its question."""

    head: list[int]
    after: str  # behind a question, before the answer
    opening: str  # of the answer whose log-probability is taken


@dataclass(frozen=True)
class Scene:
    ids: list[int]
    hidden: Hidden
    spans: dict[str, tuple[int, int]]

    def evidence(self) -> list[list[tuple[int, int]]]:
        return [[self.spans[sentence] for sentence in needle.evidence] for needle in self.hidden.needles]


def frame(tokenizer: Any, opening: str) -> Frame:
    if not tokenizer.has_chat_template:
        return Frame(list(tokenizer.encode("")), "", "")
    turn = [{"role": "user", "content": "QUESTION"}]
    before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split("QUESTION")
    return Frame(encode(tokenizer, before), after, opening)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without start tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def read(model: Any, caches: list[Any], ids: list[int]) -> mx.array:
    """Prefill tokens and return the logits [vocabulary] after the last one."""
    for start in range(0, len(ids), STEP):
        logits = model(mx.array(ids[start : start + STEP])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return logits[0, -1]


def plant_needles(tokenizer: Any, head: list[int], kind: str, tokens: int, needles: int, rng: random.Random) -> Scene:
    """Return about so many tokens of WikiText-2 with needles of a kind at even depths."""
    hidden = KINDS[kind](rng, needles)
    planted = hidden.sentences
    rng.shuffle(planted)
    space = tokens - len(head) - sum(len(encode(tokenizer, sentence + " ")) for sentence in planted)
    sentences = re.split(r"(?<=\. )", load_text()[rng.randrange(60000) :][: 8 * tokens])[1:]
    filler, length = [], 0
    for sentence in sentences:
        if length >= space:
            break
        filler.append(encode(tokenizer, sentence))
        length += len(filler[-1])
    ends = np.cumsum([0, *map(len, filler)])
    depths = np.linspace(FIRST, LAST, len(planted)) + rng.uniform(-0.02, 0.02)
    at = [int(np.abs(ends - depth * length).argmin()) for depth in depths]
    ids, spans = list(head), {}
    for number, piece in enumerate([*filler, []]):
        for sentence, place in zip(planted, at, strict=True):
            if place == number:
                start = len(ids)
                ids += encode(tokenizer, sentence + " ")
                spans[sentence] = (start, len(ids))
        ids += piece
    return Scene(ids, hidden, spans)


def config(
    key: str, value: str, spans: list[tuple[int, int]], budget: str | int | None, policy: str | None = None
) -> KVConfig:
    """Return a configuration that evicts by a policy, or else the blocks of these spans first."""
    kept = KVConfig(key, value, sinks=PREFIX, window=WINDOW)
    if budget is None:
        return kept
    first = "+".join(sorted({str(p // BLOCK) for start, stop in spans for p in range(start, stop)}))
    return replace(kept, evict=EvictConfig(policy or Given(first=first), budget, "auto"))
