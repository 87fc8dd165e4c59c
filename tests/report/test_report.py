"""`deeploop report`: numbers come from the runs, cells without a run are missing, quoted text stays text."""

import csv
import json
import math
import re
import time
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from deeploop.cli import main
from deeploop.commands.report import ReportArgs, run
from deeploop.paper import published
from deeploop.report import alignment, means, plots
from deeploop.report.beside_paper import (
    accuracy,
    accuracy_cells,
    count_escapes,
    p_sweep_table,
    p_sweeps,
    wilson,
)
from deeploop.report.groups import Histories, Setup, setups
from deeploop.report.losses import against, curves
from deeploop.report.page import Section, write
from deeploop.report.runs import find_runs
from deeploop.report.tables import MISSING, Table, inert
from deeploop.train.metrics import read_metrics
from run_folders import FLOOR, write_run, write_sweep

pytestmark = pytest.mark.usefixtures("undrawn")  # but for the module's own report, which is drawn before
EVIL = "<img src=x onerror=alert(1)> $x_1$ | `a` _"
LOSSES = {
    ("prenorm", 1): (2.5, 2.51),
    ("prenorm", 3): (2.3, 2.32),
    ("deeploop", 1): (2.6, 2.62),
    ("deeploop", 3): (2.2, 2.1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report over a table with a missing cell, a p-sweep, an evaluation, a diagnosis, an evil name."""
    root = tmp_path_factory.mktemp("report")
    cells = {}
    for (block, R), losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            name = f"{block}-r{R}-s{seed}"
            cells[name] = {"rule": block, "rounds": R, "seed": seed, "size": "medium"}
            write_run(
                root / "table" / name, rule=block, rounds=R, seed=seed, loss=loss, mfu=0.3, peak_lr=2e-3
            )
    cells["deeploop-r7-s0"] = {"rule": "deeploop", "rounds": 7, "seed": 0, "size": "medium"}
    write_sweep(root / "table", cells)
    for p in (0.25, 0.5, 0.6):
        for seed in (0, 1):
            falls = p == 0.25 or (p == 0.5 and seed == 1)
            write_run(root / "p" / f"p{p}-s{seed}", rule=f"deeploop:p={p}", seed=seed, steps=36, step=36,
                      loss=3.1 if falls else 2 + p, similarity=1.0 if falls else 0.1)  # fmt: skip
    stamp = {"command": ["deeploop", "</pre><script>alert(1)</script>", "two words"]}
    evil = write_run(root / EVIL, rounds=5, rule="prenorm", steps=80, step=40, stamp=stamp)
    results = [
        {"task": task, "shots": 0, "rounds": R, "acc": 0.3 + 0.01 * i}
        for i, task in enumerate(published.TASKS)
        for R in (3, 5)
    ]
    record = {
        "trained_rounds": 3,
        "results": results,
        "deviations": ["<b>few</b> documents"],
        "command": ["deeploop", "eval"],
    }
    (root / "table" / "deeploop-r3-s0" / "eval.json").write_text(json.dumps({"evaluations": [record]}))
    kappa = {"step": 40, "rounds": 3, "kappa": 1.25, "kappa_raw": 1.5, "similarity": 0.2, "updates": "raw"}
    metrics = root / "table" / "deeploop-r3-s1" / "metrics.jsonl"
    resume = {
        "kind": "resume",
        "step": 1200,
        "changes": {"optim.steps": [30, 40], "data.mix": [[], ["a", "b"]]},
    }
    metrics.write_text(json.dumps(resume) + "\n" + metrics.read_text())
    depth = {
        "checkpoint": "step-00000040",
        "data": "words",
        "sequences": 8,
        "rounds": [{"rounds": 9, "loss": 2}],
    }
    depth["command"] = ["deeploop", "validate"]
    metrics.with_name("depth.json").write_text(json.dumps({"evaluations": [depth]}))
    (root / "table" / "deeploop-r3-s1" / "diagnose.json").write_text(json.dumps(kappa))
    out = root / "out"
    run(ReportArgs((root / "table", root / "p", evil), out, paper=True))
    return out


def rows(made, name):
    with (made / "tables" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def tables_named(made, stem):
    return [path.stem for path in sorted((made / "tables").glob(f"{stem}*.csv"))]


def loss_rows(made):
    found = {}
    for name in tables_named(made, "loss-"):
        if any("2.1" in cell for row in rows(made, name) for cell in row):
            found = {(row[0], row[1]): row[2:] for row in rows(made, name)}
    return found


def test_losses_are_means_and_spreads_of_the_runs(made):
    table = loss_rows(made)
    assert table["", "method"] == ["R=1", "R=3", "R=5", "R=7"]
    for label, block in (("pre-norm", "prenorm"), ("DeepLoop p=0.5", "deeploop")):
        one, three = LOSSES[block, 1], LOSSES[block, 3]
        expected = [f"{fmean(own):.4f} ± {stdev(own):.4f}" for own in (one, three)]
        assert table["here", label] == [*expected, MISSING, MISSING]
    deltas = [f"{fmean(LOSSES['deeploop', R]) - fmean(LOSSES['prenorm', R]):+.4f}" for R in (1, 3)]
    assert table["here", "Δ DeepLoop p=0.5 − pre-norm"] == [*deltas, MISSING, MISSING]
    # The sweep calls itself medium, so the paper's medium stands beside it.
    assert table["paper", "DeepLoop"] == [
        published.LOSS["medium", "deeploop", R].printed for R in (1, 3, 5, 7)
    ]


def test_the_p_sweep_counts_escapes(made):
    (name,) = tables_named(made, "p-sweep")
    table = {row[1]: row for row in rows(made, name)[1:]}
    assert [table[p][3] for p in ("0.25", "0.5", "0.6")] == ["0/2", "1/2", "2/2"]
    assert table["0.5"][7:] == ["3/5", "3.73"]
    assert table["0.6"][5] == "2.6000"
    assert table["0.35"][2:7] == [MISSING] * 5  # the paper has it, nobody ran it here


@pytest.mark.parametrize(("bias", "added"), [(False, ""), (True, " + unigram bias")])
def test_every_rule_has_its_delta_against_prenorm_with_the_same_bias(tmp_path, bias, added):
    for block, loss in (("prenorm", 2.5), ("averaged", 2.25), ("deeploop", 2.0)):
        write_run(tmp_path / block, rule=block, loss=loss, model={"unigram_bias": bias})
    write_run(tmp_path / "other", rule="flat", loss=1.5, model={"unigram_bias": not bias})
    run(ReportArgs((tmp_path,), tmp_path / "out", paper=True))
    table = {row[1]: row[3] for row in rows(tmp_path / "out", "loss-a")}
    assert table[f"Δ averaged{added} − pre-norm"] == "-0.2500"
    assert table[f"Δ DeepLoop p=0.5{added} − pre-norm"] == "-0.5000"
    assert not [name for name in table if "Δ flat" in name]


def loss_panel(folder, losses):
    """Final losses against R, of runs {(block, R): a loss for each seed}."""
    for (block, R), own in losses.items():
        for seed, loss in enumerate(own):
            write_run(folder / f"{block}-{R}-{seed}", rule=block, rounds=R, seed=seed, loss=loss)
    (chart,) = against(find_runs((folder,)), Histories(), "model.rounds")
    return chart.panels[0]


def triangles(panel):
    """R of the marks at the upper edge, from left to right, and what is written at them."""
    marks = [line.x[0] for line in panel.lines if line.style == "^"]
    assert sorted(marks) == sorted(text[0] for text in panel.texts)
    return sorted((x, words) for x, _, words, _ in panel.texts)


GOOD = {
    ("prenorm", 1): (2.5, 2.52),
    ("prenorm", 3): (2.45,),
    ("averaged", 1): (2.48,),
    ("averaged", 3): (2.44,),
}


def test_what_is_far_above_the_others_does_not_stretch_the_scale(tmp_path):
    late = {("deeploop", 1): (2.9, 2.8), ("deeploop", 3): (4.0, 4.5)}
    late |= {("postnorm", 1): (2.5,), ("postnorm", 3): (3.9,)}
    panel = loss_panel(tmp_path, GOOD | late)  # 2.44 to 2.52: far off is above 2.44 + 6 · 0.08
    assert triangles(panel) == [(3, "3.90"), (3, "4.50")]
    low, high = panel.y_range
    assert low < 2.44
    assert 2.9 < high < 3.2


def test_a_run_that_is_far_off_is_marked_where_its_mean_is_not(tmp_path):
    far = {("deeploop", 1): (2.5,), ("deeploop", 3): (2.6, 2.61, 3.4)}  # on average 2.87
    panel = loss_panel(tmp_path, GOOD | far)
    assert triangles(panel) == [(3, "3.40")]
    assert 2.87 < panel.y_range[1] < 3.4


@pytest.mark.parametrize(
    "losses",
    [
        GOOD | {("deeploop", 1): (2.7, 2.9), ("deeploop", 3): (2.8,)},
        {("prenorm", 1): (2.5,), ("prenorm", 3): (2.49,), ("deeploop", 1): (2.5,), ("deeploop", 3): (2.9,)},
    ],
)
def test_a_scale_that_fits_all_is_left_alone(tmp_path, losses):
    panel = loss_panel(tmp_path, losses)  # two rules are always whole
    assert panel.y_range is None
    assert triangles(panel) == []


def test_a_rate_that_differs_is_a_column_and_an_axis(tmp_path):
    for rate in (1e-3, 2e-3, 4e-3):
        write_run(tmp_path / f"{rate:g}", peak_lr=rate, floor_lr=rate / 10, loss=2 + rate)
        write_run(tmp_path / f"other-{rate:g}", peak_lr=rate, floor_lr=rate / 10, rounds=1)
    run(ReportArgs((tmp_path,), tmp_path / "out"))
    header, *found = rows(tmp_path / "out", "runs")
    assert header[:4] == ["run", "rounds", "peak_lr", "seed"]  # the floor rate follows the peak
    assert {row[2] for row in found} == {"0.001", "0.002", "0.004"}
    (chart,) = against(find_runs((tmp_path,)), Histories(), "optim.peak_lr")
    lines = {line.label: [*line.x] for line in chart.panels[0].lines if line.label}
    assert lines == {f"DeepLoop p=0.5 · rounds {R}": [1e-3, 2e-3, 4e-3] for R in (1, 3)}


@pytest.fixture
def starts(tmp_path):
    """A set-up with three exponents at one ramp, two at a steeper one and two under a cure."""
    for warmup, bias, exponents in (
        (10, True, (0.25, 0.5)),
        (5, False, (0.25, 0.5)),
        (10, False, (0.25, 0.5, 1)),
    ):
        for p in exponents:
            write_run(
                tmp_path / f"{warmup}-{bias}-{p}",
                rule=f"deeploop:p={p}",
                warmup_steps=warmup,
                model={"unigram_bias": bias},
            )
    (setup,) = setups(find_runs((tmp_path,)))
    return setup


GENTLE, STEEP, CURED = (
    "R=3, 1.0e-04 per step",
    "R=3, 2.0e-04 per step",
    "R=3, 1.0e-04 per step + unigram bias",
)


def test_ramps_and_cures_are_sweeps_of_their_own(starts):
    found = p_sweeps(starts)
    assert [*found] == [GENTLE, STEEP, CURED]
    few = (*found[STEEP], *found[CURED])
    assert p_sweeps(Setup("A", few)) == {}


def test_ramps_that_are_printed_alike_are_one_sweep(tmp_path):
    for p in (0.25, 0.5, 1):
        for warmup in (600, 590):
            write_run(tmp_path / f"{p}-{warmup}", rule=f"deeploop:p={p}", warmup_steps=warmup)
    (setup,) = setups(find_runs((tmp_path,)))
    ((_, runs),) = p_sweeps(setup).items()
    assert len(runs) == 6


def test_the_paper_stands_beside_its_own_recipe_alone(starts):
    table = p_sweep_table(starts, Histories()).rows
    assert {row[1] for row in table if row[0] == STEEP} == {"0.25", *(f"{p:g}" for p in published.ESCAPES)}
    assert [[row[1], *row[-2:]] for row in table if row[0] == CURED] == [
        ["0.25", MISSING, MISSING],
        ["0.5", MISSING, MISSING],
    ]


def test_curves_of_a_p_sweep_are_coloured_by_exponent(tmp_path):
    for p in (0.25, 0.5, 1):
        for seed in (0, 1):
            write_run(tmp_path / f"{p}-{seed}", rule=f"deeploop:p={p}", seed=seed)
    (chart,) = curves(find_runs((tmp_path,)), Histories())
    colours = {line.label: line.colour for line in chart.panels[0].lines if line.label}
    assert colours == dict(zip(["p = 0.25", "p = 0.5", "p = 1"], plots.graded(3), strict=True))


def test_many_variants_share_their_methods_name(tmp_path):
    for peak in range(1, 6):
        for block in ("prenorm", "deeploop"):
            settings = {"rule": block, "peak_lr": peak * 1e-3, "floor_lr": 1e-4, "loss": 2 + abs(peak - 3)}
            write_run(tmp_path / f"{block}-{peak}", **settings)
    (chart,) = curves(find_runs((tmp_path,)), Histories())
    lines = [line for line in chart.panels[0].lines if line.style != "."]
    assert len(lines) == 10
    # In the legend, and drawn strongly, is the one that ends lowest.
    named = {line.label: line for line in lines if line.label}
    assert named.keys() == {"pre-norm", "DeepLoop p=0.5"}
    assert {line.colour for line in lines} == {line.colour for line in named.values()}
    assert {line.strength for line in lines if not line.label} < {line.strength for line in lines}
    assert {line.y[-1] for line in named.values()} == {min(line.y[-1] for line in lines)}


def test_curves_have_the_validations_as_points(tmp_path):
    write_run(tmp_path / "run")
    (chart,) = curves(find_runs((tmp_path,)), Histories())
    training, points = chart.panels[0].lines
    expected = [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "run", "validation")]
    assert [*zip(points.x, points.y, strict=True)] == expected
    assert points.colour == training.colour
    assert chart.panels[0].level == (FLOOR, f"unigram floor {FLOOR:.2f}")


def test_curves_are_scaled_to_what_follows_the_start(tmp_path):
    write_run(tmp_path / "run")
    (chart,) = curves(find_runs((tmp_path,)), Histories())
    low, high = chart.panels[0].y_range
    points = [pair for line in chart.panels[0].lines for pair in zip(line.x, line.y, strict=True)]
    last = max(x for x, _ in points)
    later = [y for x, y in points if x >= last / 10]
    assert low < min(later) <= max(later) < high < max(y for _, y in points)


def test_a_run_much_shorter_than_the_others_is_inside_the_scale(tmp_path):
    write_run(tmp_path / "long", step=800, loss=1.0)
    write_run(tmp_path / "short", step=40, seed=1, loss=4.9)
    (chart,) = curves(find_runs((tmp_path,)), Histories())
    low, high = chart.panels[0].y_range
    ends = [line.y[-1] for line in chart.panels[0].lines]
    assert low < min(ends) < max(ends) < high


def test_curves_have_a_panel_for_each_r(tmp_path):
    for R in (1, 3):
        write_run(tmp_path / f"r{R}", rounds=R)
    write_run(tmp_path / "other", model={"vocabulary": 257})  # in another unit
    first, second = curves(find_runs((tmp_path,)), Histories())
    assert [panel.title for panel in first.panels] == ["R = 1", "R = 3"]
    assert [panel.y for panel in (*first.panels, *second.panels)] == [
        *["loss (nats per GPT-2 token)"] * 2,
        "loss (nats per byte)",
    ]


def test_a_report_is_not_written_among_other_things(tmp_path, capsys):
    write_run(tmp_path / "runs" / "run")
    other = tmp_path / "my_corpus"
    other.mkdir()
    (other / "book.txt").write_text("a book")
    assert main(["report", str(tmp_path / "runs"), "--out", str(other)]) == 2
    assert f"out={other}: holds other things than a report; name a new folder" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["book.txt"]
    (other / "book.txt").unlink()
    for _ in range(2):  # an empty folder, and then a report
        assert main(["report", str(tmp_path / "runs"), "--out", str(other)]) == 0


def test_many_runs_are_sorted_into_rows_quickly(tmp_path):
    """A sweep of 300 rates took minutes, each run being compared with all others for each run."""
    (one,) = find_runs([write_run(tmp_path / "run")])
    runs = [replace(one, fields={**one.fields, "optim.peak_lr": 1e-5 * at}) for at in range(300)]
    began = time.process_time()
    assert len(Setup("A", tuple(runs)).rows) == 300
    assert time.process_time() - began < 5


def test_accuracy_is_at_the_trained_rounds(made):
    (name,) = tables_named(made, "accuracy")
    _, ours, theirs, absent, _ = rows(made, name)
    assert ours == ["here", "DeepLoop p=0.5", "3", "0", *(f"{30 + i:.2f}" for i in range(8)), "33.50"]
    task = next(iter(published.TASKS))
    assert theirs[:5] == ["paper", *ours[1:4], published.ACCURACY["medium", 0, "deeploop", 3, task].printed]
    assert absent[3:] == ["1", *[MISSING] * 9]


@pytest.mark.parametrize(
    ("fields", "of_the_paper"),
    [({}, True), ({"kind": "muon"}, False), ({"model": {"unigram_bias": True}}, False)],
)
def test_scores_and_hours_of_the_paper_stand_beside_its_own_methods(tmp_path, fields, of_the_paper):
    folder = write_run(tmp_path / "run", mfu=0.3, **fields)
    results = [{"task": task, "shots": 0, "rounds": 3, "acc": 0.5} for task in published.TASKS]
    record = {"trained_rounds": 3, "results": results, "deviations": []}
    (folder / "eval.json").write_text(json.dumps({"evaluations": [record]}))
    run(ReportArgs((folder,), tmp_path / "out", paper=True))
    (name,) = tables_named(tmp_path / "out", "accuracy")
    assert ("paper" in [row[0] for row in rows(tmp_path / "out", name)]) is of_the_paper
    (hours,) = [row[-1] for row in rows(tmp_path / "out", "cost")[1:]]
    assert (hours != MISSING) is of_the_paper


def test_cost_and_its_total(made):
    table = rows(made, "cost")
    deeploop = {row[2]: row for row in table if row[1] == "DeepLoop p=0.5" and row[4] != MISSING}
    assert (deeploop["1"][3], deeploop["3"][3]) == ("1.00", "3.00")
    assert deeploop["3"][5:] == ["2.74", "260"]  # the paper's medium cell
    assert deeploop["3"][4] == f"{2 * 36 / 3600:.3f}"  # two runs on a GPU, 36 s each
    assert f"{8 * 36 / 3600:.2f} GPU-hours" in (made / "report.md").read_text()


@pytest.fixture
def beside_others(tmp_path):
    """`beside_others(["--jobs", "4"])`: a sweep of R = 1 and 3, with this command and fields."""

    def make(words, **fields):
        for R in (1, 3):
            write_run(tmp_path / "sweep" / f"r{R}", rounds=R, mfu=0.3)
        cells = {f"r{R}": {"rounds": R} for R in (1, 3)}
        old = words if words is None else ["deeploop", "sweep", "s", *words]
        return write_sweep(tmp_path / "sweep", cells, command=old, **fields)

    return make


@pytest.mark.parametrize(
    ("words", "fields", "shared"),
    [
        ([], {"jobs": 2}, True),
        (["--jobs", "4"], {"jobs": 1}, False),  # the field tells, where there is one
        (["--jobs", "4"], {}, True),
        (["--jobs=2"], {}, True),
        (["--jobs", "1"], {}, False),
        (None, {}, False),
    ],
)
def test_speeds_of_runs_that_shared_their_device_are_left_out(beside_others, tmp_path, words, fields, shared):
    run(ReportArgs((beside_others(words, **fields),), tmp_path / "out", paper=True))
    speeds = [row[3] for row in rows(tmp_path / "out", "cost")[1:]]
    assert speeds == ([MISSING] * 2 if shared else ["1.00", "3.00"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert ("2 of 2 runs shared their device" in text) is shared
    assert ("at most 0.02 GPU-hours" in text) is shared


def test_a_cell_given_by_itself_is_known_to_have_shared(beside_others, tmp_path):
    cell = beside_others(["--jobs", "4"]) / "r1"
    metrics = cell / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"tokens_per_s": 900.0', '"tokens_per_s": 90.0'))
    alone = write_run(tmp_path / "alone", rounds=1, seed=1)
    found = find_runs((cell, alone))
    assert {one.name: one.shared for one in found} == {"r1": True, "alone": False}
    assert {one.tokens_per_s for one in found} == {90, 900}
    (setup,) = setups(found)
    assert means.speed(setup.rows["DeepLoop p=0.5"][1]) == 900


def test_kappa_missing_cells_differences_and_commands(made):
    assert rows(made, "kappa")[1][:6] == ["deeploop-r3-s1", "DeepLoop p=0.5", "3", "40", "raw", "1.250"]
    header, *found = rows(made, "runs")
    states = {row[0]: row[header.index("state")] for row in found}
    (absent,) = rows(made, "runs-2")[1:]  # not started: in a table of its own
    assert (absent[0], "absent" in absent) == ("deeploop-r7-s0", True)
    assert states[EVIL] == "started"
    differences = {row[0]: row[1:] for row in rows(made, "differences")}
    assert differences["optim.batch"][:3] == ["480", "480", "8"]
    assert "model.mup_base_width" not in differences  # no config says it, and its default is the paper's
    commands = rows(made, "commands")
    assert [EVIL, "train", "deeploop '</pre><script>alert(1)</script>' 'two words'", "abc"] in commands
    assert ["deeploop-r3-s0", "eval", "deeploop eval", "abc"] in commands
    own = [row[1:3] for row in commands if row[0] == "deeploop-r3-s1"]
    assert own[1:] == [
        ["train", "then --resume at step 1,200 with optim.steps=40 (was 30), data.mix=a b (was –)"],
        ["validate", "deeploop validate"],
    ]
    trained = {row[0] for row in commands if row[1] == "train"}
    assert trained == {name for name, state in states.items() if state in ("finished", "started")}


def test_kappa_of_a_single_diagnosis_has_whole_steps_and_the_line_that_its_legend_names(made):
    _, chart = alignment.kappa_parts(find_runs([made.parent / "table"]), Histories())
    over_steps, over_rounds = plots.draw(chart).axes
    assert all(tick == int(tick) for tick in over_steps.get_xticks())
    (bound,) = [line for line in over_rounds.lines if line.get_label().startswith("R,")]
    assert [*bound.get_xdata()] == [*bound.get_ydata()] == [1, 3]


def test_no_mean_has_an_unfinished_run(made):
    texts = [cell for name in tables_named(made, "loss-") for row in rows(made, name) for cell in row]
    assert "unfinished" in texts


def test_quoted_text_stays_text(made):
    page = (made / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>few" not in page
    assert "&lt;img src=x" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)  # nothing is fetched
    markdown = (made / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    assert "<img" not in markdown
    assert r"\| \`a\` \_" in markdown
    lines = markdown.splitlines()
    for name in tables_named(made, "runs"):
        width = len(rows(made, name)[0])
        own = [line for line in lines if line.startswith("| &lt;img") and "started" in line]
        assert name != "runs" or [len(re.findall(r"(?<!\\)\|", line)) for line in own] == [width + 1]


def test_a_second_report_forgets_the_first(made, tmp_path):
    out = tmp_path / "out"
    folder = write_run(tmp_path / "run")
    (out / "tables").mkdir(parents=True)
    (out / "tables" / "mine.csv").write_text("kept")
    run(ReportArgs((folder,), out))
    assert (out / "tables" / "mine.csv").exists()  # there was no report here
    (out / "tables" / "old.csv").write_text("of the first")
    first = (out / "report.html").read_text()
    run(ReportArgs((folder,), out))
    assert not (out / "tables" / "old.csv").exists()
    assert (out / "report.html").read_text() == first  # the same runs give the same page


def test_set_ups_part_what_does_not_compare(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, peak_lr=2e-3)
    write_run(tmp_path / "c", seed=1, steps=80)
    first, second = setups(find_runs([tmp_path]))
    assert ([run.name for run in first.runs], [run.name for run in second.runs]) == (["a", "b"], ["c"])
    # The same method and R at two rates: two rows, not one mean.
    assert [*first.rows] == ["DeepLoop p=0.5 · peak_lr 0.001", "DeepLoop p=0.5 · peak_lr 0.002"]
    write_run(tmp_path / "d", rule="prenorm", peak_lr=4e-3)
    first, _ = setups(find_runs([tmp_path / "a", tmp_path / "c", tmp_path / "d"]))
    assert [*first.rows] == ["pre-norm", "DeepLoop p=0.5"]


def test_a_row_is_named_by_settings_of_any_kind(tmp_path):
    write_run(tmp_path / "a", betas=[0.9, 0.95], non_finite="stop")
    write_run(tmp_path / "b", seed=1, betas=[0.8, 0.95], non_finite="skip")
    (setup,) = setups(find_runs([tmp_path]))
    assert [*setup.rows] == [
        "DeepLoop p=0.5 · betas 0.9 0.95 · non_finite stop",
        "DeepLoop p=0.5 · betas 0.8 0.95 · non_finite skip",
    ]


def test_a_damaged_run_does_not_spoil_the_report(tmp_path):
    for p in (0.25, 0.5, 0.6):
        write_run(tmp_path / f"p{p}", rule=f"deeploop:p={p}")
    write_run(tmp_path / "damaged", peak_lr=None)
    folder = write_run(tmp_path / "old")  # of a time that knew no such field
    config = json.loads((folder / "config.json").read_text())
    del config["optim"]["warmup_steps"]
    (folder / "config.json").write_text(json.dumps(config))
    run(ReportArgs((tmp_path,), tmp_path / "out"))
    tables = [rows(tmp_path / "out", name) for name in ("runs", "runs-2")]
    states = {row[0]: row[header.index("state")] for header, *found in tables for row in found}
    assert (states["damaged"], states["old"], states["p0.5"]) == ("unreadable", "finished", "finished")


def test_damaged_lines_are_named_once_and_a_torn_last_one_is_not(tmp_path, capsys):
    for name in ("broken", "killed", "whole"):
        write_run(tmp_path / name)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    path = tmp_path / "broken" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:30] + "\n", "\n", "[]\n", *lines[5:], '{"kind"']))
    run(ReportArgs((tmp_path,), tmp_path / "out"))
    words = "Lines of metrics.jsonl that can't be read, and are left out: broken (2)."
    assert capsys.readouterr().err == words + "\n"
    assert (tmp_path / "out" / "report.md").read_text().count("can't be read") == 1
    assert "broken (2)" in (tmp_path / "out" / "report.html").read_text()


def test_table_and_figure_have_the_same_average():
    tasks = [*published.TASKS]
    whole = {(0, task): 40.0 for task in tasks}
    part = {(0, task): 60.0 for task in tasks[:4]}  # a seed that was scored on half of the tasks
    assert accuracy_cells([whole, part], 0) == ["50.00"] * 4 + ["40.00"] * 4 + ["45.00"]
    assert accuracy([whole, part], 0, "average") == 45.0
    assert accuracy([part], 0, "average") is None


def test_collapsed_seeds_are_counted_apart(tmp_path):
    for seed, loss, similarity in ((0, 2.0, 0.1), (1, FLOOR + 0.1, 1.0)):
        write_run(tmp_path / f"s{seed}", seed=seed, loss=loss, similarity=similarity)
    run(ReportArgs((tmp_path,), tmp_path / "out", paper=True))
    assert loss_cell(tmp_path / "out") == "2.0000 (1 of 2 collapsed)"


def test_a_seed_that_was_run_twice_is_not_two_seeds(tmp_path):
    for name, seed, loss, similarity in (
        ("first", 0, 2.0, 0.1),
        ("again", 0, 2.1, 0.1),
        ("other", 1, FLOOR + 0.1, 1.0),
    ):
        write_run(tmp_path / name, seed=seed, loss=loss, similarity=similarity)
    run(ReportArgs((tmp_path,), tmp_path / "out", paper=True))
    assert loss_cell(tmp_path / "out") == "2.0500 ± 0.0707 (1 of 3 collapsed, 3 runs of 2 seeds)"
    header, row = rows(tmp_path / "out", "seeds")
    found = dict(zip(header, row, strict=True))
    assert (found["seeds"], found["collapsed"]) == ("3 runs of 2 seeds", "1")
    assert found["loss, nats/GPT-2 token"] == "2.0500 ± 0.0707"


def test_a_seed_that_was_run_twice_escapes_once(tmp_path):
    for p in (0.25, 0.5, 0.6):
        for name, seed, loss in (("first", 0, 2.0), ("again", 0, 3.1), ("other", 1, 3.1)):
            write_run(tmp_path / f"{p}-{name}", rule=f"deeploop:p={p}", seed=seed, loss=loss)
    run(ReportArgs((tmp_path,), tmp_path / "out"))
    (row,) = [row for row in rows(tmp_path / "out", "p-sweep-a") if row[1] == "0.5"]
    assert row[2:5] == ["1/2", "1/2", "0.09 to 0.91"]


FALLEN = {"loss": FLOOR + 0.1, "similarity": 1.0}


@pytest.mark.parametrize(
    ("own", "cells"),
    [
        ([{"loss": 2.0}], ["1/1", "1/1", "0.21 to 1.00", "2.0000", MISSING]),
        ([FALLEN], ["0/1", "0/1", "0.00 to 0.79", MISSING, MISSING]),
        ([{"loss": FLOOR - 0.05, "similarity": 1.0}], ["1/1", "0/1", "0.00 to 0.79", MISSING, MISSING]),
        ([FALLEN | {"step": 20}], ["0/0", "0/0", "0.00 to 1.00", MISSING, "1"]),  # it may yet escape
        ([{"loss": 2.0, "step": 20}, FALLEN], ["1/2", "1/2", "0.09 to 0.91", "2.0000", MISSING]),
    ],
)
def test_escapes_by_both_rules(tmp_path, own, cells):
    """The paper's rule, any validation below the floor, and ours, which a hair below it does not pass."""
    for seed, fields in enumerate(own):
        write_run(tmp_path / f"s{seed}", seed=seed, **fields)
    assert count_escapes(find_runs([tmp_path]), Histories()).cells == cells


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # the four examples of Newcombe (1998), Statistics in Medicine 17, 857
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (5, 5, 5 / 8.841459, 1.0),  # n/(n + z²)
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=6e-5)


def loss_cell(out):
    (row,) = [row for row in rows(out, "loss-a") if row[:2] == ["here", "DeepLoop p=0.5"]]
    return row[3]


def test_the_comparison_step_of_a_sweep(tmp_path):
    write_run(tmp_path / "sweep" / "cell", loss=2.0)  # 5 − 3·step/40
    write_sweep(tmp_path / "sweep", {"cell": {}}, compare_at=20)
    run(ReportArgs((tmp_path / "sweep",), tmp_path / "out", paper=True))
    assert loss_cell(tmp_path / "out") == "3.5000"


def headings(out):
    return re.findall(r"^## (.*)$", (out / "report.md").read_text(), re.M)


def test_own_runs_and_curves_come_first_and_empty_sections_are_hidden(made, tmp_path):
    assert headings(made) == [
        "Runs",
        "Loss curves",
        "Comparison",
        "Loss at other depths",
        "Visit alignment κ_R",
        "Beside the paper: validation loss",
        "Beside the paper: the exponent p",
        "Beside the paper: accuracy",
        "Beside the paper: cost",
        "Beside the paper: settings",
        "Commands",
    ]
    run(ReportArgs((write_run(tmp_path / "run"),), tmp_path / "out"))
    assert headings(tmp_path / "out") == ["Runs", "Loss curves", "Commands"]


@pytest.mark.parametrize(
    ("fields", "sweep", "beside"),
    [
        ({}, "mine", False),
        ({}, "table1", True),
        ({"model": {"blocks": 12, "width": 768}}, "mine", True),
        ({"model": {"blocks": 12, "width": 768, "vocabulary": 257}}, "mine", False),
    ],
)
def test_the_paper_stands_beside_runs_of_its_kind_alone(tmp_path, fields, sweep, beside):
    write_run(tmp_path / "sweep" / "cell", **fields)
    write_sweep(tmp_path / "sweep", {"cell": {}}, sweep=sweep)
    run(ReportArgs((tmp_path / "sweep",), tmp_path / "out"))
    assert any("paper" in title for title in headings(tmp_path / "out")) is beside


def test_a_loss_per_byte_is_in_no_column_with_one_per_token(tmp_path):
    write_run(tmp_path / "token", loss=2.5, stamp={"bytes_per_token": 4.5})
    write_run(tmp_path / "old", loss=2.25)  # of before run folders said it
    write_run(tmp_path / "byte", loss=1.5, model={"vocabulary": 257})
    out = tmp_path / "out"
    run(ReportArgs((tmp_path,), out, paper=True))
    header, *found = rows(out, "runs")
    first = header.index("nats/GPT-2 token")
    table = {row[0]: row[first : first + 3] for row in (header, *found)}
    assert table == {
        "run": ["nats/GPT-2 token", "nats/byte", "bits/byte"],
        "token": ["2.5000", MISSING, f"{2.5 / (4.5 * math.log(2)):.3f}"],
        "old": ["2.2500", MISSING, MISSING],
        "byte": [MISSING, "1.5000", f"{1.5 / math.log(2):.3f}"],
    }
    losses = {name: rows(out, name) for name in tables_named(out, "loss-")}
    beside = [{row[0] for row in table if row[0]} for table in losses.values()]
    assert sorted(beside, key=len) == [{"here"}, {"here", "paper"}]


def test_reasoners_are_listed_but_not_compared(tmp_path):
    folder = write_run(tmp_path / "hrm", stamp={"task": "puzzle"})
    config = json.loads((folder / "config.json").read_text())
    config["model"] = {"width": 64, "p": 0.5, "cycles": 2}
    (folder / "config.json").write_text(json.dumps(config))
    run(ReportArgs((folder,), tmp_path / "out", paper=True))
    found = dict(zip(*rows(tmp_path / "out", "runs"), strict=True))
    assert (found["run"], found["state"], found["step"]) == ("hrm", "finished", "40/40")
    assert tables_named(tmp_path / "out", "loss-") == []


def test_mistakes(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"deeploop report: error: {tmp_path / 'none'}: no such folder\n"


@pytest.mark.parametrize(
    "cell", ['=HYPERLINK("http://x")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", "＝1+1", "-"]
)
def test_a_formula_in_a_csv_is_text(cell, tmp_path):
    table = Table("own", "Own", ["=header", "number"], [[cell, "1"]])
    write(tmp_path, "title", [Section("Own", [table])])
    assert rows(tmp_path, "own") == [["'=header", "number"], [f"'{cell}", "1"]]


@pytest.mark.parametrize(
    "cell", ["-0.25", "+3.25", "-1.5e-05", "-1,000", "+2%", "-0.1*", "–", "a=b", "", "R=3"]
)
def test_a_number_in_a_csv_stays_one(cell):
    assert inert(cell) == cell
