"""Tables of the store of prefixes: what requests share, the tiers, many records, and what leaves."""

from collections.abc import Callable

from benchmarks.tables.markdown import Record, Table, in_order, machine, report

# Of the published table, for the same tokens and shape, on an RTX 5090: ms to warm them.
PUBLISHED = {64: 284, 256: 480, 1024: 571}


def shared() -> Table:
    """Requests at once that begin with one text."""
    about = report("store_shared.json")
    rows = []
    for f in about["figures"]:
        own, held, counted = f["own"]["held"], f["shared"]["held"], f["shared"]["nbytes"]
        cells = [f"{nbytes / 1e6:.1f}" for nbytes in (own, held, counted)]
        rows.append([f"{f['requests']}", *cells, f"{100 * held / own:.0f} %"])
    columns = [
        "requests at once",
        "each its own rows, MB",
        "shared, MB",
        "as the batch counts them, MB",
        "of each its own",
    ]
    model = "caches of the embedded model (7 million weights)"
    return Table("store_shared.json", about["command"], machine(about), columns, rows, model=model)


def beginnings() -> Table:
    """The same through a server, where they come at once."""
    about = report("store_beginnings.json")
    full, rows = about["full"], []
    for f in about["figures"]:
        counted = f["requests"] * full
        cells = [f"{f['at_once']} of {f['requests']}", f"{f['read_tokens']:,}", f"{counted / 1e6:.1f}"]
        held = f"{f['held'] / 1e6:.1f} ({100 * f['held'] / counted:.0f} %)"
        rows.append([f["beginnings"], *cells, held, f"{f['first_token']:.1f}", f"{f['seconds']:.1f}"])
    columns = [
        "system messages",
        "at once",
        "tokens read",
        "each in full, MB",
        "held at most, MB",
        "first token, s",
        "all, s",
    ]
    model = "the embedded model (7 million weights), float32"
    return Table("store_beginnings.json", about["command"], machine(about), columns, rows, model=model)


def tiers() -> Table:
    """Bulk spill and warm."""
    about = report("store_tiers.json")
    rows = []
    for f in about["figures"]:
        size = f["nbytes"]
        arms = (
            ("a copy in memory", {"spill": f["plain"]["copy"], "warm": f["plain"]["copy"]}),
            ("a plain file", f["plain"]),
            ("archive", f["archive"]),
            ("store", f["store"]),
        )
        for name, seconds in arms:
            cold = seconds.get("warm, out of the page cache")
            times = [seconds["spill"], seconds["warm"], cold]
            cells = ["-" if each is None else f"{each:.3f} ({size / each / 1e9:.2f})" for each in times]
            rows.append([f"{f['blocks']:,}", f"{f['tokens']:,}", f"{size / 1e6:.0f}", name, *cells])
        published = PUBLISHED[f["blocks"]]
        rows.append(
            [f"{f['blocks']:,}", f"{f['tokens']:,}", "-", "published, GPU", "-", f"{published / 1000:.3f}", "-"]
        )
    columns = ["blocks of 16", "tokens", "MB", "by", "spill, s (GB/s)", "warm", "warm, not in the page cache"]
    return Table(
        "store_tiers.json", about["command"], machine(about), columns, rows, model="random rows of an 8B shape"
    )


def index() -> Table:
    """100,000 records."""
    about = report("store_index.json")
    rows = [[name, f"{1000 * seconds:,.1f}"] for name, seconds in about["seconds"].items()]
    title = f"with {about['records']:,} records"
    return Table("store_index.json", about["command"], machine(about), [title, "ms"], rows, model="empty records")


def graph() -> Table:
    """Tokens read again, by what decides which block leaves."""
    about = report("store_graph.json")
    figures: list[Record] = about["figures"]
    policies, rows = in_order(figures, "policy"), []
    for trace in in_order(figures, "trace"):
        for share in in_order(figures, "share"):
            found = {f["policy"]: f for f in figures if (f["trace"], f["share"]) == (trace, share)}
            usual = found["least recently used"]["read_again"]
            cells = [_again(found[policy], usual) for policy in policies]
            blocks = found[policies[0]]["blocks"]
            rows.append([f"{trace}, {blocks:,} blocks", f"{100 * share:.0f} %", *cells])
    columns = ["trace", "held", *policies]
    return Table("store_graph.json", about["command"], "CPU", columns, rows, model="blocks of 256 tokens, no model")


def _again(figure: Record, usual: int) -> str:
    more = f", {100 * (figure['read_again'] / usual - 1):+.1f} %" if usual and figure["read_again"] != usual else ""
    return f"{figure['read_again'] / 1000:,.0f}k{more} ({100 * figure['hit_rate']:.1f} %)"


def advisor() -> Table:
    """What the graph's thread costs, and its advice on what to fetch ahead."""
    about = report("store_graph.json")
    rows = [[f"{c['blocks']:,}", f"{c['ms']:,.1f}", f"{100 * c['share']:.1f} %"] for c in about["costs"]]
    columns = ["blocks", "ms a ranking", "of a core"]
    return Table("store_graph.json", about["command"], "CPU", columns, rows, model="blocks of 256 tokens, no model")


TABLES: dict[str, Callable[[], Table | str]] = {
    "shared": shared,
    "beginnings": beginnings,
    "tiers": tiers,
    "store_index": index,
    "store_graph": graph,
    "store_advisor": advisor,
}
