"""The plots can be read: on a white page and on a dark one, with labels that are whole and apart."""

import importlib
import re

import pytest

from benchmarks.tables import RESULTS

from .pages import PAGES, README, ROOT, text

PLOTS = sorted(  # in the same order in each test process
    {(page.parent / link).resolve() for page in PAGES for link in re.findall(r"\]\((\S+\.svg)\)", text(page))}
)
PAGE_COLORS = ("#ffffff", "#0d1117")  # of GitHub
CONTRAST = 3  # what WCAG 2 asks of graphics and large text


def program(name):
    pytest.importorskip("matplotlib")
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def frontier():
    return program("plot_frontier")


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_a_page_shows_each_plot_and_the_readme_one():
    assert sorted(path.resolve() for path in ROOT.rglob("benchmarks/**/*.svg")) == PLOTS
    assert ".svg)" in text(README)


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_a_plot_is_legible_on_white_and_on_black(path):
    drawing = path.read_text("utf-8")
    colors = set(re.findall(r"#[0-9a-f]{6}\b", drawing))
    assert len(colors) > 2
    unreadable = [color for color in colors if min(contrast(color, page) for page in PAGE_COLORS) < CONTRAST]
    assert unreadable == []
    assert not re.search(r'id="patch_1">\s*<path d="[^"]*"[^>]*fill: #', drawing), "it has a background"


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_a_plot_names_what_it_compares_as_its_owners_do(path):
    shown = " ".join(re.findall("<!-- (.*?) -->", path.read_text("utf-8"))).replace(
        "- -", "--"
    )  # so in comments of XML
    assert "--kv-bits" in shown
    assert ("q4_0" in shown) == (path.stem == "frontier")
    assert "higher is better" in shown
    assert ("lower is better" in shown) == (path.stem == "contexts")
    assert not re.search("affine|conditioned|plain|embedded", shown)


@pytest.mark.full
@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_a_plot_is_that_of_the_results(path, tmp_path):
    def marks(drawing):
        places = re.findall(r'<use [^>]*?x="([\d.]+)" y="([\d.]+)"', drawing)
        return re.findall("<!-- (.*?) -->", drawing), [(round(float(x)), round(float(y))) for x, y in places]

    program(f"plot_{path.stem}").plot(tmp_path / path.name)
    drawn, kept = ((folder / path.name).read_text("utf-8") for folder in (tmp_path, RESULTS))
    assert marks(drawn) == marks(kept), "run: make plot"


@pytest.mark.parametrize(
    ("label", "offset", "fault"),
    [
        ("balanced", (-120, 5), "'balanced' overlaps 'small'"),
        ("balanced", (-20, -5), "'balanced' lies on a line"),
    ],
)
def test_a_label_that_cannot_be_read_is_refused(frontier, label, offset, fault, monkeypatch, tmp_path):
    _, _, labels = frontier.SERIES["mlx_tq"]
    name = next(name for name, (shown, _) in labels.items() if shown == label)
    monkeypatch.setitem(labels, name, (label, offset))
    with pytest.raises(ValueError, match=re.escape(fault)):
        frontier.plot(tmp_path / "frontier.svg")


def test_a_label_that_is_cut_off_is_refused():
    plots = program("plots")
    figure = plots.Figure()
    figure.text(0.98, 0.5, "llama.cpp")
    with pytest.raises(ValueError, match=r"'llama\.cpp' leaves the picture"):
        plots.check_labels(figure)
