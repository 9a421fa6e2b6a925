"""Tables of trellis codes: what they win, and what their kernels cost beside tq's."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tables.markdown import RESULTS, Record, Table, machine, machines, report
from benchmarks.tables.normalized import MODELS

_DISTORTION, _COUNTED, _TIMED = "trellis_distortion.json", "trellis_counted.json", "trellis_cuda.json"
_DIVERGENCE = "trellis_divergence_{}.json"
_GAUSSIAN, _SIMULATED, _STATES = "Gaussian vectors", "the simulator of Metal", 256


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


def distortion() -> Table:
    """By bits and states, at the head size of most models."""
    about = report(_DISTORTION)
    rows = []
    for bits, nearest in about["nearest"].items():
        rows.append([bits, "nearest level", f"{nearest:.5f}", "1.00", f"{nearest * 4 ** int(bits):.2f}"])
        for r in about["rows"]:
            if (r["bits"], r["dim"], r["around"]) == (int(bits), 128, 16):
                size, share = f"{r['mse']:.5f} ± {r['mse_error']:.5f}", f"{r['mse'] / nearest:.2f}"
                rows.append([bits, f"{r['states']} states", size, share, f"{r['mse'] * 4 ** int(bits):.2f}"])
    columns = ["bits", "codes", "mean square error", "of nearest", "of the bound"]
    return Table(_DISTORTION, about["command"], machine(about), columns, rows, model=_GAUSSIAN)


def sizes() -> Table:
    """By head size, then by how many values the search for the state at the cut reads."""
    about = report(_DISTORTION)
    rows = []
    for bits in about["nearest"]:
        found = [r for r in about["rows"] if (r["bits"], r["states"]) == (int(bits), _STATES)]
        for r in sorted(found, key=lambda r: (r["dim"], -r["around"])):
            read = "all" if 2 * r["around"] == r["dim"] else str(2 * r["around"])
            rows.append([bits, str(r["dim"]), read, f"{r['mse']:.5f} ± {r['mse_error']:.5f}"])
    columns = ["bits", "values of a vector", "values read to find the state at the cut", "mean square error"]
    return Table(_DISTORTION, about["command"], machine(about), columns, rows, model=_GAUSSIAN)


def attend() -> Table:
    """Attention's first kernel, a token and KV head."""
    about = report(_COUNTED)
    rows = []
    for r in about["rows"]:
        plain = _of(about["rows"], r["format"].replace("tcq", "tq"), r["dim"])["attend"]
        rows.append([str(r["dim"]), f"`{r['format']}`", f"{r['attend']:,.0f}", f"{r['attend'] / plain:.2f}"])
    columns = ["D", "keys and values", "lane operations", "of tq's"]
    return Table(_COUNTED, about["command"], machine(about), columns, rows, model=_SIMULATED)


def share() -> Table:
    """Encoding a token, over the products of its prefill."""
    about = report(_COUNTED)
    rows = []
    for name in dict.fromkeys(r["format"] for r in about["rows"]):
        each = {dim: _of(about["rows"], name, dim)["encode"] for dim in (64, 128, 256)}
        shares = (f"{100 * each[shape.dim] * shape.stored / shape.products:.1f}" for shape in SHAPES.values())
        rows.append([f"`{name}`", f"{each[128]:,.0f}", *shares])
    columns = ["keys and values", "lane operations a value, D = 128", *(f"{name}, %" for name in SHAPES)]
    return Table(_COUNTED, about["command"], machine(about), columns, rows, model=_SIMULATED)


def _of(rows: list[Record], name: str, dim: int) -> Record:
    (row,) = (row for row in rows if (row["format"], row["dim"]) == (name, dim))
    return row


def timed() -> Table:
    """Attention over a context, and encoding a prompt's keys and values of a layer, on a GPU, by sketches."""
    about = report(_TIMED)
    reads = {"tq": "tq: a polynomial", "table": "trellis: a table"}
    plain = {row["bits"]: row["seconds"] for row in about["attend"] if row["reads"] == "tq"}
    rows = []
    for row in about["attend"]:
        if row["reads"] in reads:
            share = f"{row['seconds'] / plain[row['bits']]:.2f}"
            rows.append(["attention", str(row["bits"]), reads[row["reads"]], f"{1e6 * row['seconds']:.0f}", share])
    for row in about["encode"]:
        cut = "" if row["around"] else ", cut by a whole search"
        states = f"{1 << row['window']} states{cut}"
        rows.append(["encoding", str(row["bits"]), states, f"{1e6 * row['seconds']:.0f}", "-"])
    columns = ["kernel", "bits", "levels or states", "µs", "of tq's"]
    about_what = (
        "sketches of the kernels on one layer: 8 KV heads of 128, a context of 32,768 tokens, a prompt of 2,048"
    )
    return Table(_TIMED, about["command"], machine(about), columns, rows, model=about_what)


def divergence() -> Table:
    """Keys and values alike: nearest levels beside trellises of the same bits."""
    files = {model: name for model in MODELS if (RESULTS / (name := _DIVERGENCE.format(model))).exists()}
    rows = []
    for model, name in files.items():
        found = report(name)["results"]
        for arm, r in found.items():
            kind = arm.partition("/")[0]
            plain = found["/".join([f"tq{kind.partition('q')[2][0]}"] * 2)]["kld"]
            kld = f"{r['kld']:.5f} ± {r['kld_error']:.5f}"
            row = [MODELS[model], kind.replace(":plain", ", keys not normalized"), kld, f"{r['kld'] / plain:.2f}"]
            rows.append([*row, f"{r['kld_median']:.6f}", f"{r['top1']:.1f} ± {r['top1_error']:.1f}"])
    columns = ["model", "keys and values", "KLD", "of tq's", "median", "top-1 %"]
    command = f"mlx_tq.evaluate divergence --profiles tq4/tq4,tcq4/tcq4,... {FLAGS} [--model M --dequantize]"
    first, *also = files.values()
    return Table(first, command, machines(files.values()), columns, rows, model="the models named", also=tuple(also))


FLAGS = "--dtype float32 --chunks 1 --length 2048 --step 32 --kv-sinks 32 --kv-window 64"
TABLES: dict[str, Callable[[], Table]] = {
    "trellis_divergence": divergence,
    "trellis_distortion": distortion,
    "trellis_sizes": sizes,
    "trellis_attend": attend,
    "trellis_share": share,
    "trellis_timed": timed,
}
