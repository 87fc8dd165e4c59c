"""Pages escape what they quote, tables line up, curves are means of what was read."""

import math
import re
from itertools import combinations

import pytest

from deeploop.report import page, plots
from deeploop.report.plots import Chart, Line, Panel
from deeploop.report.tables import MISSING, Table, text_table
from deeploop.rules import RULES


def test_page_escapes_everything_it_is_given() -> None:
    evil = '<script>alert("x")</script>'
    table = Table("evil", evil, [evil], [[evil]], evil)
    chart = Chart("evil", evil, [Panel([Line([1], [2], evil)], evil, evil, evil)])
    parts = [evil, page.command(evil), page.note(evil), table, chart]
    text = page.page(evil, [page.Section(evil, parts)], contents=True)
    assert "<script>" not in text
    # The title and the section's stand twice, the heading of the column three times with its two cells.
    assert text.count("&lt;script&gt;") == 2 + 2 + 3 + 5 + 1 + 2 * 4
    assert not re.search(r"<(?!/?[a-z!?])", text)


def test_text_table_aligns_columns() -> None:
    lines = text_table(("name", "x"), [("a", "1.5"), ("longer", "-10.25")]).splitlines()
    assert lines == ["name         x", "──────  ──────", "a          1.5", "longer  -10.25"]


def test_numbers_with_remarks_stand_to_the_right_as_numbers_do() -> None:
    losses = [
        "2.1",
        "2.05 ± 0.07 (2 runs of 1 seed)",
        "2.0 (1 of 3 collapsed, 3 runs of 2 seeds)",
        MISSING,
    ]
    counts = ["2", "3 runs of 2 seeds", "3/5", "0.09 to 0.91"]
    words = ["2", "2 blocks of width 32", "2", "2"]
    table = Table("", "", ["losses", "counts", "words"], list(zip(losses, counts, words, strict=True)))
    assert table.numeric == [True, True, False]


def test_a_table_is_the_same_in_every_form() -> None:
    table = Table.of(
        "own", "Own", [1, 2], {"n": str, "square": lambda n: str(n * n), "none": lambda n: MISSING}
    )
    assert table.filled.header == ["n", "square"]
    assert table.filled.text().splitlines()[2:] == ["1       1", "2       4"]
    assert table.filled.markdown().splitlines()[2:] == ["| 1 | 1 |", "| 2 | 4 |"]
    assert table.filled.csv().split() == ["n,square", "1,1", "2,4"]
    assert '<td class="" data-head="square">4</td>' in table.html()


def test_a_table_wider_than_a_phone_has_a_card_for_each_row() -> None:
    assert 'class="cards"' not in Table("", "", ["narrow"], [["1"]]).html()
    assert 'class="cards"' in Table("", "", [f"column {i}" for i in range(8)], [["1"] * 8]).html()


def test_a_rule_keeps_its_colour_whatever_is_added_to_it() -> None:
    labels = ("pre-norm", "averaged", "factored", "flat", "DeepNorm p=0.25", "DeepLoop p=0.5")
    found = plots.looks(labels)
    assert [colour for colour, _ in found.values()] == [plots.RULE_COLOURS[plots.rule_of(x)] for x in labels]
    assert {dashes for _, dashes in found.values()} == {"-"}
    for suffix in (" + unigram bias", ", peak_lr 0.001", " λ=2", ", set-up A"):
        assert [*plots.looks([label + suffix for label in labels]).values()] == [*found.values()]


def test_several_labels_of_a_rule_have_its_colour_and_other_dashes() -> None:
    found = plots.looks(["flat", "flat + wait", "flat + Muon", "pre-norm", "sideways p=0.3"])
    assert len({*found.values()}) == len(found)
    assert {colour for label, (colour, _) in found.items() if label.startswith("flat")} == {"#009E73"}
    assert found["sideways p=0.3"][0] not in plots.RULE_COLOURS.values()


def test_labels_of_one_rule_alone_are_told_apart_by_colour() -> None:
    found = plots.looks([f"DeepLoop p=0.5, peak_lr {rate}" for rate in (1, 2, 4)])
    assert [*found.values()] == [(colour, "-") for colour in plots.graded(3)]
    assert len({*plots.graded(7)}) == 7


@pytest.mark.parametrize("page", ["#ffffff", "#17171a"])
def test_colours_of_rules_are_far_apart_and_visible(page: str) -> None:
    """Distances of CIELAB; 2.3 is just noticeable."""
    found = {rule.label: lab(rule.colour) for rule in RULES}
    for one, other in combinations(found, 2):
        assert math.dist(found[one], found[other]) > 35, (one, other)
    for name, own in found.items():
        assert abs(own[0] - lab(page)[0]) > 20, name


def lab(colour: str) -> tuple[float, float, float]:
    """Lightness, red against green, yellow against blue."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_a_chart_fills_the_page_and_a_phone() -> None:
    chart = Chart("own", "", [Panel([Line([1, 2], [3, 4], f"line {i}")], f"panel {i}") for i in range(5)])
    wide, narrow = plots.draw(chart), plots.draw(chart, plots.NARROW)
    assert (wide.get_figwidth(), narrow.get_figwidth()) == (plots.WIDE, plots.NARROW)
    for figure, columns in ((wide, 3), (narrow, 1)):
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert [axes.get_title() for axes in shown] == [panel.title for panel in chart.panels]
        assert shown[0].get_subplotspec().get_gridspec().ncols == columns
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [f"line {i}" for i in range(5)]
    drawn = plots.inline_svg(chart)
    assert [drawn.count(f'<svg class="{kind}"') for kind in ("page", "phone")] == [1, 1]
    assert plots.INK not in drawn


def test_a_long_label_is_broken_to_fit_a_phone() -> None:
    label = "DeepLoop p=0.5 + unigram bias · peak_lr 0.004 · warmup_steps 100"
    figure = plots.draw(Chart("one", "", [Panel([Line([0, 1], [0, 1], label)])]), plots.NARROW)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text().split() == label.split()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_marks_of_a_panel_are_drawn() -> None:
    line = Line([1, 2], [3.0, 4.0], "own")
    panel = Panel([line], level=(3.5, "floor"), at=(2, "trained"), shaded=(1, 1.5), right=("bits", 2.0),
                  texts=[(1, 4, "here", "#000000")], x_ticks={1: "one"}, y_range=(2, 5))  # fmt: skip
    (axes,) = plots.draw(Chart("own", "", [panel])).axes
    assert [text.get_text() for text in axes.texts] == ["here", " trained "]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["one"]
    assert axes.get_ylim() == (2, 5)
    assert "floor" in axes.get_legend_handles_labels()[1]


def test_running_mean_against_definition() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    expected = [sum(values[max(0, i - 2) : i + 1]) / len(values[max(0, i - 2) : i + 1]) for i in range(6)]
    assert plots.running_mean(values, 3) == expected
    assert plots.running_mean(values, 1) == values
