"""Where the evidence of a question ranks among archived blocks, and what the model answers, in the package itself.

A text with access codes is read in steps while blocks leave by rounds; every block that holds a part of a code leaves.
Then each code is asked for: of the full cache, of what was left, and of that with what recall brings back.

python benchmarks/recall/bench_recall.py --model smollm2 --tokens 1000 --budgets 500,300,100 --seeds 1,2,3
"""

import argparse
import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq import compressed, load, make_prompt_cache
from mlx_tq.cli.environment import environment
from mlx_tq.cli.haystack import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies import Policy
from mlx_tq.prompt_cache.passes import compressed_caches
from mlx_tq.session.restore import recall_rows, release

RESULTS = Path(__file__).parents[1] / "results"
COLORS = ("amber", "copper", "violet", "silver", "indigo", "crimson")
DEPTHS = (0.15, 0.4, 0.65, 0.85)
STEP, ANSWER, BLOCK = 128, 24, 32


@dataclass(frozen=True)
class Scene:
    ids: list[int]
    codes: list[str]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Given(Policy):
    """Evicts certain blocks first, and others at random."""

    name = "given"
    first: str = ""  # numbers of blocks, joined by +
    trigger: int = 64

    def score(self, body: Any) -> np.ndarray:
        blocks = body.positions // BLOCK
        scores = np.random.default_rng(body.round).random(int(blocks.max()) + 1)[blocks]
        return np.where(np.isin(blocks, [int(part) for part in self.first.split("+")]), -1.0, scores)


def scene(tokenizer: Any, tokens: int, seed: int) -> Scene:
    """Return about so many tokens of WikiText-2 with four codes in it."""
    rng = np.random.default_rng(seed)
    text, codes = load_text(), [str(code) for code in rng.integers(10000, 99999, len(DEPTHS))]
    sentences = re.split(r"(?<=\. )", text[int(rng.integers(0, 60000)) :][: 12 * tokens])
    sizes = np.cumsum([len(tokenizer.encode(sentence)) for sentence in sentences])
    sentences = sentences[: int(np.searchsorted(sizes, tokens)) + 1]
    facts = [f"The access code of the {color} gate is {code}. " for color, code in zip(COLORS, codes, strict=False)]
    for depth, fact in reversed(list(zip(DEPTHS, facts, strict=True))):
        sentences.insert(int(len(sentences) * depth), fact)
    ids: list[int] = []
    spans = []
    for sentence in ["<|im_start|>user\nRead this text.\n", *sentences]:
        start = len(ids)
        ids += tokenizer.encode(sentence, add_special_tokens=False)
        if sentence in facts:
            spans.append((start, len(ids)))
    return Scene(ids, codes, spans)


def read(model: Any, caches: list[Any], ids: list[int]) -> mx.array:
    """Prefill tokens and return the logits [vocabulary] after the last one."""
    for start in range(0, len(ids), STEP):
        logits = model(mx.array(ids[start : start + STEP])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return logits[0, -1]


def answer(model: Any, tokenizer: Any, caches: list[Any], question: list[int], code: str) -> tuple[bool, float]:
    """Return whether a free answer holds the code, and the log-probability of the code where it would begin."""
    logits, said = read(model, caches, question), []
    told = copy.deepcopy(caches)
    for _ in range(ANSWER):
        token = int(logits.argmax())
        if token == tokenizer.eos_token_id:
            break
        said.append(token)
        logits = read(model, caches, [token])
    begun = tokenizer.encode("The access code is ", add_special_tokens=False)
    code_ids = tokenizer.encode(code, add_special_tokens=False)
    logits = model(mx.array([*begun, *code_ids])[None], cache=told)[0, len(begun) - 1 : -1].astype(mx.float32)
    chances = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    likely = mx.take_along_axis(chances, mx.array(code_ids)[:, None], axis=-1).sum()
    return code in tokenizer.decode(said), float(likely)


def rank(ordered: list[Any], span: tuple[int, int]) -> int | None:
    places = [
        i for i, extent in enumerate(ordered) if np.any((extent.positions >= span[0]) & (extent.positions < span[1]))
    ]
    return min(places) if places else None


def measure(
    model: Any, tokenizer: Any, args: argparse.Namespace, tokens: int, seed: int, budget: int
) -> list[dict[str, Any]]:
    made = scene(tokenizer, tokens, seed)
    blocks = "+".join(sorted({str(p // BLOCK) for start, stop in made.spans for p in range(start, stop)}))
    config = KVConfig(args.key, args.value, sinks=32, window=64, evict=EvictConfig(Given(first=blocks), budget, "auto"))
    rows = []
    with compressed(model):
        full, caches = (make_prompt_cache(model, each) for each in (replace(config, evict=None), config))
        read(model, full, made.ids)
        read(model, caches, made.ids)
        live = set(compressed_caches(caches)[0].positions.tolist())
        for color, code, span in zip(COLORS, made.codes, made.spans, strict=False):
            question = tokenizer.encode(
                f"\nWhat is the access code of the {color} gate? Answer with the number only.<|im_end|>\n"
                "<|im_start|>assistant\n",
                add_special_tokens=False,
            )
            row: dict[str, Any] = {"tokens": len(made.ids), "seed": seed, "budget": budget, "code": code}
            row["live"] = sum(p in live for p in range(*span)) / (span[1] - span[0])
            row["full"], row["full_log"] = answer(model, tokenizer, copy.deepcopy(full), question, code)
            row["evicted"], row["evicted_log"] = answer(model, tokenizer, copy.deepcopy(caches), question, code)
            found = recall_rows(model, caches, question, STEP)
            row["returned"] = sum(p in set(found.positions) for p in range(*span)) / (span[1] - span[0])
            ordered = [piece.extent for piece in found.ranked]
            row["archived"], row["recalled"] = sum(len(extent.positions) for extent in ordered), len(found.positions)
            row["rank"], row["blocks"], row["seconds"] = rank(ordered, span), len(ordered), found.seconds
            row["recall"], row["recall_log"] = answer(model, tokenizer, copy.deepcopy(caches), question, code)
            release(caches)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def survey(
    program: str,
    about: str,
    budgets: str,
    file: str,
    measure: Callable[..., list[Any]],
    summed_up: Callable[[list[Any]], dict[str, Any]],
) -> None:
    """Measure each scene that the flags name, and write the report."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="tq4")
    parser.add_argument("--value", default="tq4")
    parser.add_argument("--tokens", default="1000")
    parser.add_argument("--budgets", default=budgets)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--json", default=str(RESULTS / file))
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype="float32", dequantize=True)
    numbers = {name: [int(part) for part in getattr(args, name).split(",")] for name in ("tokens", "budgets", "seeds")}
    found = [
        each
        for tokens in numbers["tokens"]
        for budget in numbers["budgets"]
        for seed in numbers["seeds"]
        for each in measure(model, tokenizer, args, tokens, seed, budget)
    ]
    command = f"{program} --model {args.model} --key {args.key} --value {args.value}"
    command += f" --tokens {args.tokens} --seeds {args.seeds}"
    asked = {"command": command, "model": args.model, "key": args.key, "value": args.value, "settings": numbers}
    report = {**asked, "environment": environment(), **summed_up(found)}
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    survey(
        "python benchmarks/recall/bench_recall.py",
        __doc__.partition("\n")[0],
        "500,300,100",
        "recall.json",
        measure,
        lambda rows: {"rows": rows},
    )
