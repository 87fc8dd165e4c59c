"""The demo's sentences and figures, from records made up here."""

import json
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from deeploop.commands.demo_page import (
    COUNTED,
    PALE,
    RED,
    TABLE,
    accuracy,
    percent,
    read_cells,
    rgba,
    strip,
    table_rows,
    tapes,
    verdict,
)
from deeploop.report.beyond import goes_on
from deeploop.report.plots import INK, RULE_COLOURS, draw
from deeploop.report.runs import find_runs

ROOT = Path(__file__).parents[2]


def record(**cells):
    """Models whose share of cells right is 1 up to a number of steps and 0.5 beyond, or as given."""
    shares = {
        name: {str(h): 1.0 if h <= own else 0.5 for h in TABLE} if isinstance(own, int) else own
        for name, own in cells.items()
    }
    truth = ["0101", *["0110"] * 200]
    models = {
        name: {
            "cells": own,
            "states": truth[1:],
        }
        for name, own in shares.items()
    }
    copying = {str(h): 0.6 for h in TABLE if h > 4}
    return {
        "quick": False,
        "rule": 86,
        "length": 4,
        "rows": 1,
        "trained_steps": 4,
        "steps": list(TABLE),
        "models": models,
        "copying": copying,
        "truth": truth,
    }


def test_the_verdict_says_what_is_right_at_the_last_step():
    said = verdict(record(flat=200, **{"pre-norm": 9}))
    assert said == (
        "Trained on 1 to 4 steps; cells right at 200 steps: flat 100%, pre-norm 50.0%; copying one of the "
        f"first rows 60.0%. {COUNTED}"
    )


def test_how_often_a_rule_goes_on_is_what_the_ten_seeds_gave():
    """The sentence's numbers, counted again in the packed runs."""
    counts = {"deeploop": [], "flat": []}
    for run in find_runs([ROOT / "docs" / "results" / "demo-rule" / "grid"]):
        shares = dict(zip(run.validation["steps"], run.validation["cells_by_steps"], strict=True))
        if run.fields["model.rule"] in counts:
            counts[run.fields["model.rule"]].append(goes_on({h: shares[h] for h in TABLE[-2:]}, trained=4))
    assert {len(found) for found in counts.values()} == {10}
    assert (
        f"flat extrapolates to 200 steps in {sum(counts['flat'])}, DeepLoop in {sum(counts['deeploop'])};"
        in COUNTED
    )


def test_100_percent_is_said_of_nothing_less():
    assert [percent(share) for share in (1.0, 0.99999, 0.5004)] == ["100%", "99.9%", "50.0%"]


def test_copying_has_no_number_inside_the_trained_steps():
    *_, copied = table_rows(record(flat=200))
    assert copied == ("copying", "–", "–", "–", "–", *["0.600"] * 6)


def test_wrong_cells_are_red():
    """Of ones, zeros, and what is neither, each right and wrong."""
    cells, truth = read_cells(["1100?"]), read_cells(["10010"])
    assert cells.tolist() == [[1, 1, 0, 0, 2]]
    drawn = strip(cells, truth)[:, 0]
    assert np.allclose(drawn[[0, 1, 3, 4]], [rgba(INK), rgba(RED), rgba(PALE), rgba(PALE)])
    assert drawn[2, 3] == 0


def test_the_strip_says_where_the_first_wrong_cell_is():
    made = record(flat=200)
    states = made["models"]["flat"]["states"]
    made["models"]["flat"]["states"] = [*states[:6], "0111", *states[7:]]
    figure = draw(tapes(made))
    titles = [axes.get_title() for axes in figure.axes]
    assert "wrong: says 1" in [text.get_text() for text in figure.legends[0].texts]
    assert any(title.startswith("flat: first wrong cell at step 7;") for title in titles)
    whole = [panel.title for panel in tapes(record(flat=200)).panels]
    assert "flat: no cell is wrong in 200 steps" in whole


def test_lines_of_the_same_accuracy_are_both_seen():
    """In the drawn chart: pixels of either colour, in the rows where both lines are at 1."""
    figure = draw(accuracy(record(DeepLoop=200, flat=200, **{"pre-norm": 9}, stack=1)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    height = canvas.get_width_height()[1]
    row = height - round(axes.transData.transform((100, 1.0))[1])
    band = np.asarray(canvas.buffer_rgba())[row - 6 : row + 7, :, :3]
    for rule in ("DeepLoop", "flat"):
        colour = [round(255 * part) for part in rgba(RULE_COLOURS[rule])[:3]]
        assert (np.abs(band - np.array(colour)).max(-1) < 8).sum() > 200, rule


def test_curves_have_their_rules_colours():
    (panel,) = accuracy(record(DeepLoop=9, flat=200, **{"pre-norm": 9}, stack=1)).panels
    colours = {line.label: line.colour for line in panel.lines}
    assert colours["flat"] == "#009E73"
    assert colours["pre-norm"] == "#0072B2"
    assert len(set(colours.values())) == 5


def test_the_page_says_what_the_record_beside_its_picture_says():
    folder = ROOT / "docs" / "results" / "demo"
    found = json.loads((folder / "demo.json").read_text())
    page = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert f"Seed {found['seed']}: {verdict(found)}" in page
