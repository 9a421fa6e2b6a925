"""What does prompt lookup gain, by task? Runs with and without it take turns, from copies of the same caches."""

import argparse
import copy
import statistics
import time
from typing import Any

from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from benchmarks.reports import NAMES, named_model, save
from benchmarks.speculative.tasks import tasks
from mlx_tq.config import PROFILES
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.session.restore import prefill
from mlx_tq.speculative.draft_gate import DraftGate
from mlx_tq.speculative.lookup_decode import stream_with_lookup
from mlx_tq.speculative.prompt_lookup import PromptLookup


def measure(model: Any, tokenizer: Any, prompt: list[int], profile: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median ratio of times, the counts of drafts, and whether the answers are the same."""
    config, times = PROFILES[profile], []
    with compressed_attention(model):
        caches = mlx_lm_cache(model) if config.is_off else make_prompt_cache(model, config)
        prefill(model, caches, prompt[:-1], 512)
        for _ in range(rounds):
            lookup = PromptLookup(prompt, DraftGate())
            plain = stream_generate(
                model, tokenizer, prompt[-1:], max_tokens=tokens, prompt_cache=copy.deepcopy(caches)
            )
            plain_s, said = _timed(plain)
            options = {"max_tokens": tokens, "prompt_cache": copy.deepcopy(caches)}
            lookup_s, drafted = _timed(stream_with_lookup(model, tokenizer, prompt[-1:], lookup, **options))
            times.append((plain_s, lookup_s))
    return {
        "prompt": len(prompt),
        "tokens": len(said),
        "same": said == drafted,
        "drafted": lookup.drafted,
        "accepted": lookup.accepted,
        "gain": round(statistics.median(plain_s / lookup_s for plain_s, lookup_s in times), 3),
        "seconds": [[round(seconds, 2) for seconds in pair] for pair in times],
        "plain_tps": round(statistics.median(len(said) / plain_s for plain_s, _ in times), 2),
        "lookup_tps": round(statistics.median(len(drafted) / lookup_s for _, lookup_s in times), 2),
    }


def _timed(responses: Any) -> tuple[float, list[int]]:
    began = time.perf_counter()
    tokens = [response.token for response in responses]
    return time.perf_counter() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", choices=NAMES)
    parser.add_argument("--profile", default="balanced", choices=PROFILES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=["edit", "random", "code", "tool loop", "chat", "summary"])
    parser.add_argument("--output", default="lookup_speed.json")
    args = parser.parse_args()
    model, tokenizer = named_model(args.model)
    rows = []
    for name in args.tasks:
        prompt = tasks(tokenizer)[name]
        row = {"task": name, **measure(model, tokenizer, prompt, args.profile, args.tokens, args.rounds)}
        print(row, flush=True)
        rows.append(row)
        command = "python -m benchmarks.speculative.bench_lookup "
        command += f"--model {args.model} --profile {args.profile} --tokens {args.tokens} --rounds {args.rounds}"
        save(args.output, command, model=args.model, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
