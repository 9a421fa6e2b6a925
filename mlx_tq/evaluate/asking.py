"""Read a text into caches and ask about it, greedily, and say what of a needle the question could still see."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate

from mlx_tq.evaluate.passes import steps
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import compressed_caches


@dataclass(frozen=True)
class Answer:
    """What the model answered, and what the cache held of the fact.

    Attributes:
        text: generated; the question is not part of it.
        live: needle tokens that the question could attend to, at worst over the layers.
        packed: how many of them were in the packed body.
    """

    text: str
    live: int
    packed: int


def read_text(model: Any, ids: list[int], caches: list[Any], step: int) -> None:
    """Append tokens to the caches, `step` at a time."""
    with compressed(model):
        for start, stop in steps(len(ids), step):
            mx.eval(model(mx.array(ids[start:stop])[None], cache=caches))


def ask(
    model: Any, tokenizer: Any, question: list[int], caches: list[Any], needle: tuple[int, int], max_tokens: int
) -> Answer:
    """Ask about what the caches hold.

    Args:
        model: to ask.
        tokenizer: of the model.
        question: two tokens or more.
        caches: are appended to.
        needle: position of the first token of the planted sentence, and the one after its last.
        max_tokens: of the answer; 0 only reads the question.
    """
    with compressed(model):
        # Tokens are evicted when a forward begins, so what the question saw is known only after it was read.
        mx.eval(model(mx.array(question[:-1])[None], cache=caches))
        live, packed = whereabouts(caches, needle)
        if not max_tokens:
            return Answer("", live, packed)
        replies = stream_generate(model, tokenizer, question[-1:], max_tokens=max_tokens, prompt_cache=caches)
        return Answer("".join(reply.text for reply in replies), live, packed)


def whereabouts(caches: list[Any], needle: tuple[int, int]) -> tuple[int, int]:
    """How many tokens of the needle a cache holds, and how many of them packed, at worst over its layers."""
    compressed = compressed_caches(caches)
    span = range(*needle)
    if not compressed:
        return len(span), 0
    live, packed = [], []
    for cache in compressed:
        positions = list(cache.positions)
        sinks = cache.spec.sinks
        live.append(len(set(span).intersection(positions)))
        packed.append(len(set(span).intersection(positions[sinks : sinks + cache.body_tokens])))
    return min(live), min(packed)
