"""Thresholds: the built-in tables, the file of measured ones, and the command that measures them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from kernels.cases import make_problem
from kernels.metal.simulated import simulated
from mlx_tq import __main__
from mlx_tq.bench import tuning
from mlx_tq.bench.layer_caches import LayerShape
from mlx_tq.cache.view import StepView
from mlx_tq.cli.diagnostics import environment
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import backend, gpu, thresholds
from mlx_tq.kernels.thresholds import TABLES, HeadShape, KernelThresholds, ThresholdsWarning
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache

TUNED = KernelThresholds(packed_queries=16, simdgroups=300)
SHAPE, SHAPES = HeadShape(128, 4), ((128, 4), (256, 6), (256, 8), (64, 8))


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """Use another file than that of this machine."""
    path = tmp_path / "mlx_tq" / "thresholds.json"
    monkeypatch.setattr(thresholds, "file", lambda: path)
    thresholds._table.cache_clear()
    yield path
    thresholds._table.cache_clear()


def write_file(path, content) -> None:
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("chip", "table"),
    [("Apple M1", "base"), ("Apple M4 Pro", "Pro"), ("Apple M2 Max", "Max"), ("Apple M3 Ultra", "Ultra")],
)
def test_each_chip_has_a_table(chip, table):
    with (
        mock.patch.object(gpu, "gpu_backend", return_value="metal"),
        mock.patch.object(mx, "device_info", return_value={"device_name": chip}),
    ):
        assert thresholds.chip_class() == table
        assert thresholds.current(128, 4) is TABLES[table]
        assert thresholds.machine() == f"{chip}, metal"
        with backend.using("reference"):
            assert thresholds.chip_class() == "reference"


def test_written_thresholds_are_used(file):
    assert thresholds.table().origin == f"built in for {thresholds.chip_class()!r}"
    assert thresholds.write({SHAPE: TUNED}) == file
    assert thresholds.table().origin == f"measured for D 128 G 4 in {file}; other shapes use the nearest"
    assert list(file.parent.iterdir()) == [file]
    with thresholds.using(KernelThresholds()):
        assert thresholds.current(128, 4) == KernelThresholds()
    assert thresholds.current(128, 4) == TUNED


def test_each_shape_has_its_own_and_others_the_nearest():
    by_shape = {HeadShape(dim, group): replace(TUNED, packed_queries=dim // group) for dim, group in SHAPES}
    thresholds.write(by_shape)
    for shape, values in by_shape.items():
        assert thresholds.current(*shape) == values
    for shape, nearest in {(256, 4): (256, 6), (512, 16): (256, 8), (80, 7): (64, 8), (96, 3): (128, 4)}.items():
        assert thresholds.current(*shape) == by_shape[HeadShape(*nearest)]


def test_some_may_be_changed_for_every_shape_in_one_thread():
    """So that kernels are compiled for one model while another one answers."""
    thresholds.write({HeadShape(dim, group): replace(TUNED, packed_queries=dim // group) for dim, group in SHAPES})
    with thresholds.changed(short_tokens=0), ThreadPoolExecutor(1) as pool:
        for dim, group in SHAPES:
            assert thresholds.current(dim, group) == replace(TUNED, packed_queries=dim // group, short_tokens=0)
            assert pool.submit(thresholds.current, dim, group).result().short_tokens == TUNED.short_tokens
    assert thresholds.current(128, 4).short_tokens == TUNED.short_tokens


def test_attention_uses_the_thresholds_of_its_shape():
    """One kernel up to 4,096 tokens for groups of two; two kernels for groups of one, and no kernel for groups of 8."""
    with simulated() as calls:
        one, two = TABLES["base"], replace(TABLES["base"], short_tokens=0)
        shapes = {HeadShape(64, 2): replace(one, short_tokens=4096), HeadShape(64, 1): two}
        thresholds.write(shapes | {HeadShape(64, 8): replace(two, packed_queries=0)})
        for groups, expected in ((2, ["attended"]), (1, ["block_outputs", "attended"]), (8, [])):
            calls.clear()
            problem = make_problem(groups=groups, length=1, batch=1)
            options = {name: problem.arguments[name] for name in ("scale", "mask", "sinks")}
            mx.eval(StepView(problem.regions()).attend(problem.arguments["queries"], **options))
            stored = [name for call in calls for name, nbytes in call.stored.items() if nbytes]
            assert [name for name in stored if name in ("attended", "block_outputs")] == expected


def machines(*entries) -> dict:
    return {"version": 1, "machines": dict(entries)}


def measured_elsewhere(name="Apple M1, metal", **versions) -> tuple:
    entry = {"system": "macOS 13.0", "mlx": "0.1", "shapes": thresholds.to_rows({SHAPE: TUNED})}
    return name, entry | versions


def test_other_machines_keep_their_thresholds(file):
    """Next to those of this machine, they are no reason for a warning."""
    write_file(file, machines(measured_elsewhere(), measured_elsewhere("Apple M3 Max, metal")))
    thresholds.write({SHAPE: replace(TUNED, packed_queries=32)})
    assert thresholds.current(128, 4).packed_queries == 32
    content = json.loads(file.read_text())["machines"]
    assert dict([measured_elsewhere(), measured_elsewhere("Apple M3 Max, metal")]).items() <= content.items()
    assert content.keys() == {"Apple M1, metal", "Apple M3 Max, metal", thresholds.machine()}


@pytest.mark.parametrize("version", [{}, {"system": "macOS 13.0"}, {"mlx": "0.1"}])
def test_thresholds_measured_elsewhere_are_ignored(file, version):
    """With another chip, another version of the system, or another mlx; a line says so."""
    thresholds.write({SHAPE: TUNED})
    name, entry = next(iter(json.loads(file.read_text())["machines"].items()))
    file.write_text(json.dumps(machines((name, entry | version) if version else measured_elsewhere())))
    thresholds._table.cache_clear()
    why = (
        f"with .*{next(iter(version.values()))}.*, and this is .*mlx"
        if version
        else f"of Apple M1, metal, .*{re.escape(name)}"
    )
    with pytest.warns(ThresholdsWarning, match=f"ignoring .* in {file}: they (are|were measured) {why}") as caught:
        assert [thresholds.current(128, 4) for _ in range(3)] == [TABLES[thresholds.chip_class()]] * 3
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert thresholds.table().origin.startswith("built in")


def test_another_backend_of_this_chip_is_no_other_machine(file, recwarn):
    chip = thresholds.machine().rpartition(", ")[0]
    write_file(file, machines(measured_elsewhere(f"{chip}, metal")))
    assert thresholds.current(128, 4) == TABLES[thresholds.chip_class()]
    assert not recwarn.list


ROW = {"head_dim": 128, "group": 4, **asdict(TUNED)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid JSON"),
        ([], "an object with version 1"),
        ({"version": 2, "machines": {}}, "an object with version 1"),
        ({"version": 1, "machines": 3}, "an object with version 1"),
        (7, "a machine must have system, mlx, and a list of shapes"),
        ({"shapes": 3}, "a machine must have system, mlx, and a list of shapes"),
        (
            {"shapes": [{"packed_queries": 9}]},
            "a shape must have the values head_dim, group, packed_queries, short_tok",
        ),
        ({"shapes": [ROW | {"group": 0}]}, r"head_dim and group are 128 and 0; valid are positive integers"),
        ({"shapes": [ROW | {"packed_queries": -1}]}, "packed_queries is -1; valid are integers from 0 to 64"),
        ({"shapes": [ROW | {"short_tokens": -1}]}, "short_tokens is -1; valid are integers from 0 to 65536"),
        ({"shapes": [ROW | {"merge_simdgroups": True}]}, "merge_simdgroups is True; valid are integers from 1 to 8"),
        ({"shapes": [ROW | {"min_block": "64"}]}, "min_block is '64'"),
    ],
)
def test_a_bad_file_is_ignored_with_its_reason(file, content, why):
    if content == 7 or (isinstance(content, dict) and "version" not in content):
        thresholds.write({SHAPE: TUNED})
        whole = json.loads(file.read_text())
        ((name, entry),) = whole["machines"].items()
        whole["machines"][name] = entry | content if isinstance(content, dict) else content
        file.write_text(json.dumps(whole))
        thresholds._table.cache_clear()
    else:
        write_file(file, content)
    with pytest.warns(
        ThresholdsWarning, match=f"thresholds in {file}: .*{why}.*--tune again, or delete the file"
    ) as caught:
        assert [thresholds.current(128, 4) for _ in range(3)] == [TABLES[thresholds.chip_class()]] * 3
    assert len(caught) == 1


def test_a_file_that_cannot_be_written_is_an_error(file):
    write_file(file, "other content")
    with pytest.raises(ConfigError, match="not valid JSON"):
        thresholds.write({SHAPE: TUNED})
    assert file.read_text() == "other content"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"cannot save the thresholds in .*thresholds\.json: .*Make its folder writable"
    ):
        thresholds.write({SHAPE: TUNED})


def test_the_command_measures_and_saves(file, monkeypatch, capsys):
    """On a CPU it measures `packed_queries` of one shape only, and may choose 0."""
    monkeypatch.setattr(tuning, "CHAIN_SECONDS", 0)
    monkeypatch.setattr(tuning, "SHAPES", (LayerShape(4, 1, 64), LayerShape(2, 1, 128)))
    monkeypatch.setattr(tuning, "PACKED_QUERIES", (8,))
    assert __main__.main(["bench", "--tune", "--tokens", "64", "--rounds", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert str(file) in err.replace("\n", "")
    rows = json.loads(out)["thresholds"]
    assert [(row["head_dim"], row["group"]) for row in rows] == [(64, 4)]
    for row in rows:
        values = thresholds.current(row.pop("head_dim"), row.pop("group"))
        assert row == asdict(values) == asdict(KernelThresholds(packed_queries=row["packed_queries"]))
        assert values.packed_queries in (0, 8)
    assert environment()["thresholds"] == thresholds.table().origin
    assert thresholds.table().origin.startswith("measured for D 64 G 4 in ")


def tune_with(monkeypatch, seconds, chip="Apple M4 Pro") -> list:
    """Tune one shape of groups of four on a GPU where a call takes `seconds(context, arm)`."""

    def compare(shape, tokens, arms, rounds):
        taken = [sum(seconds(count, arm) for count in tokens) for arm in arms]
        return [taken[0] / value for value in taken]

    monkeypatch.setattr(tuning, "compare", compare)
    monkeypatch.setattr(tuning, "SHAPES", (LayerShape(32, 8, 128),))
    monkeypatch.setattr(backend, "current", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": chip})
    thresholds._table.cache_clear()
    return list(tuning.tune([64, 4096], 1))


def test_the_fastest_candidates_are_chosen(monkeypatch):
    """1,024 simdgroups, blocks of 128, one kernel up to 512 tokens, 12 queries, no tables, and 40 query rows are."""

    def seconds(count, arm):
        limits = arm.limits
        return (
            100
            + abs(limits.simdgroups - 1024)
            + abs(limits.min_block - 128)
            + 10 * limits.merge_simdgroups
            + 10 * limits.level_tables
            + (10 if count > 512 else -10) * (limits.short_tokens >= count)
            + (limits.matrix_queries > 8) * (10 if 4 * arm.length > 32 else -10)
            + (20 if arm.length > 12 else -20) * (not arm.decodes)
        )

    steps = tune_with(monkeypatch, seconds)
    assert steps[-1].best == KernelThresholds(12, 512, 1024, 128, 256, 1, 0, 40)
    sweeps = {"simdgroups": 7, "min_block": 4, "merge_simdgroups": 4, "level_tables": 3}
    sweeps |= {"short_tokens": 4, "matrix_queries": 4, "packed_queries": 6}
    assert [step.name for step in steps] == [name for name, count in sweeps.items() for _ in range(count)]
    assert {step.shape for step in steps} == {SHAPE}


@pytest.mark.parametrize(("gain", "left"), [(1.01, False), (1.03, True)])
def test_a_small_gain_does_not_change_a_built_in_threshold(monkeypatch, gain, left):
    """Everything but the built-in thresholds is `gain` times as fast."""
    built_in = TABLES["Pro"]

    def seconds(count, arm):
        limits = arm.limits
        names = ("simdgroups", "min_block", "merge_simdgroups", "level_tables")
        others = sum(getattr(limits, name) != getattr(built_in, name) for name in names)
        ways = (arm.decodes, limits.matrix_queries > 4 * arm.length, limits.short_tokens < count <= 512)
        return (1 / gain) ** (others + sum(ways))

    best = tune_with(monkeypatch, seconds)[-1].best
    for name in asdict(built_in):
        if name != "max_blocks":
            assert (getattr(best, name) != getattr(built_in, name)) == left, name


def test_attention_may_always_be_decoded(monkeypatch):
    """Where mlx's own attention over decoded rows is faster at every length, no query attends to packed rows."""
    best = tune_with(monkeypatch, lambda count, arm: 1 if arm.decodes else 2)[-1].best
    assert best.packed_queries == 0


def test_no_query_attends_to_packed_rows(embedded):
    """The answer is that of attention to packed rows."""
    model, tokenizer = embedded
    ids, answers = mx.array(tokenizer.encode("The harbour is quiet at night, and the boats lie still. " * 8)), []
    for most in (8, 0):
        caches = make_prompt_cache(model, KVConfig(key="q8", value="tq4", sinks=8, window=8))
        with thresholds.using(KernelThresholds(packed_queries=most)), compressed_attention(model):
            answers.append([int(t) for t, _ in generate_step(ids, model, prompt_cache=caches, max_tokens=12)])
        assert caches[0].packed_tokens > 100
    assert answers[0] == answers[1]
