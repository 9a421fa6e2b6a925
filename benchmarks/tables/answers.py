"""Tables of answers compared with those of the fp16 cache, from answers_*.json."""

from collections.abc import Callable
from functools import partial

from benchmarks.tables.markdown import Table, machine, report
from mlx_tq.evaluate.arms import OFF
from mlx_tq.evaluate.paired import Answered, compare

MODEL = "--model smollm2 --dequantize --dtype float32"
_SMALL = "--profiles tq4/tq4,tq2/tq2 --kv-sinks 32 --kv-window 64"
RUNS = {
    "reasoning": f"reasoning --data problems.jsonl {MODEL} {_SMALL} --samples 40 --max-tokens 32",
    "tools": f"tools {MODEL} {_SMALL} --tool-parser json_tools --shots 3 --samples 33 --max-tokens 40",
    "ruler": f"ruler {MODEL} {_SMALL} --lengths 400,1000 --samples 5 --max-tokens 80",
}


def answers(name: str) -> Table:
    """A row for each kind of sample and each cache."""
    source = f"answers_{name}.json"
    about = report(source)
    rows = [
        [
            row.group,
            row.name,
            f"{row.right}/{row.asked}",
            f"{100 * row.low:.0f}-{100 * row.high:.0f} %",
            f"{100 * row.score:.1f} %",
            *(["-"] * 3 if row.name == OFF.name else [str(row.lost), str(row.gained), f"{row.p:.2f}"]),
        ]
        for row in compare([Answered(**record) for record in about["results"].values()])
    ]
    columns = ["samples", "cache", "right", "95 %", "score", "lost", "gained", "p"]
    return Table(
        source,
        f"python -m mlx_tq evaluate {RUNS[name]}",
        f"{machine(about)}, float32",
        columns,
        rows,
        model="SmolLM2-135M-Instruct",
    )


TABLES: dict[str, Callable[[], Table]] = {f"answers_{name}": partial(answers, name) for name in RUNS}
