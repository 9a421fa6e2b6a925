"""Tables of the rescue service and of sessions, from rescue_*.json."""

from collections.abc import Callable

from benchmarks.rescue.ramp_cells import lines
from benchmarks.tables.markdown import EMBEDDED, Table, machine, report

NO_MODEL = "text of the collections, no language model"
RETRIEVAL = {
    "plain BM25": "plain BM25, the baseline",
    "BM25 unicode61": "words as they are",
    "BM25 porter": "words, stemmed (the default without an embedder)",
    "minilm dense": "MiniLM alone",
    "minilm fused 0.5": "fused, alpha .5",
    "minilm fused 0.6": "**fused, alpha .6 (the default)**",
    "minilm fused 0.7": "fused, alpha .7",
    "minilm RRF 0.5": "reciprocal rank fusion, .5",
    "minilm over best 0.7": "each over its best, .7",
    "hashing fused 0.3": "the hashing embedder, fused .3",
}
COLLECTIONS = {"cranfield": "Cranfield", "qmsum": "QMSum"}
MEASURES = {"R@5": "R@5", "R@10": "R@10", "R@20": "R@20", "MRR": "MRR", "nDCG@10": "nDCG"}
FLOORS = {
    "facts, sentences": "planted facts as sentences",
    "facts, 64 tokens": "planted facts within 64 tokens",
    "qmsum": "QMSum",
    "cranfield": "Cranfield",
}


def retrieval() -> Table:
    """How well spans are found."""
    about = report("rescue_retrieval.json")
    found = {name: about["results"][name] for name in COLLECTIONS}
    rows = [
        [label, *(f"{found[name][way][measure]:.3f}".lstrip("0") for name in COLLECTIONS for measure in MEASURES)]
        for way, label in RETRIEVAL.items()
    ]
    columns = [f"{short} {measure}" for short in COLLECTIONS.values() for measure in MEASURES.values()]
    command = "python -m benchmarks.rescue.bench_retrieval --data DIR"
    return Table("rescue_retrieval.json", command, machine(about), ["search", *columns], rows, model=NO_MODEL)


def latency() -> Table:
    """How long the service takes, beside what it was to take."""
    about = report("rescue_latency.json")
    few, many, mini = (about["results"][name] for name in ("20000 spans", "100000 spans", "MiniLM"))

    def both(found: dict[str, float]) -> str:
        return f"{found['p50_ms']} / {found['p95_ms']} ms"

    rows = [
        [
            "retrieve at 20k spans",
            f"{both(few['retrieve'])}; processor {few['cpu_ms_a_question']} ms",
            "p95 5 ms",
        ],
        [
            "retrieve at 100k spans",
            f"{both(many['retrieve'])}; processor {many['cpu_ms_a_question']} ms",
            "p95 25 ms",
        ],
        ["retrieve with MiniLM, warm, end to end", both(mini["end_to_end"]), "60 ms"],
        ["index of 20k spans built from the store", f"{few['index_rebuilt_s']} s", "2 s"],
        ["start with 20k spans, without the embedder", f"{few['start_without_embedder_s']} s", "5 s"],
        [
            "embedder back after kill -9: hashing, MiniLM",
            f"{few['hashing_embedder_back_s']} s, {mini['back_after_kill_s']} s",
            "5 s",
        ],
    ]
    return Table(
        "rescue_latency.json",
        "chrt -f 10 python -m benchmarks.rescue.bench_latency",
        machine(about),
        ["", "p50 / p95", "aim"],
        rows,
        model="the service alone",
    )


def load() -> Table:
    """Many clients at once."""
    about = report("rescue_load.json")
    r = about["results"]
    rows = [
        [f"calls a second of {r['clients']} clients", f"{r['calls_a_second']:,}"],
        ["errors other than 429 and 503", str(r["errors_other_than_429_503"])],
        *([f"{name}: p50 / p95", f"{r[name]['p50_ms']} / {r[name]['p95_ms']} ms"] for name in ("write", "retrieve")),
        [f"memory after {r['seconds']} s, minus before", f"{r['rss_after_minus_before_mb']} MB"],
    ]
    command = "chrt -r 10 python -m benchmarks.rescue.bench_load"
    return Table("rescue_load.json", command, machine(about), ["", ""], rows, model="the service alone")


def floor() -> Table:
    """What a least cosine loses and lets pass."""
    about = report("rescue_floor.json")
    found = about["results"]
    floors = [name for name in found["qmsum"]["minilm"]["lost"] if float(name) >= 0.2]
    rows = []
    for embedder, label in (("minilm", "MiniLM"), ("hashing", "hashing")):
        for name, what in FLOORS.items():
            if embedder in found.get(name, {}):
                r = found[name][embedder]
                cells = [f"{100 * r['lost'][at]:.0f} %, {100 * r['passed'][at]:.0f} %" for at in floors]
                rows.append([f"{label}: {what} ({r['questions']})", f"{100 * r['first']:.0f} %", *cells])
    command = "python -m benchmarks.rescue.bench_floor --data DIR"
    columns = ["embedder, questions", "answer first", *(f"cosine {float(at):g}" for at in floors)]
    return Table("rescue_floor.json", command, machine(about), columns, rows, model=NO_MODEL)


def ramp(source: str, model: str = EMBEDDED) -> Table:
    """Answers found in four arms."""
    about = report(source)
    columns = ["tokens, policy, budget", "cases", "needle gone at start, middle, end", "no eviction", "eviction"]
    columns += ["eviction and rescue", "retrieval, no eviction", "void", "evicted", "quoted"]
    return Table(source, "\n".join(about["commands"]), machine(about), columns, lines(about["cells"]), model=model)


def overhead() -> Table:
    """What rescue costs a session of two turns."""
    about = report("rescue_overhead.json")
    rows = []
    for tokens, r in about["lengths"].items():
        low, high = min(r["cpu_of_each_pair"]), max(r["cpu_of_each_pair"])
        rows.append(
            [
                f"{int(tokens):,}",
                f"{100 * r['share']:.1f} %",
                f"{100 * low:+.0f} to {100 * high:+.0f} %",
                f"{100 * r['reading']:.0f} %",
            ]
        )
    columns = [
        "tokens",
        "waiting and computing, of both turns",
        "processor, with against without",
        "reading the quotation",
    ]
    return Table("rescue_overhead.json", about["command"], machine(about), columns, rows)


TABLES: dict[str, Callable[[], Table]] = {
    "rescue_retrieval": retrieval,
    "rescue_latency": latency,
    "rescue_load": load,
    "rescue_floor": floor,
    "rescue_ramp": lambda: ramp("rescue_ramp.json"),
    "rescue_ramp_minilm": lambda: ramp("rescue_ramp_minilm.json"),
    "rescue_ramp_smollm2": lambda: ramp("rescue_ramp_smollm2.json", "SmolLM2-135M-Instruct"),
    "rescue_overhead": overhead,
}
