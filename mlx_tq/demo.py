"""`mlx_tq.demo`: evict a fact from a conversation, then recall it, and compare four cache settings."""

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_tq.cli.options import AUTO, BACKEND, DEFAULT_PROFILE, OFF
from mlx_tq.cli.parser import CommandParser, add_model_arguments, add_option, command_parser
from mlx_tq.cli.runner import DONE, FAILED, command_main
from mlx_tq.cli.terminal_text import readable
from mlx_tq.errors import RescueError

if TYPE_CHECKING:
    from mlx_tq.cli.haystack import Case
    from mlx_tq.config import KVConfig

_SINKS, _WINDOW = 32, 128
_ANSWER_WIDTH = 44


def build_parser() -> CommandParser:
    parser = command_parser("demo", "Evict a fact from a conversation, then recall it.")
    add_model_arguments(parser, adapter=False)
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="length of the text")
    parser.add_argument("--depth", type=float, default=0.0, help="position of the fact, from 0 (start) to 1 (end)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the fact and the text")
    budget = "what eviction keeps; less than elsewhere, so that it evicts the code word: tokens, a share, or bytes"
    parser.add_argument("--budget", default="40%", help=budget)
    add_option(parser, BACKEND)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask for the fact with each setting; return 1 if rescue fails, or restores less than mlx-lm's cache found."""
    from mlx_tq.cli.startup import check_model, note_loading

    check_model(args)
    note_loading(args)

    from mlx_tq.cli.haystack import QUESTION, build_case
    from mlx_tq.cli.inputs import load_text
    from mlx_tq.cli.loading import load_model
    from mlx_tq.cli.screen import human_bytes, stderr, stdout, table, warn
    from mlx_tq.config import PROFILES, EvictConfig, KVConfig
    from mlx_tq.integration.probe import model_facts
    from mlx_tq.policies import TriAttention
    from mlx_tq.policies.policy import TEXT

    packed = KVConfig.from_profile(DEFAULT_PROFILE, sinks=_SINKS, window=_WINDOW)
    policy = TriAttention(calibration=TEXT, warmup=256, granularity=64, trigger=64)
    evicting = replace(packed, evict=EvictConfig(policy, args.budget, "off"))  # rescue alone restores text
    model, tokenizer = load_model(args)
    native = model_facts(model).slots[0].dtype
    settings = {
        native: (PROFILES["off"], OFF),
        "compressed": (packed, OFF),
        "+ evicted": (evicting, OFF),
        "+ rescued": (evicting, AUTO),
    }
    room = {"sinks": _SINKS, "window": _WINDOW + 64}
    case = build_case(tokenizer, load_text(), tokens=args.tokens, depth=args.depth, seed=args.seed, chat=False, **room)
    stderr.print(f"A text of {case.question:,} tokens has the code word {case.answer} at token {case.needle[0]:,}.")
    stderr.print(f"Then the question: {QUESTION.partition('?')[0]}?\n")
    outcomes, left_out = [], {}
    for name, setting in settings.items():
        try:
            outcomes.append(_ask(model, tokenizer, case, name, *setting))
        except RescueError as error:
            left_out[name] = str(error)
    if args.json:
        sys.stdout.write(json.dumps({"expected": case.answer, "outcomes": outcomes, "left_out": left_out}) + "\n")
    else:
        stdout.print()
        rows = table("", "KV cache", "answer", "found", "live", "evicted", "rescued", "bytes", f"of {native}")
        answers = rows.columns[1]
        answers.no_wrap, answers.justify, answers.max_width = False, "left", _ANSWER_WIDTH
        for outcome in outcomes:
            counts = [f"{outcome[key]:,}" for key in ("live", "evicted", "quoted_tokens")]
            sizes = human_bytes(outcome["nbytes"]), f"{outcome['nbytes'] / outcomes[0]['nbytes']:.0%}"
            answer = " ".join(readable(outcome["answer"]).split())
            rows.add_row(outcome["name"], answer, "yes" if outcome["found"] else "no", *counts, *sizes)
        stdout.print(rows)
    for name, reason in left_out.items():
        warn(f"{name} is left out: {reason}")
    if left_out:
        return FAILED
    return DONE if outcomes[-1]["found"] or not outcomes[0]["found"] else FAILED


def _ask(model: Any, tokenizer: Any, case: "Case", name: str, config: "KVConfig", rescue: str) -> dict[str, Any]:
    """Send the text, then ask for the code word; return the answer and the cache behind it."""
    from mlx_tq.cli.haystack import QUESTION, Verdict, judge_answer  # loads mlx, which --help does without
    from mlx_tq.cli.screen import memory_bar, stderr  # likewise
    from mlx_tq.config import RescueConfig  # likewise
    from mlx_tq.rescue import START_S  # likewise
    from mlx_tq.session import Session  # likewise

    patient = RescueConfig(rescue, timeout=START_S)  # however busy the machine is
    with Session(model, tokenizer, config, rescue=patient, warn=lambda _: None) as session:
        if session.client is not None:
            session.client.ready(START_S)
        "".join(session.respond(tokenizer.decode(case.ids[: case.question]), max_tokens=8))
        answer = "".join(session.respond(QUESTION, max_tokens=32)).strip()
        stderr.print(f"{name:12} {answer!r}")
        stderr.print(memory_bar(session))
        stats, quoted_tokens = session.stats, session.quoted_tokens
    is_right = judge_answer(answer, case.answer) is Verdict.PASS
    return {"name": name, "answer": answer, "found": is_right, "quoted_tokens": quoted_tokens, **stats.to_dict()}


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
