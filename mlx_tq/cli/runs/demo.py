"""Run `mlx_tq.demo`: one conversation with four cache settings."""

import argparse
import json
import sys
from dataclasses import replace
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


def make_settings(budget: str) -> dict[str, tuple[KVConfig, str]]:
    """Return the cache settings to compare by name: configuration and rescue."""
    packed = profile(DEFAULT_PROFILE, sinks=_SINKS, window=_WINDOW)
    # Calibrates on the text itself, at once.
    policy = TriAttention(calibration=TEXT, warmup=256, granularity=64, trigger=64)
    evicting = replace(packed, evict=EvictConfig(policy, budget, "off"))  # rescue alone restores text
    return {
        "fp16": (PROFILES["off"], OFF),
        "compressed": (packed, OFF),
        "+ evicted": (evicting, OFF),
        "+ rescued": (evicting, AUTO),
    }


def ask(model: Any, tokenizer: Any, case: Case, name: str, config: KVConfig, rescue: str) -> dict[str, Any]:
    """Send the text, then ask for the code word; return the answer and the cache when the question came."""
    patient = RescueConfig(rescue, timeout=_START_S)  # however busy the machine is
    with Session(model, tokenizer, config, rescue=patient, warn=lambda _: None) as session:
        if session.client is not None:
            session.client.ready(_START_S)
        "".join(session.respond(tokenizer.decode(case.ids[: case.question]), max_tokens=8))
        stats = session.stats
        answer = "".join(session.respond(QUESTION, max_tokens=_ANSWER_TOKENS)).strip()
        console.print(f"{name:12} {answer!r}", markup=False)
        console.print(memory_bar(session), soft_wrap=True)
        quoted_tokens = len(session.turns[-1].quotation.ids)
    is_right = judge_answer(answer, case.answer) is Verdict.PASS
    return {"name": name, "answer": answer, "found": is_right, "quoted_tokens": quoted_tokens, **stats.to_dict()}


def run(args: argparse.Namespace) -> int:
    """Ask with each setting; return 1 if rescue did not restore what fp16 found."""
    model, tokenizer = load_chosen(args)
    room = {"sinks": _SINKS, "window": _WINDOW + 64}
    case = build_case(tokenizer, load_text(), tokens=args.tokens, depth=args.depth, seed=args.seed, chat=False, **room)
    console.print(
        f"A text of {case.question:,} tokens; at token {case.needle[0]:,} stands the code word {case.answer}."
    )
    console.print("Then the question: What is the secret code word mentioned earlier?\n")
    outcomes = [ask(model, tokenizer, case, name, *setting) for name, setting in make_settings(args.budget).items()]
    if args.json:
        sys.stdout.write(json.dumps({"expected": case.answer, "outcomes": outcomes}) + "\n")
    else:
        results.print()
        shown = table("", "KV cache", "answer", "found", "live", "evicted", "quoted", "bytes", "of fp16")
        for outcome in outcomes:
            counts = [f"{outcome[key]:,}" for key in ("live", "evicted", "quoted_tokens")]
            sizes = human_bytes(outcome["nbytes"]), f"{outcome['nbytes'] / outcome['fp16_nbytes']:.0%}"
            answer = shorten(readable(outcome["answer"]), _SHOWN, placeholder=" ...")
            shown.add_row(outcome["name"], answer, "yes" if outcome["found"] else "no", *counts, *sizes)
        results.print(shown)
    return 0 if outcomes[-1]["found"] or not outcomes[0]["found"] else 1
