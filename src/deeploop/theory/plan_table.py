"""The plan as a person reads it: counts, what to set, the paper's summary table, one sentence of verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from deeploop.theory.bounds import (
    Bound,
    aligned_bound,
    exponent_threshold,
    kappa_bar_range,
    rules_by_module,
    untied_bound,
)
from deeploop.theory.depth_law import effective_depth, mean_read_write
from deeploop.theory.scaling import (
    DEEPLOOP,
    DEEPNORM,
    PAPER_RULES,
    Real,
    ScalingRule,
    averaged_epsilon,
    exact,
    factored_epsilon,
    flat_alpha,
)
from deeploop.theory.visits import SUBLAYERS_PER_BLOCK, Schedule

if TYPE_CHECKING:
    from deeploop.rules import Rule
    from deeploop.theory.plan import Plan

WIDTH = 100
UNTIED, ALIGNED = exponent_threshold(0), exponent_threshold(1)
THRESHOLDS = f"  γ = 0, decorrelated visits: p ≥ {UNTIED}      γ = 1, aligned visits: p ≥ {ALIGNED}"
DEPTH_FROM = {
    "cycles": "α and β are taken at the paper's N_g: the blocks of every cycle that a gradient reaches.",
    "graph": "α and β are taken at the blocks in the training graph (--depth-from graph).",
}
ModuleRules = Mapping[str, ScalingRule]
LOSSES = "Bounds do not rank rules by their loss; docs/rules.md has the losses."


def render(plan: Plan) -> str:
    """The whole table."""
    parts = _hierarchy_parts(plan) if plan.horizons else _loop_parts(plan)
    return "\n\n".join([*parts, textwrap.fill(f"Verdict: {verdict(plan)} {LOSSES}", WIDTH)])


def verdict(plan: Plan) -> str:
    """Whether the rule keeps the aligned bound finite as visits are added, in one sentence."""
    if plan.other:
        return f"under {plan.other}, {plan.other.claim}. The paper's bounds are for its own block."
    R = "R_g" if plan.horizons else "R"
    name = _names(plan.rules)
    exponents = {m: exact(rule.p) for m, rule in plan.rules.items()}
    tied = [p for m, p in exponents.items() if plan.schedule.R_g_of(m) > 1]
    if min(exponents.values()) < UNTIED:
        growth = _theta(N=1 - 4 * min(exponents.values()))
        return f"{name} is unbounded, since p < 1/4 lets even the untied bound grow with depth, as {growth}."
    if not tied:
        return f"nothing is visited twice in the graph, so p ≥ 1/4 is enough and {name} is bounded."
    if min(tied) < ALIGNED:
        growth = _theta(**{R: 2 - 4 * min(tied)})
        return (
            f"{name} is bounded only while γ ≤ {float(4 * min(tied) - 1):g}; under aligned visits (γ = 1), "
            f"with the blocks fixed, its bound grows as {growth}, where p = 1/2 would hold it."
        )
    now, under_deepnorm = (
        aligned_bound(plan.schedule, rules, plan.depth()) for rules in (plan.rules, DEEPNORM)
    )
    return (
        f"{name} stays bounded under aligned visits (now {_bound(now)}) however large {R} gets with the "
        f"blocks fixed, while DeepNorm's bound (now {_bound(under_deepnorm)}) grows in proportion to {R}."
    )


def flat_alphas(schedule: Schedule) -> dict[str, float]:
    """The flat rule's alpha of each module: its own blocks, and its visits in the training graph."""
    return {
        m: flat_alpha(schedule.J_of(m) // SUBLAYERS_PER_BLOCK, schedule.R_g_of(m)) for m in schedule.modules
    }


def _loop_parts(plan: Plan) -> list[str]:
    s, K, R = plan.schedule, plan.settings["blocks"], plan.settings["rounds"]
    return [
        f"A loop of K = {K} blocks, visited for R = {R} rounds\n"
        f"  depth N = KR = {s.N} blocks, visits M = 2N = {s.M}, stored sublayers J = 2K = {s.J}",
        _other_to_set(plan, plan.other) if plan.other else _to_set(plan, "x ← Norm(α·x + f(Norm(x)))"),
        "The paper's rules, for comparison\n" * (plan.other is not None)
        + _comparison(plan, "N", "R", lambda p: _theta(R=2 - 4 * p, K=1 - 4 * p))
        + "\n"
        "  untied bound M(β/α)²; aligned bound M·R(β/α)², growing in R with K fixed",
        "Exponents: where κ_R grows as R^γ, the bound M·κ_R(β/α)² stays finite if p ≥ (1+γ)/4\n" + THRESHOLDS,
        "Other rules for a loop: pre-norm with a scaled branch, x ← x + ε·f(Norm(x)), no β\n"
        f"  factored ε = λ/(R√K) = {plan.epsilons['factored']:.6g} at λ = 1      "
        f"averaged ε = 1/N = {plan.epsilons['averaged']:.6g}\n"
        "  or the flat rule, x ← Norm(α·x + f(Norm(x)·g)) with no gain on the outer norm, no β\n"
        f"  flat α = λ·R·√K = {flat_alphas(s)['loop']:.6g} at λ = 1",
        *_once_parts(plan),
        *_training_parts(plan),
    ]


def _training_parts(plan: Plan) -> list[str]:
    """N* where rounds are drawn or truncated, and what it would make of α; α itself is the mean's."""
    if plan.training is None:
        return []
    training, K, N = plan.training, int(plan.settings["blocks"]), plan.schedule.N
    law, rule = training.law, plan.rules["loop"]
    mean, star = mean_read_write(law, training.backprop), effective_depth(K, law, training.backprop)
    drawn = f"{training.sample}, mean {float(law.mean):.4g}, {law.least} to {law.most}"
    kept = f", gradient through the last {training.backprop}" if training.truncates else ""
    alpha = rule.alpha(1) * star ** float(rule.p)
    gain = "" if plan.once else f" (--rule flat:gain={star / N:.4g})"  # which is for all parts
    above, named = ("The scale", f"{rule.name} ") if plan.other else ("α", "")
    written = _number(float(mean), mean if isinstance(mean, Fraction) else None)
    return [
        f"Rounds of a training step: {drawn}{kept}\n"
        f"  N* = {training.formula} = {K}·√{written} = {star:.6g}, where N = K·R = {N}\n"
        "  The aligned bound, read in R rounds and written in R_g, is 2K·R·R_g(β/α)² = 2(N*)²/K·(β/α)²\n"
        f"  {above} above is that of the mean R, and stays. At N* α would be\n"
        f"  {named}{alpha:.6g}, flat {star / K**0.5:.6g}{gain}. N* is our reading of the bound, untested"
    ]


def _once_parts(plan: Plan) -> list[str]:
    """The scales of prelude and coda, where there are any."""
    if not plan.once:
        return []
    rule = plan.rules["loop"]
    rows = [
        [f"{name}, K = {K}", *(f"{value:.6g}" for value in (rule.alpha(K), rule.beta(K), *_at_one_round(K)))]
        for name, K in plan.once.items()
    ]
    return [
        "Prelude and coda are visited once, so each rule is taken at its own blocks and R = 1\n"
        + _columns(["", f"{rule.name} α", "β", "flat α", "factored ε", "averaged ε"], *rows)
    ]


def _at_one_round(K: int) -> tuple[float, ...]:
    return flat_alpha(K, 1), factored_epsilon(K, 1), averaged_epsilon(K, 1)


def _hierarchy_parts(plan: Plan) -> list[str]:
    s, size = plan.schedule, plan.settings
    needs = [f"{m} (R_g = {s.R_g_of(m)}) p ≥ {ALIGNED if s.R_g_of(m) > 1 else UNTIED}" for m in s.modules]
    return [
        f"Modules H ({size['high_blocks']} blocks) and L ({size['low_blocks']} blocks), "
        f"C = {size['cycles']} cycles, in each L for C_L = {size['low_cycles']} calls and H once\n"
        f"  forward visits M = {s.M}, depth N = {s.N} blocks, stored sublayers J = {s.J} "
        f"(H {s.J_of('H')}, L {s.J_of('L')})",
        _horizon_table(plan) + "\n"
        f"  {DEPTH_FROM[plan.depth_from]}\n"
        "  HRM's code keeps last_call in the graph. Flat α = λ·R_g·√K of each module at λ = 1, no β.",
        _to_set(plan, "x ← Norm(α·x + f(x))"),
        _comparison(plan, "N_g", "R_g", lambda p: _theta(R_g=2 - 4 * p)) + "\n"
        "  untied bound M_g(β/α)²; aligned bound (J_H·R_H² + J_L·R_L²)(β/α)², growing in R_g with J fixed",
        "Exponents: where a module's κ grows as R_g^γ, its bound stays finite if p ≥ (1+γ)/4\n"
        + THRESHOLDS
        + "\n"
        f"  aligned visits ask here: {', '.join(needs)}",
    ]


def _to_set(plan: Plan, update: str) -> str:
    """What to put into the model."""
    N = plan.depth()
    alpha = _each(plan.rules, lambda rule: f"{rule.alpha(N):.7g}")
    beta = _each(plan.rules, lambda rule: f"{rule.beta(N):.7g}")
    width = max(len(alpha), len(beta))
    return (
        f"Set, for {_names(plan.rules)} at depth {N}\n"
        f"  α = {alpha:{width}}   at every visit: {update}\n"
        f"  β = {beta:{width}}   once, at init: on value, output and feed-forward matrices"
    )


def _other_to_set(plan: Plan, rule: Rule) -> str:
    """The same for a rule that is not the paper's."""
    alpha, beta, epsilon = plan.scales
    value = alpha if rule.has_alpha else epsilon
    unit = f" at λ = {rule.gain:g}" if "λ" in rule.formula else ""
    drawn = f"β = {beta:.7g}" if rule.beta else "no β"
    scale = f"{rule.formula} = {value:.7g}{unit}, {drawn}" if rule.formula else "no α, β or ε"
    return f"Set, for {rule} (--rule {rule})\n  {scale}   at every visit: {rule.equation}"


def _horizon_table(plan: Plan) -> str:
    """Visit counts, alpha and beta at the three horizons side by side."""

    def row(label: str, cell: Callable[[Schedule], str]) -> list[str]:
        return [label, *map(cell, plan.horizons.values())]

    chosen, rules = plan.settings["horizon"], plan.rules
    return _columns(
        ["gradient horizon", *(f"{name} (chosen)" if name == chosen else name for name in plan.horizons)],
        row("visits in the graph M_g", lambda s: str(s.M_g)),
        row("blocks in the graph", lambda s: str(s.N_g)),
        row("depth of α and β", lambda s: str(plan.depth(s))),
        row("rounds R_g of L, of H", lambda s: f"{s.R_g_of('L')}, {s.R_g_of('H')}"),
        row("α", lambda s: _each(rules, lambda rule: f"{rule.alpha(plan.depth(s)):.5g}")),
        row("β", lambda s: _each(rules, lambda rule: f"{rule.beta(plan.depth(s)):.5g}")),
        row("flat α of L, of H", lambda s: "{L:.5g}, {H:.5g}".format(**flat_alphas(s))),
        row("mean κ_g lies in", lambda s: "[{}, {}]".format(*kappa_bar_range(s))),
        row("untied bound", lambda s: _bound(untied_bound(s, rules, plan.depth(s)))),
        row("aligned bound", lambda s: _bound(aligned_bound(s, rules, plan.depth(s)))),
    )


def _comparison(plan: Plan, N: str, R: str, aligned_growth: Callable[[Fraction], str]) -> str:
    """The paper's summary table (Section 3.6) with this plan's numbers; other chosen rules beside it."""
    schedule, depth = plan.schedule, plan.depth()
    sides: list[ModuleRules] = [rules_by_module(schedule, rule) for rule in PAPER_RULES.values()]
    sides += [plan.rules] if plan.rules not in sides else []

    def row(label: str, cell: Callable[[ModuleRules], str]) -> list[str]:
        return [label, *map(cell, sides)]

    def each(label: str, cell: Callable[[ScalingRule], str]) -> list[str]:
        return row(label, lambda rules: _each(rules, cell))

    def equation(
        label: str, form: Callable[[ScalingRule], str], value: Callable[[ScalingRule], str]
    ) -> list[str]:
        """form = value, or the values alone where each module has its own."""
        return row(
            label,
            lambda rules: _each(
                rules, value if _mixed(rules) else lambda rule: f"{form(rule)} = {value(rule)}"
            ),
        )

    def name(rules: ModuleRules) -> str:
        return ("by module" if _mixed(rules) else _names(rules)) + (
            " (chosen)" if rules == plan.rules and not plan.other else ""
        )

    ratio = {DEEPNORM: f"1/(2√{N})", DEEPLOOP: f"1/(4{N})"}
    return _columns(
        row("", name),
        equation(
            "residual scale α",
            lambda rule: f"({rule.c}{N})^{_power(rule.p)}",
            lambda rule: f"{rule.alpha(depth):.6g}",
        ),
        equation(
            "init gain β",
            lambda rule: f"({rule.d}{N})^{_power(-rule.p)}",
            lambda rule: f"{rule.beta(depth):.6g}",
        ),
        each("use of β", lambda _: "W ← β·W"),
        equation(
            "ratio β/α",
            lambda rule: ratio.get(rule, f"({rule.c * rule.d}{N}²)^{_power(-rule.p)}"),
            lambda rule: _number(rule.ratio(depth), rule.ratio_exact(depth)),
        ),
        row("untied bound", lambda rules: _bound(untied_bound(schedule, rules, depth))),
        each(f"  growth in {N}", lambda rule: _theta(**{N: 1 - 4 * exact(rule.p)})),
        row("aligned bound", lambda rules: _bound(aligned_bound(schedule, rules, depth))),
        each(f"  growth in {R}", lambda rule: aligned_growth(exact(rule.p))),
    )


def _each(rules: ModuleRules, cell: Callable[[ScalingRule], str]) -> str:
    """One cell where all modules agree, else one for each of them."""
    cells = {m: cell(rule) for m, rule in rules.items()}
    if len(set(cells.values())) == 1:
        return next(iter(cells.values()))
    return ", ".join(f"{m} {text}" for m, text in cells.items())


def _mixed(rules: ModuleRules) -> bool:
    return len(set(rules.values())) > 1


def _names(rules: ModuleRules) -> str:
    return _each(rules, lambda rule: rule.name)


def _bound(bound: Bound) -> str:
    return _number(bound.value, bound.exact)


def _number(value: float, fraction: Fraction | None) -> str:
    """A short fraction if there is one, else six digits."""
    return str(fraction) if fraction is not None and len(str(fraction)) <= 12 else f"{value:.6g}"


def _power(exponent: Real) -> str:
    """1/2, -1/4 or 1; other exponents as decimals."""
    return str(exact(exponent)) if exact(exponent).denominator <= 4 else f"{float(exponent):g}"


def _theta(**exponents: Fraction) -> str:
    """Θ of a product of powers: R=1 gives Θ(R), R=0 and K=-1 give Θ(1/K)."""
    written = {Fraction(1): "{}", Fraction(-1): "1/{}"}
    factors = (written.get(e, f"{{}}^{float(e):.3g}").format(symbol) for symbol, e in exponents.items() if e)
    return f"Θ({'·'.join(factors) or '1'})"


def _columns(header: Sequence[str], *rows: Sequence[str]) -> str:
    """Left-aligned columns under a ruled header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "   ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in (header, *rows)
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(f"  {line}".rstrip() for line in lines)
