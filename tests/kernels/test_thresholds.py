"""Thresholds: the built-in tables, the file of measured ones, and the command that measures them."""

import json
from dataclasses import asdict, replace
from unittest import mock

import mlx.core as mx
import pytest

from mlx_tq import __main__
from mlx_tq.cli.diagnostics import environment
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import backend, gpu, thresholds, tuning
from mlx_tq.kernels.thresholds import TABLES, KernelThresholds, ThresholdsWarning

TUNED = KernelThresholds(packed_queries=16, simdgroups=300)


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
        assert thresholds.current() is TABLES[table]
        assert thresholds.machine() == f"{chip}, metal"
        with backend.using("reference"):
            assert thresholds.chip_class() == "reference"


def test_written_thresholds_are_used(file):
    assert thresholds.table().origin == f"built in for {thresholds.chip_class()!r}"
    assert thresholds.write(TUNED) == file
    assert thresholds.table() == (TUNED, f"measured, {file}")
    assert list(file.parent.iterdir()) == [file]
    with thresholds.using(KernelThresholds()):
        assert thresholds.current() == KernelThresholds()
    assert thresholds.current() == TUNED


def test_other_machines_keep_their_tables(file):
    write_file(file, {"version": 1, "tables": {"Apple M1, metal": asdict(TUNED)}})
    assert thresholds.current() == TABLES[thresholds.chip_class()]
    thresholds.write(replace(TUNED, packed_queries=32))
    tables = json.loads(file.read_text())["tables"]
    assert tables == {"Apple M1, metal": asdict(TUNED), thresholds.machine(): asdict(replace(TUNED, packed_queries=32))}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid JSON"),
        ([], "an object with version 1"),
        ({"version": 2, "tables": {}}, "an object with version 1"),
        ({"version": 1, "tables": 3}, "an object with version 1"),
        ({"packed_queries": 9}, "a table must have the values packed_queries, short_tokens, simdgroups, min_block"),
        (asdict(TUNED) | {"packed_queries": 0}, "packed_queries is 0; valid are integers from 1 to 64"),
        (asdict(TUNED) | {"short_tokens": -1}, "short_tokens is -1; valid are integers from 0 to 65536"),
        (asdict(TUNED) | {"merge_simdgroups": True}, "merge_simdgroups is True; valid are integers from 1 to 8"),
        (asdict(TUNED) | {"min_block": "64"}, "min_block is '64'"),
    ],
)
def test_a_bad_file_is_ignored_with_its_reason(file, content, why):
    if isinstance(content, dict) and "version" not in content:
        content = {"version": 1, "tables": {thresholds.machine(): content}}
    write_file(file, content)
    with pytest.warns(
        ThresholdsWarning, match=f"thresholds in {file}: .*{why}.*--tune again, or delete the file"
    ) as caught:
        assert [thresholds.current() for _ in range(3)] == [TABLES[thresholds.chip_class()]] * 3
    assert len(caught) == 1


def test_a_file_that_cannot_be_written_is_an_error(file):
    write_file(file, "other content")
    with pytest.raises(ConfigError, match="not valid JSON"):
        thresholds.write(TUNED)
    assert file.read_text() == "other content"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"cannot save the thresholds in .*thresholds\.json: .*Make its folder writable"
    ):
        thresholds.write(TUNED)


def test_the_command_measures_and_saves(file, monkeypatch, capsys):
    """On a CPU it measures `packed_queries` only."""
    monkeypatch.setattr(tuning, "_SECONDS", 0)
    monkeypatch.setattr(tuning, "PACKED_QUERIES", (8,))
    assert __main__.main(["bench", "--tune", "--tokens", "64", "--rounds", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert str(file) in err.replace("\n", "")
    assert json.loads(out)["thresholds"] == asdict(thresholds.current()) == asdict(KernelThresholds(packed_queries=8))
    assert thresholds.table().origin == f"measured, {file}"
    assert environment()["thresholds"] == f"measured, {file}"


def test_the_fastest_candidates_are_chosen(monkeypatch):
    """The times are made up.

    512 simdgroups, blocks of 128, one kernel up to 512 tokens, 12 queries, no tables, and 40 query rows are fastest.
    """

    def seconds(cases, rounds):
        return [
            1
            + abs(case.limits.simdgroups - 512)
            + abs(case.limits.min_block - 128)
            + case.limits.merge_simdgroups
            + case.limits.level_tables
            + (case.limits.short_tokens > 512)
            - (0 < case.limits.short_tokens <= 512) * (case.run is tuning.attend)
            + (case.limits.matrix_queries > 8) * (0.1 if 4 * case.queries > 32 else -0.1)
            + (2 if case.queries > 12 else -2) * (case.run is tuning.attend)
            for case in cases
        ]

    monkeypatch.setattr(tuning, "_time_cases", seconds)
    monkeypatch.setattr(tuning, "_make_cache", lambda tokens: tokens)
    monkeypatch.setattr(backend, "current", lambda: "metal")
    monkeypatch.setattr(thresholds, "current", KernelThresholds)
    steps = list(tuning.tune([64, 4096], 1))
    assert steps[-1][-1] == KernelThresholds(12, 512, 512, 128, 256, 1, 0, 40)
    sweeps = {"simdgroups": 7, "min_block": 4, "merge_simdgroups": 4, "level_tables": 3}
    sweeps |= {"short_tokens": 4, "matrix_queries": 4, "packed_queries": 6}
    assert [name for name, *_ in steps] == [name for name, count in sweeps.items() for _ in range(count)]
