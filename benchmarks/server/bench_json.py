"""Measure answers constrained to 20 schemas: how many end, how many are valid, and the cost per token.

They are sampled at temperature 1, 20 at once, with the openai client. Each answer is a line of --answers, and is not
generated again. The cost is measured separately, on the same answers with constant logits: consuming the last token,
computing the mask and applying it.

python -m benchmarks.server.bench_json --answers answers.jsonl --model smollm2 --dtype float32 --dequantize on
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

from benchmarks.reports import save
from benchmarks.server.bench_streams import serving
from mlx_tq.grammar.constraint import Grammars
from mlx_tq.grammar.grammar_source import GrammarSource
from mlx_tq.models import load

CASES = json.loads(Path(__file__).with_name("schemas.json").read_text())
AT_ONCE = 20
MAX_TOKENS = 400


def generate(client, case, seed):
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
    """Return text and finish reason by schema and seed; generate those that `file` lacks, and append them."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    answers = {(number, seed): (text, finish) for number, seed, text, finish in lines}
    jobs = [(number, seed) for seed in range(seeds) for number in range(len(CASES)) if (number, seed) not in answers]
    with serving(*flags) as url, ThreadPoolExecutor(AT_ONCE) as pool, file.open("a", buffering=1) as out:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
        futures = {pool.submit(generate, client, CASES[number], seed): (number, seed) for number, seed in jobs}
        for future in as_completed(futures):
            answers[futures[future]] = future.result()
            out.write(json.dumps([*futures[future], *future.result()]) + "\n")
    return answers


def is_valid(case, text):
    """Validate with a library that is independent of llguidance."""
    try:
        return jsonschema_rs.is_valid(case["schema"], json.loads(text))
    except ValueError:
        return False


def costs(model, tokenizer, grammars, answers):
    tokens, compilations = [], []
    logits = mx.zeros((1, model.args.vocab_size))
    mx.eval(logits)
    for case, text in answers:
        started = time.perf_counter()
        grammar = asyncio.run(grammars.compile(GrammarSource.of_schema(case["schema"])))
        constraint = grammars.constraint(grammar)
        compilations.append(1e6 * (time.perf_counter() - started))
        ids = [0, *tokenizer.encode(text, add_special_tokens=False)]
        for count in range(1, len(ids) + 1):
            before = mx.array(ids[:count])
            mx.eval(before)
            started = time.perf_counter()
            mx.eval(constraint(before, logits))
            tokens.append(1e6 * (time.perf_counter() - started))
        constraint.check()
    return tokens, compilations


def summary(times):
    ordered = sorted(times)
    values = {"median": median(ordered), "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1]}
    return {name: round(value) for name, value in values.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--dtype")
    parser.add_argument("--dequantize")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE")
    args, others = parser.parse_known_args()  # the others are the server's
    flags = [*(["--model", args.model] if args.model else []), *(["--dtype", args.dtype] if args.dtype else [])]
    flags += [*(["--dequantize", args.dequantize] if args.dequantize else []), *others]
    answers = [
        (CASES[number], text, finish)
        for (number, _), (text, finish) in sorted(answered(args.answers, args.seeds, flags).items())
    ]
    ended = [(case, text) for case, text, finish in answers if finish == "stop"]
    model, tokenizer = load(args.model)
    started = time.perf_counter()
    grammars = Grammars(tokenizer)
    start = time.perf_counter() - started
    tokens, compilations = costs(model, tokenizer, grammars, ended)
    report = {
        "model": args.model,
        "generations": len(answers),
        "schemas": len(CASES),
        "ended": len(ended),
        "valid": sum(is_valid(case, text) for case, text in ended),
        "tokens": len(tokens),
        "token_us": summary(tokens),
        "schema_us": summary(compilations),
        "start_s": round(start, 2),
        "unended": [case["asked"] for case, _, finish in answers if finish != "stop"],
    }
    print(json.dumps(report))
    save(
        "server_json.json",
        " ".join(["python -m benchmarks.server.bench_json --answers answers.jsonl", *flags]),
        **report,
    )


if __name__ == "__main__":
    main()
