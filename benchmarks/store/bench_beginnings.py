"""Measure a server's memory under 20 requests at once that share a system message, and under 10 that do not.

    python -m benchmarks.store.bench_beginnings

One `mlx_tq.server` for each arm: the embedded model in float32, a system message of nearly its whole context, greedy
answers, and a memory limit for fewer than half of the requests if each counts in full. Memory is what mlx holds beyond
that before the first request, from /metrics. Some answers are compared with those of a server without a cache.
"""

import argparse
import json
import threading
import time
from statistics import median

import httpx
import openai

from benchmarks.reports import save
from benchmarks.server.bench_streams import ENDLESS, serving, texts
from mlx_tq.config import KVConfig
from mlx_tq.models import EMBEDDED, load
from mlx_tq.prompt_cache.compressed import plan_caches

REQUESTS, OWN, SYSTEM, ANSWER = 20, 10, 3960, 16
FLAGS = ("--dtype", "float32", "--temp", "0", "--max-tokens", str(ANSWER))
NAMES = ("running", "waiting", "kv_bytes", "memory_bytes", "prefill_tokens_total", "cached_tokens_total")


def metrics(url):
    lines = httpx.get(f"{url}/metrics", timeout=600).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    return {name: int(float(found[f"mlx_tq_{name}"])) for name in NAMES}


def ask(url, system, number):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
    said = [{"role": "system", "content": system}, {"role": "user", "content": f"What weighs {number} grams?"}]
    began, first, pieces = time.perf_counter(), 0.0, []
    stream = client.chat.completions.create(
        model="default_model", messages=said, stream=True, logit_bias=ENDLESS, extra_body={"seed": 0}
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            pieces.append(chunk.choices[0].delta.content)
    return "".join(pieces), first


def at_once(systems, limit):
    with serving(*FLAGS, "--kv-memory-limit", limit) as url:
        ask(url, "Be brief.", 0)  # what a process does once is done
        before, samples, found = metrics(url), [], [None] * len(systems)

        def run(number):
            found[number] = ask(url, systems[number], number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(systems))]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            samples.append(metrics(url))
            time.sleep(0.1)
        seconds = time.perf_counter() - began
    most = {name: max(sample[name] for sample in samples) for name in NAMES}
    return [text for text, _ in found], {
        "requests": len(systems),
        "at_once": most["running"],
        "read_tokens": most["prefill_tokens_total"] - before["prefill_tokens_total"],
        "held": most["memory_bytes"] - before["memory_bytes"],
        "seconds": round(seconds, 1),
        "first_token": round(median(first for _, first in found), 2),
    }


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    model, tokenizer = load(dtype="float32")
    systems = [tokenizer.decode(ids) for ids in texts(EMBEDDED, OWN, SYSTEM)]
    plan = plan_caches(model, KVConfig.from_profile("balanced"))
    full = plan.nbytes(SYSTEM + 60 + ANSWER)
    limit = f"{REQUESTS * full * 9 // 20_000_000}MB"
    answers, shared = at_once([systems[0]] * REQUESTS, limit)
    print(json.dumps(shared), flush=True)
    with serving(*FLAGS, "--prompt-cache-bytes", "1KB") as url:
        alone = {number: ask(url, systems[0], number)[0] for number in (0, REQUESTS - 1)}
    assert all(answers[number] == text for number, text in alone.items()), (alone, answers)
    _, own = at_once(systems, limit)
    print(json.dumps(own), flush=True)
    sizes = {"system": SYSTEM, "limit": limit, "full": full, "answers_as_alone": len(alone)}
    figures = [{"beginnings": "one", **shared}, {"beginnings": "each its own", **own}]
    save("store_beginnings.json", "python -m benchmarks.store.bench_beginnings", **sizes, figures=figures)


if __name__ == "__main__":
    main()
