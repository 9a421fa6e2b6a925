"""Tables of eviction, from quality_sweep*.json and evict_*.json.

Needles: tokens alive in percent, then answers found of those that the fp16 cache finds. Text: change of perplexity in
percent and its standard error.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from statistics import mean
from typing import Any

from benchmarks.tables.markdown import Record, Table, by_row, in_order, machine, report

SWEEP, HYBRID = "quality_sweep.json", "quality_sweep_hybrid.json"
HYBRID_MODEL = "a hybrid of 3.65 million weights"
SMOLLM2 = "quality_sweep_smollm2.json"
# Policies as the records name them. *v1*, *v2* and *v3* are the modes in which TriAttention chooses the lowest.
POLICY, STATS = "triattention:calibration=text", "calibration=questions.safetensors"
QUESTIONS = f"triattention:{STATS}"
PAPER = ":aggregation=paper"
MAIN = (POLICY, QUESTIONS, "random")
LABELS = {
    POLICY: "v3",
    QUESTIONS: "v3, questions",
    f"{POLICY}:mode=v1": "v1",
    f"triattention:mode=v1:{STATS}": "v1, questions",
    f"{POLICY}:mode=v2": "v2",
    f"{QUESTIONS}:aggregation=v3": "v3, questions, aggregation `v3`",
    f"expected_attention:{STATS}": "`expected_attention`, questions",
    f"{POLICY}:evict=highest": "v3, highest leave",
}
OPTIONS = {
    f"{POLICY}:segments=1": "v3, one segment",
    f"{POLICY}:segment_tokens=64": "v3, segments of 64 tokens",
    f"{POLICY}:ema=0.1": "v3, moving mean of .1",
    f"{POLICY}:recalibrate=256": "v3, calibrated anew every 256 tokens",
    f"triattention:segments=1:{STATS}": "v3, questions, one segment",
    f"triattention:segment_tokens=64:{STATS}": "v3, questions, segments of 64 tokens",
}
HYBRID_LABELS = {
    f"{POLICY}:score_unrotated_dims=on": "v3, un-rotated dims scored",
    POLICY: "v3, rotated dims alone",
    "triattention:calibration=hybrid_questions.safetensors:score_unrotated_dims=on": "v3, questions, all dims scored",
    "triattention:calibration=hybrid_questions.safetensors": "v3, questions, rotated dims alone",
    "triattention:calibration=hybrid_mixed.safetensors": "v3, questions and 25 % text, rotated dims alone",
    "random": "random",
}
SMOLLM2_LABELS = {
    "triattention": "v3, questions and text, half each",
    POLICY: "v3, text",
    "random": "random",
}
SMOLLM2_COMMAND = """python -m mlx_tq calibrate --model smollm2 --dequantize --dtype float32 --text-share 0.5
python -m mlx_tq evaluate sweep --model smollm2 --dequantize --dtype float32 --kv-window 64 \\
    --prefixes 32 --triggers 32 --warmup 256 \\
    --policies triattention:aggregation=paper,triattention:calibration=text:aggregation=paper,random \\
    --retentions 90,75,50 --max-tokens 24 --once --chunks 0 --kinds multi --depths middle --seeds 4 --lengths 1000
# and in place of the last line's, for the text: --seeds 0 --chunks 2 --length 1000"""
RETENTIONS = (95, 90, 85, 80, 75, 65, 50, 25, 10)
FEW = (90, 75, 50)
BLOCKS = (1, 8, 16, 32, 64)
SCENE = {"kind": "multi", "length": 800, "granularity": 1, "trigger": 32}
ONCE, ROUNDS = {**SCENE, "once": True}, {**SCENE, "once": False}
TEXT = {"text": "3 x 1000", "granularity": 1, "trigger": 32}
Show = Callable[[list[Record]], str]
# What a round takes.
_COST: dict[str, Callable[[Record], str]] = {
    "round": lambda r: f"{r['round_seconds']:.3f} s",
    "256 tokens of prefill": lambda r: f"{r['step_seconds']:.1f} s",
    "share of the prefill": lambda r: f"{r['percent']:.2f} %",
}


@cache
def records(source: str) -> list[Record]:
    """What a sweep measured; of a text also which, as `text`. That aggregation is `paper` goes without saying."""
    found = []
    for name, row in report(source)["results"].items():
        text = name.partition(" | text ")[2]
        more = {"variant": row["variant"].removesuffix(PAPER)} if "variant" in row else {}
        found.append({"once": False, **row, **more, **({"text": text} if text else {})})
    return found


def find(source: str, fields: Record) -> list[Record]:
    """Records that have all the fields; in the sweep a sinks that is not asked for is 32, or 0 for v1 and v2."""
    found = [r for r in records(source) if all(r.get(name) == value for name, value in fields.items())]
    if source == SWEEP and "sinks" not in fields:
        found = [r for r in found if r.get("sinks") == (0 if ":mode=" in r["variant"] else 32)]
    return found


def needles(found: list[Record]) -> str:
    """Alive and answered."""
    alive = 100 * mean(r["live"] / (r["needle"][1] - r["needle"][0]) for r in found)
    verdicts = [r["verdict"] for r in found]
    return f"{alive:.0f}, {verdicts.count('PASS')}/{len(verdicts) - verdicts.count('VOID')}"


def text(found: list[Record]) -> str:
    """Change of perplexity and its error."""
    (record,) = found
    return f"{record['delta']:+.1f} ({record['delta_error']:.1f})"


def _table(first: str, rows: dict[str, Record], columns: dict[str, tuple[Record, Show]], **more: Any) -> Table:
    """Of the sweep; a cell that was not measured is a dash, and a row without any is left out."""
    source, parts = more.pop("source", SWEEP), more.pop("parts", "")
    command = more.pop("command", f"python benchmarks/evict/run_sweep.py {parts}")
    cells = []
    for label, row in rows.items():
        found = [(find(source, {**row, **fields}), show) for fields, show in columns.values()]
        if any(some for some, _ in found):
            cells.append([label, *(show(some) if some else "-" for some, show in found)])
    return Table(source, command, machine(report(source)) + ", float32", [first, *columns], cells, **more)


def _policies(*names: str) -> dict[str, Record]:
    """A row for each of these."""
    return {LABELS.get(name, name): {"variant": name} for name in names}


def _columns(shares: Iterable[int], fields: Record, show: Show, prefix: str = "") -> dict[str, tuple[Record, Show]]:
    return {f"{prefix}{share} %": ({**fields, "retention": share}, show) for share in shares}


def by_retention(fields: Record, shares: Iterable[int], show: Show, parts: str) -> Table:
    """A row for each policy, a column for each share of tokens that stays."""
    measured = in_order(find(SWEEP, fields), "variant")
    rows = _policies(*(name for name in measured if name not in OPTIONS))
    return _table("policy", rows, _columns(shares, fields, show), parts=parts)


def kinds() -> Table:
    """One needle; asked for in other words; among decoys."""
    columns: dict[str, tuple[Record, Show]] = {}
    for kind in ("single", "paraphrased", "decoys"):
        columns |= _columns(FEW, {**ONCE, "kind": kind}, needles, f"{kind}, ")
    return _table("policy", _policies(*MAIN), columns, parts="kinds")


def blocks(fields: Record, show: Show, parts: str) -> Table:
    """A row for each number of tokens that leave together."""
    fields = {name: value for name, value in fields.items() if name != "granularity"}
    columns: dict[str, tuple[Record, Show]] = {}
    for variant in MAIN:
        columns |= _columns(FEW, {**fields, "variant": variant}, show, f"{LABELS.get(variant, variant)}, ")
    rows = {str(size): {"granularity": size} for size in BLOCKS}
    measured = {head: each for head, each in columns.items() if find(SWEEP, {**each[0], "granularity": 64})}
    return _table("together", rows, measured, parts=parts)


def options() -> Table:
    """Needles after one round, with rounds while reading, and text."""
    rows = _policies(POLICY, QUESTIONS) | {label: {"variant": name} for name, label in OPTIONS.items()}
    columns = _columns(FEW, ONCE, needles, "one round, ") | _columns(FEW, ROUNDS, needles, "rounds, ")
    return _table(
        "policy",
        rows,
        columns | _columns((75,), TEXT, text, "text, "),
        parts="needles rounds text segments text_options",
    )


def prefixes() -> Table:
    """A row for each policy and sinks."""
    rows = {
        f"{LABELS.get(name, name)}, {sinks}": {"variant": name, "sinks": sinks}
        for name in MAIN
        for sinks in (0, 16, 32)
    }
    columns = _columns(FEW, ONCE, needles) | _columns((75,), TEXT, text, "text, ")
    return _table("policy, sinks", rows, columns, parts="prefixes text_prefixes")


def triggers() -> Table:
    """Tokens above the budget at which a round begins."""
    columns = {
        f"{trigger:,}": ({"text": "1 x 3000", "retention": 25, "trigger": trigger}, text)
        for trigger in (32, 128, 512, 2048)
    }
    return _table("policy", _policies(POLICY, "random"), columns, parts="triggers")


def hybrid() -> Table:
    """The dims that RoPE leaves alone, scored or not; single tokens leave, or blocks."""
    rows = {label: {"variant": name} for name, label in HYBRID_LABELS.items()}
    command = "# the model and its sweep: benchmarks/models/README.md"
    columns: dict[str, tuple[Record, Show]] = {}
    for size, prefix in ((1, ""), (8, "blocks of 8, "), (32, "blocks of 32, ")):
        columns |= _columns(FEW, {"granularity": size}, needles, prefix)
    return _table("policy", rows, columns, source=HYBRID, command=command, model=HYBRID_MODEL)


def smollm2() -> Table:
    """Needles after one round, and text with rounds while it is read."""
    once = {"kind": "multi", "length": 1000, "once": True}
    columns = _columns(FEW, once, needles) | _columns(FEW, {"text": "2 x 1000"}, text, "text, ")
    rows = {label: {"variant": name} for name, label in SMOLLM2_LABELS.items()}
    return _table("policy", rows, columns, source=SMOLLM2, command=SMOLLM2_COMMAND, model="SmolLM2-135M-Instruct")


def cost() -> Table:
    """What a round takes, beside the reading of 256 tokens."""
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "context": lambda r: f"{r['context']:,}",
        "evicted": lambda r: f"{r['evicted']:,}",
        **_COST,
    }
    return by_row("evict_cost.json", columns, _timed("evict_cost.json"))


def cost_by_policy() -> Table:
    """The same of each calibrated policy."""
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "policy": lambda r: f"`{r['policy']}`",
        **_COST,
    }
    return by_row("evict_policies.json", columns, _timed("evict_policies.json"))


def _timed(source: str) -> str:
    return f"the models named, float32, {report(source)['environment']['blas']}"


def key_formats() -> Table:
    """Scores of packed keys against those of fp16 keys, a column for each model."""
    about = report("evict_formats.json")
    models = in_order(about["rows"], "model")
    found = {
        (r["key"], r["model"]): f"{r['spearman']:.3f}, {r['jaccard_0.1']:.2f}, {r['jaccard_0.25']:.2f}"
        for r in about["rows"]
    }
    # Coefficients of 8 and 16 bits choose the same.
    keys = [key for key in in_order(about["rows"], "key") if key != "fp16" and "int" not in key]
    rows = [[key, *(found.get((key, model), "-") for model in models)] for key in keys]
    model = "the models named, float32"
    return Table("evict_formats.json", about["command"], machine(about), ["keys", *models], rows, model=model)


def spans() -> Table:
    """The text that tokens which leave together leave behind."""
    columns: dict[str, Callable[[Record], str]] = {
        "model": lambda r: r["model"],
        "together": lambda r: str(r["granularity"]),
        "spans per 1,000 tokens": lambda r: f"{1000 * r['spans'] / r['evicted']:.0f}",
        "tokens a span": lambda r: f"{r['span_tokens']:.1f}",
        "stored / evicted tokens": lambda r: f"{r['ratio']:.2f}",
        "JSON bytes a token": lambda r: f"{r['wire_bytes']:.1f}",
    }
    return by_row("evict_blocks.json", columns, "the models named, float32")


def oracle() -> Table:
    """Scores of the same keys by whose queries: alive, then answers found."""
    about = report("evict_oracle.json")
    cells = {(r["score"], r["retention"]): f"{r['alive']:.0f}, {r['found']}" for r in about["rows"]}
    shares = sorted({share for _, share in cells}, reverse=True)
    rows = [[score, *(cells[score, share] for share in shares)] for score in in_order(about["rows"], "score")]
    return Table(
        "evict_oracle.json", about["command"], machine(about), ["score", *(f"{share} %" for share in shares)], rows
    )


TABLES: dict[str, Callable[[], Table | str]] = {
    "evict_needles": partial(by_retention, ONCE, RETENTIONS, needles, "needles prefix"),
    "evict_rounds": partial(by_retention, ROUNDS, FEW, needles, "rounds"),
    "evict_kinds": kinds,
    "evict_long": partial(by_retention, {**ONCE, "length": 2000}, FEW, needles, "long"),
    "evict_text": partial(by_retention, TEXT, RETENTIONS, text, "text text_others"),
    "evict_blocks": partial(blocks, ONCE, needles, "needles blocks"),
    "evict_blocks_text": partial(blocks, TEXT, text, "text text_blocks"),
    "evict_spans": spans,
    "evict_options": options,
    "evict_prefixes": prefixes,
    "evict_triggers": triggers,
    "evict_hybrid": hybrid,
    "evict_smollm2": smollm2,
    "evict_cost": cost,
    "evict_policies": cost_by_policy,
    "evict_formats": key_formats,
    "evict_oracle": oracle,
}
