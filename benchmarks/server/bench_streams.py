"""Measure the speed and the KV bytes of `mlx_tq.server` with several streams at once, cold and with a shared prefix.

Each run starts one server; its figures replace those of the same profile and count in the JSON file. Cold: the prompts
share no prefix. Hot: all prompts share a prefix that was prefilled before.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.reports import RESULTS, save
from mlx_tq.models import load

ENDLESS = {"0": -100, "2": -100}  # the embedded model's end tokens: every answer runs to its limit


@dataclass(frozen=True)
class Figure:
    """One measurement; token counts are totals of all streams.

    `tokens_per_second` includes the prefill; `decode_tokens_per_second` counts from when every stream had a token.
    `kv_bytes` are the largest bytes of the batch; the profile `off` gives those of mlx-lm's own cache.
    """

    profile: str
    prefix: str
    streams: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    seconds: float
    tokens_per_second: float
    first_token: float
    decode_tokens_per_second: float
    kv_bytes: int


@contextmanager
def serving(*flags):
    with tempfile.NamedTemporaryFile("r+") as log:
        command = [sys.executable, "-m", "mlx_tq", "server", "--port", "0", "--log-level", "WARNING", *map(str, flags)]
        process = subprocess.Popen(command, stderr=log)
        try:
            while not (match := re.search(r"listening on (\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.02)
            yield match[1]
        finally:
            process.terminate()
            process.wait()


def texts(count, tokens):
    _, tokenizer = load()
    prompts = []
    for place in range(count):
        lines = (
            f"{place} {n} weighs {(n + 7 * place) * 37 % 9973} grams and costs {n * 13 % 29}." for n in range(tokens)
        )
        prompts.append(tokenizer.encode("\n".join(lines))[:tokens])
    return prompts


async def stream(client, prompt, answer_tokens):
    body = {"prompt": prompt, "max_tokens": answer_tokens, "logit_bias": ENDLESS}
    times, usage = [], {}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            if chunk["choices"]:
                times.append(time.perf_counter())
            usage = chunk.get("usage") or usage
    return times, usage


async def watch(client, seen):
    while True:
        text = (await client.get("/metrics")).text
        seen.append(int(float(re.search(r"^mlx_tq_kv_bytes (\S+)", text, re.MULTILINE)[1])))
        await asyncio.sleep(0.05)


async def measure(url, profile, prefix, prompts, answer_tokens):
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        if prefix == "hot":
            await stream(client, prompts[0], 1)
        seen = []
        watcher = asyncio.create_task(watch(client, seen))
        started = time.perf_counter()
        done = await asyncio.gather(*(stream(client, prompt, answer_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        watcher.cancel()
    usages = [usage for _, usage in done]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    all_begun = max(times[0] for times, _ in done)
    later = [moment for times, _ in done for moment in times if moment > all_begun]
    return Figure(
        profile=profile,
        prefix=prefix,
        streams=len(prompts),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        cached_tokens=sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        answer_tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens / seconds, 1),
        first_token=round(median(times[0] for times, _ in done) - started, 3),
        decode_tokens_per_second=round(len(later) / (max(later) - all_begun), 1) if later else 0.0,
        kv_bytes=max(seen),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--prefix", choices=["cold", "hot"], default="cold")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=16)
    args = parser.parse_args()
    figures = []
    hot = args.prefix == "hot"
    prompts_left = texts(1 if hot else sum(args.streams), args.prompt_tokens)
    with serving("--kv-profile", args.profile, "--decode-concurrency", max(args.streams)) as url:
        for count in args.streams:
            if hot:
                prompts = [[*prompts_left[0][:-4], 50 + place, 51, 52, 53] for place in range(count)]
            else:
                prompts, prompts_left = prompts_left[:count], prompts_left[count:]
            figure = asyncio.run(measure(url, args.profile, args.prefix, prompts, args.answer_tokens))
            print(json.dumps(asdict(figure)))
            figures.append(asdict(figure))
    # They replace earlier figures of the same kind.
    path = RESULTS / "server_streams.json"
    old = json.loads(path.read_text())["figures"] if path.exists() else []
    merged = {(row["profile"], row["prefix"], row["streams"]): row for row in [*old, *figures]}
    command = "python -m benchmarks.server.bench_streams --profile PROFILE [--prefix hot --prompt-tokens 2048]"
    save(path, command, figures=list(merged.values()))


if __name__ == "__main__":
    main()
