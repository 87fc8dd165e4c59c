"""The models of the collapse at a toy size, and the record of them that comes with the package."""

import json
from pathlib import Path

import pytest

from deeploop.commands import demo_collapse, demo_page
from deeploop.commands.demo_collapse import (
    CURES,
    METHODS,
    QUICK_ROUNDS,
    QUICK_STEPS,
    ROUNDS,
    STEPS,
    grid,
    train_all,
)
from deeploop.report import plots
from deeploop.train.metrics import read_metrics

TITLES, CURED = ([title for title, _ in found.values()] for found in (METHODS, CURES))
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "demo-collapse"


@pytest.fixture(scope="module", autouse=True)
def narrow():
    """The models at an eighth of their width."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("model.width", "model.hidden"):
            patch.setitem(demo_collapse.SETTINGS, name, 16)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, train_all(out, 0, quick=True)


def runs_of(out):
    return out / "runs" / f"collapse-seed0-{QUICK_STEPS}steps"


def test_the_record_holds_what_the_runs_wrote(trained):
    out, record = trained
    assert [(run["method"], run["rounds"]) for run in record["runs"]] == [
        *((method, R) for R in (1, QUICK_ROUNDS) for method in TITLES),
        *((method, QUICK_ROUNDS) for method in CURED),
    ]
    cells = grid(out, 0, (1, QUICK_ROUNDS), QUICK_STEPS).cells()
    for cell, run, row in zip(cells, record["runs"], demo_page.collapse_table(record).rows, strict=True):
        settings, folder = cell.config(), runs_of(out) / cell.name
        last = read_metrics(folder, "validation")[-1]
        assert run["validations"][-1]["step"] == last["step"] == QUICK_STEPS
        assert run["train"][-1] == (QUICK_STEPS, round(read_metrics(folder, "train")[-1]["loss"], 4))
        assert f"{last['loss']:.3f}" in row
        assert f"{last['similarity']:.2f}" in row
        if law := settings.model.residual.law:
            assert f"{(2 * 2 * run['rounds']) ** law.p:.3f}" in row  # α = (2N)^p, N = 2 blocks × R


def test_a_second_start_trains_nothing_again(trained):
    out, record = trained
    metrics = runs_of(out) / f"r{QUICK_ROUNDS}-deeploop" / "metrics.jsonl"
    before = metrics.read_text()
    assert train_all(out, 0, quick=True) == record
    assert metrics.read_text() == before


def test_nothing_follows_from_a_quick_look(trained):
    assert "nothing follows" in demo_page.collapse_verdict(trained[1])


def test_all_six_share_seed_data_and_schedule():
    cells = [c.config() for c in grid(Path("demo"), 0).cells()]
    assert len(cells) == 7
    assert len({repr((c.seed, c.data, c.optim, c.device)) for c in cells}) == 1
    assert [c.model.unigram_bias for c in cells] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("small", "large", "says"),
    [
        ("collapsed", "escaped", "the exponent decides"),
        ("escaped", "escaped", "both exponents train"),
        ("collapsed", "collapsed", "both exponents collapse"),
        ("escaped", "collapsed", "not what the bound predicts"),
        ("undecided", "escaped", "p = 1/4 undecided; p = 1/2 trains"),
        ("collapsed", "undecided", "p = 1/4 COLLAPSED; p = 1/2 undecided"),
    ],
)
def test_verdict_says_what_happened(small, large, says):
    ends = {("DeepNorm p=1/4", ROUNDS): small, ("DeepLoop p=1/2", ROUNDS): large}
    ends |= dict.fromkeys([(method, 1) for method in TITLES], "escaped")
    ends |= dict.fromkeys([(method, ROUNDS) for method in CURED], "escaped")
    runs = [
        {"method": method, "rounds": R, "validations": [{"verdict": end}]}
        for (method, R), end in ends.items()
    ]
    assert says in demo_page.collapse_verdict({"quick": False, "runs": runs})


@pytest.mark.parametrize(
    ("end", "says"),
    [("escaped", "trains"), ("collapsed", "collapses as well"), ("undecided", "is undecided")],
)
def test_verdict_says_whether_the_bias_helped(end, says):
    ends = {"DeepNorm p=1/4": "collapsed", "DeepLoop p=1/2": "escaped", "DeepNorm p=1/4, unigram bias": end}
    runs = [
        {"method": method, "rounds": 12, "validations": [{"verdict": end}]} for method, end in ends.items()
    ]
    said = demo_page.collapse_verdict({"quick": False, "runs": runs})
    assert said.endswith(f"that starts at the unigram frequencies p = 1/4 {says}.")


def test_the_shipped_record_is_of_the_models_that_are_trained():
    record = demo_page.read_collapse()
    assert not record["quick"]
    cells = grid(Path("demo"), record["seed"]).cells()
    assert record["steps"] == STEPS
    for cell, run in zip(cells, record["runs"], strict=True):
        settings = cell.config()
        assert (METHODS | CURES)[cell.axes["method"]][0] == run["method"]
        assert run["validations"][-1]["step"] == run["train"][-1][0] == settings.optim.steps
        assert run.get("alpha", 1) == settings.model.scales.alpha
    assert plots.draw(demo_page.collapse_chart(record)).axes


def test_the_shipped_record_ends_as_its_seed_did_when_seeds_were_counted():
    record = demo_page.read_collapse()
    counted = [
        row
        for name in ("seeds.json", "seeds-r1.json")
        for row in json.loads((RESULTS / name).read_text())
        if row["seed"] == record["seed"]
    ]
    for run in record["runs"]:
        if run["method"] in CURED:  # seeds were not counted with them
            continue
        own = next(r for r in counted if (r["method"], r["rounds"]) == (run["method"], run["rounds"]))
        assert run["validations"][-1]["verdict"] == own["validations"][-1]["verdict"]


def test_seed_counts_are_those_of_the_page_beside_them():
    rows = json.loads((RESULTS / "seeds.json").read_text())
    page = (RESULTS / "README.md").read_text()
    for method in TITLES:
        own = [row for row in rows if row["method"] == method]
        assert len(own) >= 3
        escaped = sum(row["validations"][-1]["verdict"] == "escaped" for row in own)
        written = method.replace("p=1/4", "p = ¼").replace("p=1/2", "p = ½")
        assert f"| {written} | {escaped} of {len(own)} |" in page
