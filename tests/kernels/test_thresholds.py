"""Thresholds: the built-in tables, the file of this machine, and the command that measures it."""

import json
from dataclasses import asdict, replace
from unittest import mock

import mlx.core as mx
import pytest

from mlx_tq import __main__
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import backend, build, thresholds, tuning
from mlx_tq.kernels.thresholds import TABLES, KernelThresholds, ThresholdsWarning

TUNED = KernelThresholds(packed_queries=16, simdgroups=300)


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """Where the table is kept, out of the way of this machine's own."""
    path = tmp_path / "mlx_tq" / "thresholds.json"
    monkeypatch.setattr(thresholds, "file", lambda: path)
    thresholds._in_use.cache_clear()
    yield path
    thresholds._in_use.cache_clear()


def keep(path, content) -> None:
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("chip", "table"),
    [("Apple M1", "base"), ("Apple M4 Pro", "Pro"), ("Apple M2 Max", "Max"), ("Apple M3 Ultra", "Ultra")],
)
def test_each_chip_has_a_table(chip, table):
    with (
        mock.patch.object(build, "backend", return_value="metal"),
        mock.patch.object(mx, "device_info", return_value={"device_name": chip}),
    ):
        assert thresholds.chip_class() == table
        assert thresholds.current() is TABLES[table]
        assert thresholds.machine() == f"{chip}, metal"
        with backend.using("reference"):
            assert thresholds.chip_class() == "reference"


def test_what_was_written_is_taken_until_it_is_gone(file):
    assert thresholds.table().origin == f"built in for {thresholds.chip_class()!r}"
    assert thresholds.write(TUNED) == file
    assert thresholds.table() == (TUNED, f"measured, {file}")
    assert list(file.parent.iterdir()) == [file]
    with thresholds.using(KernelThresholds()):
        assert thresholds.current() == KernelThresholds()
    assert thresholds.current() == TUNED


def test_other_machines_keep_their_tables(file):
    keep(file, {"version": 2, "tables": {"Apple M1, metal": asdict(TUNED)}})
    assert thresholds.current() == TABLES[thresholds.chip_class()]
    thresholds.write(replace(TUNED, packed_queries=32))
    tables = json.loads(file.read_text())["tables"]
    assert tables == {"Apple M1, metal": asdict(TUNED), thresholds.machine(): asdict(replace(TUNED, packed_queries=32))}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "this is no JSON"),
        ([], "an object with version 2"),
        ({"version": 1, "tables": {}}, "an object with version 2"),
        ({"version": 2, "tables": 3}, "an object with version 2"),
        ({"packed_queries": 9}, "a table has the values packed_queries, short, simdgroups, least_block"),
        (asdict(TUNED) | {"packed_queries": 0}, "packed_queries is 0; valid are whole numbers from 1 to 64"),
        (asdict(TUNED) | {"short": -1}, "short is -1; valid are whole numbers from 0 to 65536"),
        (asdict(TUNED) | {"merging": True}, "merging is True; valid are whole numbers from 1 to 8"),
        (asdict(TUNED) | {"least_block": "64"}, "least_block is '64'"),
    ],
)
def test_a_bad_file_is_ignored_with_its_reason(file, content, why):
    if isinstance(content, dict) and "version" not in content:
        content = {"version": 2, "tables": {thresholds.machine(): content}}
    keep(file, content)
    with pytest.warns(
        ThresholdsWarning, match=f"{file} are ignored: .*{why}.*--tune again, or delete the file"
    ) as caught:
        assert [thresholds.current() for _ in range(3)] == [TABLES[thresholds.chip_class()]] * 3
    assert len(caught) == 1


def test_where_nothing_can_be_written(file):
    keep(file, "mine")
    with pytest.raises(ConfigError, match="no JSON"):
        thresholds.write(TUNED)
    assert file.read_text() == "mine"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*thresholds\.json: .*Make its folder writable"):
        thresholds.write(TUNED)


def test_the_command_measures_and_keeps(file, monkeypatch, capsys):
    """Of what a CPU has: up to how many queries attend to packed rows."""
    monkeypatch.setattr(tuning, "_TARGET", 0)
    monkeypatch.setattr(tuning, "QUERIES", (8,))
    assert __main__.main(["bench", "--tune", "--tokens", "64", "--rounds", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert str(file) in err.replace("\n", "")
    assert json.loads(out)["thresholds"] == asdict(thresholds.current()) == asdict(KernelThresholds(packed_queries=8))
    assert thresholds.table().origin == f"measured, {file}"
    assert __main__.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"]["thresholds"] == f"measured, {file}"


def test_the_fastest_is_chosen(monkeypatch):
    """With times that are made up: 512 simdgroups, blocks of 128, one kernel up to 512 tokens, and up to 12 queries."""

    def seconds(cases, rounds):
        return [
            1
            + abs(cut.simdgroups - 512)
            + abs(cut.least_block - 128)
            + cut.merging
            + (cut.short > 512)
            - (0 < cut.short <= 512) * (run is tuning.attend)
            + (2 if count > 12 else -2) * (run is tuning.attend)
            for _, run, count, cut in cases
        ]

    monkeypatch.setattr(tuning, "_seconds", seconds)
    monkeypatch.setattr(backend, "current", lambda: "reference")
    monkeypatch.setattr(tuning, "_Problem", lambda tokens: tokens)
    monkeypatch.setattr(tuning.backend, "current", lambda: "metal")
    monkeypatch.setattr(tuning.thresholds, "current", KernelThresholds)
    steps = list(tuning.tune([64, 4096], 1))
    assert steps[-1][-1].simdgroups == 512
    assert steps[-1][-1].least_block == 128
    assert steps[-1][-1].merging == 1
    assert steps[-1][-1].short == 512
    assert steps[-1][-1].packed_queries == 12
    names = [*["simdgroups"] * 7, *["least_block"] * 4, *["merging"] * 4, *["short"] * 4, *["packed_queries"] * 6]
    assert [name for name, *_ in steps] == names
