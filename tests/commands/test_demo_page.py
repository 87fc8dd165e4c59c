"""The demo's sentences and figures, from records made up here."""

import json
from pathlib import Path

import numpy as np
import pytest

from deeploop.commands.demo_page import (
    COUNTED,
    FAR,
    RED,
    TABLE,
    accuracy,
    percent,
    reach,
    read_cells,
    rgba,
    strip,
    table_rows,
    tapes,
    verdict,
)
from deeploop.report.plots import INK, draw
from deeploop.report.runs import find_runs
from deeploop.report.views import goes_on

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
            "optim_steps": 1000 if name == "stack" else 2000,
            "neither": {"200": 0.0},
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


def test_the_claim_is_made_where_it_holds():
    said = verdict(record(flat=200, **{"pre-norm": 9}, stack=1))
    assert said.startswith(
        "Trained on 1 to 4 steps, the flat loop has 100% of the cells right at 127 steps and 100% at 200."
    )
    assert "The pre-norm loop is right up to 9 steps and has 50.0% at 200." in said
    assert "loop, trained for 1,000 steps of 2,000, is right up to 1 step and has 50.0% at 200." in said
    assert said.endswith(f"Copying one of the first rows would have 60.0% right at 200. {COUNTED}")


def test_deeploop_stands_beside_flat():
    said = verdict(record(DeepLoop=24, flat=200))
    assert "The DeepLoop loop is right up to 24 steps and has 50.0% at 200." in said


def test_how_often_a_rule_goes_on_is_what_the_ten_seeds_gave():
    """The sentence's numbers, counted again in the packed runs."""
    counts = {"deeploop": [], "flat": []}
    for run in find_runs([ROOT / "docs" / "results" / "demo-rule" / "grid"]):
        shares = dict(zip(run.validation["steps"], run.validation["cells_by_steps"], strict=True))
        if run.fields["model.rule"] in counts:
            counts[run.fields["model.rule"]].append(goes_on({h: shares[h] for h in FAR}, trained=4))
    assert {len(found) for found in counts.values()} == {10}
    assert (
        f"flat extrapolates to 200 steps in {sum(counts['flat'])}, DeepLoop in {sum(counts['deeploop'])};"
        in COUNTED
    )


@pytest.mark.parametrize(
    ("flat", "says"),
    [
        (24, "With this seed the flat loop is right up to 24 steps, not to 200: 50.0%"),
        (4, "is not right beyond its 4 trained steps"),
        (0, "is not right beyond its 4 trained steps"),
    ],
)
def test_where_it_does_not_hold_that_is_said(flat, says):
    assert says in verdict(record(flat=flat, stack=0))


def test_a_model_without_a_right_step_is_said_to_learn_none():
    said = verdict(record(flat=200, **{"pre-norm": 0}))
    assert "The pre-norm loop does not learn even one step, and has 50.0% at 200." in said


def test_answers_that_are_no_cells_are_told():
    made = record(flat=200, **{"pre-norm": 9})
    made["models"]["pre-norm"]["neither"]["200"] = 0.4
    assert "has 50.0% at 200, where 40% of its answers are neither 0 nor 1." in verdict(made)


def test_one_far_number_alone_does_not_make_the_claim():
    shares = {str(h): 1.0 for h in TABLE} | {"127": 0.98}
    said = verdict(record(flat=shares))
    assert "is right up to 77 steps, not to 200: 98.0% of the cells right at 127 steps and 100%" in said


def test_reach_ends_at_the_first_miss():
    assert reach({"cells": {"1": 1.0, "2": 0.99, "4": 0.98, "9": 1.0}}) == 2
    assert reach({"cells": {"10": 1.0, "9": 0.5}}) == 0  # by number, not by text


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
    assert np.allclose(drawn[0], rgba(INK, 1))
    assert np.allclose(drawn[1], rgba(RED, 1))
    assert drawn[2, 3] == 0
    assert np.allclose(drawn[3:], [rgba(RED, 0.5), rgba(RED, 0.25)])


def test_the_strip_says_where_the_first_wrong_cell_is():
    made = record(flat=200)
    states = made["models"]["flat"]["states"]
    made["models"]["flat"]["states"] = [*states[:6], "0111", *states[7:]]
    figure = draw(tapes(made))
    titles = [axes.get_title() for axes in figure.axes]
    # The picture is also shown without its page: it explains the colours that are in it, and no others.
    assert [text.get_text() for text in figure.legends[0].texts] == ["1 (0 is empty)", "wrong: says 1"]
    assert any(title.startswith("flat: first wrong cell at step 7;") for title in titles)
    whole = [panel.title for panel in tapes(record(flat=200)).panels]
    assert "flat: no cell is wrong in 200 steps" in whole


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
