"""The tables of the documentation: `python -m benchmarks.tables` writes them into the pages from benchmarks/results.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.count_attention import Cost
from benchmarks.quality.ratios import compare
from benchmarks.reports import RESULTS
from mlx_tq.codec.formats import format_names, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACE = re.compile(r"^<!-- table: (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)

EMBEDDED = "needle, the bundled model (7 million weights)"
MODELS = {"embedded": "needle", "smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
REAL_MODELS = {name: label for name, label in MODELS.items() if name != "embedded"}
SMALL_CACHE = "--kv-sinks 32 --kv-window 64"
ON_MODEL = "[--model M --dequantize on] --dtype float32"


def report(name: str) -> Record:
    found: Record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def machine(name: str) -> str:
    """Return the processor or backend, and the versions of mlx, that a report names."""
    about = report(name)
    about = {**about, **about.get("environment", {}), **about.get("machine", {}), **about.get("versions", {})}
    about = {key.replace("_", "-"): value for key, value in about.items()}
    if "processor" in about:
        return f"{about['cores']} cores of {about['processor']}"
    is_gpu = about.get("backend", "cpu") != "cpu"
    where = f"{about['backend'].upper()} ({about['device']})" if is_gpu else f"CPU ({about.get('device', 'x86_64')})"
    return f"{where}, mlx {about['mlx']}, mlx-lm {about['mlx-lm']}"


def lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    wrong = [row for row in rows if len(row) != len(columns)]
    if wrong or not rows:
        raise ValueError(f"no rows, or rows that do not fit the columns {columns}: {wrong[:1]}")
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def table(
    files: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]], *, on: str, command: str = ""
) -> str:
    """Return a table with its caption: model, machine, files and the command that measures it."""
    commands = command or report(files[0])["command"]
    machines = "; ".join(dict.fromkeys(machine(name) for name in files))
    links = ", ".join(f"[{name}](../../benchmarks/results/{name})" for name in files)
    return "\n".join(
        ["```", commands, "```", "", f"*Measured on {on}; {machines}; {links}.*", "", lines(columns, rows)]
    )


def record_table(
    name: str, records: Iterable[Record], columns: Mapping[str, Callable[[Record], str]], *, on: str
) -> str:
    """Return a table of one report, with a row for each record."""
    return table([name], list(columns), [[show(record) for show in columns.values()] for record in records], on=on)


def with_error(value: float, error: float, digits: int = 5) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def existing(pattern: str, models: Mapping[str, str] = MODELS) -> dict[str, str]:
    files = {pattern.format(model): label for model, label in models.items()}
    return {name: label for name, label in files.items() if (RESULTS / name).exists()}


def pair(config: KVConfig) -> str:
    return f"{config.key}/{config.value}"


def arm_label(name: str) -> str:
    """Return the formats of an arm, with its profile if it has one."""
    return f"{pair(PROFILES[name])} (`{name}`)" if name in PROFILES else name


def frontier_results(model: str) -> Record:
    """Return the arms of a model, those with sorted keys among them."""
    results: Record = {}
    for name in (f"frontier_{model}.json", f"frontier_sorted_{model}.json"):
        results |= report(name)["results"]
    return results


# README and formats

PURPOSES = {
    "off": "mlx-lm's own cache",
    "safe": "nearly lossless",
    "balanced": "everyday use",
    "small": "longer contexts",
    "tiny": "smallest footprint",
    "long": "long chats, with recall of evicted tokens",
}
OTHERS = {"affine4_64:plain/affine4_64": "`mlx_lm --kv-bits 4`", "q4_0:plain/q4_0": "llama.cpp `q4_0`"}
QWEN3_4B = {"layers": 36, "heads": 8, "head_dim": 128, "tokens": 32768}


def bits_per_value(config: KVConfig) -> float:
    """Return the stored bits per value of a packed token, scales and means included."""
    vectors = sum(get_format(name).bytes_per_vector(QWEN3_4B["head_dim"]) for name in (config.key, config.value))
    means = 2 * QWEN3_4B["head_dim"] / MEAN_TOKENS if config.normalize and not config.is_off else 0
    return float(8 * (vectors + means) / (2 * QWEN3_4B["head_dim"]))


def cache_gigabytes(bits: float) -> float:
    values = 2 * QWEN3_4B["layers"] * QWEN3_4B["heads"] * QWEN3_4B["head_dim"] * QWEN3_4B["tokens"]
    return values * bits / 8e9


def profiles() -> str:
    measured = {label: frontier_results(model) for model, label in REAL_MODELS.items()}
    evicted = {label: report(name)["results"] for name, label in existing("long_{}.json", REAL_MODELS).items()}
    rows = []
    for name, config in PROFILES.items():
        bits, kept, formats = bits_per_value(config), 1.0, pair(config)
        agree = [_top1(found, formats) for found in measured.values()]
        if config.is_off:
            agree = ["100 %" for _ in measured]
        if config.evict is not None:
            kept, formats = 0.5, f"{formats}, half evicted"
            agree = [f"perplexity {evicted[m]['long']['delta']:+.0f} %" if m in evicted else "-" for m in measured]
        shown = f"`{name}`" + (" (default)" if name == DEFAULT_PROFILE else "")
        rows.append([shown, formats, f"{bits:.2f}", f"{cache_gigabytes(kept * bits):.2f} GB", *agree, PURPOSES[name]])
    for name, label in OTHERS.items():
        rows.append([label, "", "4.50", f"{cache_gigabytes(4.5):.2f} GB"])
        rows[-1] += [*(_top1(found, name) for found in measured.values()), "for comparison"]
    columns = ["`--kv-profile`", "keys/values", "bits per value", "KV cache, Qwen3-4B at 32k"]
    return lines([*columns, *(f"same next token, {label}" for label in measured), "for"], rows)


def _top1(results: Record, name: str) -> str:
    return f"{results[name]['top1']:.1f} %" if name in results else "-"


def formats() -> str:
    rows = []
    for name in format_names(compared=False):
        found = get_format(name)
        sizes = ["-" if dim % found.multiple else str(found.bytes_per_vector(dim)) for dim in (64, 80, 128, 256)]
        rows.append([f"`{name}`", *sizes])
    return lines(["format", *(f"D = {dim}" for dim in (64, 80, 128, 256))], rows)


# Quality


def divergence() -> str:
    files = existing("quality_profiles_{}.json")
    found = [report(file)["results"] for file in files]
    rows = []
    for name in found[0]:
        if name == "off":
            continue
        cells = [
            (with_error(each[name]["kld"], each[name]["kld_error"], 6), f"{each[name]['top1']:.1f}") for each in found
        ]
        rows.append([arm_label(name), *(cell for both in cells for cell in both)])
    columns = ["keys/values", *(f"{label}: {what}" for label in files.values() for what in ("KLD", "top-1 %"))]
    command = (
        "python -m mlx_tq evaluate divergence --profiles safe,balanced,small,tiny,tq4/tq4,tq3/tq3,tq4/tq3,tq4/tcq3 \\\n"
        f"    --length 2048 --chunks N --text wiki.test.raw {ON_MODEL}"
    )
    return table(list(files), columns, rows, on="three models, default sinks and window", command=command)


FIDELITY_NAMES = {
    "off": "`off`: rounding alone",
    "affine8_64:plain/affine8_64": "`mlx_lm --kv-bits 8`",
    "affine4_64:plain/affine4_64": "`mlx_lm --kv-bits 4`",
}


def fidelity() -> str:
    files = existing("fidelity_{}.json")
    found = [report(name)["results"] for name in files]
    rows = []
    for name in found[0]:
        cells = [
            (_scientific(each[name]["kld"], each[name]["kld_error"]), f"{each[name]['top1']:.1f}") for each in found
        ]
        rows.append([FIDELITY_NAMES.get(name, name), *(cell for both in cells for cell in both)])
    columns = ["keys/values", *(f"{label}: {what}" for label in files.values() for what in ("KLD", "top-1 %"))]
    counts = {label: report(name)["settings"]["chunks"] for name, label in files.items()}
    on = ", ".join(f"{label} ({count} pieces)" for label, count in counts.items())
    command = "python -m benchmarks.studies.fidelity --chunks N [--model M]"
    return table(list(files), columns, rows, on=f"{on}, everything packed", command=command)


def _scientific(value: float, error: float) -> str:
    return with_error(value, error) if value > 1e-4 else f"{value:.1e} ± {error:.0e}"


FRONTIER = (
    *("q8/q8", "q8/tq4", "tq4/tq4", "tq4/tq3", "tq3/tq3", "tq2/tq2", "tcq4/tcq4", "tcq3/tcq3", "tcq2/tcq2"),
    *("stcq4/tq4", "stcq4/tcq3", "stcq3/tcq3", "stcq2/tcq2"),
    *("4.3bits", "3.4bits", "2.6bits", "affine8_64:plain/affine8_64", "affine4_64:plain/affine4_64"),
    *("affine2_64:plain/affine2_64", "q8_0:plain/q8_0", "q4_0:plain/q4_0", "tq4:plain/tq4"),
)
FRONTIER_NAMES = {
    "affine8_64:plain/affine8_64": "`mlx_lm --kv-bits 8`",
    "affine4_64:plain/affine4_64": "`mlx_lm --kv-bits 4`",
    "affine2_64:plain/affine2_64": "`mlx_lm --kv-bits 2`",
    "q8_0:plain/q8_0": "llama.cpp `q8_0`",
    "q4_0:plain/q4_0": "llama.cpp `q4_0`",
    "tq4:plain/tq4": "tq4/tq4, `--kv-normalize off`",
    **{f"{bits}bits": f"`--kv-mean-bits {bits}`" for bits in ("4.3", "3.4", "2.6")},
}


def frontier() -> str:
    files = existing("frontier_{}.json", REAL_MODELS) | existing("frontier_sorted_{}.json", REAL_MODELS)
    found = [frontier_results(model) for model in REAL_MODELS]
    rows = []
    for name in FRONTIER:
        cells = [
            (
                f"{32 / each[name]['ratio']:.2f}",
                with_error(each[name]["kld"], each[name]["kld_error"]),
                _top1(each, name),
            )
            if name in each
            else ("-",) * 3
            for each in found
        ]
        rows.append([FRONTIER_NAMES.get(name, name), *(cell for three in cells for cell in three)])
    heads = [f"{label}: {what}" for label in REAL_MODELS.values() for what in ("bits", "KLD", "top-1")]
    command = (
        "python -m benchmarks.quality.frontier ours+trellis+sorted+layers+plain+field --length 1024 --step 128 \\\n"
        f"    --chunks N {SMALL_CACHE} {ON_MODEL}"
    )
    return table(list(files), ["keys/values", *heads], rows, on="two models, sinks 32, window 64", command=command)


def trajectories() -> str:
    files = existing("trajectory_{}.json", REAL_MODELS)
    found = [report(name)["results"] for name in files]
    rows = []
    for name in found[0]:
        rows.append([FIDELITY_NAMES.get(name, arm_label(name))])
        for each in found:
            rows[-1].append(_scientific(each[name]["kld"], each[name]["kld_error"]))
            rows[-1].append(with_error(each[name]["agreement"], each[name]["agreement_error"], digits=0))
            rows[-1].append(f"{each[name]['same_until']:.0f}")
    heads = [f"{label}: {what}" for label in files.values() for what in ("KLD", "same tokens, %", "same until token")]
    settings = report(next(iter(files)))["settings"]
    command = (
        f"python -m mlx_tq evaluate trajectory --model M --dequantize on --chunks {settings['chunks']} \\\n"
        f"    --length {settings['length']} --answer-tokens {settings['answer_tokens']} --text wiki.test.raw \\\n"
        f"    --profiles {','.join(name for name in found[0] if name != 'off')}"
    )
    return table(list(files), ["keys/values", *heads], rows, on="two models, default sinks and window", command=command)


UNSORTED = {f"stcq{bits}/tcq{bits}": f"tcq{bits}/tcq{bits}" for bits in (2, 3, 4)} | {
    "stcq4/tcq3": "tcq4/tcq3",
    "stcq4/tq4": "tq4/tq4",
}


def sorted_caches() -> str:
    files = existing("frontier_sorted_{}.json")
    found = [frontier_results(model) for model in MODELS]
    rows = []
    for name, plain in UNSORTED.items():
        rows.append([name, plain])
        for each in found:
            rows[-1] += [with_error(each[name]["kld"], each[name]["kld_error"]), f"{each[plain]['kld']:.5f}"]
    columns = [f"{label}: {what}" for label in files.values() for what in ("KLD", "KLD, unsorted")]
    command = f"python -m benchmarks.quality.frontier sorted --length N --step 128 --chunks N {SMALL_CACHE} {ON_MODEL}"
    on = "three models, sinks 32, window 64"
    return table([*files], ["keys/values", "unsorted, same bytes", *columns], rows, on=on, command=command)


def peer_formulas() -> str:
    return _formulas("peer_frontier_{}.json", lambda name: True)


def sorted_ablation() -> str:
    return _formulas("sorted_ablation_{}.json", lambda name: "sorted" in name or "groups of tcq" in name)


def _formulas(pattern: str, is_shown: Callable[[str], bool]) -> str:
    """Return the table of runs of `benchmarks.quality.peer_frontier`."""
    files = existing(pattern, REAL_MODELS)
    found = [report(name)["results"] for name in files]
    bits = {name: row["bits"] for each in found for name, row in each.items() if is_shown(name)}
    rows = []
    for name in sorted(bits, key=lambda name: bits[name]):
        cells = []
        for each in found:
            row, base = each.get(name), each.get("tcq2/tcq2")
            if row is None or base is None:
                cells += ["-"] * 3
                continue
            cells += [f"{row['bits']:.2f}", with_error(row["kld"], row["kld_error"])]
            cells.append(with_error(*compare(row, base), digits=3))
        rows.append([name, *cells])
    heads = [f"{label}: {what}" for label in files.values() for what in ("bits", "KLD", "of tcq2/tcq2")]
    command = (
        "python -m benchmarks.quality.peer_frontier --model M --text wiki.test.raw --calibration FILE --json FILE \\\n"
        f"    --length {report(next(iter(files)))['settings']['length']} --texts N"
    )
    return table(list(files), ["keys and values", *heads], rows, on="two models, sinks 32, window 64", command=command)


def normalization() -> str:
    files = existing("quality_normalized_{}.json")
    rows = []
    for name, label in files.items():
        found = report(name)["results"]
        plain, normalized = found["tq4:plain/tq4"], found["tq4/tq4"]
        errors = [with_error(each["kld"], each["kld_error"]) for each in (plain, normalized)]
        rows.append([label, *errors, f"{normalized['kld'] / plain['kld']:.2f}"])
        rows[-1] += [f"{each['top1']:.1f}" for each in (plain, normalized)]
    columns = ["model", "KLD, off", "KLD, on", "ratio", "top-1 %, off", "top-1 %, on"]
    command = (
        "python -m mlx_tq evaluate divergence --profiles tq4/tq4,tq4:plain/tq4 --chunks 1 --length 2048 --step 32 \\\n"
        f"    --text wiki.test.raw {SMALL_CACHE} {ON_MODEL}"
    )
    return table(list(files), columns, rows, on="three models, tq4/tq4, sinks 32, window 64", command=command)


def trellis() -> str:
    files = existing("trellis_divergence_{}.json")
    rows = []
    for name, label in files.items():
        found = report(name)["results"]
        for bits in (4, 3, 2):
            nearest, codes = found[f"tq{bits}/tq{bits}"], found[f"tcq{bits}/tcq{bits}"]
            errors = [with_error(each["kld"], each["kld_error"]) for each in (nearest, codes)]
            tops = [f"{each['top1']:.1f}" for each in (nearest, codes)]
            rows.append([label, str(bits), *errors, f"{codes['kld'] / nearest['kld']:.2f}", *tops])
    columns = ["model", "bits", "KLD, tq", "KLD, tcq", "ratio", "top-1 %, tq", "top-1 %, tcq"]
    command = (
        "python -m mlx_tq evaluate divergence --profiles tq4/tq4,tcq4/tcq4,tq3/tq3,tcq3/tcq3,tq2/tq2,tcq2/tcq2 \\\n"
        f"    --chunks 1 --length 2048 --step 32 {SMALL_CACHE} {ON_MODEL}"
    )
    return table(list(files), columns, rows, on="the models named, sinks 32, window 64", command=command)


def by_layer() -> str:
    files = existing("by_layer_{}.json")
    rows = [
        [label, arm, with_error(found["kld"], found["kld_error"], 6), f"{found['top1']:.1f}"]
        for name, label in files.items()
        for arm, found in report(name)["results"].items()
        if arm != "off"
    ]
    command = (
        "python -m mlx_tq evaluate divergence --profiles stcq4/tq4,4.21bits,... --length 1024 --step 128 \\\n"
        f"    --chunks 2 --text REST {SMALL_CACHE} {ON_MODEL}"
    )
    return table(list(files), ["model", "formats", "KLD", "top-1 %"], rows, on="the models named", command=command)


STATES = {"hybrid": "small hybrid, 1.2M tokens of training", "random": "random, head dims of Qwen3.5"}


def states() -> str:
    files = {f"state_formats_{name}.json": label for name, label in STATES.items()}
    rows = [
        [
            label,
            row["format"],
            f"{row['kld']:.1e}",
            f"{row['kld_99']:.1e}",
            f"{row['top1']:.2f}",
            f"{row['equal_answers']} of {about['prompts']}",
            f"{statistics.median(row['agreed_tokens']):.0f}",
        ]
        for name, label in files.items()
        for about in [report(name)]
        for row in about["rows"]
    ]
    columns = ["model", "states", "KLD", "KLD, 99th percentile", "top-1 %", "equal answers", "equal tokens, median"]
    return table([*files], columns, rows, on="two models in float32")


ANSWERS = {
    "reasoning": "reasoning --data problems.jsonl --samples 40 --max-tokens 32",
    "tools": "tools --tool-parser json_tools --shots 3 --samples 33 --max-tokens 40",
    "ruler": "ruler --lengths 400,1000 --samples 5 --max-tokens 80",
}


def answers() -> str:
    files = [f"answers_{name}.json" for name in ANSWERS]
    rows = [
        [
            *(kind, row["group"], row["name"], f"{row['right']}/{row['samples']}"),
            *(["-"] * 3 if row["name"] == "off" else [str(row["lost"]), str(row["gained"]), f"{row['p']:.2f}"]),
        ]
        for kind, name in zip(ANSWERS, files, strict=True)
        for row in report(name)["rows"]
        if any(each["right"] for each in report(name)["rows"] if each["group"] == row["group"])
    ]
    commands = "\n".join(
        f"python -m mlx_tq evaluate {words} --model smollm2 --dequantize on --dtype float32 \\\n"
        f"    --profiles tq4/tq4,tq2/tq2 {SMALL_CACHE}"
        for words in ANSWERS.values()
    )
    columns = ["task", "samples", "cache", "right", "lost", "gained", "p (McNemar)"]
    return table(files, columns, rows, on="SmolLM2-135M-Instruct", command=commands)


# Speed


BATCHES = (2, 4, 8)
WHOLE_MODELS = {f"bench_model_{name}.json": label for name, label in REAL_MODELS.items()}


def whole_models() -> str:
    rows = []
    for name, label in WHOLE_MODELS.items():
        figures = [figure for figure in report(name)["figures"] if figure["dtype"] == "float32"]
        rates = {(f["tokens"], f["arm"], f["batch"]): f["decode_tps"] for f in figures}
        for figure in figures:
            tokens, arm = figure["tokens"], figure["arm"]
            streams = [rates.get((tokens, arm, size)) for size in BATCHES]
            if figure["batch"] == 1:
                rows.append([label, f"{tokens:,}", f"`{arm}`"])
                rows[-1] += [f"{figure[field] / 1e6:.1f}" for field in ("kv_nbytes", "peak_nbytes")]
                rows[-1] += [f"{figure['prefill_tps']:.0f}" if figure["prefill_tps"] else "-"]
                rows[-1] += [f"{figure['decode_tps']:.1f}", f"{figure['decode_tps'] / rates[tokens, 'off', 1]:.2f}"]
                rows[-1] += ["-" if rate is None else f"{rate:.1f}" for rate in streams]
    columns = ["model", "tokens", "cache", "KV, MB", "peak, MB", "prefill, tok/s", "decode, tok/s", "times `off`"]
    columns += [f"{size} streams" for size in BATCHES]
    command = (
        "python -m mlx_tq bench --model M --dequantize on --dtypes float32 --tokens N --rounds 5 \\\n"
        "    --prefill-rounds 1 --profiles balanced small tiny --kv-evict none --json FILE"
    )
    return table(list(WHOLE_MODELS), columns, rows, on="two models in float32", command=command)


def long_contexts() -> str:
    name = "cpu_long_contexts.json"
    figures = report(name)["figures"]
    base = {figure["tokens"]: figure["ms"] for figure in figures if figure["arm"] == "off"}
    columns: dict[str, Callable[[Record], str]] = {
        "tokens": lambda f: f"{f['tokens']:,}",
        "cache": lambda f: f"`{f['arm']}`",
        "ms per token": lambda f: f"{f['ms']:.1f}",
        "low to high": lambda f: f"{f['low']:.1f} to {f['high']:.1f}",
        "times as fast as `off`": lambda f: f"{base[f['tokens']] / f['ms']:.2f}",
        "KV, MB": lambda f: f"{f['kv_nbytes'] / 1e6:,.1f}",
    }
    return record_table(
        name, figures, columns, on="a random model of four layers, 9 query and 3 KV heads of 64, float32"
    )


def llama_cpp() -> str:
    name = "llama_cpp.json"
    columns: dict[str, Callable[[Record], str]] = {
        "tokens": lambda f: f"{f['tokens']:,}",
        "cache": lambda f: f["arm"],
        "KV, MB": lambda f: f"{f['kv_nbytes'] / 1e6:.1f}",
        "prefill, tok/s": lambda f: f"{f['prefill_tps']:.0f}",
        "decode, tok/s": lambda f: f"{f['decode_tps']:.1f}",
    }
    return record_table(name, report(name)["figures"], columns, on="SmolLM2-135M-Instruct")


def one_layer() -> str:
    name, arms = "decode_attention.json", ("safe", "balanced", "tq4/tq4")
    timings = report(name)["timings"]
    median = {(t["dtype"], t["tokens"], t["arm"]): t["median"] for t in timings}
    rows = []
    for dtype, tokens in dict.fromkeys((t["dtype"], t["tokens"]) for t in timings):
        quantized, plain = (median[dtype, tokens, arm] for arm in ("kv-bits 4", "off"))
        ours = [median[dtype, tokens, arm] for arm in arms]
        ratios = [base / each for base in (plain, quantized) for each in ours]
        rows.append([dtype, f"{tokens:,}", *(f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in ratios)])
    columns = [
        "type",
        "tokens",
        *(f"{arm}, times `off`" for arm in arms),
        *(f"{arm}, times --kv-bits 4" for arm in arms),
    ]
    return table([name], columns, rows, on="no model: one layer", command="make bench")


def kernels() -> str:
    name = "kernels_counted.json"
    rows = [
        [f"`{k['kernel']}`", f"{k['loaded']:,.0f}", f"{k['stored']:,.0f}", f"{k['lane_operations']:,.0f}"]
        for k in report(name)["kernels"]
    ]
    return table([name], ["kernel", "bytes loaded", "bytes stored", "lane operations"], rows, on="the Metal simulator")


def attention_counts() -> str:
    return _counts([row for row in report(COUNTED)["rows"] if row["length"] == 1])


def verify_counts() -> str:
    return _counts([row for row in report(COUNTED)["rows"] if row["length"] > 1 and row["dim"] in (128, 256)])


COUNTED = "attention_counted.json"


def _counts(records: Sequence[Record]) -> str:
    """Compare what a token costs with mlx's kernel of long contexts on base and Pro chips."""
    formats = report(COUNTED)["formats"]
    rows = []
    for record in records:
        costs = {name: Cost(**cost) for name, cost in record["costs"].items()}
        kernel = record["kernels"]["base"][-1]
        operations, ratios, nbytes = "-", ["-"] * len(formats), f"at least {4 * record['dim']:,}"
        if kernel:
            other = costs[kernel]
            operations, nbytes = f"{other.plain:,.0f} ({other.weighted:,.0f})", _both_bytes(other)
            ours = [costs[name] for name in formats]
            ratios = [f"{cost.plain / other.plain:.2f} ({cost.weighted / other.weighted:.2f})" for cost in ours]
        shape = [str(record[name]) for name in ("dim", "groups", "length")]
        rows.append([*shape, f"`{kernel}`" if kernel else "no vector kernel", operations, *ratios, nbytes])
        rows[-1] += [_both_bytes(costs[name]) for name in formats]
    columns = ["D", "G", "L", "mlx's kernel", "its operations", *formats, "its bytes"]
    columns += [f"{pair}, bytes" for pair in formats]
    return table([COUNTED], columns, rows, on="the Metal simulator")


def _both_bytes(cost: Cost) -> str:
    return f"{cost.fetched:,.0f}" + (f" ({cost.loaded:,.0f})" if cost.loaded > cost.fetched else "")


def gpu_attention() -> str:
    name = "attention_cuda.json"
    about = report(name)
    arms = ("fp16", "q8/tq4", "tq4/tq4", "tq2/tq2")
    times = {
        (r["shape"], r["tokens"], r["arm"]): 1e6 * r["seconds"]
        for r in about["rows"]
        if (r["batch"], r["length"]) == (1, 1)
    }
    rows = []
    for shape, (queries, heads, dim) in about["shapes"].items():
        for tokens in (4096, 65536, 131072):
            cells = [times[shape, tokens, arm] for arm in arms]
            rows.append([f"{shape.split()[0]}: {queries}/{heads} heads of {dim}", f"{tokens:,}"])
            rows[-1] += [f"{cell:.0f}" for cell in cells] + [f"{cells[0] / cells[2]:.2f}"]
    columns = ["shape", "tokens", *(f"{arm}, µs" for arm in arms), "tq4/tq4, times as fast as fp16"]
    command = "python -m benchmarks.gpu"
    return table([name], columns, rows, on="no model: one layer", command=command)


PREDICTED = "kernels_predicted.json"
ON_COMPILER, ON_ROOFLINE = "no GPU: nvcc's machine code for sm_90", "no GPU: a roofline"


def machine_code() -> str:
    """Show `attend` for heads of 128 and 256 in an H100's instructions."""
    columns: dict[str, Callable[[Record], str]] = {
        "D": lambda row: str(row["dim"]),
        "G": lambda row: str(row["groups"]),
        "formats": lambda row: row["formats"],
        "registers": lambda row: str(row["registers"]),
        "spilled bytes": lambda row: str(row["spilled"]),
        "shared, KB": lambda row: f"{row['shared'] / 1024:.1f}",
        "warps per SM": lambda row: str(row["warps"]),
        "instructions": lambda row: f"{sum(row['instructions'].values()):,.0f}",
        "float": lambda row: f"{row['instructions']['float']:,.0f}",
        "integer": lambda row: f"{row['instructions']['integer']:,.0f}",
        "shared loads": lambda row: f"{row['instructions']['shared load']:,.0f}",
        "tokens at once": lambda row: str(32 * row["team"]),
        "their cycles": lambda row: f"{row['cycles']:,}",
        "one load at a time": lambda row: f"{row['rolled_cycles']:,}",
    }
    rows = [row for row in report(PREDICTED)["attend"] if row["dim"] in (128, 256)]
    return record_table(PREDICTED, rows, columns, on=ON_COMPILER)


def h100_predicted() -> str:
    """Show the time of packed tokens on an H100."""
    columns: dict[str, Callable[[Record], str]] = {
        "shape": lambda row: row["shape"],
        "tokens": lambda row: f"{row['tokens']:,}",
        "formats": lambda row: row["formats"],
        "predicted, µs": lambda row: f"{1e6 * row['prediction']['seconds']:.0f}",
        "bound": lambda row: row["prediction"]["bound"],
        "one load at a time, µs": lambda row: f"{1e6 * row['rolled']['seconds']:.0f}",
        "bytes alone, µs": lambda row: f"{1e6 * row['bytes_only']:.0f}",
    }
    rows = [r for r in report(PREDICTED)["h100"] if r["tokens"] == 65536 and r["formats"] in ("q8/tq4", "tq4/tq4")]
    return record_table(PREDICTED, rows, columns, on=ON_ROOFLINE)


def macs_predicted() -> str:
    """Show mlx's attention and ours on Macs."""

    def arm(name: str) -> Callable[[Record], str]:
        return lambda row: f"{1e3 * row[name]['seconds']:.2f} ({row[name]['bound']})"

    def ratio(name: str) -> Callable[[Record], str]:
        return lambda row: f"{row['mlx']['seconds'] / row[name]['seconds']:.1f}"

    columns: dict[str, Callable[[Record], str]] = {
        "chip": lambda row: row["chip"],
        "shape": lambda row: row["shape"],
        "mlx, ms": arm("mlx"),
        "q8/tq4, ms": arm("q8/tq4"),
        "stcq4/tq4, ms": arm("stcq4/tq4"),
        "q8/tq4, times": ratio("q8/tq4"),
        "stcq4/tq4, times": ratio("stcq4/tq4"),
    }
    chips, shapes = ("M1", "M1 Max", "M3 Pro", "M4", "M4 Max", "M5", "M5 Max"), ("32/8/128", "16/2/256", "24/4/256")
    about = report(PREDICTED)["macs"]
    rows = [r for r in about if r["tokens"] == 65536 and r["chip"] in chips and r["shape"] in shapes]
    return record_table(PREDICTED, rows, columns, on=ON_ROOFLINE)


def prediction_checks() -> str:
    """Compare predictions with times that were measured."""
    about = report(PREDICTED)
    shapes = report("attention_cuda.json")["shapes"]

    def row(what: str, shape: str, tokens: str, predicted: float, measured: float, source: str) -> list[str]:
        return [what, shape, tokens, f"{predicted:,.0f}", f"{measured:,.0f}", f"{predicted / measured:.2f}", source]

    rows = [
        row(
            f"mlx, {r['chip']}",
            r["shape"],
            f"{r['tokens']:,}",
            1e3 * r["predicted"],
            1e3 * r["milliseconds"],
            r["source"],
        )
        for r in about["reports"]
    ]
    for r in about["h200"]:
        shape = "/".join(map(str, shapes[r["shape"]]))
        rows.append(
            row(f"{r['formats']}, H200", shape, "65,536 more", r["predicted"], r["measured"], "attention_cuda.json")
        )
    columns = ["what", "shape", "tokens", "predicted, µs", "measured, µs", "predicted/measured", "source"]
    return table([PREDICTED], columns, rows, on=ON_ROOFLINE)


def lookup_speed() -> str:
    about = report("lookup_speed.json")
    rows = [
        (
            row["task"],
            f"{row['prompt']:,}",
            f"{row['plain_tps']:.1f}",
            f"{row['lookup_tps']:.1f}",
            f"{row['gain']:.2f}",
            f"{row['accepted']} of {row['drafted']}",
        )
        for row in about["rows"]
    ]
    columns = ("task", "prompt tokens", "without, tok/s", "with, tok/s", "times as fast", "drafted tokens accepted")
    return table(
        ["lookup_speed.json"],
        columns,
        rows,
        on=f"{MODELS[about['model']]} in float32, medians of {about['rounds']} pairs; "
        "times as fast: median of the ratios of the pairs",
    )


def lookup_acceptance() -> str:
    about = report("lookup_acceptance.json")
    rows = []
    for profile in dict.fromkeys(row["profile"] for row in about["rows"]):
        of_profile = [row for row in about["rows"] if row["profile"] == profile]
        shares = []
        for way in ("lookup", "draft_model"):
            drafted, accepted = (sum(row[way][count] for row in of_profile) for count in ("drafted", "accepted"))
            shares.append(f"{100 * accepted / drafted:.0f} % of {drafted:,}")
        rows.append((arm_label(profile), *shares))
    columns = ("keys/values", "prompt lookup", "draft model of 3-bit weights")
    names = " and ".join(dict.fromkeys(row["task"] for row in about["rows"]))
    where = f"{MODELS[about['model']]} in float32, {names}; drafted tokens that were accepted"
    return table(["lookup_acceptance.json"], columns, rows, on=where)


def streams() -> str:
    name = "server_streams.json"
    order = {word: place for place, word in enumerate(("cold", "hot", "off", "balanced"))}
    figures = sorted(
        report(name)["figures"], key=lambda f: (f["model"], order[f["prefix"]], f["streams"], order[f["profile"]])
    )
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda f: f["model"],
        "prompt tokens": lambda f: (
            f"{f['prompt_tokens'] // f['streams']:,}, {'cached' if f['prefix'] == 'hot' else 'new'}"
        ),
        "profile": lambda f: f"`{f['profile']}`",
        "streams": lambda f: str(f["streams"]),
        "tok/s": lambda f: f"{f['tokens_per_second']:.1f}",
        "times `off`": lambda f: f"{f.get('ratio', 1):.2f}",
        "decode, tok/s": lambda f: f"{f['decode_tokens_per_second']:.1f}",
        "time to first token, s": lambda f: f"{f['first_token']:.2f}",
        "KV, MB": lambda f: f"{f['kv_bytes'] / 1e6:.1f}",
    }
    return record_table(name, figures, columns, on="two models in float32")


PREFIX_CACHE = {
    "read": "no prefix cache",
    "stored": "first request, stored",
    "restored": "cache hit after a restart",
    "restored cold": "cache hit after a restart, cold page cache",
}


def prefix_cache() -> str:
    name = "server_store.json"
    about = report(name)
    without = next(f["median"] for f in about["figures"] if f["arm"] == "read")
    columns: dict[str, Callable[[Record], str]] = {
        "request": lambda f: PREFIX_CACHE[f["arm"]],
        "cached tokens": lambda f: f"{f['cached_tokens']:,} of {f['prompt_tokens']:,}",
        "time to first token, s": lambda f: f"{f['median']:.2f}",
        "of no prefix cache": lambda f: f"{100 * f['median'] / without:.1f} %",
    }
    return record_table(name, about["figures"], columns, on=f"{about['model']} in float32")


RESTORES = {"smollm2": "SmolLM2-135M", "random_long": "random, 2 layers"}


def restores() -> str:
    files = {f"store_restore_{model}.json": label for model, label in RESTORES.items()}
    rows = [
        [
            label,
            f"{f['tokens']:,}",
            f"{f['bytes'] / 1e6:.1f}",
            f"{f['prefill']:.1f}",
            f"{f['restore']:.3f}",
            f"{100 * f['share of prefill']:.2f} %",
            str(f["prefilled again"]),
        ]
        for name, label in files.items()
        for f in report(name)["figures"]
    ]
    columns = ["model", "tokens", "MB", "prefill, s", "restore, s", "of prefill", "prefilled again if it diverges"]
    return table([*files], columns, rows, on="two models in float32")


def shared_steps() -> str:
    name = "store_shared_steps.json"
    rows = [
        [
            f"`{f['profile']}`",
            *(f"{f['processor']['milliseconds'][arm]:.1f}" for arm in ("one", "copies", "shared")),
            f"{f['processor']['shared_to_copies']:.2f}",
            f"{f['processor']['shared_to_one']:.2f}",
            *(f"{f['cache_bytes'][arm] / 1e6:.1f}" for arm in ("copies", "shared")),
        ]
        for f in report(name)["figures"]
    ]
    columns = [
        "profile",
        "one stream, ms",
        "eight, private prefixes, ms",
        "eight, shared prefix, ms",
        "shared / private",
    ]
    columns += ["shared / one stream", "private KV, MB", "shared KV, MB"]
    return table([name], columns, rows, on="caches of SmolLM2's shape with random rows, processor time on one core")


LONG_PROMPT = {
    "share kept by the slowest": ("speed that the slowest of four streams keeps while 32K are prefilled", "{:.3f}"),
    "longest gap, s": ("longest gap between two of its tokens, s", "{:.2f}"),
    "32K alone, s": ("time to first token of 32K alone, s", "{:.1f}"),
    "32K beside streams, s": ("with four streams, s", "{:.1f}"),
    "1K alone, s": ("time to first token of 1K alone, s", "{:.2f}"),
    "1K behind 32K, s": ("behind 32K, s", "{:.2f}"),
}


def long_prompt() -> str:
    name = "server_long_prompt.json"
    figures = report(name)["figures"]
    rows = [[text, form.format(figures[key])] for key, (text, form) in LONG_PROMPT.items()]
    return table([name], ["what", "median"], rows, on="a random model with 2 layers and 131,072 positions")


AGENTS_MODEL = "a random model with 2 layers and 131,072 positions"
REUSES = {
    ("mlx_tq", "memory"): "reused",
    ("mlx_tq", "restart"): "after SIGTERM",
    ("mlx_tq", "kill"): "after kill -9",
    ("mlx_tq", "side"): "with side requests",
    ("mlx_tq", "two"): "two at once",
    ("mlx-lm", "memory"): "mlx-lm's server",
    ("mlx-lm", "side"): "mlx-lm's server, with side requests",
}


def agent_figures(name: str) -> dict[str, dict[tuple[str, str], Record]]:
    """Return the figures of each client by server and arm, for clients with all sessions."""
    clients: dict[str, dict[tuple[str, str], Record]] = {}
    for row in report(name)["figures"]:
        clients.setdefault(row["client"], {})[row["server"], row["arm"]] = row
    return {client: rows for client, rows in sorted(clients.items()) if ("mlx_tq", "memory") in rows}


def agents() -> str:
    name, rows = "agents_random_long.json", []
    for client, figures in agent_figures(name).items():
        whole = figures["mlx_tq", "memory"]
        shares = [figures[key]["reused_share"] if key in figures else None for key in REUSES]
        shown = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        counts = [str(whole["requests"]), f"{whole['prompt_tokens']:,}"]
        rows.append([client, *counts, f"{100 * whole['shared_tokens'] / whole['prompt_tokens']:.1f} %", *shown])
    columns = ["client", "requests", "prompt tokens", "shared", *REUSES.values()]
    return table([name], columns, rows, on=AGENTS_MODEL)


def agent_turns() -> str:
    name, rows = "agents_random_long.json", []
    for client, figures in agent_figures(name).items():
        ours, other = figures["mlx_tq", "memory"], figures.get(("mlx-lm", "memory"))
        after = figures.get(("mlx_tq", "restart"), {}).get("first_token_after")
        seconds = [ours["first"], ours["later"], after]
        nbytes = [ours["kept_bytes"], ours["stored_bytes"], other and other["kept_bytes"]]
        shown = ["-" if value is None else f"{value:.1f}" for value in seconds]
        shown += ["-" if value is None else f"{value / 1e6:.0f}" for value in nbytes]
        rows.append([client, *shown])
    columns = ["client", "first turn, s", "later turns, s", "first turn after SIGTERM, s"]
    columns += ["in memory, MB", "on disk, MB", "mlx-lm's server in memory, MB"]
    return table([name], columns, rows, on=AGENTS_MODEL)


def hostile() -> str:
    columns: dict[str, Callable[[Record], str]] = {
        "server": lambda f: f["server"],
        "attack": lambda f: f["attack"],
        "slowest request, s": lambda f: f"{f['plain_max_s']:.2f}",
        "slowest health, s": lambda f: f"{f['health_max_s']:.2f}",
        "memory growth, MB": lambda f: f"{f['grown_mb']:,}",
    }
    name = "server_hostile.json"
    return record_table(name, report(name)["figures"], columns, on=EMBEDDED)


def soak() -> str:
    columns: dict[str, Callable[[Record], str]] = {
        "server": lambda f: f["service"],
        "seconds": lambda f: f"{f['seconds']:.0f}",
        "answers": lambda f: ", ".join(f"{count:,} x {status}" for status, count in f["statuses"].items()),
        "memory after warm-up, MB": lambda f: f"{f['warm_mb']:.0f}",
        "growth": lambda f: f"{f['growth_percent']:.1f} %",
    }
    name = "server_soak.json"
    return record_table(name, report(name)["figures"], columns, on=EMBEDDED)


# Eviction and recall

ARMS = {"off": "mlx-lm's", "balanced": "compressed", "off@90%": "evicted", "balanced@90%": "both"}
ARM_FILES = {"embedded": (3500,), "smollm2": (2000, 7500), "gemma3-270m": (8000, 16000, 32000)}
FOUR_ARMS = (
    f"--profiles off,balanced,off@90%,balanced@90% --kv-evict published:granularity=1:aggregation=paper {SMALL_CACHE}"
)


def four_arms() -> str:
    files = {f"four_arms_{model}_{n}.json": (MODELS[model], n) for model, sizes in ARM_FILES.items() for n in sizes}
    rows = []
    for name, (label, tokens) in files.items():
        for arm, shown in ARMS.items():
            found = report(name)["results"][arm]
            change = f"{found['delta']:+.2f} ± {found['delta_error']:.2f}"
            rows.append([f"{label}, {tokens:,}", shown, f"{found['ppl']:.2f}", change])
            rows[-1] += [f"{100 * found['kept']:.0f}", f"{found['nbytes'] / 1e6:.1f}"]
    columns = ["model, tokens", "cache", "perplexity", "change %", "kept %", "MB"]
    command = f"python -m mlx_tq evaluate perplexity {FOUR_ARMS} \\\n    --length L --chunks N --step S {ON_MODEL}"
    return table(list(files), columns, rows, on="three models", command=command)


POLICIES = {
    "triattention:granularity=32": "`triattention`",
    "triattention:granularity=32:calibration=text": "`triattention`, calibrated on the prompt",
    "published:granularity=32:aggregation=paper": "`published:aggregation=paper`",
    "expected_attention:granularity=32": "`expected_attention`",
    "random:granularity=32": "`random`",
    "recency:granularity=32": "`recency`",
    "knorm:granularity=32": "`knorm`",
}
SHARES = (90, 75, 50, 25)
SWEEP = (
    f"python -m benchmarks.studies.sweep {ON_MODEL} --kv-window 64 --sinks 32 --triggers 32 --warmup 256 \\\n"
    "    --policies triattention:granularity=32,...,knorm:granularity=32 \\\n    "
)


def policies() -> str:
    files = existing("evict_sweep_{}.json")

    def show(record: Record) -> str:
        asked = record["cases"] - record["void"]
        return f"{100 * record['alive']:.0f} %" + (f", {record['found']}/{asked}" if asked else "")

    rows = _by_policy(files, lambda record: "alive" in record, show)
    command = f"{SWEEP}--once --kinds multi --depths middle --seeds 3 --lengths 1000 --chunks 0 --max-tokens 20"
    columns = ["model", "policy", *(f"keeps {share} %" for share in SHARES)]
    return table(list(files), columns, rows, on="three models in float32, 1,000 tokens", command=command)


def policies_text() -> str:
    files = existing("evict_sweep_text_{}.json")

    def show(record: Record) -> str:
        return f"{record['delta']:+.1f} ± {record['delta_error']:.1f}"

    rows = _by_policy(files, lambda record: "delta" in record, show)
    columns = ["model", "policy", *(f"keeps {share} %" for share in SHARES)]
    command = f"{SWEEP}--text REST --seeds 0 --chunks 2 --length 1000"
    return table(list(files), columns, rows, on="three models in float32, 1,000 tokens", command=command)


def _by_policy(
    files: Mapping[str, str], is_measured: Callable[[Record], bool], show: Callable[[Record], str]
) -> list[list[str]]:
    rows = []
    for name, label in files.items():
        records = [record for record in report(name)["rows"] if is_measured(record)]
        for variant, shown in POLICIES.items():
            cells = {r["retention"]: show(r) for r in records if r.get("variant") == variant}
            if cells:
                rows.append([label, shown, *(cells.get(share, "-") for share in SHARES)])
    return rows


def evict_cost() -> str:
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "context": lambda r: f"{r['context']:,}",
        "evicted per round": lambda r: f"{r['evicted']:,}",
        "round, s": lambda r: f"{r['round_seconds']:.3f}",
        "prefill of 256 tokens, s": lambda r: f"{r['step_seconds']:.2f}",
        "share of prefill": lambda r: f"{r['percent']:.2f} %",
    }
    name = "evict_cost.json"
    return record_table(name, report(name)["rows"], columns, on="three models in float32")


def recall() -> str:
    name = "recall_grid.json"
    about = report(name)
    models = list(dict.fromkeys(row["model"] for row in about["rows"]))
    rows = []
    for row in sorted(about["rows"], key=lambda r: (models.index(r["model"]), r["kind"], r["asked"], r["budget"])):
        if row["budget"] in ("50%", "10%"):
            answered = row["answers"]
            rows.append([f"{row['model'].removeprefix('the ')}, {row['asked']:,}", row["kind"], row["budget"]])
            rows[-1] += [_share(row["first"], "queries"), _share(row["back"], "queries"), _share(row["back"], "words")]
            rows[-1] += [_answers(answered, arm) for arm in ("full", "evicted", "queries")]
    columns = ["model, tokens", "question", "kept", "evidence ranked first", "recalled, by queries", "by keywords"]
    columns += ["answered, all tokens", "evicted", "with recall"]
    return table([name], columns, rows, on="three models in float32, q8/tq4, sinks 32, window 64")


def _share(counts: Record, way: str) -> str:
    return f"{counts[way][0]}/{counts[way][1]}" if way in counts else "-"


def _answers(answered: Record, arm: str) -> str:
    found = answered.get(arm)
    return "-" if found is None or found["right"] is None else f"{found['right']}/{found['asked']}"


def recall_cost() -> str:
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "search": lambda r: (
            f"{'before prefill' if r['when'] == 'question' else 'while decoding'}, {r['asked']} queries"
        ),
        "layers searched": lambda r: f"{r['looking']} of {r['layers']}",
        "archived tokens": lambda r: f"{r['archived']:,}",
        "keys read, MB": lambda r: f"{r['nbytes'] / 1e6:.1f}",
        "search, ms": lambda r: f"{r['look_ms']:,.0f}",
        "64 decode steps, ms": lambda r: f"{r['steps_ms']:,.0f}",
    }
    name = "recall_look.json"
    return record_table(name, report(name)["rows"], columns, on="three models in float32")


# The rescue service

SEARCHES = {
    "plain BM25": "BM25",
    "BM25 porter": "BM25 with stemming (default without an embedder)",
    "minilm dense": "MiniLM",
    "minilm fused 0.6": "hybrid, alpha .6 (the default)",
    "minilm RRF 0.5": "reciprocal rank fusion",
    "hashing fused 0.3": "hybrid, hashing embedder",
}


def retrieval() -> str:
    name = "rescue_retrieval.json"
    found = report(name)["results"]
    measures = ("R@5", "R@10", "MRR", "nDCG@10")
    rows = [
        [shown, *(f"{found[each][way][measure]:.3f}" for each in ("cranfield", "qmsum") for measure in measures)]
        for way, shown in SEARCHES.items()
    ]
    columns = ["search", *(f"{each} {measure}" for each in ("Cranfield", "QMSum") for measure in measures)]
    command = "python -m benchmarks.rescue.bench_retrieval --data DIR"
    return table([name], columns, rows, on="text, no language model", command=command)


def rescue_latency() -> str:
    names = ["rescue_latency.json", "rescue_postgres.json"]
    sqlite, postgres = (report(name)["results"] for name in names)

    def times(found: Record) -> str:
        return f"{found['p50_ms']} / {found['p95_ms']}"

    rows = [
        [f"SQLite and FAISS, {spans:,} spans", times(sqlite[f"{spans} spans"]["retrieve"])] for spans in (20000, 100000)
    ]
    rows += [
        [f"{arm}, {spans:,} spans", times(postgres[f"{spans} spans"]["retrieve"][arm])]
        for spans in (20000, 100000)
        for arm in ("PostgreSQL, HNSW", "PostgreSQL, exact")
        if arm in postgres[f"{spans} spans"]["retrieve"]
    ]
    rows.append(["MiniLM embeds the question, end to end", times(sqlite["MiniLM"]["end_to_end"])])
    command = "python -m benchmarks.rescue.bench_latency\npython -m benchmarks.rescue.bench_postgres size SPANS"
    return table(names, ["retrieve", "p50 / p95, ms"], rows, on="the service alone", command=command)


def ramp() -> str:
    files = {"rescue_ramp.json": "needle", "rescue_ramp_smollm2.json": "SmolLM2-135M"}
    rows = []
    for name, label in files.items():
        for row in report(name)["rows"]:
            rows.append([f"{label}, {row['tokens']:,}", f"`{row['policy']}`, {row['budget']}", str(row["cases"])])
            rows[-1] += [str(row["gone"]), str(row["none"]), str(row["evict"])]
            rows[-1] += [str(row["rescue"] + row["rescued"]), str(row["void"])]
    columns = ["model, tokens", "policy, budget", "facts", "evicted completely", "answered, all tokens"]
    columns += ["evicted", "with rescue", "void"]
    command = "\n".join(report("rescue_ramp.json")["commands"])
    return table(list(files), columns, rows, on="two models in float32", command=command)


FACTS = {
    "evict_facts.json": "facts in WikiText-2",
    "evict_facts_compact.json": "facts in WikiText-2",
    "evict_facts_needle.json": "facts in WikiText-2",
    "evict_facts_2000.json": "facts in WikiText-2",
    "evict_facts_4000.json": "facts in WikiText-2",
    "evict_facts_7500.json": "facts in WikiText-2",
    "evict_facts_code.json": "facts in code",
    "evict_facts_conversations.json": "facts in conversations",
    "evict_facts_tables.json": "facts in tables",
    "evict_facts_german.json": "facts in German text",
    "evict_topics.json": "topics of a conversation",
    "evict_lines.json": "numbers of lines",
    "evict_meetings.json": "questions about a meeting",
}


def everyday_facts() -> str:
    files = [name for name in FACTS if (RESULTS / name).exists()]
    rows = [
        [
            FACTS[name],
            f"{row['model']}, {row['tokens']:,}",
            row["arm"],
            f"{100 * row['held']:.0f} %",
            f"{row['difference']:+.2f} ± {row['error']:.2f}",
            f"{row['right']} of {row['questions']}",
            f"{row['recalled']:.0f}",
        ]
        for name in files
        for row in report(name)["rows"]
    ]
    columns = [
        "asked",
        "model, tokens",
        "cache",
        "rows held",
        "log-probability of the answer",
        "right",
        "tokens recalled",
    ]
    command = f"{report(files[0])['command']} \\\n    [--text FILE] [--task topics --data DIR]"
    return table(files, columns, rows, on="the models named, float32, q8/q8, sinks 4, window 32", command=command)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(profiles, formats, divergence, fidelity, frontier),
        *(peer_formulas, sorted_ablation, sorted_caches),
        *(normalization, trellis, trajectories, states),
        *(by_layer, answers),
        *(whole_models, long_contexts, llama_cpp, one_layer, kernels, attention_counts, verify_counts, gpu_attention),
        *(machine_code, h100_predicted, macs_predicted, prediction_checks),
        *(lookup_speed, lookup_acceptance),
        *(streams, shared_steps, long_prompt, agents, agent_turns, prefix_cache, restores, hostile, soak),
        *(
            four_arms,
            policies,
            policies_text,
            everyday_facts,
            evict_cost,
            recall,
            recall_cost,
            retrieval,
            rescue_latency,
            ramp,
        ),
    )
}


def render(text: str) -> str:
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (current := render(text)) != text:
            page.write_text(current, encoding="utf-8")
            sys.stdout.write(f"written: {page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
