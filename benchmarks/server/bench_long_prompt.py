"""Measure what a long prompt does to running streams and to short prompts, and they to it.

    python -m benchmarks.models.random_long FOLDER
    python -m benchmarks.server.bench_long_prompt FOLDER

Four streams decode, then a prompt of 32K tokens arrives; and, with no streams, a prompt of 1K tokens arrives behind one
of 32K. Each prompt is new, so that nothing of it is cached. Each figure is the median of all rounds.
"""

import argparse
import asyncio
import json
import time
from statistics import median

import httpx
import numpy as np

from benchmarks.reports import save
from benchmarks.server.bench_streams import serving, stream

LONG, SHORT, STREAMS = 32_768, 1_024, 4
BEFORE = 3.0  # seconds for which the streams run alone


class Prompts:
    """Random prompts of which no two share a prefix."""

    def __init__(self):
        self._chance = np.random.default_rng(0)

    def new(self, tokens):
        return self._chance.integers(100, 40_000, tokens).tolist()


async def timed_stream(client, prompt, answer_tokens):
    started = time.perf_counter()
    times, usage = await stream(client, prompt, answer_tokens)
    assert usage["prompt_tokens_details"]["cached_tokens"] < 32, usage
    return started, times


async def first_token(client, prompt):
    started, times = await timed_stream(client, prompt, 1)
    return times[0] - started


async def beside_streams(client, prompts):
    """Return the speed of streams alone and beside a long prompt, their longest gap, and the prompt's first token."""
    moments = [[] for _ in range(STREAMS)]

    async def run(own):
        body = {"prompt": prompts.new(16), "max_tokens": 100_000, "stream": True, "logit_bias": {"0": -100, "2": -100}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    own.append(time.perf_counter())

    streams = [asyncio.create_task(run(own)) for own in moments]
    while not all(moments):
        await asyncio.sleep(0.01)
    begun = time.perf_counter()
    await asyncio.sleep(BEFORE)
    asked = time.perf_counter()
    first = await first_token(client, prompts.new(LONG))
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    stop = asked + first
    alone = [sum(begun < moment < asked for moment in own) / (asked - begun) for own in moments]
    beside = [sum(asked < moment < stop for moment in own) / first for own in moments]
    gaps = [max(np.diff([asked, *(m for m in own if asked < m < stop), stop])) for own in moments]
    return {
        "streams alone, tokens/s each": median(alone),
        "share kept by the slowest": min(b / a for a, b in zip(alone, beside, strict=True)),
        "longest gap, s": float(max(gaps)),
        "32K beside streams, s": first,
    }


async def behind_a_long_prompt(client, prompts):
    """Return the first token of a short prompt that arrives one second after a long one."""
    long = asyncio.create_task(timed_stream(client, prompts.new(LONG), 1))
    await asyncio.sleep(1)
    short = await first_token(client, prompts.new(SHORT))
    started, times = await long
    return {"1K behind 32K, s": short, "32K overtaken by 1K, s": times[0] - started}


async def measure(url, rounds):
    prompts, figures = Prompts(), []
    async with httpx.AsyncClient(base_url=url, timeout=1200) as client:
        await first_token(client, prompts.new(SHORT))
        for _ in range(rounds):
            alone = {
                "1K alone, s": await first_token(client, prompts.new(SHORT)),
                "32K alone, s": await first_token(client, prompts.new(LONG)),
            }
            figures.append(
                {**alone, **await beside_streams(client, prompts), **await behind_a_long_prompt(client, prompts)}
            )
            print(json.dumps(figures[-1]), flush=True)
    return {name: round(median(figure[name] for figure in figures), 3) for name in figures[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with serving("--model", args.model, "--dtype", "float32") as url:
        figures = asyncio.run(measure(url, args.rounds))
    print(json.dumps(figures))
    command = "python -m benchmarks.server.bench_long_prompt FOLDER"
    save("server_long_prompt.json", command, model="random, 2 layers", rounds=args.rounds, figures=figures)


if __name__ == "__main__":
    main()
