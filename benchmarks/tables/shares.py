"""Statistics, aggregation and blocks of eviction, model by model, from evict_shares_*.json and evict_modes_*.json."""

from collections.abc import Callable

from benchmarks.tables.eviction import needles, text
from benchmarks.tables.markdown import RESULTS, Record, Table, lines, machines, report

MODELS = {
    "embedded": "embedded",
    "smollm2": "SmolLM2-135M-Instruct",
    "smollm2_2000": "SmolLM2-135M-Instruct, 2,000 tokens",
    "gemma3-270m": "Gemma 3 270M",
}
RETENTIONS = (90, 75, 50)
SMOLLM2 = ("evict_modes_smollm2.json", "evict_modes_text_smollm2.json")
LABELS = {
    "triattention:granularity=32:calibration=questions.safetensors": "questions alone",
    "triattention:granularity=32:calibration=text25.safetensors": "a quarter of the text (the default share)",
    "triattention:granularity=32:calibration=text50.safetensors": "half of the text",
    "triattention:granularity=32:calibration=both.safetensors": "both beside each other",
    "random:granularity=32": "random",
}
COMMAND = """python benchmarks/evict/make_stats.py [--model M --dequantize] --dtype float32 FOLDER
python -m mlx_tq evaluate sweep [--model M --dequantize] --dtype float32 --text REST --kv-window 64 --prefixes 32 \\
    --triggers 32 --warmup 256 --retentions 90,75,50 --max-tokens 20 --once --kinds multi --depths middle --seeds 6 \\
    --lengths 1000 --chunks 0 \\
    --policies triattention:granularity=32:calibration=FOLDER/text25.safetensors,...,random:granularity=32
# and in place of --once and all behind it but the policies, for the text: --seeds 0 --chunks 6 --length 1000"""
MODES = {
    "triattention:granularity=32": "v3, blocks of 32 (the default)",
    "triattention:granularity=32:calibration=questions.safetensors": "v3, blocks of 32, statistics of questions alone",
    "triattention:granularity=32:mode=v1": "v1 (no sinks, no segments), blocks of 32",
    "triattention": "v3, single tokens",
    "triattention:granularity=32:aggregation=paper": "aggregation paper, v3, blocks of 32",
    "triattention:granularity=32:mode=v1:aggregation=paper": "aggregation paper, v1, blocks of 32",
    "triattention:granularity=16:aggregation=paper": "aggregation paper, v3, blocks of 16",
    "triattention:granularity=8:aggregation=paper": "aggregation paper, v3, blocks of 8",
    "triattention:aggregation=paper": "aggregation paper, v3, single tokens",
    "triattention:granularity=32:aggregation=v3": "aggregation v3, v3, blocks of 32",
    "triattention:aggregation=v3": "aggregation v3, v3, single tokens",
    "expected_attention:granularity=32": "`expected_attention`, blocks of 32",
    "random:granularity=32": "random, blocks of 32",
    "random": "random, single tokens",
}
# How a guide calls some of them.
SHORT = {
    "v3, blocks of 32 (the default)": "`triattention`",
    "aggregation paper, v3, blocks of 32": "`triattention:aggregation=paper`",
    "`expected_attention`, blocks of 32": "`expected_attention`",
    "random, blocks of 32": "`random`",
}
MODES_COMMAND = """python -m mlx_tq evaluate sweep [--model M --dequantize] --dtype float32 --kv-window 64 \\
    --prefixes 32 --triggers 32 --warmup 256 --retentions 90,75,50 --max-tokens 20 --once --kinds multi \\
    --depths middle --seeds 6 --lengths 1000 --chunks 0 \\
    --policies triattention,triattention:granularity=32,...,random:granularity=32
# and in place of --once and all behind it but the policies, for the text:
#   --text REST --seeds 0 --chunks 6 --length 1000"""


def shares() -> Table:
    """A row for each model and mixture; a cell that was not measured is a dash."""
    return _by_variant("evict_shares", LABELS, COMMAND, "statistics")


def modes() -> Table:
    """A row for each model and variant of aggregation and blocks."""
    return _by_variant("evict_modes", MODES, MODES_COMMAND, "variant")


def _by_variant(stem: str, labels: dict[str, str], command: str, what: str) -> Table:
    """What was measured on text may be in a file of its own."""
    names = {model: [f"{stem}_{model}.json", f"{stem}_text_{model}.json"] for model in MODELS}
    each = {model: [name for name in found if (RESULTS / name).exists()] for model, found in names.items()}
    files, rows = [name for found in each.values() for name in found], []
    for model in filter(each.get, each):
        found = [item for name in each[model] for item in report(name)["results"].items()]
        for variant, label in labels.items():
            own = [(key, r) for key, r in found if r.get("variant") == variant]
            if own:
                cells = [_cell(own, share) for share in RETENTIONS]
                rows.append([MODELS[model], label, *cells, *_texts(own)])
    first, *also = files
    columns = ["model", what, *(f"{s} %" for s in RETENTIONS), *(f"text, {s} %" for s in RETENTIONS)]
    which = " and ".join(MODELS[model] for model in filter(each.get, each))
    return Table(first, command, f"{machines(files)}, float32", columns, rows, model=which, also=tuple(also))


def in_short() -> str:
    """Those of SmolLM2 in blocks of 32 without the command, for a guide."""
    table = modes()
    rows = [[SHORT[row[1]], *row[2:]] for row in table.rows if row[0] == MODELS["smollm2"] and row[1] in SHORT]
    files = [f"[{name}](../../benchmarks/results/{name})" for name in SMOLLM2]
    about = f"*Tokens alive, answers found; then perplexity. {MODELS['smollm2']}, 1,000 tokens, four codes; "
    return f"{about}{', '.join(files)}.*\n\n{lines(['policy', *table.columns[2:]], rows)}"


def _cell(own: list[tuple[str, Record]], share: int) -> str:
    found = [r for _, r in own if r["retention"] == share and "live" in r]
    return needles(found) if found else "-"


def _texts(own: list[tuple[str, Record]]) -> list[str]:
    cells = [[r for _, r in own if r["retention"] == share and "delta" in r] for share in RETENTIONS]
    return [text(found) if found else "-" for found in cells]


TABLES: dict[str, Callable[[], Table | str]] = {
    "evict_shares": shares,
    "evict_in_short": in_short,
    "evict_modes": modes,
}
