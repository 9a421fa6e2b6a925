"""Answers that are held to 20 schemas of bounded strings and arrays: how many end, are valid, and what a token costs.

Sampled at temperature 1, 20 at once, by the openai client. Each answer is a line of --answers, and those that are there
are not asked for again. What holding costs is timed apart, on the same answers with logits that are there: reading the
last token, making the mask and applying it.

python -m benchmarks.server.bench_json --answers answers.jsonl --model smollm2 --dtype float32 --dequantize
"""

import argparse
import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median

import jsonschema_rs
import mlx.core as mx
import openai

from benchmarks.server.bench_streams import serving
from mlx_tq.cli.environment import environment
from mlx_tq.cli.grammar import Grammars
from mlx_tq.cli.grammar_source import GrammarSource
from mlx_tq.models import load

HERE = Path(__file__)
RESULTS = HERE.parents[1] / "results" / "server_json.json"
CASES = json.loads(HERE.with_name("schemas.json").read_text())
AT_ONCE = 20
MAX_TOKENS = 400


def generate(client, case, seed):
    """The text and why it ended."""
    choice = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": f"Describe {case['asked']} as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": case["schema"]}},
        temperature=1,
        seed=seed,
        max_tokens=MAX_TOKENS,
    ).choices[0]
    return choice.message.content, choice.finish_reason


def answered(file, seeds, flags):
    """Text and reason by schema and seed; those that `file` has not are asked for, and added to it."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    found = {(number, seed): (text, finish) for number, seed, text, finish in lines}
    jobs = [(number, seed) for seed in range(seeds) for number in range(len(CASES)) if (number, seed) not in found]
    with serving(*flags) as url, ThreadPoolExecutor(AT_ONCE) as pool, file.open("a", buffering=1) as out:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
        asked = {pool.submit(generate, client, CASES[number], seed): (number, seed) for number, seed in jobs}
        for answer in as_completed(asked):
            found[asked[answer]] = answer.result()
            out.write(json.dumps([*asked[answer], *answer.result()]) + "\n")
    return found


def is_valid(case, text):
    """By a validator that shares nothing with what made the text."""
    try:
        return jsonschema_rs.is_valid(case["schema"], json.loads(text))
    except ValueError:
        return False


def costs(model, tokenizer, grammars, answers):
    """Microseconds of each token of answers, and of the grammars before them."""
    tokens, beginnings = [], []
    logits = mx.zeros((1, model.args.vocab_size))
    mx.eval(logits)
    for case, text in answers:
        began = time.perf_counter()
        grammar = asyncio.run(grammars.compile(GrammarSource.of_schema(case["schema"])))
        constraint = grammars.constraint(grammar)
        beginnings.append(1e6 * (time.perf_counter() - began))
        for token in [0, *tokenizer.encode(text, add_special_tokens=False)]:
            last = mx.array([token])
            mx.eval(last)
            began = time.perf_counter()
            mx.eval(constraint(last, logits))
            tokens.append(1e6 * (time.perf_counter() - began))
        constraint.check()
    return tokens, beginnings


def summary(times):
    """Median, 99th percentile and largest, rounded."""
    ordered = sorted(times)
    found = {"median": median(ordered), "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1]}
    return {name: round(value) for name, value in found.items()}


def main():
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--dtype")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE")
    args, others = parser.parse_known_args()  # the others are the server's
    flags = [*(["--model", args.model] if args.model else []), *(["--dtype", args.dtype] if args.dtype else [])]
    flags += [*(["--dequantize"] if args.dequantize else []), *others]
    answers = [
        (CASES[number], text, finish)
        for (number, _), (text, finish) in sorted(answered(args.answers, args.seeds, flags).items())
    ]
    ended = [(case, text) for case, text, finish in answers if finish == "stop"]
    model, tokenizer = load(args.model)
    began = time.perf_counter()
    grammars = Grammars(tokenizer)
    start = time.perf_counter() - began
    tokens, beginnings = costs(model, tokenizer, grammars, ended)
    report = {
        "command": " ".join(["python -m benchmarks.server.bench_json --answers answers.jsonl", *flags]),
        "model": args.model,
        "environment": environment(),
        "generations": len(answers),
        "schemas": len(CASES),
        "ended": len(ended),
        "valid": sum(is_valid(case, text) for case, text in ended),
        "tokens": len(tokens),
        "token_us": summary(tokens),
        "schema_us": summary(beginnings),
        "start_s": round(start, 2),
        "unended": [case["asked"] for case, _, finish in answers if finish != "stop"],
    }
    print(json.dumps(report))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
