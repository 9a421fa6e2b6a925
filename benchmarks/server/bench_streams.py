"""Measure the speed and the KV bytes of `mlx_tq.server` with several streams at once, cold and with a shared prefix.

A server for each profile runs, and they take turns: a figure is the median of all rounds. The figures replace those of
the same model, profile, prefix and count in the JSON file. Cold: the prompts share no prefix. Hot: all prompts share a
prefix that was prefilled before.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import httpx

from benchmarks.reports import RESULTS, save
from mlx_tq.models import EMBEDDED, load

ENDLESS = {"0": -100, "2": -100}  # the embedded model's end tokens: every answer runs to its limit


@dataclass(frozen=True)
class Figure:
    """One measurement; token counts are totals of all streams.

    `tokens_per_second` includes the prefill; `decode_tokens_per_second` counts from when every stream had a token.
    `kv_bytes` are the largest bytes of the batch; the profile `off` gives those of mlx-lm's own cache. `ratio` is the
    median over the rounds of the tokens per second, times those of the first profile in the same round.
    """

    model: str
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
    ratio: float = 1.0


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


def texts(model, count, tokens):
    _, tokenizer = load(model)
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


async def measure(url, model, profile, prefix, prompts, answer_tokens):
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
        model=model,
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


def median_figure(figures, ratios):
    """Return the figure of the round of median speed, with the median of the ratios."""
    middle = sorted(figures, key=lambda figure: figure.tokens_per_second)[len(figures) // 2]
    return replace(middle, ratio=round(median(ratios), 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--profiles", nargs="+", default=["off", "balanced"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--prefix", choices=["cold", "hot"], default="cold")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    # Only a single stream would draft, which says nothing about caches.
    model = ["--model", args.model, "--dtype", args.dtype, "--dequantize", "on", "--prompt-lookup", "off"]
    hot, figures = args.prefix == "hot", []
    prompts_left = texts(args.model, 1 if hot else sum(args.streams) * args.rounds, args.prompt_tokens)
    with ExitStack() as stack:
        urls = {
            profile: stack.enter_context(
                serving(*model, "--kv-profile", profile, "--decode-concurrency", max(args.streams))
            )
            for profile in args.profiles
        }
        for count in args.streams:
            rounds = {profile: [] for profile in urls}
            for number in range(args.rounds):
                if hot:
                    ends = [[50 + place, 50 + number, 52, 53] for place in range(count)]
                    prompts = [[*prompts_left[0][:-4], *end] for end in ends]
                else:
                    prompts, prompts_left = prompts_left[:count], prompts_left[count:]
                for profile, url in urls.items():
                    measured = measure(url, args.model, profile, args.prefix, prompts, args.answer_tokens)
                    rounds[profile].append(asyncio.run(measured))
            first = rounds[args.profiles[0]]
            for measured in rounds.values():
                pairs = zip(measured, first, strict=True)
                ratios = [figure.tokens_per_second / other.tokens_per_second for figure, other in pairs]
                figures.append(asdict(median_figure(measured, ratios)))
                print(json.dumps(figures[-1]), flush=True)
    # They replace earlier figures of the same kind.
    path = RESULTS / "server_streams.json"
    old = json.loads(path.read_text())["figures"] if path.exists() else []
    merged = {(row["model"], row["profile"], row["prefix"], row["streams"]): row for row in [*old, *figures]}
    command = "python -m benchmarks.server.bench_streams --model M [--prefix hot --prompt-tokens 2048]"
    save(path, command, figures=list(merged.values()))


if __name__ == "__main__":
    main()
