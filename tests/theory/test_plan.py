"""`deeploop plan`: its numbers as JSON, its table, and the errors of its arguments."""

import json
import re
from fractions import Fraction

import pytest
import tyro

from deeploop.commands.plan import PlanArgs, run
from deeploop.theory import DEEPLOOP, DEEPNORM, ScalingRule, plan_hierarchy, plan_single
from deeploop.theory.plan import render

LOOP = {"blocks": 12, "rounds": 3}
HRM = {"high_blocks": 4, "low_blocks": 4, "cycles": 2, "low_cycles": 2}


def planned(**args):
    return json.loads(run(PlanArgs(**args, json=True)))


def test_gpt2_small_at_three_rounds():
    plan = planned(**LOOP)
    assert (plan["N"], plan["M"], plan["J"]) == (36, 72, 24)
    assert plan["alpha"] == pytest.approx(8.485281, abs=1e-6)
    assert plan["beta"] == pytest.approx(0.0589256, abs=1e-7)
    exact = plan_single(**LOOP)
    for key, below in (("ratio", 144), ("untied_bound", 288), ("aligned_bound", 96)):
        assert exact[key] == Fraction(1, below)
        assert plan[key] == 1 / below
    assert plan["comparison"]["DeepNorm"]["aligned_bound"] == 1.5
    loop = plan["modules"]["loop"]
    assert loop["aligned_exponent"] == 0.5
    assert (loop["factored_epsilon"], loop["averaged_epsilon"]) == pytest.approx((1 / (3 * 12**0.5), 1 / 36))
    assert plan["flat_alpha"] == pytest.approx({"loop": 3 * 12**0.5})


@pytest.mark.parametrize(
    ("horizon", "M_g", "N_g", "alpha", "beta", "R_g"),
    [
        ("full", 48, 24, 6.9282, 0.07217, {"H": 2, "L": 4}),
        ("last_cycle", 24, 12, 4.8990, 0.10206, {"H": 1, "L": 2}),
        ("last_call", 16, 8, 4.8990, 0.10206, {"H": 1, "L": 1}),
    ],
)
def test_published_hrm(horizon, M_g, N_g, alpha, beta, R_g):
    plan = planned(**HRM, horizon=horizon)
    assert (plan["M"], plan["N"], plan["J"]) == (48, 24, 16)
    assert {m: module["R_g"] for m, module in plan["modules"].items()} == R_g
    for at in (plan, plan["horizons"][horizon]):
        assert (at["M_g"], at["N_g"]) == (M_g, N_g)
        assert at["alpha"] == pytest.approx(alpha, abs=5e-5)
        assert at["beta"] == pytest.approx(beta, abs=5e-6)
    assert plan["horizons"].keys() == {"full", "last_cycle", "last_call"}
    flat = {module: 2.0 * rounds for module, rounds in R_g.items()}  # √4 blocks
    assert plan["flat_alpha"] == plan["horizons"][horizon]["flat_alpha"] == flat


@pytest.mark.parametrize("horizon", ["last_cycle", "last_call"])
def test_the_papers_hrm_exactly(horizon):
    """Section 5.3: M_g = 24 visits, N_g = 12, alpha = (2·12)^½, beta = (8·12)^-½."""
    plan = planned(**HRM, horizon=horizon)
    assert (plan["rule_depth"], plan["alpha"], plan["beta"]) == (12, 24**0.5, 96**-0.5)
    assert plan["ratio"] == 1 / 48
    assert plan["horizons"]["last_cycle"]["M_g"] == 24


def test_the_graphs_own_count_is_an_option_that_says_so():
    plan = planned(**HRM, horizon="last_call", depth_from="graph")
    assert (plan["rule_depth"], plan["depth_from"], plan["alpha"]) == (8, "graph", 4.0)
    table = run(PlanArgs(**HRM, depth_from="graph"))
    assert re.search(r"depth N of α and β +24 +12 +8\n", table)


def test_an_exponent_for_each_module():
    plan = planned(**HRM, high_p=0.25)
    assert [plan["modules"][m]["p"] for m in "HL"] == [0.25, 0.5]
    assert [plan["modules"][m]["aligned_exponent"] for m in "HL"] == [0.25, 0.5]
    assert plan["modules"]["H"]["alpha"] == plan["alpha"]["H"] == 24**0.25
    assert plan["aligned_bound"] == 13 / 72
    with pytest.raises(ValueError, match=r"--high-p 0.25: goes with --high-blocks"):
        run(PlanArgs(**LOOP, high_p=0.25))


def test_rule_and_exponent_are_chosen_by_flag():
    assert planned(**LOOP, rule="deepnorm")["untied_bound"] == 0.5
    other = planned(**LOOP, rule="deeploop:p=0.3")
    assert (other["p"], other["ratio"]) == (0.3, pytest.approx((16 * 36**2) ** -0.3))
    assert other["untied_bound"] == pytest.approx(72 * (16 * 36**2) ** -0.6)
    assert other["alpha"] == pytest.approx(72**0.3)


@pytest.mark.parametrize(
    ("rule", "alpha", "epsilon", "text"),
    [
        ("flat", 3 * 12**0.5, 1.0, "α = λ·R·√K = 10.3923 at λ = 1, no β"),
        ("averaged", 1.0, 1 / 36, "ε = 1/N = 0.02777778, no β"),
        ("factored", 1.0, 1 / (3 * 12**0.5), "ε = λ/(R√K) = 0.0962"),
        ("prenorm", 1.0, 1.0, "no α, β or ε   at every visit: x ← x + f(Norm(x))"),
        ("postnorm", 1.0, 1.0, "no α, β or ε   at every visit: x ← Norm(x + f(x))"),
    ],
)
def test_rules_that_are_not_the_papers(rule, alpha, epsilon, text):
    plan = planned(**LOOP, rule=rule)
    assert (plan["rule"], plan["p"], plan["beta"]) == (rule, None, 1.0)
    assert (plan["alpha"], plan["epsilon"]) == pytest.approx((alpha, epsilon))
    assert plan["aligned_bound"] is None
    assert plan["verdict"].startswith(f"under {rule}, ")
    table = run(PlanArgs(**LOOP, rule=rule, prelude=1, sample="uniform"))
    assert text in table
    assert "stays bounded" not in table
    assert max(map(len, table.splitlines())) <= 100
    with pytest.raises(ValueError, match=f"--rule={rule}:p=0.3: p: no parameter of {rule}; it has "):
        run(PlanArgs(**LOOP, rule=f"{rule}:p=0.3"))
    with pytest.raises(ValueError, match=f"--rule {rule}: goes with --blocks and --rounds"):
        run(PlanArgs(**HRM, rule=rule))


def test_a_rule_for_each_module():
    plan = plan_hierarchy(**HRM, rules={"H": DEEPNORM, "L": DEEPLOOP})
    assert plan["alpha"] == {m: plan["modules"][m]["alpha"] for m in "LH"}
    assert plan["modules"]["H"]["alpha"] == pytest.approx(24**0.25)
    assert plan["modules"]["L"]["alpha"] == pytest.approx(24**0.5)
    assert plan["aligned_bound"] == Fraction(13, 72)  # 8/48 + 32/2304
    assert "L DeepLoop" not in render(plan_hierarchy(**HRM))
    assert re.search(r"residual scale α .* 2.213364 +4.898979 +L 4.899, H 2.2134\n", render(plan))


def test_loop_table_shows_the_papers_summary():
    table = render(plan_single(12, 3))
    rows = {line[:28].strip(): line[28:].split() for line in table.splitlines()}
    assert rows["aligned bound"] == ["3/2", "1/96"]
    assert rows["growth, blocks fixed"] == ["Θ(R)", "Θ(1/K)"]
    assert rows["untied bound"] == ["1/2", "1/288"]
    assert rows["growth in N"] == ["Θ(1)", "Θ(1/N)"]
    assert rows["ratio β/α"] == ["1/12", "1/144"]
    assert rows["residual scale α = (2N)^p"] == ["2.912951", "8.485281"]
    assert rows["init gain β = (8N)^-p"] == ["0.2427459", "0.05892557"]
    assert rows["flat α = λ·R_g·√K"] == ["10.3923"]
    assert rows["averaged ε = 1/(KR)"] == ["0.02777778"]
    assert rows["aligned visits need p ≥"] == ["1/2"]
    assert "1/4 for decorrelated visits, 1/2 for aligned" in table


def test_hierarchy_table_shows_all_horizons():
    table = render(plan_hierarchy(**HRM))
    rows = {line[:28].strip(): line[28:].split() for line in table.splitlines()}
    assert rows["visits in the graph M_g"] == ["48", "24", "16"]
    assert rows["blocks in the graph"] == ["24", "12", "8"]
    assert rows["depth N of α and β"] == ["24", "12", "12"]
    assert rows["residual scale α = (2N)^p"] == ["6.928203", "4.898979", "4.898979"]
    assert rows["init gain β = (8N)^-p"] == ["0.07216878", "0.1020621", "0.1020621"]
    assert rows["flat α = λ·R_g·√K"] == ["L", "8,", "H", "4", "L", "4,", "H", "2", "L", "2,", "H", "2"]
    assert rows["mean κ_g lies in"] == ["[0,", "10/3]", "[1/3,", "5/3]", "[1/2,", "1]"]
    assert "HRM's code: last_call" in table
    assert re.search(r"growth, blocks fixed +Θ\(R_g\) +Θ\(1\)\n", table)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (plan_single(12, 3), "DeepLoop stays bounded"),
        (plan_single(12, 3, ScalingRule(0.75)), "p = 0.75 stays bounded"),
        (plan_single(12, 3, DEEPNORM), "DeepNorm is bounded only while γ ≤ 0; .* grows as Θ\\(R\\)"),
        (plan_single(12, 3, ScalingRule(0.3)), "γ ≤ 0.2; .* grows as Θ\\(R\\^0.8\\)"),
        (plan_single(12, 3, ScalingRule(0.2)), "unbounded.*Θ\\(N\\^0.2\\)"),
        (plan_single(12, 1, DEEPNORM), "nothing is visited twice"),
        (plan_hierarchy(**HRM, rules=DEEPNORM), "grows as Θ\\(R_g\\)"),
        (plan_hierarchy(**HRM, rules={"H": DEEPNORM, "L": DEEPLOOP}), "stays bounded"),
        (plan_hierarchy(**HRM, horizon="full", rules={"H": DEEPNORM, "L": DEEPLOOP}), "grows as Θ\\(R_g\\)"),
        (plan_hierarchy(**HRM, horizon="last_call", rules=DEEPNORM), "nothing is visited twice"),
        (plan_hierarchy(**HRM, rules={"H": DEEPLOOP, "L": ScalingRule(0.2)}), "unbounded.*Θ\\(N\\^0.2\\)"),
    ],
)
def test_verdict_and_width(plan, says):
    assert re.search(says, plan["verdict"])
    assert max(map(len, render(plan).splitlines())) <= 100


def test_the_table_is_printed_unless_json_is_asked_for():
    assert run(PlanArgs(**LOOP)) == render(plan_single(**LOOP))


def test_arguments_parse_with_tyro():
    flags = "--high-blocks 4 --low-blocks 4 --cycles 2 --low-cycles 2 --horizon last_call --json"
    assert json.loads(run(tyro.cli(PlanArgs, args=flags.split())))["N_g"] == 8


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "no sizes: give --blocks --rounds, or --high-blocks"),
        ({"blocks": 12}, "--blocks: give --blocks --rounds, or"),
        ({"high_blocks": 4, "cycles": 2}, "--high-blocks --cycles: give"),
        ({**LOOP, "cycles": 2}, "--blocks --rounds --cycles: give"),
        ({"blocks": 12, "rounds": 0}, "rounds=0"),
        ({**LOOP, "rule": "deeploop:p=-1"}, "p=-1: must be a positive number"),
        ({**LOOP, "rule": "deeploop:p=1e6"}, "p=1e\\+06"),
    ],
)
def test_mistakes_are_value_errors_that_name_the_argument(args, says):
    with pytest.raises(ValueError, match=says) as error:
        run(PlanArgs(**args))
    assert "\n" not in str(error.value)


def test_prelude_and_coda_are_planned_at_one_round():
    plan = planned(blocks=4, rounds=4, prelude=2, coda=1)
    assert plan["N"] == 16  # the loop's own
    assert plan["alpha"] == planned(blocks=4, rounds=4)["alpha"]
    assert plan["once"]["prelude"]["alpha"] == pytest.approx(2.0)
    assert plan["once"]["prelude"]["flat_alpha"] == pytest.approx(2**0.5)
    assert (plan["once"]["coda"]["factored_epsilon"], plan["once"]["coda"]["averaged_epsilon"]) == (1.0, 1.0)
    assert re.search(r"residual scale α .* 5.656854 +2\n", run(PlanArgs(blocks=4, rounds=4, prelude=2)))
    assert "prelude" not in run(PlanArgs(blocks=4, rounds=4))
    with pytest.raises(ValueError, match="prelude=-1: must be 0"):
        run(PlanArgs(blocks=4, rounds=4, prelude=-1))
    with pytest.raises(ValueError, match=r"--coda 1: goes with --blocks and --rounds"):
        run(PlanArgs(**HRM, coda=1))


def test_nstar_of_truncated_and_sampled_rounds_is_printed_with_its_formula():
    plan = planned(blocks=2, rounds=16, backprop=4)["training"]
    assert (plan["formula"], plan["read_times_written"]) == ("K·√(R·R_g)", 64)
    assert plan["N_star"] == 16.0
    plan = planned(blocks=3, rounds=4, sample="uniform")["training"]
    assert (plan["formula"], plan["read_times_written"]) == ("K·√E[R²]", 20)
    plan = planned(blocks=2, rounds=4, sample="poisson-lognormal", backprop=4)["training"]
    assert (plan["formula"], plan["most_rounds"]) == ("K·√E[R·R_g]", 16)
    assert planned(**LOOP)["training"] is planned(**LOOP, backprop=3)["training"] is None
    table = run(PlanArgs(blocks=2, rounds=16, backprop=4))
    assert "At N* = K·√(R·R_g), untested and not set, α would be:" in table
    assert re.search(r"mean of R·R_g +64\n", table)
    assert re.findall(r"(?:residual scale α = \(2N\)\^p|flat α = λ·R_g·√K) +([0-9.]+)\n", table) == [
        *("8", "22.62742"),  # of the mean, to be set
        *("5.656854", "11.31371"),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (LOOP | {"backprop": 4}, "--backprop 4: must be at most 3, the most rounds of a step"),
        (LOOP | {"sample": "uniform", "limit": 2}, "limit=2: must be at least rounds=3, the mean"),
        (
            LOOP | {"rounds": 10**5, "sample": "poisson-lognormal"},
            "limit=400000: must be at most 10000; lower it",
        ),
        (LOOP | {"limit": 5}, "limit=5: must be 0 with sample=fixed"),
        (
            LOOP | {"sample": "uniform", "spread": float("nan")},
            "--spread nan: goes with --sample poisson-lognormal",
        ),
        (HRM | {"backprop": 1}, "--backprop 1: goes with --blocks and --rounds"),
    ],
)
def test_training_that_can_not_be_is_an_error(args, message):
    with pytest.raises(ValueError) as caught:
        run(PlanArgs(**args))
    assert str(caught.value).startswith(message)
