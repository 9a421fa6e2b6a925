"""The tables of the pages are what the package and the results say now."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.tables import PLACE, RESULTS, TABLES, lines, render
from mlx_tq.config import PROFILES

from .pages import PAGES, ROOT, name, text

HAND_WRITTEN = {"published.md", "formats.md"}  # their tables of words have no other source


def places(page):
    return re.findall(r"^<!-- table: (\w+) -->$", text(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_current(page):
    assert render(text(page)) == text(page), "run: python -m benchmarks.tables"
    assert len(places(page)) == len(PLACE.findall(text(page))), "a table without its end"


def test_every_table_is_generated_and_used():
    assert {table for page in PAGES for table in places(page)} == set(TABLES)
    for page in (ROOT / "docs" / "measurements").glob("*.md"):
        assert page.name in HAND_WRITTEN or not re.search(r"^\|", PLACE.sub("", text(page)), re.MULTILINE), name(page)
    with pytest.raises(ValueError, match="do not fit"):
        lines(["one", "two"], [["1"]])


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"profiles", "formats"}))
def test_a_table_names_model_machine_and_command(table):
    shown = TABLES[table]()
    command, caption = re.match(r"```\n(.+?)\n```\n\n\*(.+?)\*\n", shown, re.DOTALL).groups()
    assert re.search(r"python (-m |benchmarks)|make |mlx_tq", command)
    assert re.match(r"Measured on .+; .+(mlx|cores of).+results/", caption)


def test_the_index_of_benchmarks_is_complete():
    index = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    words = set(re.findall(r"[\w.*]+", index))
    programs = {path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text("utf-8")}
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in programs} - {"workers"}
    assert names - {word.rpartition(".")[2] for word in words} == set()
    assert set(TABLES) <= words
    shown = [re.compile(word.replace("*", ".*")) for word in words]
    unknown = [path for path in RESULTS.iterdir() if not any(w.fullmatch(path.stem) for w in shown)]
    assert [path.name for path in unknown if path.name not in words] == []
    modules = {found.replace(".", "/") for found in re.findall(r"`(benchmarks\.[\w.]+)", index)}
    assert [m for m in modules if not (ROOT / f"{m}.py").exists() and not (ROOT / m / "__main__.py").exists()] == []


def test_what_is_compared_over_a_text_was_measured_over_the_same_one():
    """All records of a text imply one perplexity of the uncompressed cache."""
    for path in RESULTS.glob("*.json"):
        about, whole = json.loads(path.read_text()), {}
        for row in about["rows"] if about.get("command") == "sweep" else ():
            if "delta" in row:
                whole.setdefault(row["text"], set()).add(row["ppl"] / (1 + row["delta"] / 100))
        assert all(max(each) < 1.0001 * min(each) for each in whole.values()), path.name


@pytest.mark.parametrize("name", ["safe", "balanced"])
def test_a_recommended_profile_diverges_least_of_all_pairs_as_small(name):
    reports = [
        json.loads((RESULTS / f"quality_{kind}.json").read_text()) for kind in ("all_formats", "spectral", "mixed")
    ]
    rows = {row["name"]: row for report in reports for row in report["results"].values()}
    chosen = rows[f"{PROFILES[name].key}/{PROFILES[name].value}"]
    better = [row["name"] for row in rows.values() if row["nbytes"] <= chosen["nbytes"] and row["kld"] < chosen["kld"]]
    assert not better


@pytest.mark.parametrize("name", ["safe", "balanced", "small", "tiny"])
def test_no_pair_as_small_as_a_profile_diverges_less_on_all_models(name):
    """Trellis codes of values take longer: pairs with them compete only with a profile that has them."""
    chosen, value = tables.pair(PROFILES[name]), PROFILES[name].value
    better = []
    for model in tables.MODELS:
        rows = {pair: row for pair, row in tables.frontier_results(model).items() if "/" in pair and ":" not in pair}
        pairs = [pair for pair in rows if value.startswith("tcq") or not pair.partition("/")[2].startswith("tcq")]
        least, most = rows[chosen]["ratio"], rows[chosen]["kld"]
        better.append({pair for pair in pairs if rows[pair]["ratio"] >= least and rows[pair]["kld"] < most})
    assert not set.intersection(*better)


def test_a_number_that_changes_changes_its_table(monkeypatch):
    """Nothing in between remembers a figure."""
    before, source = TABLES["divergence"](), "quality_profiles_smollm2.json"
    changed = json.loads((RESULTS / source).read_text())
    changed["results"]["balanced"]["kld"] += 1
    report = tables.report
    monkeypatch.setattr(tables, "report", lambda found: changed if found == source else report(found))
    differ = [line for line in TABLES["divergence"]().splitlines() if line not in before]
    assert len(differ) == 1
    assert differ[0].startswith("| q8/tq4 ")


def test_results_keep_no_record_of_a_single_question():
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 3e6
    for path in RESULTS.glob("*.json"):
        assert '"answer": "' not in path.read_text("utf-8"), f"{path.name}: see benchmarks/summarize.py"
