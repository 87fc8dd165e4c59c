"""Does a rule keep its rate? Runs made from known parabolas give back their best rates, slope and regret."""

import math

import pytest

from deeploop.report.groups import Histories
from deeploop.report.runs import find_runs
from research import transfer as views
from research.rates import Cell, Curve, Parabola, Transfer, find_studies
from run_folders import FLOOR, write_run

PEAKS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
CURVATURE = 0.05  # nats per octave²


def write_rule(root, block, best, *, rounds=(1, 4, 16), peaks=PEAKS, seeds=(0, 1, 2), shift=0.0, lost=()):
    """Losses on a parabola around best(R); seed s has its own best `shift`·s octaves higher, 0.01·s worse."""
    for R in rounds:
        for peak in peaks:
            for seed in seeds:
                off = math.log2(peak / best(R)) - shift * (seed - 1)
                fallen = (R, peak, seed) in lost
                write_run(
                    root / f"{block}-rounds{R}-peak_lr{peak:g}-seed{seed}",
                    rule=block, rounds=R, seed=seed, peak_lr=peak,
                    loss=FLOOR if fallen else 2 + 0.01 * seed + CURVATURE * off**2,
                    similarity=1.0 if fallen else 0.2,
                )  # fmt: skip


def only_study(root):
    (study,) = find_studies(find_runs([root]), Histories())
    return study


def only_rule(root):
    (rule,) = only_study(root).rules.values()
    return rule


def test_a_parabola_gives_back_its_vertex():
    for x in ((0.0, 1.0, 2.0), (-9.0, -8.5, -6.0)):
        for lowest in (x[0], x[1] - 0.2, x[1] + 0.3):
            curve = Parabola.through(x, [3 + 0.5 * (at - lowest) ** 2 for at in x])
            assert curve.lowest == pytest.approx(lowest)
            assert curve(lowest) == pytest.approx(3)
    assert Parabola.through((0, 1, 2), (1, 0, -2)).lowest == 2  # no minimum: the lower end
    assert Parabola.through((0, 1, 2), (1, 1, 1)).lowest == 0


def test_it_gives_back_best_rates_slope_and_regret(tmp_path):
    write_rule(tmp_path, "flat", lambda R: 3.7e-3, shift=0.1)
    write_rule(tmp_path, "prenorm", lambda R: 5e-3 * R**-0.25)
    study = only_study(tmp_path)
    assert [*study.rules] == ["pre-norm", "flat"]  # by loss
    flat, prenorm = study.rules["flat"], study.rules["pre-norm"]
    for R in (1, 4, 16):
        assert flat.optima[R].peak == pytest.approx(3.7e-3)
        assert flat.optima[R].loss == pytest.approx(2.01 + CURVATURE * 0.02 / 3)
        # Seeds at -0.1, 0, 0.1 octaves: Student's t for two degrees of freedom, s.d. 0.1.
        half = 4.303 * 0.1 / math.sqrt(3)
        assert flat.optima[R].interval == pytest.approx((3.7e-3 * 2**-half, 3.7e-3 * 2**half))
        assert prenorm.optima[R].peak == pytest.approx(5e-3 * R**-0.25)
        assert prenorm.regret(R) == pytest.approx(CURVATURE * (0.25 * math.log2(R)) ** 2)
    assert flat.slope.value == pytest.approx(0, abs=1e-9)
    assert flat.slope.of == "3 seeds"
    assert prenorm.slope.value == pytest.approx(-0.25)
    assert prenorm.slope.interval == pytest.approx((-0.25, -0.25))
    assert (flat.verdict, prenorm.verdict) == ("transfers", "does not")


def test_the_interval_of_a_slope_is_over_seeds(tmp_path):
    """Seed s has the slope 0.1·(s - 1); with one seed the interval is what least squares leave."""
    for seed in (0, 1, 2):
        write_rule(
            tmp_path / "all", "flat", lambda R, seed=seed: 4e-3 * R ** (0.1 * (seed - 1)), seeds=(seed,)
        )
    slope = only_rule(tmp_path / "all").slope
    half = 4.303 * 0.1 / math.sqrt(3)
    assert slope.interval == pytest.approx((-half, half), abs=1e-6)
    # Off the line at R = 4 by one octave: residuals 1/3, -2/3, 1/3 of it, one degree of freedom.
    write_rule(tmp_path / "one", "flat", lambda R: 4e-3 * (2 if R == 4 else 1), seeds=(0,))
    slope = only_rule(tmp_path / "one").slope
    left = math.log(2) * math.sqrt(6 / 9)
    half = 12.71 * left / math.sqrt(2 * math.log(4) ** 2)
    assert (slope.value, slope.of) == (pytest.approx(0, abs=1e-9), "the fit")
    assert slope.interval == pytest.approx((-half, half))


@pytest.mark.parametrize("slope", [0.099, 0.101, -0.101])
def test_the_criterion_is_a_slope_below_a_tenth(tmp_path, slope):
    write_rule(tmp_path, "flat", lambda R: 4e-3 * R**slope, seeds=(0,))
    rule = only_rule(tmp_path)
    assert rule.regret(16) < 0.01
    assert rule.transfers == (abs(slope) < 0.1)


def test_a_large_regret_does_not_transfer(tmp_path):
    """Half an octave at R = 16 alone, then back: a slope of 0 with a regret."""
    write_rule(tmp_path, "flat", lambda R: 4e-3 * {1: 1, 4: 1, 16: 1.5, 64: 0.75}[R], rounds=(1, 4, 16, 64))
    rule = only_rule(tmp_path)
    assert abs(rule.slope.value) < 0.1
    assert rule.regret(16) == pytest.approx(CURVATURE * math.log2(1.5) ** 2)
    assert rule.regret(16) > 0.01
    assert rule.verdict == "does not"


def test_a_best_rate_at_an_edge_is_a_bound(tmp_path):
    write_rule(tmp_path, "flat", lambda R: {1: 2e-3, 4: 1e-3, 16: 5e-4}[R])
    rule = only_rule(tmp_path)
    assert rule.marks == {4: "edge", 16: "edge"}
    assert rule.optima[16].peak == 1e-3
    assert rule.optima[16].interval is None
    assert rule.slope.interval is None
    assert rule.verdict == "does not"  # by the regret, which can only grow
    write_rule(tmp_path / "level", "prenorm", lambda R: {1: 1.05e-3, 4: 1e-3, 16: 9.5e-4}[R])
    level = only_rule(tmp_path / "level")
    assert level.transfers is None
    assert level.verdict.startswith("open: best rate at the edge of the grid at R = ")


def test_an_edge_at_one_round_leaves_the_regret_open(tmp_path):
    """η*(1) is not known then, and neither is what it would cost at R = 16."""
    write_rule(tmp_path, "flat", lambda R: {1: 1e-3, 4: 4e-3, 16: 4e-3}[R])
    assert only_rule(tmp_path).regret(16) > 0.1
    assert only_rule(tmp_path).verdict == "open: best rate at the edge of the grid at R = 1"


def test_a_lost_seed_takes_its_rate_out_of_the_choice(tmp_path):
    """The best cell of R = 16 has a collapsed seed; the next lower one then stands at a cliff."""
    write_rule(tmp_path, "deeploop", lambda R: 4e-3, lost={(16, 4e-3, 2), (16, 8e-3, 0), (4, 1.6e-2, 1)})
    rule = only_rule(tmp_path)
    assert rule.marks == {16: "cliff"}
    assert rule.optima[16].peak == 2e-3
    assert rule.optima[4].mark == ""  # the lost rate is not next to the best
    assert rule.regret(16) == math.inf
    assert rule.verdict == "does not"
    cell = next(cell for cell in rule.curves[16].cells if cell.peak == 4e-3)
    assert cell.lost == ("deeploop-rounds16-peak_lr0.004-seed2",)
    assert views.loss(cell) == "2.0050 (1 of 3 lost)"


def test_beside_a_lost_cell_the_nearer_rate_decides(tmp_path):
    lost = {(16, 8e-3, seed) for seed in (0, 1, 2)}
    write_rule(tmp_path, "deeploop", lambda R: 4.4e-3, lost=lost)
    rule = only_rule(tmp_path)
    assert rule.optima[16].mark == "cliff"
    assert rule.optima[16].peak == 4e-3
    assert rule.regret(16) == 0  # 4.4e-3 is nearer to 4e-3, which is the best
    assert rule.verdict == "transfers, beside a cliff at R = 16"
    curve = rule.curves[16]
    assert curve.loss_at(7e-3) == math.inf
    assert curve.loss_at(3.2e-2) is None
    exact = 2.01 + CURVATURE * math.log2(1.5e-3 / 4.4e-3) ** 2
    assert curve.loss_at(1.5e-3) == pytest.approx(exact)


def test_the_best_rate_is_that_of_the_seeds_around_it():
    """Seed 0, which all rates have, is lowest at 8e-3, and the three of 4e-3 and its neighbours at 4e-3."""
    by_three = {2e-3: (2.20, 2.20, 2.20), 4e-3: (2.14, 2.10, 2.10), 8e-3: (2.12, 2.15, 2.15)}
    by_one = {1e-3: (2.40,), 1.6e-2: (2.18,)}
    losses = {**by_three, **by_one}
    curve = Curve(tuple(Cell(peak, dict(enumerate(losses[peak]))) for peak in sorted(losses)))
    assert curve.best.peak == 4e-3
    assert [cell.peak for cell in curve.around] == [2e-3, 4e-3, 8e-3]
    assert 4e-3 < curve.optimum.peak < 8e-3


def test_neighbours_of_other_seeds_give_no_parabola():
    """4e-3 is better than 8e-3 over three seeds; the one that 2e-3 has says the opposite."""
    losses = {2e-3: (5.145,), 4e-3: (5.14, 5.02, 5.02), 8e-3: (5.13, 5.09, 5.09), 1.6e-2: (5.2,)}
    curve = Curve(tuple(Cell(peak, dict(enumerate(own))) for peak, own in losses.items()))
    assert (curve.best.peak, curve.mark) == (4e-3, "edge")
    assert (curve.optimum.peak, curve.optimum.interval) == (4e-3, None)


def test_a_loss_between_two_rates_is_between_their_losses():
    """A cliff beyond them must not bend the curve below the best."""
    losses = (5.0, 4.88, 4.90, 4.92, 5.3)
    curve = Curve(tuple(Cell(peak, {0: loss}) for peak, loss in zip(PEAKS, losses, strict=True)))
    for peak in (4.1e-3, 5e-3, 6e-3, 7.9e-3):
        assert 4.90 <= curve.loss_at(peak) <= 4.92
    assert curve.loss_at(2e-3) == pytest.approx(4.88)
    assert curve.loss_at(1.6e-2) == pytest.approx(5.3)


def test_two_rates_give_no_regret():
    """The best of two is at an edge: how far R = 1's rate is from it is not known, and it is not lost."""
    one, four = (
        Curve(
            tuple(
                Cell(peak, {0: loss}) for peak, loss in zip(PEAKS[1 : 1 + n], (5.0, 4.9, 5.0), strict=False)
            )
        )
        for n in (3, 2)
    )
    rule = Transfer("averaged", {1: one, 4: four}, {})
    assert rule.curves[4].loss_at(rule.optima[1].peak) == pytest.approx(4.9)
    assert rule.regret(4) is None


def test_every_rate_lost(tmp_path):
    write_rule(tmp_path, "deeploop", lambda R: 4e-3, lost={(16, p, s) for p in PEAKS for s in (0, 1, 2)})
    rule = only_rule(tmp_path)
    assert 16 not in rule.optima
    assert rule.regret(16) == math.inf
    assert rule.verdict == "does not"
    views.transfer_figure(only_study(tmp_path))


def test_a_study_without_a_trained_cell_has_tables(tmp_path):
    rounds = (1, 4, 16)
    lost = {(R, p, 0) for R in rounds for p in PEAKS}
    write_rule(tmp_path, "deeploop", lambda R: 4e-3, rounds=rounds, seeds=(0,), lost=lost)
    study = only_study(tmp_path)
    assert views.rules_table(study).rows[0][1:4] == ["–", "–", "–"]
    assert {cell for row in views.losses_table(study).rows for cell in row[2:]} == {"lost"}


def test_a_diverged_run_is_lost_and_a_broken_one_is_absent(tmp_path):
    write_rule(tmp_path, "flat", lambda R: 4e-3, seeds=(0, 1))
    ends = {8e-3: "step 7: loss nan, gradient norm nan; first non-finite tensor: weight w", 4e-3: "disk full"}
    for peak, why in ends.items():
        folder = tmp_path / f"flat-rounds16-peak_lr{peak:g}-seed1"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        write_run(folder, rule="flat", rounds=16, seed=1, peak_lr=peak, step=8)
        folder.with_name(folder.name + ".log").write_text(f"deeploop train: error: {why}\n")
    curve = only_rule(tmp_path).curves[16]
    assert {cell.peak for cell in curve.cells if cell.lost} == {8e-3}
    assert {cell.peak: len(cell.losses) for cell in curve.cells}[4e-3] == 1


def test_partial_grids(tmp_path):
    """Seeds that only some cells have do not shift the parabola, and an R with two rates has no best one."""
    write_rule(tmp_path, "flat", lambda R: 4.6e-3, seeds=(0,))
    write_rule(tmp_path, "flat", lambda R: 4.6e-3, seeds=(1, 2), peaks=(4e-3,))
    write_rule(tmp_path, "flat", lambda R: 4e-3, rounds=(64,), peaks=(2e-3, 4e-3))
    write_rule(tmp_path, "averaged", lambda R: 4e-3, rounds=(4,))
    rules = only_study(tmp_path).rules
    assert {R: one.peak for R, one in rules["flat"].optima.items()} == pytest.approx(
        dict.fromkeys((1, 4, 16), 4.6e-3)
    )
    assert rules["flat"].curves[1].seeds == {0}
    assert rules["averaged"].slope is None
    assert rules["averaged"].verdict == "open: needs R = 1 and R = 16"


def test_only_runs_that_agree_in_all_else_are_compared(tmp_path):
    write_rule(tmp_path / "a", "flat", lambda R: 4e-3)
    for peak in PEAKS:  # three rates at one R only, with another warm-up
        write_run(tmp_path / "b" / f"w{peak}", rule="flat", rounds=1, peak_lr=peak, warmup_steps=5)
    studies = find_studies(find_runs([tmp_path]), Histories())
    assert sorted((study.letter, study.over_rounds, len(study.runs)) for study in studies) == [
        ("A1", True, 45),
        ("A2", False, 5),
    ]


def test_names_leave_out_a_bias_that_all_have(tmp_path):
    for index, block in enumerate(("flat", "prenorm")):
        for R in (1, 4):
            for peak in PEAKS:
                write_run(tmp_path / f"{block}{R}{peak}", rule=block, rounds=R, peak_lr=peak,
                          loss=2 + index, model={"unigram_bias": True})  # fmt: skip
    study = only_study(tmp_path)
    assert [*study.rules] == ["flat", "pre-norm"]
    assert study.title.endswith("all with the unigram bias")
    named = {"model.rule": "flat", "model.unigram_bias": True}
    assert named.items() <= study.rules["flat"].settings.items()


def test_the_tables_and_the_figure_show_it(tmp_path):
    write_rule(tmp_path, "flat", lambda R: 3.7e-3)
    write_rule(tmp_path, "prenorm", lambda R: 5e-3 * R**-0.25, lost={(16, 1.6e-2, 0)})
    study = only_study(tmp_path)
    assert "these keep it: flat; do not: pre-norm." in views.caption(study)
    table = views.rules_table(study)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["flat"]["keeps its rate?"] == "transfers"
    assert rows["pre-norm"]["slope"] == "-0.250"
    assert rows["pre-norm"]["η* R=16"].startswith("2.50e-03")
    table = views.losses_table(study)
    cells = {tuple(row[:2]): dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert cells["pre-norm", "16"]["0.016"].endswith("(1 of 3 lost)")
    panels = {axes.get_title(): axes for axes in views.transfer_figure(study).axes}
    # A curve for each R, and a diamond on each best rate.
    diamonds = [line.get_xdata() for line in panels["pre-norm"].lines if line.get_marker() == "D"]
    assert [x[0] for x in diamonds if len(x)] == pytest.approx([5e-3, 5e-3 * 4**-0.25, 2.5e-3])


def test_the_curve_of_a_single_cell_has_no_best_rate(tmp_path):
    write_rule(tmp_path, "flat", lambda R: 4e-3)
    cells = only_rule(tmp_path).curves[1].cells
    assert Curve(cells[:2]).optimum is None
    assert Curve(cells[:3]).optimum.mark == "edge"
