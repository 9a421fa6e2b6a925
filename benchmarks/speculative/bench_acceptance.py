"""How many drafted tokens are accepted with each KV format? For prompt lookup, and for a draft model.

The draft model is a copy of the model with 3-bit weights, and its cache has the same format. It is run over the model's
answer in passes of 8 tokens, each of which sees what it would have seen alone: up to the first token that differs, its
drafts are those that it would have made itself.
"""

import argparse
import copy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from benchmarks.reports import NAMES, named_model, save
from benchmarks.speculative.tasks import tasks
from mlx_tq.config import PROFILES
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.session.restore import prefill
from mlx_tq.speculative.draft_gate import MAX_ROWS
from mlx_tq.speculative.lookup_decode import stream_with_lookup
from mlx_tq.speculative.prompt_lookup import PromptLookup

_DRAFT_BITS, _NUM_DRAFT = 3, 3  # of the weights; tokens drafted per pass, as in mlx-lm


def coarse_copy(model: Any) -> Any:
    """Return a copy of a model whose weights have `_DRAFT_BITS` bits, made dense again."""

    def coarsen(path: str, weight: mx.array) -> mx.array:
        if weight.ndim != 2 or weight.shape[-1] % 64:
            return weight
        packed = mx.quantize(weight, group_size=64, bits=_DRAFT_BITS)
        return mx.dequantize(*packed, group_size=64, bits=_DRAFT_BITS).astype(weight.dtype)

    draft = copy.deepcopy(model)
    draft.update(tree_map_with_path(coarsen, draft.parameters()))
    mx.eval(draft.parameters())
    return draft


def make_caches(model: Any, profile: str) -> list[Any]:
    config = PROFILES[profile]
    return mlx_lm_cache(model) if config.is_off else make_prompt_cache(model, config)


def accepted_drafts(model: Any, profile: str, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Return how many tokens a draft model would have drafted for an answer, and how many accepted."""
    likeliest: list[int] = []
    ids = [prompt[-1], *answer[:-1]]
    with compressed_attention(model):
        caches = make_caches(model, profile)
        prefill(model, caches, prompt[:-1], 512)
        for start in range(0, len(ids), MAX_ROWS):
            logits = model(mx.array([ids[start : start + MAX_ROWS]]), cache=caches)
            likeliest += logits[0].argmax(axis=-1).tolist()
    drafted = accepted = position = 0
    while position + _NUM_DRAFT < len(answer):
        agreement = 0
        while agreement < _NUM_DRAFT and likeliest[position + agreement] == answer[position + agreement]:
            agreement += 1
        drafted, accepted, position = drafted + _NUM_DRAFT, accepted + agreement, position + agreement + 1
    return drafted, accepted


def measure(model: Any, draft: Any, tokenizer: Any, prompt: list[int], profile: str, tokens: int) -> dict[str, Any]:
    lookup = PromptLookup(prompt, None)
    with compressed_attention(model):
        caches = make_caches(model, profile)
        prefill(model, caches, prompt[:-1], 512)
        options = {"max_tokens": tokens, "prompt_cache": caches}
        answer = [part.token for part in stream_with_lookup(model, tokenizer, prompt[-1:], lookup, **options)]
    drafted, accepted = accepted_drafts(draft, profile, prompt, answer)
    return {
        "tokens": len(answer),
        "lookup": {"drafted": lookup.drafted, "accepted": lookup.accepted},
        "draft_model": {"drafted": drafted, "accepted": accepted},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", choices=NAMES)
    parser.add_argument("--profiles", nargs="+", default=["off", "safe", "balanced", "small", "tiny"])
    parser.add_argument("--tasks", nargs="+", default=["edit", "tool loop"])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model, tokenizer = named_model(args.model)
    draft, prompts, rows = coarse_copy(model), tasks(tokenizer), []
    for profile in args.profiles:
        for name in args.tasks:
            row = {"profile": profile, "task": name}
            row |= measure(model, draft, tokenizer, prompts[name], profile, args.tokens)
            print(row, flush=True)
            rows.append(row)
        command = "python -m benchmarks.speculative.bench_acceptance "
        command += f"--model {args.model} --profiles {' '.join(args.profiles)} --tokens {args.tokens}"
        save("lookup_acceptance.json", command, model=args.model, rows=rows)


if __name__ == "__main__":
    main()
