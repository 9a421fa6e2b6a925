"""`mlx_tq demo`: a fact in a conversation that outgrows its cache, asked for with and without what mlx_tq does."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_tq.args import add_impl_argument
from mlx_tq.chat.screen import memory_bar
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, EvictConfig, KVConfig, profile
from mlx_tq.haystack import QUESTION, Case, Verdict, build_case, load_text, verdict
from mlx_tq.models import load
from mlx_tq.rescue import AUTO, OFF
from mlx_tq.session import Session
from mlx_tq.ui import console, human_bytes, results, table

_PREFIX, _WINDOW = 32, 128
_ANSWER_TOKENS = 24
_START_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What one way to keep the conversation answered, and at what cost.

    Attributes:
        name: of the way.
        answer: what the model said.
        found: the answer holds the fact, to the letter.
        live, evicted: tokens when the question came.
        brought_back: tokens that rescue quoted.
        nbytes, fp16_nbytes: of the cache then, and of all tokens at fp16.
    """

    name: str
    answer: str
    found: bool
    live: int
    evicted: int
    brought_back: int
    nbytes: int
    fp16_nbytes: int


def ways(budget: str) -> dict[str, tuple[KVConfig, str]]:
    """Configuration and rescue of each."""
    packed = profile(DEFAULT_PROFILE, prefix=_PREFIX, window=_WINDOW)
    evicting = replace(packed, evict=EvictConfig(budget=budget, warmup=256, granularity=64, trigger=64))
    return {
        "fp16": (PROFILES["off"], OFF),
        "compressed": (packed, OFF),
        "+ evicted": (evicting, OFF),
        "+ rescued": (evicting, AUTO),
    }


def converse(model: Any, tokenizer: Any, case: Case, name: str, config: KVConfig, rescue: str) -> Outcome:
    """Say the text, then ask for the fact."""
    with Session(model, tokenizer, config, rescue=rescue, warn=lambda _: None) as session:
        if session.client is not None:
            session.client.ready(_START_S)
        "".join(session.respond(tokenizer.decode(case.ids[: case.question]), max_tokens=8))
        stats = session.stats
        answer = "".join(session.respond(QUESTION, max_tokens=_ANSWER_TOKENS)).strip()
        rehydration = session.turns[-1].rehydration
        console.print(f"{name:12} {answer!r}", markup=False)
        console.print(memory_bar(session.stats), soft_wrap=True)
    return Outcome(
        name=name,
        answer=answer,
        found=verdict(answer, case.answer) is Verdict.PASS,
        live=stats.live,
        evicted=stats.evicted,
        brought_back=len(rehydration.ids),
        nbytes=stats.nbytes,
        fp16_nbytes=stats.fp16_nbytes,
    )


def build_parser() -> argparse.ArgumentParser:
    """Length, place and seed of the fact, and the budget."""
    parser = argparse.ArgumentParser(prog="mlx_tq demo", description="A conversation that outgrows its cache.")
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the text (default: 1000)")
    parser.add_argument("--depth", type=float, default=0.0, help="where the fact stands, 0 to 1 (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the fact and the text around it")
    parser.add_argument("--budget", default="50%", help="what may stay: tokens, a share, or bytes (default: 50%%)")
    add_impl_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(args: argparse.Namespace) -> int:
    """Keep the conversation in each way; returns 1 if rescue did not bring back what fp16 found."""
    model, tokenizer = load(args.model)
    room = {"prefix": _PREFIX, "window": _WINDOW + 64}
    case = build_case(tokenizer, load_text(), tokens=args.tokens, depth=args.depth, seed=args.seed, chat=False, **room)
    console.print(
        f"A text of {case.question:,} tokens; at token {case.needle[0]:,} stands the code word {case.answer}."
    )
    console.print("Then the question: What is the secret code word mentioned earlier?\n")
    outcomes = [converse(model, tokenizer, case, name, *way) for name, way in ways(args.budget).items()]
    if args.json:
        sys.stdout.write(json.dumps({"expected": case.answer, "outcomes": [asdict(o) for o in outcomes]}) + "\n")
    else:
        results.print()
        shown = table("", "KV cache", "answer", "found", "live", "evicted", "brought back", "bytes", "of fp16")
        for o in outcomes:
            counts = (f"{o.live:,}", f"{o.evicted:,}", f"{o.brought_back:,}")
            sizes = (human_bytes(o.nbytes), f"{o.nbytes / o.fp16_nbytes:.0%}")
            shown.add_row(o.name, o.answer, "yes" if o.found else "no", *counts, *sizes)
        results.print(shown)
    return 0 if outcomes[-1].found or not outcomes[0].found else 1
