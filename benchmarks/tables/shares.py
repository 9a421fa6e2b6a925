"""How questions and text are mixed in the statistics of eviction, model by model, from evict_shares_*.json."""

from collections.abc import Callable

from benchmarks.tables.eviction import needles, text
from benchmarks.tables.markdown import RESULTS, Record, Table, lines, machine, report

MODELS = {
    "embedded": "embedded",
    "smollm2": "SmolLM2-135M-Instruct",
    "smollm2_2000": "SmolLM2-135M-Instruct, 2,000 tokens",
    "gemma3-270m": "Gemma 3 270M",
}
RETENTIONS = (90, 75, 50)
SMOLLM2 = "evict_shares_smollm2.json"
LABELS = {
    "triattention:stats=questions.safetensors": "questions alone",
    "triattention:stats=text25.safetensors": "a quarter of the text (the default)",
    "triattention:stats=text50.safetensors": "half of the text",
    "triattention:stats=both.safetensors": "the larger of both scores",
    "random": "random",
}
COMMAND = """python benchmarks/evict/make_stats.py [--model M --dequantize] --dtype float32 FOLDER
python -m mlx_tq evaluate sweep [--model M --dequantize] --dtype float32 --text REST --kv-window 64 --prefixes 32 \\
    --triggers 32 --warmup 256 --retentions 90,75,50 --max-tokens 20 --once --kinds multi --depths middle --seeds N \\
    --lengths 1000 --chunks 3 --length 1000 --policies triattention:stats=FOLDER/text25.safetensors,...,random"""


def shares() -> Table:
    """A row for each model and mixture; a cell that was not measured is a dash."""
    files = {model: f"evict_shares_{model}.json" for model in MODELS}
    files = {model: name for model, name in files.items() if (RESULTS / name).exists()}
    rows = []
    for model, name in files.items():
        found = list(report(name)["results"].items())
        for variant, label in LABELS.items():
            own = [(key, r) for key, r in found if r.get("variant") == variant]
            if own:
                rows.append([MODELS[model], label, *(cell(own, share) for share in RETENTIONS), *_texts(own)])
    first, *also = files.values()
    columns = ["model", "statistics", *(f"{s} %" for s in RETENTIONS), *(f"text, {s} %" for s in RETENTIONS)]
    which = " and ".join(MODELS[model] for model in files)
    return Table(first, COMMAND, f"{machine(report(first))}, float32", columns, rows, model=which, also=tuple(also))


def in_short() -> str:
    """Those of SmolLM2 without the command, for a guide."""
    table = shares()
    rows = [row[1:] for row in table.rows if row[0] == MODELS["smollm2"]]
    file = f"[{SMOLLM2}](../../benchmarks/results/{SMOLLM2})"
    about = f"*Tokens alive, answers found; then perplexity. {MODELS['smollm2']}, 1,000 tokens, four codes; {file}.*"
    return f"{about}\n\n{lines(table.columns[1:], rows)}"


def cell(own: list[tuple[str, Record]], share: int) -> str:
    """Needle tokens alive and answers found of one variant at one retention."""
    found = [r for _, r in own if r["retention"] == share and "live" in r]
    return needles(found) if found else "-"


def _texts(own: list[tuple[str, Record]]) -> list[str]:
    cells = [[r for _, r in own if r["retention"] == share and "delta" in r] for share in RETENTIONS]
    return [text(found) if found else "-" for found in cells]


TABLES: dict[str, Callable[[], Table | str]] = {"evict_shares": shares, "evict_shares_in_short": in_short}
