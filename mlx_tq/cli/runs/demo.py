"""The work of `mlx_tq.demo`: one conversation, kept in four ways."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any

from mlx_tq.cli.foreign_text import readable
from mlx_tq.cli.haystack import QUESTION, Case, Verdict, build_case, judge_answer, load_text
from mlx_tq.cli.loading import load_chosen
from mlx_tq.cli.memory_bar import memory_bar
from mlx_tq.cli.screen import console, human_bytes, results, table
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, EvictConfig, KVConfig, RescueConfig, profile
from mlx_tq.policies import TriAttention
from mlx_tq.policies.policy import TEXT
from mlx_tq.rescue import AUTO, OFF
from mlx_tq.session import Session

_SINKS, _WINDOW = 32, 128
_ANSWER_TOKENS = 32
_SHOWN = 44  # characters of an answer in the table
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
    """The configuration and the rescue of each way to keep the conversation."""
    packed = profile(DEFAULT_PROFILE, sinks=_SINKS, window=_WINDOW)
    policy = TriAttention(
        calibration=TEXT, warmup=256, granularity=64, trigger=64
    )  # at once: no questions are asked first
    evicting = replace(packed, evict=EvictConfig(policy, budget, "off"))  # rescue by itself
    return {
        "fp16": (PROFILES["off"], OFF),
        "compressed": (packed, OFF),
        "+ evicted": (evicting, OFF),
        "+ rescued": (evicting, AUTO),
    }


def converse(model: Any, tokenizer: Any, case: Case, name: str, config: KVConfig, rescue: str) -> Outcome:
    """Say the text, then ask for the fact."""
    asked = RescueConfig(rescue, timeout=_START_S)  # shown whole, however busy the machine is
    with Session(model, tokenizer, config, rescue=asked, warn=lambda _: None) as session:
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
        found=judge_answer(answer, case.answer) is Verdict.PASS,
        live=stats.live,
        evicted=stats.evicted,
        brought_back=len(rehydration.ids),
        nbytes=stats.nbytes,
        fp16_nbytes=stats.fp16_nbytes,
    )


def run(args: argparse.Namespace) -> int:
    """Keep the conversation in each way; returns 1 if rescue did not bring back what fp16 found."""
    model, tokenizer = load_chosen(args)
    room = {"sinks": _SINKS, "window": _WINDOW + 64}
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
            answer = shorten(readable(o.answer), _SHOWN, placeholder=" ...")
            shown.add_row(o.name, answer, "yes" if o.found else "no", *counts, *sizes)
        results.print(shown)
    return 0 if outcomes[-1].found or not outcomes[0].found else 1
