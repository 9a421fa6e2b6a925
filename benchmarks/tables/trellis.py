"""Tables of trellis codes: what they win, and what sketches of their kernels cost."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tables.conditioned import MODELS
from benchmarks.tables.markdown import RESULTS, Record, Table, machine, machines, report

_DISTORTION, _COUNTED, _TIMED = "trellis_distortion.json", "trellis_counted.json", "trellis_cuda.json"
_DIVERGENCE = "trellis_divergence_{}.json"
_GAUSSIAN, _SKETCHES = "Gaussian vectors", "sketches of kernels on the simulator of Metal"
_READS = {"tq": "tq: a polynomial", "table": "trellis: a table", "computed": "trellis: computed (1MAD)"}
_MOST = {"4": 256, "3": 512, "2": 512}  # states, where a format does not name them
_TQ_ENCODE = 256  # values of keys and values that `encode` of kernels_counted.json takes a token


@dataclass(frozen=True)
class Shape:
    """A model's matrices.

    Attributes:
        kept: layers that keep the whole context.
        layers, hidden, inner, heads, kv_heads, dim: as in its configuration; inner is that of the MLP.
    """

    kept: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def products(self) -> int:
        """Products a token: weights of all layers, without embeddings and attention to the prompt."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def stored(self) -> int:
        """Values that a token stores."""
        return 2 * self.kept * self.kv_heads * self.dim


SHAPES = {
    "SmolLM2-135M": Shape(30, 30, 576, 1536, 9, 3, 64),
    "Gemma 3 270M": Shape(3, 18, 640, 2048, 4, 1, 256),
    "Qwen3 4B": Shape(36, 36, 2560, 9728, 32, 8, 128),
    "Qwen2.5 7B": Shape(28, 28, 3584, 18944, 28, 4, 128),
    "Llama 3.1 8B": Shape(32, 32, 4096, 14336, 32, 8, 128),
    "Qwen3 14B": Shape(40, 40, 5120, 17408, 40, 8, 128),
    "Llama 3.1 70B": Shape(80, 80, 8192, 28672, 64, 8, 128),
}


def _found(rows: list[Record], **where: object) -> Record:
    (row,) = (row for row in rows if all(row[name] == value for name, value in where.items()))
    return row


def distortion() -> Table:
    """By bits and states, at the head size of most models."""
    about = report(_DISTORTION)
    rows = []
    for bits, nearest in about["nearest"].items():
        rows.append([bits, "nearest level", f"{nearest:.5f}", "1.00", f"{nearest * 4 ** int(bits):.2f}"])
        found = [r for r in about["rows"] if r["bits"] == int(bits) and r["dim"] == 128 and r["around"] == 64]
        for r in found:
            states = f"{1 << r['window']} states" + (", computed" if r["table"] == "computed" else "")
            size, share = f"{r['mse']:.5f} ± {r['mse_error']:.5f}", f"{r['mse'] / nearest:.2f}"
            rows.append([bits, states, size, share, f"{r['mse'] * 4 ** int(bits):.2f}"])
    columns = ["bits", "codes", "mean square error", "of nearest", "of the bound"]
    return Table(_DISTORTION, about["command"], machine(about), columns, rows, model=_GAUSSIAN)


def sizes() -> Table:
    """By head size, then by how many values the search for the state at the cut reads."""
    about = report(_DISTORTION)
    rows = []
    for bits in about["nearest"]:
        widest = max(r["window"] for r in about["rows"] if r["bits"] == int(bits))
        found = [r for r in about["rows"] if (r["bits"], r["window"], r["table"]) == (int(bits), widest, "trained")]
        for r in sorted(found, key=lambda r: (r["dim"], -r["around"])):
            read = "all" if 2 * r["around"] == r["dim"] else str(2 * r["around"])
            rows.append([bits, str(r["dim"]), read, f"{r['mse']:.5f} ± {r['mse_error']:.5f}"])
    columns = ["bits", "values of a vector", "values read to find the state at the cut", "mean square error"]
    return Table(_DISTORTION, about["command"], machine(about), columns, rows, model=_GAUSSIAN)


def attend() -> Table:
    """Pass 1 of attention, a token and KV head."""
    about = report(_COUNTED)
    rows = []
    for r in about["attend"]:
        plain = _found(about["attend"], bits=r["bits"], reads="tq")["lane_operations"]
        operations = r["lane_operations"]
        rows.append([str(r["bits"]), _READS[r["reads"]], f"{operations:,.0f}", f"{operations / plain:.2f}"])
    columns = ["bits", "levels", "lane operations", "of tq's"]
    return Table(_COUNTED, about["command"], machine(about), columns, rows, model=_SKETCHES)


def share() -> Table:
    """Encoding a token, over the products of its prefill."""
    about = report(_COUNTED)
    encode = _found(report("kernels_counted.json")["kernels"], kernel="encode")["lane_operations"] / _TQ_ENCODE
    ways = {("4", "tq4"): encode}
    for r in about["encode"]:
        cut = "" if r["around"] else ", cut by a whole search"
        ways[str(r["bits"]), f"{1 << r['window']} states{cut}"] = r["lane_operations"]
    rows = []
    for (bits, name), operations in ways.items():
        shares = (f"{100 * operations * shape.stored / shape.products:.1f}" for shape in SHAPES.values())
        rows.append([bits, name, f"{operations:,.0f}", *shares])
    columns = ["bits", "codes", "lane operations a value", *(f"{name}, %" for name in SHAPES)]
    return Table(_COUNTED, about["command"], machine(about), columns, rows, _SKETCHES, ("kernels_counted.json",))


def timed() -> Table:
    """Attention over a context, and encoding a prompt's keys and values of a layer, on a GPU."""
    about = report(_TIMED)
    plain = {row["bits"]: row["seconds"] for row in about["attend"] if row["reads"] == "tq"}
    rows = []
    for row in about["attend"]:
        share = f"{row['seconds'] / plain[row['bits']]:.2f}"
        rows.append(["attention", str(row["bits"]), _READS[row["reads"]], f"{1e6 * row['seconds']:.0f}", share])
    for row in about["encode"]:
        cut = "" if row["around"] else ", cut by a whole search"
        states = f"{1 << row['window']} states{cut}"
        rows.append(["encoding", str(row["bits"]), states, f"{1e6 * row['seconds']:.0f}", "-"])
    columns = ["kernel", "bits", "levels or states", "µs", "of tq's"]
    about_what = "sketches of kernels on one layer: 8 KV heads of 128, a context of 32,768 tokens, a prompt of 2,048"
    return Table(_TIMED, "python -m benchmarks.trellis.costs", machine(about), columns, rows, model=about_what)


def divergence() -> Table:
    """Keys and values alike: nearest levels beside trellises of the same bits."""
    files = {model: name for model in MODELS if (RESULTS / (name := _DIVERGENCE.format(model))).exists()}
    rows = []
    for model, name in files.items():
        found = report(name)["results"]
        for arm, r in found.items():
            bits = arm.partition("q")[2][0]
            plain = found[f"tq{bits}/tq{bits}"]["kld"]
            kld = f"{r['kld']:.5f} ± {r['kld_error']:.5f}"
            row = [MODELS[model], _named(arm.partition("/")[0]), kld, f"{r['kld'] / plain:.2f}"]
            rows.append([*row, f"{r['kld_median']:.6f}", f"{r['top1']:.1f} ± {r['top1_error']:.1f}"])
    columns = ["model", "keys and values", "KLD", "of tq's", "median", "top-1 %"]
    command = f"python -m benchmarks.trellis.evaluate divergence --profiles A,B,... {FLAGS} [--model M --dequantize]"
    first, *also = files.values()
    return Table(first, command, machines(files.values()), columns, rows, model="the models named", also=tuple(also))


def _named(arm: str) -> str:
    """What a format of the measurement is."""
    if not arm.startswith("tcq"):
        return arm.replace(":plain", ", keys not conditioned")
    bits, _, window = arm.removeprefix("tcq").partition(".")
    return f"{bits} bits, {1 << int(window) if window else _MOST[bits]} states"


FLAGS = "--dtype float32 --chunks 1 --length 2048 --step 32 --kv-prefix 32 --kv-window 64"
TABLES: dict[str, Callable[[], Table]] = {
    "trellis_divergence": divergence,
    "trellis_distortion": distortion,
    "trellis_sizes": sizes,
    "trellis_attend": attend,
    "trellis_share": share,
    "trellis_timed": timed,
}
