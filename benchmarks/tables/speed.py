"""Tables of speed and of counted cost."""

from collections.abc import Callable

from benchmarks.tables.markdown import Table, machine, report

ARMS = ("safe", "balanced", "small")
REPORTS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m": "Gemma 3 270M"}
ONE_LAYER = "no model: one layer"


def decode() -> Table:
    """How many times faster than mlx-lm's quantised cache, and than mlx's own attention."""
    about = report("decode_attention.json")
    median = {(t["dtype"], t["tokens"], t["arm"]): t["median"] for t in about["timings"]}
    rows = []
    for dtype, tokens in dict.fromkeys((t["dtype"], t["tokens"]) for t in about["timings"]):
        packed, plain = (median[dtype, tokens, arm] for arm in ("kv-bits 4", "fp16"))
        own = [median[dtype, tokens, arm] for arm in ARMS]
        rows.append([dtype, f"{tokens:,}", *(f"{packed / each:.3g} ({plain / each:.2g})" for each in own)])
    return Table(
        "decode_attention.json", "make bench", machine(about), ["type", "tokens", *ARMS], rows, model=ONE_LAYER
    )


def whole_model() -> Table:
    """A real model: what each cache takes, and how fast it reads and answers."""
    about = report("bench_model_smollm2.json")
    off = {(f["dtype"], f["tokens"]): f for f in about["figures"] if f["arm"] == "off"}
    rows = []
    for f in about["figures"]:
        nbytes = [f"{f[name] / 1e6:.1f}" for name in ("kv_nbytes", "active_nbytes", "peak_nbytes")]
        speeds = [f"{f['prefill_tps']:.0f}", f"{f['first_token']:.1f}", f"{f['decode_tps']:.1f}"]
        share = f"{f['decode_tps'] / off[f['dtype'], f['tokens']]['decode_tps']:.2f}"
        rows.append([f"{f['dtype']}, {f['tokens']:,}", f"`{f['arm']}`", *nbytes, *speeds, share])
    columns = ["type, tokens", "cache", "KV, MB", "held, MB", "peak, MB", "read, tok/s", "first token, s"]
    columns += ["answer, tok/s", "of `off`'s"]
    command = "python -m mlx_tq bench --model smollm2 --dequantize --tokens 1024 4096 --dtypes float32 bfloat16 \\\n"
    command += "    --profiles balanced --kv-evict none --kv-bits --batches 1 --rounds 1 --max-tokens 32"
    where = f"SmolLM2-135M-Instruct, {about['environment']['blas']}"
    return Table("bench_model_smollm2.json", command, machine(about), columns, rows, model=where)


def report_of_models() -> Table:
    """What `mlx_tq.bench --report` has of two real models: all caches, one and several answers at once."""
    files = {f"bench_report_{name}.json": label for name, label in REPORTS.items()}
    rows = []
    for source, label in files.items():
        figures = report(source)["figures"]
        rates = {(f["arm"], f["batch"]): f["decode_tps"] for f in figures}
        batches = sorted({f["batch"] for f in figures})
        for f in figures:
            if f["batch"] == 1:
                nbytes = [f"{f[name] / 1e9:.4f}" for name in ("kv_nbytes", "active_nbytes", "peak_nbytes")]
                together = [f"{rates[f['arm'], n]:.1f}" if (f["arm"], n) in rates else "-" for n in batches]
                share = f"{f['decode_tps'] / rates['off', 1]:.2f}"
                rows.append([label, f"`{f['arm']}`", *nbytes, f"{f['prefill_tps']:.0f}", *together, share])
    columns = ["model", "cache", "KV, GB", "held, GB", "peak, GB", "read, tok/s", "answer, tok/s"]
    columns += [*(f"{n} answers" for n in batches[1:]), "of `off`'s"]
    command = "python -m mlx_tq bench --model M --dequantize --tokens 1024 --dtypes float32 --rounds 2 --report FILE"
    first, *also = files
    about = report(first)
    where = f"the models named, float32, 1,024 tokens, {about['environment']['blas']}"
    return Table(first, command, machine(about), columns, rows, model=where, also=tuple(also))


def step_parts() -> Table:
    """Where a step of an answer spends its time."""
    about = report("step_parts.json")
    rows = [
        [f"{r['tokens']:,}", f"`{r['cache']}`"]
        + [f"{r[part]:.1f}" for part in ("step_ms", "asked_ms", "computed_ms", "packing_ms")]
        for r in about["rows"]
    ]
    columns = ["tokens", "cache", "a step, ms", "asked for in Python", "computed", "packing, on average"]
    where = f"SmolLM2-135M-Instruct, float32, {about['environment']['blas']}"
    return Table("step_parts.json", about["command"], machine(about), columns, rows, model=where)


def streams() -> Table:
    """The server: many answers at once."""
    about = report("server_streams.json")
    order = {"cold": 0, "hot": 1, "off": 0, "balanced": 1, "small": 2}
    figures = sorted(about["figures"], key=lambda f: (order[f["prefix"]], order[f["profile"]], f["streams"]))
    rows = [
        [
            f"{f['prompt_tokens'] // f['streams']:,}, {f['prefix']}",
            f"`{f['profile']}`",
            str(f["streams"]),
            f"{f['tokens_per_second']:.1f}",
            f"{f['decode_tokens_per_second']:.1f}",
            f"{f['first_token']:.2f}",
            f"{f['kv_bytes'] / 1e9:.4f}",
            f"{f['fp16_bytes'] / 1e9:.4f}",
        ]
        for f in figures
    ]
    columns = ["tokens of a prompt", "profile", "streams", "tok/s", "tok/s once all have begun", "first token, s"]
    return Table("server_streams.json", about["command"], machine(about), [*columns, "KV, GB", "fp16, GB"], rows)


def store() -> Table:
    """The server's store of prefixes: the first token of a request whose beginning was read before."""
    about = report("server_store.json")
    names = {
        "read": "no store: all is read",
        "stored": "all is read and stored",
        "restored": "restored after a restart",
        "restored cold": "restored after a restart, page cache dropped",
    }
    read = next(f["median"] for f in about["figures"] if f["arm"] == "read")
    rows = [
        [
            names[f["arm"]],
            f"{f['cached_tokens']:,} of {f['prompt_tokens']:,}",
            f"{f['median']:.2f} ({min(f['seconds']):.2f} to {max(f['seconds']):.2f})",
            f"{100 * f['median'] / read:.1f} %",
        ]
        for f in about["figures"]
    ]
    columns = ["request", "tokens restored", "first token, s", "of reading"]
    model = f"{about['model']}, float32, {about['environment']['blas']}"
    return Table("server_store.json", about["command"], machine(about), columns, rows, model=model)


def flood() -> Table:
    """Both servers' health in a crowd."""
    about = report("server_flood.json")
    rows = [
        [
            f["server"],
            f"{f['count']:,} {f['crowd']}" if f["count"] else f["crowd"],
            *(f"{f[share]:.1f}" for share in ("p50_ms", "p95_ms", "most_ms")),
            f"{f['wrong']} of {f['asked']:,}",
            str(f["logged_kb"]),
        ]
        for f in about["figures"]
    ]
    logged = f"logged in {about['seconds']:.0f} s, kB"
    columns = ["server", "crowd", "half, ms", "95 %, ms", "longest, ms", "without an answer", logged]
    return Table("server_flood.json", about["command"], machine(about), columns, rows)


def hostile() -> Table:
    """A plain request and health next to hostile requests."""
    about = report("server_hostile.json")
    rows = [
        [f["server"], f["attack"], f"{f['plain_max_s']:.2f}", f"{f['health_max_s']:.2f}", f"{f['grown_mb']:,}"]
        for f in about["figures"]
    ]
    columns = ["server", "attack", "slowest request, s", "slowest health, s", "memory added, MB"]
    return Table("server_hostile.json", about["command"], machine(about), columns, rows)


def soak() -> Table:
    """Both servers under 64 clients."""
    about = report("server_soak.json")
    rows = [
        [
            f["service"],
            f"{f['seconds']:.0f}",
            ", ".join(f"{count:,} x {status}" for status, count in f["statuses"].items()),
            f"{f['warm_mb']:.0f}",
            f"{f['growth_percent']:.1f} %",
        ]
        for f in about["figures"]
    ]
    columns = ["server", "seconds", "answers", "memory after a warm-up, MB", "growth from then on"]
    return Table("server_soak.json", about["command"], machine(about), columns, rows)


def counted() -> Table:
    """What each kernel does for a packed token."""
    about = report("kernels_counted.json")
    rows = [
        [f"`{k['kernel']}`", f"{k['loaded']:,.0f}", f"{k['stored']:,.0f}", f"{k['lane_operations']:,.0f}"]
        for k in about["kernels"]
    ]
    columns = ["kernel", "bytes loaded", "bytes stored", "lane operations"]
    return Table(
        "kernels_counted.json", about["command"], "the simulator of Metal", columns, rows, model="no model: one KV head"
    )


def short() -> Table:
    """A short context: two kernels against one."""
    about = report("kernels_counted.json")
    rows = [
        [k["kernel"], str(k["dispatches"]), f"{k['loaded']:,}", f"{k['stored']:,}", f"{k['lane_operations']:,}"]
        for k in about["short"]["kernels"]
    ]
    columns = ["kernels", "dispatches", "bytes loaded", "bytes stored", "lane operations"]
    return Table(
        "kernels_counted.json", about["command"], "the simulator of Metal", columns, rows, model="no model: one KV head"
    )


def archived() -> Table:
    """What a look costs for 1,000 archived tokens, by the queries that ask."""
    about = report("kernels_counted.json")
    parts = ("stored", "keys", "asked", "lane_operations")
    rows = [[str(each["queries"]), *(f"{each[part]:,.0f}" for part in parts)] for each in about["archived"]]
    columns = ["queries of a KV head", "bytes of keys", "loaded of keys", "loaded of queries", "lane operations"]
    return Table(
        "kernels_counted.json", about["command"], "the simulator of Metal", columns, rows, model="no model: one KV head"
    )


def skipping() -> Table:
    """Shares of tiles whose values need not be loaded, by what is known of the others."""
    about = report("value_skipping.json")
    rules = ["below 1e-06", "below 0.0001", "at best", *(f"in blocks of {size}" for size in (64, 256, 1024))]
    rows = [
        [r["model"], f"{r['tokens']:,}", *(f"{r[rule]:.2f}" if rule in r else "-" for rule in rules)]
        for r in about["rows"]
    ]
    heads = ["largest weight below 1e-6, %", "below 1e-4, %", "2^-9 left out, at best, %"]
    columns = ["model", "tokens", *heads, *(f"in a block of {size}, %" for size in (64, 256, "1,024"))]
    return Table("value_skipping.json", about["command"], machine(about), columns, rows, model="models in float32")


def skipping_counted() -> Table:
    """What attention does for a token, and without its value."""
    about = report("value_skipping_counted.json")
    rows = [[f"`{r['kernel']}`", f"{r['loaded']:,.0f}", f"{r['lane_operations']:,.0f}"] for r in about["rows"]]
    columns = ["kernel", "bytes of rows", "lane operations"]
    source = "value_skipping_counted.json"
    return Table(source, about["command"], "the simulator of Metal", columns, rows, model="no model: one KV head")


def host() -> Table:
    """What a call of a kernel costs the host."""
    about = report("kernels_host.json")
    found = {(c["text_bytes"], c["template_values"]): c["microseconds"] for c in about["calls"]}
    values = sorted({count for _, count in found})
    rows = [
        [f"{size:,}", *(f"{found[size, count]} us" for count in values)]
        for size in dict.fromkeys(size for size, _ in found)
    ]
    columns = ["bytes of text", *(f"{count} template values" for count in values)]
    return Table("kernels_host.json", about["command"], machine(about), columns, rows, model="no model: one call")


def batch_counted() -> Table:
    """A step of eight rows on the simulator, in three ways."""
    about = report("batch_attend.json")
    rows = [
        [
            ", ".join(map(str, case["packed_tokens"])),
            case["kernels"],
            way["way"],
            str(way["dispatches"]),
            f"{way['loaded']:,}",
            f"{way['lane_operations']:,}",
        ]
        for case in about["counted"]
        for way in case["ways"]
    ]
    columns = ["packed tokens of each row", "kernels", "way", "dispatches", "bytes loaded", "lane operations"]
    return Table(
        "batch_attend.json", about["command"], "the simulator of Metal", columns, rows, model="no model: one KV head"
    )


def batch() -> Table:
    """The same on a CPU, and what joining the rows in one buffer costs."""
    about = report("batch_attend.json")
    ways = ("row by row", "own buffers, one call", "one buffer, one call", "joining the buffers")
    rows = [
        [
            ", ".join(map(str, case["packed_tokens"])),
            *(f"{1000 * case['seconds'][way]:.0f}" for way in ways),
            *(f"{case['nbytes'][buffers] / 1e6:.1f}" for buffers in ("own buffers", "one buffer")),
        ]
        for case in about["cpu"].values()
    ]
    columns = [
        "packed tokens of each row",
        *(f"{way}, ms" for way in ways),
        "rows of their own, MB",
        "in one buffer, MB",
    ]
    return Table("batch_attend.json", about["command"], machine(about), columns, rows, model=ONE_LAYER)


TABLES: dict[str, Callable[[], Table]] = {
    "whole_model": whole_model,
    "report_of_models": report_of_models,
    "step_parts": step_parts,
    "decode": decode,
    "streams": streams,
    "flood": flood,
    "hostile": hostile,
    "soak": soak,
    "store": store,
    "kernels_counted": counted,
    "kernels_short": short,
    "kernels_archived": archived,
    "skipping": skipping,
    "skipping_counted": skipping_counted,
    "kernels_host": host,
    "batch_counted": batch_counted,
    "batch": batch,
}
