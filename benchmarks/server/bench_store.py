"""Measure the time to first token of requests that share a prefix, with and without the prefix cache.

The prefix is a system message of 2,000 tokens; the user messages differ. A server without a prefix cache prefills it, a
server with one prefills and stores it, and after a restart that server restores it: once with the files in the page
cache of the operating system, once without (posix_fadvise, where available).

python -m benchmarks.server.bench_store --model smollm2 --dequantize on --dtype float32
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import openai

from benchmarks.reports import save
from benchmarks.server.bench_streams import serving
from mlx_tq.cli.inputs import load_text
from mlx_tq.models import load

ARMS = ("read", "stored", "restored", "restored cold")


def texts(model, count, tokens):
    _, tokenizer = load(model)
    ids = tokenizer.encode(load_text())
    return [f"Text {n}. " + tokenizer.decode(ids[n * tokens : (n + 1) * tokens - 5]) for n in range(count)]


def ask(client, system, user):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model="default_model", messages=messages, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    first, usage = 0.0, None
    for chunk in stream:
        if not first and chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
            first = time.perf_counter() - started
        usage = chunk.usage or usage
    return first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def drop(folder):
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(flags, systems, folder):
    times = {arm: [] for arm in ARMS}
    counts = {}

    def run(arm, *more, user, before=lambda: None):
        with serving(*flags, "--prompt-cache-bytes", "1KB", *more) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
            ask(client, "Be brief.", "Hello!")  # one-time work of the process
            for system in systems:
                before()
                seconds, length, cached = ask(client, system, user)
                times[arm].append(seconds)
                counts[arm] = {"prompt_tokens": length, "cached_tokens": cached}

    store = ("--prefix-cache", folder)
    run("read", user="What is this text about?")
    run("stored", *store, user="What is this text about?")
    run("restored", *store, user="Name a place in it.")
    if hasattr(os, "posix_fadvise"):
        run("restored cold", *store, user="Who is named in it?", before=lambda: drop(folder))
    return times, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--dequantize")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=3)
    args = parser.parse_args()
    flags = [*(["--model", args.model] if args.model else []), *(["--dtype", args.dtype] if args.dtype else [])]
    flags += ["--dequantize", args.dequantize] if args.dequantize else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        times, counts = measure(flags, texts(args.model, args.texts, args.tokens), path)
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    figures = [
        {
            "arm": arm,
            **counts[arm],
            "median": round(median(seconds), 4),
            "seconds": [round(second, 4) for second in seconds],
        }
        for arm, seconds in times.items()
        if seconds
    ]
    for figure in figures:
        print(json.dumps(figure))
    command = " ".join(["python -m benchmarks.server.bench_store", *flags])
    save("server_store.json", command, model=args.model, texts=args.texts, store_bytes=nbytes, figures=figures)


if __name__ == "__main__":
    main()
