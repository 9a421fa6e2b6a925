"""Tables of what a compressed cache costs in quality, from quality_*.json."""

from collections.abc import Callable
from functools import partial

from benchmarks.quality.run import LEAN, RICH, RUNS
from benchmarks.tables.markdown import Record, Table, in_order, machine, report

NAMES = {LEAN: "lean schedule/tq4", RICH: "rich schedule/tq4"}
Columns = dict[str, Callable[[Record], str]]

PERPLEXITY: Columns = {
    "cache": lambda r: r["name"],
    "PPL": lambda r: f"{r['ppl']:.2f}",
    "±": lambda r: f"{r['ppl_error']:.2f}",
    "change %": lambda r: f"{r['delta']:+.3f}",
    "± of it": lambda r: f"{r['delta_error']:.3f}",
    "packed %": lambda r: f"{100 * r['packed']:.0f}",
}
DIVERGENCE: Columns = {
    "cache": lambda r: r["name"],
    "KLD": lambda r: f"{r['kld']:.6f}",
    "±": lambda r: f"{r['kld_error']:.6f}",
    "median": lambda r: f"{r['kld_median']:.6f}",
    "99 %": lambda r: f"{r['kld_99']:.4f}",
    "top-1 %": lambda r: f"{r['top1']:.2f}",
    "± of it": lambda r: f"{r['top1_error']:.2f}",
    "packed %": lambda r: f"{100 * r['packed']:.0f}",
}
PAIRS: Columns = {
    "K/V": lambda r: NAMES.get(r["name"], r["name"]),
    "B/token": lambda r: f"{r['nbytes']:,.0f}",
    "ratio": lambda r: f"{r['ratio']:.2f}",
    "K error": lambda r: f"{r['key_error']:.5f}",
    "V error": lambda r: f"{r['value_error']:.5f}",
    "cosine": lambda r: f"{r['cosine']:.5f}",
    "KLD": lambda r: f"{r['kld']:.5f}",
    "±": lambda r: f"{r['kld_error']:.5f}",
    "top-1 %": lambda r: f"{r['top1']:.2f}",
    "PPL": lambda r: f"{r['ppl']:.2f}",
    "change %": lambda r: f"{r['delta']:+.2f}",
    "± of it": lambda r: f"{r['delta_error']:.2f}",
}
DRIFT: Columns = {
    "cache": lambda r: r["name"],
    "read at a time": lambda r: str(r["step"]),
    "first layer": lambda r: "-" if r["first_layer"] is None else str(r["first_layer"]),
    "later layers %": lambda r: "-" if r["later_layers"] is None else f"{r['later_layers']:.1f}",
    "KLD": lambda r: f"{r['kld']:.6f}",
    "logits": lambda r: f"{r['logits']:.5f}",
    "top-1 %": lambda r: f"{r['top1']:.2f}",
}


def _records(name: str) -> list[Record]:
    return list(report(f"quality_{name}.json")["results"].values())


def _table(name: str, columns: list[str], rows: list[list[str]], command: str = "", *also: str) -> Table:
    source, others = f"quality_{name}.json", tuple(f"quality_{other}.json" for other in also)
    command = command or f"python -m mlx_tq evaluate {RUNS[name]}"
    return Table(source, command, machine(report(source)), columns, rows, also=others)


def plain(name: str, columns: Columns) -> Table:
    """A row for each record of a file."""
    return _table(name, list(columns), [[show(r) for show in columns.values()] for r in _records(name)])


def pairs(*names: str, command: str = "") -> Table:
    """A row for each pair of formats, smallest first; needles where they were asked for."""
    found = sorted((r for name in names for r in _records(name)), key=lambda r: (r["nbytes"], r["name"]))
    columns = dict(PAIRS)
    if any(r.get("asked") for r in found):
        columns["needles"] = lambda r: f"{r['found']}/{r['asked']}" if r.get("asked") else "-"
    return _table(names[0], list(columns), [[show(r) for show in columns.values()] for r in found], command, *names[1:])


def needles(name: str) -> Table:
    """Needles found of those that the fp16 cache finds, by length and depth."""
    cells = _records(name)
    places = list(dict.fromkeys((c["tokens"], c["depth"]) for c in cells))
    rows = []
    for arm in in_order(cells, "name"):
        verdicts = [
            [c["verdict"] for c in cells if c["name"] == arm and (c["tokens"], c["depth"]) == place] for place in places
        ]
        rows.append([arm, *(f"{v.count('PASS')}/{len(v) - v.count('VOID')}" for v in verdicts)])
    return _table(name, ["cache", *(f"{tokens:,} at {depth:g}" for tokens, depth in places)], rows)


def ablation() -> Table:
    """A row for each change, keys and values at 4 and at 3 bits side by side."""
    found = {r["name"]: r for r in _records("ablation")}
    rows = []
    for change in dict.fromkeys(name.replace("fp16/", "").rpartition(".")[0] for name in found):
        row = [change]
        for pattern in ("{}.4/fp16", "{}.3/fp16", "fp16/{}.4", "fp16/{}.3"):
            r = found.get(pattern.format(change))
            row += (
                [f"{r['key_error'] + r['value_error']:.4f}", f"{r['kld']:.5f} ± {r['kld_error']:.5f}"]
                if r
                else ["-", "-"]
            )
        rows.append(row)
    sides = [f"{side}: {what}" for side in ("K 4", "K 3", "V 4", "V 3") for what in ("error", "KLD")]
    return _table("ablation", ["change", *sides], rows, "python benchmarks/quality/ablation.py")


def layers() -> Table:
    """Hidden states and codes by layer, against fp16 and against float32."""
    exact = {(r["name"], r["layer"]): r for r in _records("layers_float32") if "layer" in r}
    rows = []
    for r in (r for r in _records("layers") if "layer" in r):
        other = exact[r["name"], r["layer"]]
        row = [r["name"], str(r["layer"]), f"{r['cosine']:.6f}", f"{r['least']:.6f}"]
        row += [f"{r['keys']:.2f}", f"{r['values']:.2f}"]
        rows.append([*row, f"{other['least']:.6f}", f"{other['keys']:.2f}", f"{other['values']:.2f}"])
    columns = ["cache", "layer", "cosine", "least", "key codes %", "value codes %"]
    columns += ["float32: least", "float32: key codes %", "float32: value codes %"]
    command = "\n".join(f"python -m mlx_tq evaluate {RUNS[name]}" for name in ("layers", "layers_float32"))
    return _table("layers", columns, rows, command, "layers_float32")


def adversarial() -> Table:
    """Keys that no healthy model makes: errors plain, then normalized."""
    about = report("adversarial_keys.json")
    found = {(e["keys"], e["format"]): e for e in about["errors"] if e["asked"] == "all"}
    formats = list(dict.fromkeys(name for _, name in found))
    rows = [
        [kind, *(f"{found[kind, name]['plain']:.4f}, {found[kind, name]['normalized']:.4f}" for name in formats)]
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    columns = ["keys", *(f"{name}: plain, normalized" for name in formats)]
    made = "no model: made-up keys of 128 dims"
    return Table("adversarial_keys.json", about["command"], machine(about), columns, rows, model=made)


def adversarial_rules() -> Table:
    """The same vectors by scale rule: least squares, unbiased without a limit, and with the one it has."""
    about = report("adversarial_keys.json")
    found = {(r["keys"], r["format"]): r for r in about["rules"]}
    formats = list(dict.fromkeys(name for _, name in found))
    shown = ("ls", "unlimited", "unbiased")
    rows = [
        [kind, *(", ".join(f"{found[kind, name][rule]:.3f}" for rule in shown) for name in formats)]
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    columns = ["vectors", *(f"{name}: ls, no limit, unbiased" for name in formats)]
    made = "no model: made-up vectors of 128 dims"
    return Table("adversarial_keys.json", about["command"], machine(about), columns, rows, model=made)


def scale_rules() -> Table:
    """Two real models: divergence by rule, keys alone and values alone; keys are normalized."""
    files = {"SmolLM2-135M-Instruct": "quality_scales_smollm2.json", "Gemma 3 270M": "quality_scales_gemma3-270m.json"}
    rows, rules = [], ("matched", "ls", "unbiased")
    for model, name in files.items():
        found = report(name)["results"]
        for part, arm in (("keys", "tq{}:{}/fp16"), ("values", "fp16/tq{}:{}")):
            for bits in (4, 3, 2):
                each = [found[arm.format(bits, rule)] for rule in rules]
                rows.append([model, part, str(bits), *(f"{r['kld']:.5f} ± {r['kld_error']:.5f}" for r in each)])
    columns = ["model", "of", "bits", *(f"`{rule}`" for rule in rules)]
    command = f"python -m mlx_tq evaluate divergence --profiles tq4:matched/fp16,tq4:ls/fp16,... {RULES_READ} --model M"
    first, *also = files.values()
    return Table(first, command, machine(report(first)), columns, rows, model="the models named", also=tuple(also))


RULES_READ = "--dequantize --dtype float32 --chunks 1 --length 1024 --step 128 --kv-sinks 32 --kv-window 64"
TABLES: dict[str, Callable[[], Table]] = {
    "scale_rules": scale_rules,
    "adversarial": adversarial,
    "adversarial_rules": adversarial_rules,
    "perplexity": partial(plain, "perplexity", PERPLEXITY),
    "divergence": partial(plain, "divergence", DIVERGENCE),
    "needle_default": partial(needles, "needle_default"),
    "needle": partial(needles, "needle"),
    "scales_key": partial(plain, "scales_key", DIVERGENCE),
    "scales_value": partial(plain, "scales_value", DIVERGENCE),
    "ablation": ablation,
    "pairs": partial(pairs, "formats"),
    "all_formats": partial(
        pairs, "all_formats", "spectral", command="python benchmarks/quality/run.py all_formats spectral"
    ),
    "mixed_long": partial(pairs, "mixed_long"),
    "mixed": partial(pairs, "mixed"),
    "layers": layers,
    "drift": partial(plain, "drift", DRIFT),
}
