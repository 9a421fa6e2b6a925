"""The table of measurements: what each one measures, and the columns of its table."""

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_tq.cli.loading import load_model
from mlx_tq.cli.options import Request
from mlx_tq.cli.screen import progress_bar
from mlx_tq.evaluate.all_packed import score_all_packed
from mlx_tq.evaluate.arms import OFF, Arm, with_control
from mlx_tq.evaluate.asking import PASS, VOID, Sample, ask_samples, check_positions, compare_answers
from mlx_tq.evaluate.flag_values import parse_depths, whole_numbers
from mlx_tq.evaluate.formats import TOGETHER, measure_formats
from mlx_tq.evaluate.kld_records import write_records
from mlx_tq.evaluate.lm_eval_harness import import_lm_eval, run_tasks
from mlx_tq.evaluate.needles import needle_samples, note_on_needles, tabulate_needles
from mlx_tq.evaluate.reasoning import problem_samples, read_problems
from mlx_tq.evaluate.results import Columns, Record, Results
from mlx_tq.evaluate.ruler import ruler_samples
from mlx_tq.evaluate.teacher_forced import TokenScores, cut_chunks, divergence, perplexity, score_text
from mlx_tq.evaluate.tools import tool_samples
from mlx_tq.evaluate.trajectory import compare_trajectories, run_trajectories
from mlx_tq.models import EMBEDDED
from mlx_tq.models.load import short_name

_NEEDLE_TOKENS = 64  # of an answer


@dataclass
class Run:
    """One measurement: its flags, text, arms and results. The model is loaded when it is first used."""

    args: argparse.Namespace
    text: str
    arms: list[Arm]
    results: Results

    @cached_property
    def model(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return load_model(self.args, *(arm.config for arm in self.arms))

    @cached_property
    def chunks(self) -> list[list[int]]:
        return cut_chunks(self.model[1], self.text, self.args.chunks, self.args.length)


class Measurement(NamedTuple):
    measure: Callable[[Run], list[Record]]  # saves its records, and returns the rows of the table
    title: str
    columns: Columns | None  # None: those of the rows
    settings: tuple[str, ...]  # flags that must be equal for results to be resumed
    note: Callable[[Sequence[Record]], str] = lambda records: ""
    resumes: bool = True


def run_measurement(request: Request, arms: list[Arm], text: str) -> int:
    """Compare the arms on a text, show the results and return the exit code."""
    args = request.args
    measurement = MEASUREMENTS[args.measurement]
    results = Results(
        args.json, args.measurement, settings_of(args, measurement.settings, arms), resume=measurement.resumes
    )
    rows = measurement.measure(Run(args, text, arms, results))
    records = list(results.rows.values())
    columns = measurement.columns or {name: _field(name) for name in rows[0]}
    results.show(measurement.title.format_map(records[0]), columns, rows, measurement.note(records))
    if not getattr(args, "strict", False):
        return 0
    return int(any(row["verdict"] not in (PASS, VOID) for row in records if row["name"] != OFF.name))


def settings_of(args: argparse.Namespace, names: tuple[str, ...], arms: list[Arm]) -> Record:
    """Return what must be equal for results to be resumed; a file may change, so its hash is included."""
    settings: Record = {"model": args.model or EMBEDDED}
    if hasattr(args, "text"):
        settings |= {"text": args.text or "embedded"}
    for name in ("text", "data"):
        if getattr(args, name, None):
            settings |= {f"{name}_sha256": hashlib.sha256(Path(getattr(args, name)).read_bytes()).hexdigest()}
    settings |= {name: getattr(args, name) for name in names}
    settings |= {} if args.dtype is None else {"dtype": args.dtype}
    return settings | {"arms": {arm.name: arm.config.to_dict() for arm in arms}}


def _score(run: Run, arms: list[Arm]) -> list[TokenScores]:
    total = (1 + len(arms)) * sum(len(chunk) - 1 for chunk in run.chunks)
    with progress_bar(run.args.measurement, total) as advance:
        if getattr(run.args, "protocol", None) is not None:
            return score_all_packed(run.model[0], run.chunks, arms, advance)
        return score_text(run.model[0], run.chunks, arms, run.args.step, advance)


def _perplexity(run: Run) -> list[Record]:
    arms = [OFF, *(arm for arm in run.arms if not arm.config.is_off)]
    scores = _score(run, arms[1:])
    for arm, score in zip(arms, scores, strict=True):
        run.results.add(arm.name, perplexity(arm.name, score, scores[0].nll))
    return list(run.results.rows.values())


def _divergence(run: Run) -> list[Record]:
    args, arms, started = run.args, with_control(run.arms), time.monotonic()
    scores = _score(run, arms)
    before: TokenScores | None = None
    for arm, score in zip(arms, scores[1:], strict=True):
        run.results.add(arm.name, divergence(arm.name, score, before))
        before = None if arm.config.is_off else score
    if args.records is not None:
        settings = settings_of(args, _TEXT, arms)
        settings |= {} if args.protocol is None else {"step": 0}  # all tokens are scored
        options: dict[str, Any] = {"settings": settings, "seconds": time.monotonic() - started}
        write_records(args.records, run.model[0], short_name(args.model), arms, scores, run.chunks, **options)
    return list(run.results.rows.values())


def _trajectory(run: Run) -> list[Record]:
    args, model, arms = run.args, run.model[0], with_control(run.arms)
    options = {"answer": args.answer_tokens, "step": args.step, "temp": args.temp, "seed": args.seed}
    with progress_bar("trajectory", (1 + len(arms)) * args.chunks * args.answer_tokens) as advance:
        reference, *trajectories = run_trajectories(model, run.chunks, arms, advance=advance, **options)
    for arm, answers in zip(arms, trajectories, strict=True):
        run.results.add(arm.name, compare_trajectories(arm.name, answers, reference))
    return list(run.results.rows.values())


def _formats(run: Run) -> list[Record]:
    args, results, (model, tokenizer), arms = run.args, run.results, run.model, with_control(run.arms)
    seeds = range(args.needles)
    samples = {
        arm.name: needle_samples(tokenizer, run.text, [arm], [args.needle_length], seeds=seeds)
        for arm in arms
        if args.needles and not arm.config.is_off
    }
    for of_arm in samples.values():  # before the measurement, not after it
        check_positions(model, of_arm, _NEEDLE_TOKENS)
    missing = [arm for arm in arms if arm.name not in results.rows]
    passes = len(missing) + -(-len(missing) // TOGETHER)
    with progress_bar("formats", passes * args.chunks * (args.length - 1)) as advance:
        for record in measure_formats(model, run.chunks, missing, args.step, advance):
            results.add(record["name"], record)
    answers = Results(None, "needles", {})  # the uncompressed cache answers once for all pairs
    for arm in arms:
        if arm.name not in samples or results.rows[arm.name].get("needles") == args.needles:
            continue
        options = {"max_tokens": _NEEDLE_TOKENS, "step": args.step}
        records = ask_samples(model, tokenizer, samples[arm.name], [arm], answers, **options)
        verdicts = [record["verdict"] for record in records if record["name"] == arm.name]
        counts = {"found": verdicts.count(PASS), "asked": len(verdicts) - verdicts.count(VOID), "needles": args.needles}
        results.add(arm.name, results.rows[arm.name] | counts)
    rows = [results.rows[arm.name] for arm in arms]
    return sorted(rows, key=lambda row: (row["nbytes"], row["name"]))


def _ask(run: Run, samples: list[Sample]) -> list[Record]:
    args, (model, tokenizer) = run.args, run.model
    arms = [arm for arm in run.arms if not arm.config.is_off]
    options = {"max_tokens": args.max_tokens, "temp": getattr(args, "temp", 0.0), "step": args.step}
    with progress_bar(args.measurement, (1 + len(arms)) * len(samples)) as advance:
        return ask_samples(model, tokenizer, samples, arms, run.results, advance=advance, **options)


def _needle(run: Run) -> list[Record]:
    args = run.args
    lengths, depths = whole_numbers(args.lengths, "--lengths"), parse_depths(args.depths)
    samples = needle_samples(run.model[1], run.text, run.arms, lengths, depths, range(args.seeds))
    return tabulate_needles(_ask(run, samples))


def _reasoning(run: Run) -> list[Record]:
    args, problems = run.args, read_problems(run.args.data)
    tokenizer = run.model[1]
    chat = tokenizer.has_chat_template and not args.ignore_chat_template
    sizes = {"shots": args.shots, "count": args.samples, "seeds": args.seeds}
    return compare_answers(_ask(run, problem_samples(tokenizer, problems, chat=chat, **sizes)))


def _tools(run: Run) -> list[Record]:
    args = run.args
    samples = tool_samples(run.model[1], args.data, shots=args.shots, count=args.samples, parser_name=args.tool_parser)
    return compare_answers(_ask(run, samples))


def _ruler(run: Run) -> list[Record]:
    args, lengths = run.args, whole_numbers(run.args.lengths, "--lengths")
    return compare_answers(
        _ask(run, ruler_samples(run.model[1], run.text, args.tasks.split(","), lengths, args.samples))
    )


def _lm_eval(run: Run) -> list[Record]:
    import_lm_eval()  # before the model
    metrics = run_tasks(run.args, *run.model, run.arms[0].config)
    for task, values in metrics.items():
        run.results.add(task, values)
    return [
        {"task": task, "metric": name, "value": value}
        for task, values in metrics.items()
        for name, value in values.items()
    ]


def _field(name: str, style: str = "", scale: float = 1) -> Callable[[Record], str]:
    """Return what shows a field of a record, or a dash if there is no such field."""
    return lambda row: "-" if row.get(name) is None else format(row[name] * scale if style else row[name], style)


def _kld(name: str) -> Callable[[Record], str]:
    """Return what shows a divergence, whose floor has more zeros than a column has room for."""

    def show(row: Record) -> str:
        value = row.get(name)
        if value is None:
            return "-"
        return f"{value:.6f}" if value == 0 or abs(value) >= 1e-5 else f"{value:.1e}"

    return show


def _note_on_parts(records: Sequence[Record]) -> str:
    return f"±: one standard error, over {records[0]['clusters']} parts of the text, within which tokens are dependent"


def _note_on_errors(records: Sequence[Record]) -> str:
    """Say what the errors are of, and which divergences are rounding."""
    floors = [row["kld"] for row in records if row.get("cosine", 1) == 1 and row["packed"] == 0]
    floor = max(floors, default=0.0)
    near = [row["name"] for row in records if row["packed"] and row["kld"] < 2 * floor]
    rounding = f"{OFF.name}: a second uncompressed cache, which rounds differently; its KLD of {floor:.1e} is the floor"
    doubt = f". Not above it: {', '.join(near)}. Lower it with --dtype float32" if near else ""
    return f"{_note_on_parts(records)}\n{rounding}{doubt}"


def _select(titles: str) -> Columns:
    return {title: _COLUMNS[title] for title in titles.split(",")}


_COLUMNS: Columns = {
    "cache": _field("name"),
    "PPL": _field("ppl", ".3f"),
    "± PPL": _field("ppl_error", ".3f"),
    "change %": _field("delta", "+.3f"),
    "± change": _field("delta_error", ".3f"),
    "packed %": _field("packed", ".0f", 100),
    "kept %": _field("kept", ".0f", 100),
    "MB": _field("nbytes", ".1f", 1e-6),
    "s": _field("seconds", ".1f"),
    "KLD": _kld("kld"),
    "± KLD": _kld("kld_error"),
    "from above": _kld("kld_change"),
    "± from above": _kld("kld_change_error"),
    "median": _kld("kld_median"),
    "99 %": _field("kld_99", ".5f"),
    "top-1 %": _field("top1", ".2f"),
    "± top-1": _field("top1_error", ".2f"),
    "same until": _field("same_until", ".0f"),
    "agree %": _field("agreement", ".1f"),
    "± agree": _field("agreement_error", ".1f"),
    "exact": _field("exact"),
    "KLD by quarter": lambda row: " ".join(f"{kld:.5f}" for kld in row["kld_quarters"]),
    "B/token": _field("nbytes", ",.0f"),
    "ratio": _field("ratio", ".2f"),
    "K err": _field("key_error", ".5f"),
    "V err": _field("value_error", ".5f"),
    "cos": _field("cosine", ".5f"),
    "needles": lambda row: f"{row['found']}/{row['asked']}" if row.get("asked") else "-",
    "samples": _field("group"),
    "right": lambda row: f"{row['right']}/{row['samples']}",
    "%": lambda row: f"{100 * row['right'] / row['samples']:.1f}",
    "95 %": lambda row: f"{100 * row['low']:.1f}-{100 * row['high']:.1f}",
    "score %": _field("score", ".1f", 100),
    "lost": _field("lost"),
    "gained": _field("gained"),
    "p": _field("p", ".3f"),
}
_NOTE = (
    "lost, gained: right with the uncompressed cache only, with this one only; "
    "p: of such a difference by chance (McNemar)"
)
_TRAJECTORY_NOTE = (
    "same until: median number of tokens before the first difference; KLD in nats, along each cache's own answer;\n"
    "±: one standard error over answers; off: a second uncompressed cache, which rounds differently: the floor"
)
_asking = partial(
    Measurement,
    title="Answers",
    columns=_select("samples,cache,right,%,95 %,score %,lost,gained,p"),
    note=lambda records: _NOTE,
)
_TEXT = ("chunks", "length", "step")
_SHOTS = ("data", "shots", "samples", "max_tokens", "temp", "step")

MEASUREMENTS = {
    "perplexity": Measurement(
        _perplexity,
        "Perplexity over {tokens:,} tokens",
        _select("cache,PPL,± PPL,change %,± change,packed %,kept %,MB,s"),
        _TEXT,
        note=_note_on_parts,
        resumes=False,
    ),
    "divergence": Measurement(
        _divergence,
        "Divergence from the uncompressed cache over {tokens:,} tokens, in nats",
        _select("cache,KLD,± KLD,from above,± from above,median,99 %,top-1 %,± top-1,packed %"),
        (*_TEXT, "protocol"),
        note=_note_on_errors,
        resumes=False,
    ),
    "trajectory": Measurement(
        _trajectory,
        "{answers} answers of {tokens:,} tokens, compared with those of the uncompressed cache",
        _select("cache,same until,agree %,± agree,exact,KLD,± KLD,KLD by quarter"),
        (*_TEXT, "answer_tokens", "temp", "seed"),
        note=lambda records: _TRAJECTORY_NOTE,
        resumes=False,
    ),
    "formats": Measurement(
        _formats,
        "Pairs of formats",
        _select("cache,B/token,ratio,K err,V err,cos,KLD,± KLD,top-1 %,PPL,change %,± change,packed %,needles"),
        (*_TEXT, "needle_length"),
        note=_note_on_errors,
    ),
    "needle": Measurement(
        _needle, "Needles found", None, ("lengths", "depths", "seeds", "step", "max_tokens"), note=note_on_needles
    ),
    "reasoning": _asking(_reasoning, settings=(*_SHOTS, "seeds", "ignore_chat_template")),
    "tools": _asking(_tools, settings=(*_SHOTS, "tool_parser")),
    "ruler": _asking(_ruler, settings=("tasks", "lengths", "samples", "max_tokens", "temp", "step")),
    "lm-eval": Measurement(
        _lm_eval,
        "Tasks of lm-eval",
        None,
        ("tasks", "num_shots", "limit", "max_tokens", "seed", "temp", "top_p", "min_p", "top_k"),
        resumes=False,
    ),
}
