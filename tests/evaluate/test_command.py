import json
import shlex

import pytest

from mlx_tq.__main__ import main
from mlx_tq.cli.diagnostics import environment
from mlx_tq.cli.inputs import load_text
from mlx_tq.evaluate import build_parser, set_sizes
from mlx_tq.evaluate.measurements import MEASUREMENTS

ROWS = [("off", 1e-4, 0), ("q8/q8", 1.5e-4, 0.4), ("tq4/tq4", 1e-3, 0.4)]
READ = shlex.split("--dtype float32 --chunks 1 --length 256 --step 144 --kv-sinks 16 --kv-window 16")


def test_json_on_stdout_and_nothing_else(capsys):
    assert main(["evaluate", "divergence", "--profiles", "off,tq2/tq2", *READ, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert set(found) == {"command", "settings", "versions", "blas", "results"}
    assert found["command"] == "divergence"
    assert {"model", "dtype", "text", "chunks", "length", "step", "arms", "protocol"} == set(found["settings"])
    assert found["settings"]["arms"]["tq2/tq2"]["sinks"] == 16
    assert set(found["versions"]) == {"mlx_tq", "mlx", "mlx_lm"}
    assert found["blas"] == environment()["blas"]
    assert set(found["results"]) == {"off", "tq2/tq2"}
    assert 0 < found["results"]["off"]["kld"] < 1e-9 < found["results"]["tq2/tq2"]["kld"]


def test_a_table_on_stdout_and_json_in_a_file(tmp_path, capsys):
    target = tmp_path / "out.json"
    assert main(["evaluate", "perplexity", "--profiles", "small", *READ, "--json", str(target)]) == 0
    out, err = capsys.readouterr()
    assert (err, "change %" in out) == ("", True)
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["off", "small", "±:"]
    assert json.loads(target.read_text())["results"]["small"]["tokens"] == 111
    assert list(tmp_path.iterdir()) == [target]


def test_what_reports_a_divergence_computes_in_float32_unless_told_otherwise():
    for name, dtype in (("divergence", "float32"), ("formats", "float32"), ("trajectory", "float32"), ("needle", None)):
        assert build_parser().parse_args([name]).dtype == dtype
    assert build_parser().parse_args(["divergence", "--dtype", "bfloat16"]).dtype == "bfloat16"


def test_a_protocol_sets_what_no_flag_does():
    def sizes(*words):
        args = build_parser().parse_args(["divergence", *words])
        set_sizes(args)
        return args.chunks, args.length, args.step, args.kv_sinks, args.kv_window

    assert sizes("--protocol", "fidelity") == (100, 512, 512, 0, 0)
    assert sizes("--chunks", "20", "--protocol", "fidelity", "--kv-window", "64") == (20, 512, 512, 0, 64)
    assert sizes() == (3, 2048, 512, None, None)


def test_a_protocol_changes_no_typed_flag(capsys):
    words = shlex.split("--chunks 3 --protocol fidelity --length 136 --profiles tq2/tq2 --json -")
    assert main(["evaluate", "divergence", *words]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    arm = settings["arms"]["tq2/tq2"]
    assert (settings["chunks"], settings["length"], arm["sinks"], arm["window"]) == (3, 136, 0, 0)


def test_the_note_names_what_is_not_above_the_floor():
    rows = [{"name": name, "kld": kld, "packed": packed, "clusters": 16} for name, kld, packed in ROWS]
    note = MEASUREMENTS["divergence"].note(rows)
    assert "over 16 parts of the text" in note
    assert "KLD of 1.0e-04 is the floor. Not above it: q8/q8. Lower it" in note
    assert "Not above" not in MEASUREMENTS["divergence"].note(rows[::2])


@pytest.mark.full
def test_formats_resume_and_refuse_other_settings(tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "formats.json"
    text.write_text(load_text())
    words = ["evaluate", "formats", "--keys", "tq2", "--values", "q8,tq2", *READ, "--text", str(text)]
    words += ["--json", str(target)]
    assert main(words) == 0
    first = json.loads(target.read_text())
    assert set(first["results"]) == {"off", "tq2/q8", "tq2/tq2"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["tq2/tq2", "tq2/q8", "off", "±:", "off:"]  # sorted by bytes

    del first["results"]["tq2/tq2"]
    first["results"]["tq2/q8"]["ppl"] = 123.25  # not measured again
    target.write_text(json.dumps(first))
    assert main(words) == main(words) == 0
    before = target.read_text()
    results = json.loads(before)["results"]
    assert (set(results), results["tq2/q8"]["ppl"]) == ({"off", "tq2/q8", "tq2/tq2"}, 123.25)

    assert main([*words, "--step", "48"]) == 2
    text.write_text(load_text()[1:])
    assert main(words) == 2
    assert capsys.readouterr().err.count("holds results of other settings") == 2
    assert target.read_text() == before
    target.write_text("{")
    assert main(words) == 2
    assert "no results to resume" in capsys.readouterr().err


@pytest.mark.full
def test_formats_ask_for_needles_once(tmp_path, capsys):
    target = tmp_path / "formats.json"
    words = ["evaluate", "formats", "--pairs", "fp16/fp16,q8/q8", *READ, "--json", str(target)]
    words += ["--needle-length", "260", "--needles", "1"]
    assert main(words) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-4:-2]] == ["3/3", "-"]
    found = json.loads(target.read_text())
    found["results"]["q8/q8"]["found"] = 1  # not asked again
    target.write_text(json.dumps(found))
    assert main(words) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-4:-2]] == ["1/3", "-"]
    assert main([*words, "--needles", "2"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-4:-2]] == ["6/6", "-"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("verdicts", "strict", "code"),
    [
        (("PASS", "PASS"), True, 0),
        (("PASS", "PARTIAL_WORD"), True, 1),
        (("PASS", "TITLE_CASE"), True, 1),
        (("PASS", "FAIL"), False, 0),
        (("FAIL", "VOID"), True, 0),
    ],
)
def test_strict_fails_if_a_compressed_cache_misses_a_needle(tmp_path, capsys, verdicts, strict, code):
    """The records are read from the file of an earlier run."""
    target = tmp_path / "needles.json"
    words = shlex.split("evaluate needle --dtype float32 --lengths 300 --depths 0.5 --seeds 1 --max-tokens 1")
    words += shlex.split(f"--profiles small --kv-sinks 16 --kv-window 16 --json {target}")
    assert main(words) == 0
    saved = json.loads(target.read_text())
    assert list(saved["results"]) == ["off 300 0.5 0", "small 300 0.5 0"]
    for record, verdict in zip(saved["results"].values(), verdicts, strict=True):
        record["verdict"] = verdict
    target.write_text(json.dumps(saved))
    assert main([*words, *(["--strict"] if strict else [])]) == code
    assert "Needles found" in capsys.readouterr().out
