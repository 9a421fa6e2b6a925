"""Recall of access codes: where the evidence ranks among archived blocks, and what the model answers.

    python -m benchmarks.recall.bench_recall --model smollm2 --tokens 1000 --budgets 500,300,100 --seeds 1,2,3

A text with four codes is prefilled while blocks are evicted; every block that holds a part of a code is. Then each code
is asked for: of the full cache, of the evicted one, and of that with what recall brings back. `--codes one` plants one
code a text, for models that cannot tell several apart. With `--policy` the policy chooses what is evicted.
"""

import argparse
import copy
import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recall.arms import Asked, answer, inside
from benchmarks.recall.scenes import STEP, config, encode, read
from benchmarks.reports import save
from mlx_tq import compressed_attention, load, make_prompt_cache
from mlx_tq.cli.inputs import load_text
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.session.restore import recall_rows, release
from mlx_tq.session.transcript import sentence_at

DEPTHS = (0.15, 0.4, 0.65, 0.85)
ANSWER = 24  # tokens


@dataclass(frozen=True)
class Wording:
    """How codes are told and asked for, and how an answer begins whose log-probability is taken."""

    facts: tuple[str, ...]
    question: str
    opening: str

    def ask(self, fact: str) -> str:
        """Return the question for what a fact says, and what follows it in a prompt."""
        name = fact.removeprefix("The ").partition(" is ")[0]
        return f"\n{self.question.format(name)}<|im_end|>\n<|im_start|>assistant\n"


WORDINGS = {
    "four": Wording(
        tuple(f"The access code of the {color} gate is {{}}. " for color in ("amber", "copper", "violet", "silver")),
        "What is the {}? Answer with the number only.",
        "The access code is ",
    ),
    "one": Wording(("The access code is {}. ",), "What is the {}?", ""),
}

Scene = tuple[list[int], list[str], list[tuple[int, int]]]  # a text in tokens, its codes, and where each code lies


def make_scene(tokenizer: Any, tokens: int, seed: int, wording: Wording) -> Scene:
    """Return about so many tokens of WikiText-2 with codes in it; one alone is as deep as any of four."""
    rng = np.random.default_rng(seed)
    depths = DEPTHS if len(wording.facts) > 1 else (DEPTHS[seed % len(DEPTHS)],)
    text, codes = load_text(), [str(code) for code in rng.integers(10000, 99999, len(depths))]
    sentences = re.split(r"(?<=\. )", text[int(rng.integers(0, 60000)) :][: 12 * tokens])
    sizes = np.cumsum([len(tokenizer.encode(sentence)) for sentence in sentences])
    sentences = sentences[: int(np.searchsorted(sizes, tokens)) + 1]
    facts = [fact.format(code) for fact, code in zip(wording.facts, codes, strict=True)]
    for depth, fact in reversed(list(zip(depths, facts, strict=True))):
        sentences.insert(int(len(sentences) * depth), fact)
    ids: list[int] = []
    spans = []
    for sentence in ["<|im_start|>user\nRead this text.\n", *sentences]:
        start = len(ids)
        ids += encode(tokenizer, sentence)
        if sentence in facts:
            spans.append((start, len(ids)))
    return ids, codes, spans


def measure(model: Any, tokenizer: Any, args: argparse.Namespace, scene: Scene, budget: int) -> list[dict[str, Any]]:
    ids, codes, spans = scene
    rows, wording = [], WORDINGS[args.codes]
    full, caches = (
        make_prompt_cache(model, config(args.key, args.value, spans, limit, args.policy)) for limit in (None, budget)
    )
    read(model, full, ids)
    read(model, caches, ids)
    live = compressed_caches(caches)[0].positions
    for fact, code, span in zip(wording.facts, codes, spans, strict=True):
        question = encode(tokenizer, wording.ask(fact))
        asked = Asked(question, encode(tokenizer, wording.opening), encode(tokenizer, code), (code,), ANSWER)
        size = span[1] - span[0]
        row: dict[str, Any] = {"tokens": len(ids), "budget": budget, "code": code, "live": inside(live, span) / size}
        row["full"], row["full_log"] = answer(model, tokenizer, copy.deepcopy(full), asked)
        row["evicted"], row["evicted_log"] = answer(model, tokenizer, copy.deepcopy(caches), asked)
        sentences = partial(sentence_at, ids=ids, decode=tokenizer.decode)
        recalled = recall_rows(model, caches, question, STEP, passage_at=sentences)
        blocks = [piece.block.positions for piece in recalled.ranked]
        row["returned"] = inside(np.array(recalled.positions), span) / size
        row["archived"], row["recalled"] = sum(map(len, blocks)), len(recalled.positions)
        row["rank"] = next((rank for rank, block in enumerate(blocks) if inside(block, span)), None)
        row["blocks"], row["partial"], row["seconds"] = len(blocks), recalled.is_partial, recalled.seconds
        row["recall"], row["recall_log"] = answer(model, tokenizer, copy.deepcopy(caches), asked)
        release(caches)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="tq4")
    parser.add_argument("--value", default="tq4")
    parser.add_argument("--tokens", default="1000")
    parser.add_argument("--budgets", default="500,300,100")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--codes", choices=WORDINGS, default="four")
    parser.add_argument("--policy", help="that evicts (default: the blocks of codes are evicted first)")
    parser.add_argument("--json", type=Path, default=Path("recall.json"), help="file of benchmarks/results, or a path")
    args = parser.parse_args()
    model, tokenizer = load(args.model, dtype="float32", dequantize=True)
    numbers = {name: [int(part) for part in getattr(args, name).split(",")] for name in ("tokens", "budgets", "seeds")}
    rows = []
    with compressed_attention(model):
        for tokens, budget, seed in product(*numbers.values()):
            scene = make_scene(tokenizer, tokens, seed, WORDINGS[args.codes])
            for row in measure(model, tokenizer, args, scene, budget):
                rows.append({"seed": seed, **row})
                print(json.dumps(rows[-1]), flush=True)
    command = f"python -m benchmarks.recall.bench_recall --model {args.model} --key {args.key} --value {args.value}"
    about = {"model": args.model, "key": args.key, "value": args.value, "settings": numbers}
    command += f" --tokens {args.tokens} --budgets {args.budgets} --seeds {args.seeds} --codes {args.codes}"
    save(args.json, command + (f" --policy {args.policy}" if args.policy else ""), **about, rows=rows)


if __name__ == "__main__":
    main()
