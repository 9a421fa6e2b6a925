"""Seconds to the first token of a request whose beginning another one had, by the openai client.

The beginning is a text of 2,000 tokens as the system's message; the user's differ. A server without a store reads it, a
server with one reads and stores it, and after a restart of that server it is restored: once with the files in the
system's page cache, once without (posix_fadvise, where the system has it).

python -m benchmarks.server.bench_store --model smollm2 --dequantize --dtype float32
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import openai

from benchmarks.server.bench_streams import serving
from mlx_tq.cli.environment import environment
from mlx_tq.cli.haystack import load_text
from mlx_tq.models import load

RESULTS = Path(__file__).parents[1] / "results" / "server_store.json"
ARMS = ("read", "stored", "restored", "restored cold")


def texts(model, count, tokens):
    """Texts of `tokens` tokens, each beginning in its own way."""
    _, tokenizer = load(model)
    ids = tokenizer.encode(load_text())
    return [f"Text {n}. " + tokenizer.decode(ids[n * tokens : (n + 1) * tokens - 5]) for n in range(count)]


def ask(client, system, user):
    """Seconds to the first token, and tokens of the prompt and of those that were cached."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model="default_model", messages=messages, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    first, usage = 0.0, None
    for chunk in stream:
        if not first and chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
            first = time.perf_counter() - began
        usage = chunk.usage or usage
    return first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def drop(folder):
    """Let the files of a folder leave the system's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(flags, systems, folder):
    """Times of each arm, one for each text, and the tokens of a prompt and of those restored."""
    times = {arm: [] for arm in ARMS}
    counts = {}

    def run(arm, *more, user, before=lambda: None):
        with serving(*flags, "--prompt-cache-size", 0, *more) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
            ask(client, "Be brief.", "Hello!")  # what a process does once is done
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
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=3)
    args = parser.parse_args()
    flags = [*(["--model", args.model] if args.model else []), *(["--dtype", args.dtype] if args.dtype else [])]
    flags += ["--dequantize"] if args.dequantize else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        times, counts = measure(flags, texts(args.model, args.texts, args.tokens), path)
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    figures = [
        {"arm": arm, **counts[arm], "median": round(median(each), 4), "seconds": [round(one, 4) for one in each]}
        for arm, each in times.items()
        if each
    ]
    for figure in figures:
        print(json.dumps(figure))
    command = " ".join(["python -m benchmarks.server.bench_store", *flags])
    report = {"command": command, "model": args.model, "environment": environment(), "texts": args.texts}
    RESULTS.write_text(json.dumps({**report, "store_bytes": nbytes, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
