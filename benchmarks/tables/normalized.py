"""Tables of normalized keys: how block means and weights were chosen, and what they win in the package."""

from collections.abc import Callable

from benchmarks.tables.markdown import RESULTS, Table, in_order, lines, machine, report

STUDY = "normalized_keys.json"
MODELS = {"embedded": "embedded", "smollm2": "SmolLM2-135M-Instruct", "gemma3-270m": "Gemma 3 270M"}
FLAGS = "--chunks 1 --length 2048 --step 32 --kv-sinks 32 --kv-window 64"
_COMMAND = f"python -m mlx_tq evaluate divergence --profiles tq4/tq4,tq4:plain/tq4 --dtype float32 {FLAGS}"
_WEIGHTS = {
    "none": "1",
    "queries and keys by pair": "queries over keys, by pair",
    "queries and keys by dim": "queries over keys, by dim",
    "keys by pair": "1 over keys, by pair",
}


def choice() -> Table:
    """A row for each way to normalize keys, most of them at 4 bits."""
    about = report(STUDY)
    found = list(about["results"].values())
    rows = []
    for name in in_order(found, "format"):
        ways = dict.fromkeys((r["means"], r["scale"]) for r in found if r["format"] == name)
        for means, scale in sorted(ways, key=lambda way: ([*_MEANS].index(way[0]), [*_WEIGHTS].index(way[1]))):
            row = [name, _MEANS[means], _WEIGHTS[scale]]
            for model in MODELS:
                r = about["results"][f"{model}, {name}, mean {means}, scale {scale}"]
                row += [f"{r['kld']:.6f} ± {r['kld_error']:.6f}", f"{r['top1']:.1f}"]
            rows.append(row)
    columns = ["keys", "mean of", "weights", *(f"{m}: {w}" for m in MODELS.values() for w in ("KLD", "top-1 %"))]
    command = (
        "python -m benchmarks.quality.normalized_keys embedded= smollm2=FOLDER gemma3-270m=FOLDER --text wiki.test.raw"
    )
    return Table(STUDY, command, machine(about), columns, rows, model="three models, in float32")


_MEANS = {
    "none": "nothing",
    "32": "each 32",
    "64 of first 32": "each 64, its first 32",
    "64": "each 64",
    "128 of first 32": "each 128, its first 32",
    "128 of first 96": "each 128, its first 96",
    "128": "each 128",
    "128 before": "the 128 before each 128",
    "first 128": "the first 128 alone",
}


def package() -> str:
    """Normalized against plain keys in the package, on each model; those not run yet are named."""
    every = {model: f"quality_normalized_{model}.json" for model in MODELS}
    names = {model: name for model, name in every.items() if (RESULTS / name).exists()}
    missing = ", ".join(MODELS[model] for model in every if model not in names)
    rows = []
    for model, name in names.items():
        found = report(name)["results"]
        plain = found["tq4:plain/tq4"]["kld"]
        for arm, what in (("tq4:plain/tq4", "plain"), ("tq4/tq4", "normalized")):
            r = found[arm]
            row = [MODELS[model], what, f"{r['kld']:.5f} ± {r['kld_error']:.5f}", f"{r['kld'] / plain:.3f}"]
            row += [f"{r['kld_median']:.6f}", f"{r['top1']:.1f} ± {r['top1_error']:.1f}", f"{100 * r['packed']:.0f}"]
            rows.append(row)
    files = ", ".join(f"[{name}](../../benchmarks/results/{name})" for name in names.values())
    about = f"*{machine(report(names['embedded']))}; {files}.*"
    columns = ["model", "keys", "KLD", "of plain", "median", "top-1 %", "packed %"]
    return "\n".join(
        [
            *("```", f"{_COMMAND} [--model M --text wiki.test.raw]", "```", "", about, "", lines(columns, rows)),
            *(["", f"Not run yet: {missing}."] if missing else []),
        ]
    )


TABLES: dict[str, Callable[[], Table | str]] = {"normalized_choice": choice, "normalized": package}
