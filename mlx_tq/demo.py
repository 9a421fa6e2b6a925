"""`mlx_tq demo`: a fact in a long text, asked for with the cache at fp16 and compressed."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.generate import stream_generate

from mlx_tq.args import add_impl_argument
from mlx_tq.config import PROFILES
from mlx_tq.dispatch import attention
from mlx_tq.haystack import Case, Verdict, build_case, load_text, verdict
from mlx_tq.models import load
from mlx_tq.prompt_cache import make_caches
from mlx_tq.stats import cache_stats
from mlx_tq.ui import console, human_bytes, prefill_progress, results, table

_STEP = 512  # tokens read at a time: all but the last step of the text is packed when the question comes
_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Outcome:
    """What one profile answered, and at what cost.

    Attributes:
        profile: name.
        answer: what the model said.
        found: the answer holds the fact, to the letter.
        nbytes: of the cache.
        prompt_tps, generation_tps: tokens a second.
    """

    profile: str
    answer: str
    found: bool
    nbytes: int
    prompt_tps: float
    generation_tps: float


def ask(model: Any, tokenizer: Any, case: Case, profile: str) -> Outcome:
    """Read the case's prompt into a cache of `profile` and answer."""
    made = make_caches(model, PROFILES[profile])
    answer = ""
    response: Any = None
    with attention(model), prefill_progress(show=True) as progress:
        for response in stream_generate(
            model,
            tokenizer,
            case.ids,
            max_tokens=_ANSWER_TOKENS,
            prompt_cache=made.caches,
            prefill_step_size=_STEP,
            prompt_progress_callback=progress,
        ):
            answer += response.text
    return Outcome(
        profile=profile,
        answer=answer.strip(),
        found=verdict(answer, case.answer) is Verdict.PASS,
        nbytes=cache_stats(made.caches, made.plan).nbytes,
        prompt_tps=response.prompt_tps,
        generation_tps=response.generation_tps,
    )


def build_parser() -> argparse.ArgumentParser:
    """Length, place and seed of the fact."""
    parser = argparse.ArgumentParser(prog="mlx_tq demo", description="Answer a question about a long text.")
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt (default: 2000)")
    parser.add_argument("--depth", type=float, default=0.3, help="where the fact stands, 0 to 1 (default: 0.3)")
    parser.add_argument("--seed", type=int, default=0, help="of the fact and the text around it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_impl_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask with each profile; returns 1 if a compressed cache lost what fp16 found."""
    model, tokenizer = load(args.model)
    case = build_case(tokenizer, load_text(), tokens=args.tokens, depth=args.depth, seed=args.seed)
    fact = tokenizer.decode(case.ids[case.needle[0] : case.needle[1]]).strip()
    console.print(f"{len(case.ids):,} tokens of WikiText-2; at token {case.needle[0]:,} stands: {fact}")
    outcomes = []
    for profile in ("off", "balanced", "small"):
        outcomes.append(ask(model, tokenizer, case, profile))
        console.print(f"{profile:9} answers: {outcomes[-1].answer}")
    if args.json:
        sys.stdout.write(json.dumps({"expected": case.answer, "outcomes": [asdict(o) for o in outcomes]}) + "\n")
    else:
        shown = table("", "profile", "answer", "found", "KV cache", "of fp16", "prompt tok/s", "answer tok/s")
        for o in outcomes:
            share = f"{o.nbytes / outcomes[0].nbytes:.0%}"
            speeds = (f"{o.prompt_tps:.0f}", f"{o.generation_tps:.0f}")
            shown.add_row(o.profile, o.answer, "yes" if o.found else "no", human_bytes(o.nbytes), share, *speeds)
        results.print(shown)
    return 0 if all(o.found for o in outcomes) or not outcomes[0].found else 1
