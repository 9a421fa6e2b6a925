"""Records for mlx-kld: its locked fields, as its validator lists them, and what ranks and plots caches."""

import hashlib
import json
import shlex

import numpy as np
import pytest

from mlx_tq.__main__ import main
from mlx_tq.cli.inputs import load_text

FIELDS = {
    "teacher": ("path", "revision", "precision"),
    "student": ("path", "format", "size_bytes", "effective_bpw", "n_params", "quantization"),
    "tokenizer": ("mode", "identical", "encoding_parity", "forced", "diffs"),
    "calibration": ("corpus", "num_samples", "max_seq_len", "seed", "score_window", "corpus_tokens_hash"),
    "kld": ("mean", "se", "se_method", "floor_mean", "p50", "p95", "p99", "p999", "max"),
    "delta_p": ("mean", "se", "rms"),
    "agreement": ("top1", "top5"),
}
TYPES = {"schema_version": int, "tokens_scored": int, "elapsed_seconds": float, "scorer_version": str, "timestamp": str}
READ = shlex.split("--profiles q8/q8,tq2/tq2 --chunks 2 --length 256 --step 96 --kv-sinks 16 --kv-window 16")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    words = ["evaluate", "divergence", *READ, "--records", str(folder / "new"), "--json", str(folder / "out.json")]
    assert main(words) == 0
    found = [json.loads(path.read_text()) for path in (folder / "new" / "needle").glob("*.json")]
    return json.loads((folder / "out.json").read_text())["results"], {each["student"]["path"]: each for each in found}


def test_each_cache_has_a_record_with_the_locked_fields(records):
    assert set(records[1]) == {"needle-off", "needle-q8-q8-s16-w16", "needle-tq2-tq2-s16-w16"}
    for record in records[1].values():
        for part, names in FIELDS.items():
            assert set(names) <= set(record[part]), part
        assert {name: type(record[name]) for name in TYPES} == TYPES
        assert (record["schema_version"], record["student"]["format"]) == (1, "mlx")


def test_figures_are_those_of_the_results(records, embedded):
    results, found = records
    for name, path in (("off", "needle-off"), ("tq2/tq2", "needle-tq2-tq2-s16-w16")):
        row, record = results[name], found[path]
        kld = record["kld"]
        assert (kld["mean"], kld["se"], kld["p50"], kld["p99"]) == pytest.approx(
            (row["kld"], row["kld_error"], row["kld_median"], row["kld_99"])
        )
        assert kld["floor_mean"] == results["off"]["kld"]
        assert kld["p50"] < kld["p95"] < kld["p99"] < kld["p999"] < kld["max"]
        assert 100 * record["agreement"]["top1"] == pytest.approx(row["top1"])
        assert record["agreement"]["top1"] <= record["agreement"]["top5"] <= 1
        assert record["tokens_scored"] == row["tokens"] == 2 * 159
    ids = embedded[1].encode(load_text()[:4000], add_special_tokens=False)[:512]
    digest = hashlib.sha256(np.array(ids, np.int32).tobytes()).hexdigest()[:16]
    assert found["needle-off"]["calibration"]["corpus_tokens_hash"] == digest


def test_only_a_compressed_cache_is_plotted_at_its_stored_bits(records):
    students = {path: record["student"] for path, record in records[1].items()}
    assert students["needle-off"]["quantization"]["kind"] == "none"  # which `mlx-kld plot` leaves out
    assert students["needle-tq2-tq2-s16-w16"]["quantization"] == {"kind": "kv-cache", "key": "tq2", "value": "tq2"}
    bits = [students[path]["effective_bpw"] for path in sorted(students)]
    assert bits == pytest.approx([32, 8.3, 2.3], abs=0.2)


def test_eviction_is_named_and_changes_no_bits(tmp_path):
    words = shlex.split("--profiles tq2/tq2 --kv-evict recency --kv-budget 50% --kv-sinks 16 --kv-window 16")
    words += shlex.split("--chunks 1 --length 1024 --step 256")
    assert main(["evaluate", "divergence", *words, "--records", str(tmp_path)]) == 0
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "needle").glob("needle-tq2*.json"))
    assert record["student"]["provenance"]["evict"]["budget"] == "50%"
    assert record["student"]["effective_bpw"] == pytest.approx(2.3, abs=0.2)


def test_a_folder_that_cannot_be_is_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["evaluate", "divergence", *READ, "--records", str(tmp_path / "file")]) == 2
    assert "is neither a folder nor in one" in capsys.readouterr().err
