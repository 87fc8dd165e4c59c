"""The line through best rates, and tables that compare cells, of runs written by hand."""

import math

import pytest

from research.study import runs_of
from research.tables import quantization, recommend
from research.tables import rules as tables
from run_folders import FLOOR, write_run, write_sweep


def test_a_line_is_drawn_through_the_best_rates_of_a_rule(tmp_path):
    for R, best in ((1, 4e-3), (4, 2e-3), (16, 1e-3)):
        for peak in (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3):
            write_run(
                tmp_path / "transfer" / f"flat-rounds{R}-peak_lr{peak:g}-seed0",
                rule="flat", rounds=R, seed=0, peak_lr=peak, similarity=0.2,
                loss=2 + 0.05 * math.log2(peak / best) ** 2, model={"unigram_bias": True},
            )  # fmt: skip
    ((rule, points),) = recommend.best_rates(tmp_path).items()
    assert (rule, len(points)) == ("flat", 3)
    line = recommend.line_through(points)
    assert line.slope == pytest.approx(-0.5)
    assert line.spread == pytest.approx(0, abs=1e-6)
    assert line.rate(4, points[0].width, points[0].batch_tokens) == pytest.approx(2e-3, rel=1e-5)


# ── Tables that compare cells ─────────────────────────────────────────────────────────────────────
def study(folder, runs):
    """A sweep of runs, given as keywords of write_run."""
    for index, settings in enumerate(runs):
        model = {"unigram_bias": True, **settings.pop("model", {})}
        write_run(folder / f"cell{index}", model=model, **settings)
    write_sweep(folder, {f"cell{index}": {} for index in range(len(runs) + 1)})  # the last was not run
    return folder


def rows(text):
    """The first cell of each row, or the first few → the others."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {tuple(line[:-1]): line[-1] for line in lines}


def test_parts_are_compared_at_the_best_rate(tmp_path):
    def cell(loss, seed, peak, gain=True, beta="off", **more):
        rule = f"deeploop:alpha=flat,beta={beta},outer_gain={'on' if gain else 'off'}"
        return {"loss": loss, "seed": seed, "peak_lr": peak, "rounds": 16, "rule": rule, **more}

    lost = {"similarity": 1.0, "loss": FLOOR}
    study(
        tmp_path / "parts",
        [
            *(cell(2.0 + shift, seed, 2e-3) for seed, shift in enumerate((0.0, 0.1, 0.2))),
            # Worse in the mean of its own seeds, better in the one that both rates have.
            *(cell(1.9 + shift, seed, 2e-3, gain=False) for seed, shift in enumerate((0.0, 0.11, 0.22))),
            cell(1.95, 0, 4e-3, gain=False),
            cell(1.0, 0, 8e-3, gain=False),
            cell(1.0, 1, 8e-3, gain=False) | lost,
            cell(2.5, 0, 2e-3, beta="on") | lost,
        ],
    )  # fmt: skip
    losses = {key[:5]: (key[5:], last) for key, last in rows(tables.parts(tmp_path)).items()}
    assert losses["16", "yes", "R√K", "off", "no"] == (
        ("2.0100 (3)", "1.9500 (1)", "1.0000 (1 of 2 lost)", "2.00e-03 (edge)"),
        "–",
    )
    assert losses["16", "yes", "R√K", "off", "yes"] == (
        ("2.1000 (3)", "–", "–", "2.00e-03 (edge)"),
        # By hand: the two cells' variances are 0.0100 and 0.0121; t(0.975, 4) = 2.7764.
        "+0.0900 (-0.1483 to 0.3283), few rates",
    )
    assert losses["16", "yes", "R√K", "on", "yes"] == (("lost", "–", "–", "lost"), "lost")
    effects = rows(tables.part_effects(tmp_path))
    gain = effects["outer gain: no in place of yes", "bias yes, α R√K, β off"]
    assert gain == "-0.0900 (-0.3283 to 0.1483), few rates"
    assert effects["β: off in place of on", "bias yes, α R√K, outer gain yes"] == "lost"


def test_rules_are_compared_without_the_seed_that_picked_the_rates_too(tmp_path):
    losses = {"flat": (2.0, 2.0, 2.0), "averaged": (1.0, 2.1, 2.3), "prenorm": (3.0,)}
    runs = [
        {"rule": block, "rounds": R, "seed": seed, "loss": loss, "peak_lr": 2e-3}
        for block, by_seed in losses.items()
        for R in (4, 16)
        for seed, loss in enumerate(by_seed[: 1 if R == 4 else 3])
    ]
    study(tmp_path / "transfer", runs)
    text = tables.pairs(tmp_path)
    assert text.startswith("| rule minus flat | R = 4 | R = 16 | R = 16 without seed 0 |")
    found = {key[0]: last for key, last in rows(text).items()}
    assert found["averaged"] == "+0.2000 (-0.2303 to 0.6303)"  # variances 0 and 0.02; t(0.975, 2) = 4.3027
    assert found["pre-norm"] == "–"


def test_a_best_rate_at_an_edge_gives_a_bound(tmp_path):
    def curve(*losses):
        runs = [
            {"rule": "flat", "peak_lr": 1e-3 * 2**place, "loss": loss} for place, loss in enumerate(losses)
        ]
        folder = study(tmp_path / "-".join(map(str, losses)), runs)
        (only,) = tables.curves_of(runs_of(folder), lambda run: ("flat",)).values()
        return only

    between, above, below = curve(2.1, 2.0, 2.1), curve(2.2, 2.1, 2.0), curve(2.0, 2.1, 2.2)
    assert tables.octaves(between, above) == "≤ -1.0"
    assert tables.octaves(above, between) == tables.octaves(between, below) == "≥ +1.0"
    assert tables.octaves(above, below) == "≥ +2.0"
    assert tables.octaves(above, curve(2.3, 2.2, 2.1)) == "–"  # both may lie anywhere above
    assert tables.octaves(between, curve(2.3, 2.2, 2.3)) == "+0.0"
    apart = tables.minus(above, curve(1.5), tables.family([above]))
    assert str(apart) == "+0.5000 (1 and 1 seeds), few rates (0.004 against 0.001)"  # no interval


def test_gain_over_prenorm_and_its_growth_are_corrected_together(tmp_path):
    gains = {1: (0.0, 0.02), 7: (0.05, 0.09)}
    runs = []
    for R, by_seed in gains.items():
        for seed, gain in enumerate(by_seed):
            runs.append({"rule": "prenorm", "rounds": R, "seed": seed, "loss": 2 + seed / 3})
            runs.append({"rule": "flat", "rounds": R, "seed": seed, "loss": 2 + seed / 3 - gain})
    study(tmp_path / "tokens-per-parameter" / "grid", runs)
    _, gained, bias = tables.tokens(tmp_path).split("\n\n")
    # The cells' squares over 4 degrees of freedom; t(1 - 0.025 / 3, 4) = 3.9608, for two gains and a growth.
    sd = ((2 * (1 / 3) ** 2 + (1 / 3 - 0.02) ** 2 + (1 / 3 - 0.04) ** 2) / 2 / 4) ** 0.5
    half, wider = 3.9608 * sd, 3.9608 * sd * 2**0.5
    ((_, *found),) = [(*key, last) for key, last in rows(gained).items() if key[0] == "flat"]
    means = (0.01, half), (0.07, half), (0.06, wider)
    assert found == [f"{mean:+.4f} ({mean - half:.4f} to {mean + half:.4f})" for mean, half in means]
    assert rows(bias)["no bias minus bias", "–"] == "–"


def test_escapes_under_muon_stand_beside_those_under_adamw(tmp_path):
    for folder, fallen in (("muon-escape", ()), ("p-sweep", (0, 1))):
        for seed in (0, 1):
            similarity, loss = (1.0, FLOOR) if seed in fallen else (0.2, 2.0)
            write_run(tmp_path / folder / f"seed{seed}", seed=seed, similarity=similarity, loss=loss)
        axes = {f"seed{seed}": {"warmup_steps": 600, "p": 0.25, "seed": seed} for seed in (0, 1)}
        write_sweep(tmp_path / folder, axes)
    found = rows(tables.muon_escape(tmp_path))
    assert ("600", "0.25", "2/2", "2/2", "0.34 to 1.00", "2.000", "–", "0/2", "0/2") in found


def test_a_rounded_model_is_shown_at_the_rate_of_its_lowest_loss_beside_all_rates():
    def run(rule, loss, cost):
        return {"rule": rule, "loss": loss, **dict.fromkeys(quantization.FORMATS, loss + cost)}

    runs = [run("flat", 2.5, 0.03), run("flat", 2.4, 0.02), run("flat", 2.6, 0.01), run("prenorm", 2.7, 0.04)]
    first, *formats = [line for line in quantization.larger_table(runs).splitlines() if line[2:3] in "ni"]
    assert first == "| none: the loss as trained | 2.4000 | 2.7000 |"
    assert [line.split(" | ")[1:] for line in formats] == [
        ["0.0200 (0.0100 to 0.0300)", "0.0400 (0.0400 to 0.0400) |"]
    ] * len(quantization.FORMATS)
