"""Study how much text evicted tokens send to the rescue service, by the number that is evicted together.

    python -m benchmarks.studies.eviction_blocks --models embedded,smollm2,gemma-3-270m.gguf

A model prefills WikiText-2 at a budget of 75 %; the positions of each round become spans as in a session. Text is
counted in the model's tokens, each span encoded by itself, and in bytes of the JSON.
"""

import json
from collections.abc import Iterator
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.reports import ALL_NAMES, named_model, survey_models
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.evaluate.asking import prefill_caches
from mlx_tq.policies import TriAttention
from mlx_tq.prompt_cache.compressed import make_prompt_cache
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.session.text import PlainText
from mlx_tq.session.transcript import make_spans

STEP, LENGTH = 128, 1600
GRANULARITIES = (1, 8, 16, 32, 64)


def measure(model: Any, plain: PlainText, ids: list[int], granularity: int) -> dict[str, Any]:
    policy = TriAttention(warmup=256, trigger=32, calibration="text", granularity=granularity)
    evict = EvictConfig(policy, budget="75%", recall="off")
    caches = make_prompt_cache(model, KVConfig(sinks=32, window=64, evict=evict))
    sequence = layer_group_of(caches)
    assert sequence is not None
    rounds, before = list[np.ndarray](), sequence.evicted
    for start in range(0, len(ids) + 1, STEP):
        prefill_caches(model, caches, [*ids, ids[0]][start : start + STEP], STEP)
        if sequence.evicted is not before:
            rounds.append(np.setdiff1d(sequence.evicted, before))
            before = sequence.evicted
    spans = [span for positions in rounds for span in make_spans(positions, ids, plain.decode)]
    evicted = sum(map(len, rounds))
    stored = sum(len(plain.encode(span.text)) for span in spans)
    wire = sum(len(json.dumps({"start": s.start, "stop": s.stop, "text": s.text}).encode()) for s in spans)
    return {
        "granularity": granularity,
        "rounds": len(rounds),
        "evicted": evicted,
        "kept": 1 - evicted / len(ids),
        "spans": len(spans),
        "span_tokens": mean(span.stop - span.start for span in spans),
        "stored_tokens": stored,
        "ratio": stored / evicted,
        "text_bytes": sum(len(span.text.encode()) for span in spans) / evicted,
        "wire_bytes": wire / evicted,
    }


def left(name: str) -> Iterator[dict[str, Any]]:
    model, tokenizer = named_model(name)
    plain = PlainText(tokenizer)
    ids = plain.encode(load_text()[: 8 * LENGTH])[:LENGTH]
    for granularity in GRANULARITIES:
        yield {"model": ALL_NAMES[name], **measure(model, plain, ids, granularity)}


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.studies.eviction_blocks", "evict_blocks.json", left)
