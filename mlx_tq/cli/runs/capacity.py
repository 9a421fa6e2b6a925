"""The work of `mlx_tq.doctor --capacity`: which contexts fit, and how many at once, by profile."""

import argparse
import json
import os
import sys
from dataclasses import asdict

import mlx.core as mx

from mlx_tq.cli.screen import human_bytes, results, table
from mlx_tq.config import PROFILES
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import model_facts
from mlx_tq.models import load
from mlx_tq.prompt_cache.capacity import capacities, context_limit, weights_nbytes

STREAMS = [1, 2, 4, 8]
CONTEXTS = [4096, 16384, 65536]


def memory_nbytes() -> int:
    """What a GPU may hold on a Mac; elsewhere the machine's memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return int(recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def run(args: argparse.Namespace) -> int:
    """Count and show."""
    model, _ = load(
        args.model,
        dtype=args.dtype,
        dequantize=args.dequantize,
        tokenizer_config={"trust_remote_code": True} if args.trust_remote_code else {},
    )
    memory, weights, limit = args.memory or memory_nbytes(), weights_nbytes(model), context_limit(model)
    dtype = model_facts(model).slots[0].dtype
    if weights >= memory:
        raise ConfigError(
            f"the weights take {human_bytes(weights)}, and --memory is {human_bytes(memory)}. Take a model with fewer "
            "or smaller weights, or name more memory."
        )
    contexts = [tokens for tokens in CONTEXTS if tokens <= limit] or [limit]
    found = capacities(model, PROFILES, memory - weights, contexts=contexts, streams=STREAMS)
    if args.json:
        about = {"memory_nbytes": memory, "weights_nbytes": weights, "dtype": dtype, "positions": limit}
        sys.stdout.write(json.dumps({**about, "profiles": [asdict(each) for each in found]}) + "\n")
        return 0
    fitting = table("The longest context", "profile", *(f"{n} at once" for n in STREAMS))
    together = table("How many fit", "profile", *(f"of {tokens:,} tokens" for tokens in contexts))
    for each in found:
        fitting.add_row(each.profile, *(f"{tokens:,}" for tokens in each.longest.values()))
        together.add_row(
            each.profile, *(f"{each.streams[tokens]:,} x {human_bytes(each.nbytes[tokens])}" for tokens in contexts)
        )
    results.print(
        f"{human_bytes(memory)} of memory, {human_bytes(weights)} of it weights; the model computes in {dtype} and "
        f"takes {limit:,} tokens at most.\nReading a prompt takes some beyond these bytes: leave a tenth.",
        soft_wrap=True,
    )
    results.print("", fitting, "", together, sep="\n")
    return 0
