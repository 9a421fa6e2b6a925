"""Measure as `bench_cost` what a round of each calibrated policy costs, at 8,192 tokens.

OMP_NUM_THREADS=1 python -m benchmarks.evict.bench_policies --models embedded,smollm2,gemma-3-270m.gguf
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.evict.bench_cost import measure
from benchmarks.reports import ALL_NAMES, named_model, survey_models

CONTEXT = 8192
POLICIES = ("triattention", "published:aggregation=paper", "expected_attention")


def costs(name: str) -> Iterator[dict[str, Any]]:
    model, _ = named_model(name)
    for policy in POLICIES:
        yield {"model": ALL_NAMES[name], "policy": policy, **measure(model, CONTEXT, policy)}


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.evict.bench_policies", "evict_policies.json", costs)
