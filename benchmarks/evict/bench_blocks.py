"""What text evicted tokens leave for the rescue service, by the tokens that leave together.

python benchmarks/evict/bench_blocks.py [--length 1600] [--json FILE]

The embedded model reads WikiText-2 at a budget of 75 %; the positions of every round become spans as in a session. The
text is counted in tokens of the same model, each span encoded by itself, and in bytes of the JSON that is sent.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from report import write

from mlx_tq.commands.needles.haystack import load_text
from mlx_tq.config import KVConfig
from mlx_tq.conversation.plain_text import PlainText
from mlx_tq.conversation.spans import make_spans
from mlx_tq.evaluate.asking import read_text
from mlx_tq.models import load
from mlx_tq.policies import EvictConfig, TriAttention
from mlx_tq.sequence.compressed import make_prompt_cache
from mlx_tq.sequence.passes import sequence_in

STEP = 128


def measure(model: Any, plain: PlainText, ids: list[int], **options: Any) -> dict[str, Any]:
    """One way to evict."""
    evict = EvictConfig(TriAttention(warmup=256, trigger=32, stats="text", **options), budget="75%", recall="off")
    caches = make_prompt_cache(model, KVConfig(prefix=32, window=64, evict=evict))
    sequence = sequence_in(caches)
    assert sequence is not None
    rounds: list[np.ndarray] = []
    for start in range(0, len(ids) + 1, STEP):
        read_text(model, [*ids, ids[0]][start : start + STEP], caches, STEP)
        if len(departed := sequence.take_departed()):
            rounds.append(departed)
    spans = [span for positions in rounds for span in make_spans(positions, ids, plain.decode)]
    evicted = sum(map(len, rounds))
    stored = sum(len(plain.encode(span.text)) for span in spans)
    wire = sum(len(json.dumps({"start": s.start, "stop": s.stop, "text": s.text}).encode()) for s in spans)
    return {
        "granularity": options["granularity"],
        "segment_tokens": options.get("segment_tokens", 0),
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


def main() -> None:
    """Measure every granularity, and segments of a constant width."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=1600)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load()
    plain = PlainText(tokenizer)
    ids = plain.encode(load_text()[: 8 * args.length])[: args.length]
    rows = []
    for options in (*({"granularity": size} for size in (1, 8, 16, 32, 64)), {"granularity": 1, "segment_tokens": 64}):
        rows.append(measure(model, plain, ids, **options))
        print(rows[-1], flush=True)
        write(args.json, f"python benchmarks/evict/bench_blocks.py --length {args.length}", rows)


if __name__ == "__main__":
    main()
