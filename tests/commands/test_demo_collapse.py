"""The models of the collapse at a toy size, and the record of them that comes with the package."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deeploop.commands import demo_collapse
from deeploop.commands.demo_collapse import CURES, METHODS, QUICK_ROUNDS, QUICK_STEPS, ROUNDS, cell, train_all
from deeploop.report import collapse
from deeploop.tasks.language.recipes import tiny
from deeploop.train.metrics import read_metrics

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "demo-collapse"


@pytest.fixture(scope="module", autouse=True)
def narrow():
    """The recipe that all of them start from, at an eighth of its width."""
    base = tiny()
    model = replace(base.model, width=16, hidden=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_collapse, "tiny", lambda: replace(base, model=model))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, train_all(out, 0, quick=True)


def test_the_record_holds_what_the_runs_wrote(trained):
    out, record = trained
    assert [(run["method"], run["rounds"]) for run in record["runs"]] == [
        *((method, R) for R in (1, QUICK_ROUNDS) for method in METHODS),
        *((method, QUICK_ROUNDS) for method in CURES),
    ]
    for run, row in zip(record["runs"], collapse.table_rows(record), strict=True):
        settings = cell(out, 0, run["method"], run["rounds"], QUICK_STEPS)
        last = read_metrics(settings.out, "validation")[-1]
        assert run["validations"][-1]["step"] == last["step"] == QUICK_STEPS
        assert run["train"][-1] == (QUICK_STEPS, round(read_metrics(settings.out, "train")[-1]["loss"], 4))
        assert f"{last['loss']:.3f}" in row
        assert f"{last['similarity']:.2f}" in row
        if law := settings.model.residual.law:
            assert f"{(2 * 2 * run['rounds']) ** law.p:.3f}" in row  # α = (2N)^p, N = 2 blocks × R


def test_a_second_start_trains_nothing_again(trained):
    out, record = trained
    settings = cell(out, 0, "DeepLoop p=1/2", QUICK_ROUNDS, QUICK_STEPS)
    before = (settings.out / "metrics.jsonl").read_text()
    assert train_all(out, 0, quick=True) == record
    assert (settings.out / "metrics.jsonl").read_text() == before


def test_nothing_follows_from_a_quick_look(trained):
    assert "nothing follows" in collapse.verdict(trained[1])


def test_all_six_share_seed_data_and_schedule():
    cells = [cell(Path("demo"), 0, method, rounds) for method in METHODS for rounds in (1, ROUNDS)]
    assert len({repr((c.seed, c.data, c.optim, c.device)) for c in cells}) == 1
    assert len({c.out for c in cells}) == 6


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
    ends |= dict.fromkeys([(method, 1) for method in METHODS], "escaped")
    ends |= dict.fromkeys([(method, ROUNDS) for method in CURES], "escaped")
    runs = [
        {"method": method, "rounds": R, "validations": [{"verdict": end}]}
        for (method, R), end in ends.items()
    ]
    assert says in collapse.verdict({"quick": False, "runs": runs})


@pytest.mark.parametrize(
    ("end", "says"),
    [("escaped", "trains"), ("collapsed", "collapses as well"), ("undecided", "is undecided")],
)
def test_verdict_says_whether_the_bias_helped(end, says):
    ends = {"DeepNorm p=1/4": "collapsed", "DeepLoop p=1/2": "escaped", "DeepNorm p=1/4, unigram bias": end}
    runs = [
        {"method": method, "rounds": 12, "validations": [{"verdict": end}]} for method, end in ends.items()
    ]
    said = collapse.verdict({"quick": False, "runs": runs})
    assert said.endswith(f"that starts at the unigram frequencies p = 1/4 {says}.")


def test_the_shipped_record_is_of_the_models_that_are_trained():
    record = collapse.read()
    assert not record["quick"]
    for run in record["runs"]:
        settings = cell(Path("demo"), record["seed"], run["method"], run["rounds"])
        assert run["validations"][-1]["step"] == run["train"][-1][0] == settings.optim.steps
        assert run.get("alpha", 1) == settings.model.scales.alpha
    assert collapse.draw(record).axes


def test_the_shipped_record_ends_as_its_seed_did_when_seeds_were_counted():
    record = collapse.read()
    counted = [
        row
        for name in ("seeds.json", "seeds-r1.json")
        for row in json.loads((RESULTS / name).read_text())
        if row["seed"] == record["seed"]
    ]
    for run in record["runs"]:
        if run["method"] in CURES:  # seeds were not counted with them
            continue
        own = next(r for r in counted if (r["method"], r["rounds"]) == (run["method"], run["rounds"]))
        assert run["validations"][-1]["verdict"] == own["validations"][-1]["verdict"]


def test_seed_counts_are_those_of_the_page_beside_them():
    rows = json.loads((RESULTS / "seeds.json").read_text())
    page = (RESULTS / "README.md").read_text()
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        assert len(own) >= 3
        escaped = sum(row["validations"][-1]["verdict"] == "escaped" for row in own)
        written = method.replace("p=1/4", "p = ¼").replace("p=1/2", "p = ½")
        assert f"| {written} | {escaped} of {len(own)} |" in page
