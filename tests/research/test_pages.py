"""Pages, figures and assets/rules.json are those that docs/results makes: texts to the byte."""

import json

import pytest

from deeploop.report.plots import RULE_COLOURS
from research import DOCS, RESULTS
from research.pages import FIGURES, FILES, PAGES, renewed
from research.tables import front


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_step(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert renewed(text, PAGES[page], RESULTS) == text, "run: make results"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_in_step(path):
    assert FILES[path](RESULTS) == path.read_text(encoding="utf-8"), "run: make results"


def test_every_page_with_such_a_table_is_made():
    pages = {path for path in DOCS.rglob("*.md") if ": written by `make results` -->" in path.read_text()}
    assert pages == {DOCS / page for page in PAGES}
    assert all((DOCS / name).is_file() for name in FIGURES)


def test_a_table_is_made_between_its_marks():
    marked = "a\n<!-- one: written by `make results` -->\n{}\n<!-- end of one -->\nb\n"
    made = renewed(marked.format("old"), {"one": lambda results: results.name}, RESULTS)
    assert made == marked.format("results")
    with pytest.raises(ValueError, match="lacks the markers"):
        renewed("no markers", {"one": lambda results: ""}, RESULTS)


def test_the_picture_shows_what_readme_says():
    figure = front.front_figure(RESULTS)
    rates, depth = figure.axes
    labels = {text.get_text(): text.get_color() for axes in figure.axes for text in axes.texts}
    assert labels["flat: 4 of 5"] == RULE_COLOURS["flat"]
    assert labels["pre-norm: 0 of 5"] == RULE_COLOURS["pre-norm"]
    assert depth.get_xlim()[1] == 200
    # Diamonds, the means of four seeds: DeepLoop's is the lowest, by 0.006.
    means = {
        line.get_color(): line.get_ydata()[0]
        for line in rates.lines
        if line.get_marker() == "D" and len(line.get_ydata())
    }
    lowest, second = sorted(means.values())[:2]
    assert means[labels["DeepLoop"]] == lowest
    assert round(second - lowest, 3) == 0.006


def test_counts_of_a_steep_ramp_are_those_of_its_runs():
    folder = RESULTS / "demo-collapse"
    page, rows = (folder / "README.md").read_text(), json.loads((folder / "seeds.json").read_text())
    for written in ("pre-norm", "DeepNorm p = ¼", "DeepLoop p = ½"):
        method = written.replace("p = ¼", "p=1/4").replace("p = ½", "p=1/2")
        ends = [row["validations"][-1]["verdict"] for row in rows if row["method"] == method]
        assert f"| {written} | {ends.count('escaped')} of {len(ends)} |" in page
