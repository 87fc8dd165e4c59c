"""`deeploop plan`: alpha, beta and the stability bounds of an architecture, as numbers and as a table."""

import textwrap
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from deeploop.theory import scaling
from deeploop.theory.bounds import Bound, Rules, aligned_bound, kappa_bar_range, rules_by_module, untied_bound
from deeploop.theory.depth_law import DepthLaw, effective_depth, mean_read_write
from deeploop.theory.scaling import DEEPLOOP, DEEPNORM, ScalingRule, exact
from deeploop.theory.visits import HORIZONS, DepthFrom, Horizon, Schedule, hierarchy, single_loop

if TYPE_CHECKING:
    from deeploop.rules import Rule

Numbers = dict[str, Any]  # fractions where they are exact, None where a rule has none, strings
UNTIED, ALIGNED = Fraction(1, 4), Fraction(1, 2)  # the least p whose bound stays finite at γ = 0 and γ = 1
N_STAR = "Rounds of a step. At N* = {formula}, untested and not set, α would be:"
LOSSES = "Bounds do not rank rules by their loss; docs/rules.md has the losses."
LABELS = {  # of the tables' rows; numbers without a label are for JSON alone
    "mean_rounds": "mean rounds",
    "least_rounds": "least rounds",
    "most_rounds": "most rounds",
    "backprop": "rounds with gradients",
    "N_star": "N*",
    "read_times_written": "mean of R·R_g",
    "M_g": "visits in the graph M_g",
    "N_g": "blocks in the graph",
    "R_g": "rounds in the graph R_g",
    "p": "exponent p",
    "aligned_exponent": "aligned visits need p ≥",
    "rule_depth": "depth N of α and β",
    "alpha": "residual scale α = (2N)^p",
    "beta": "init gain β = (8N)^-p",
    "ratio": "ratio β/α",
    "untied_bound": "untied bound",
    "untied_growth": "  growth in N",
    "aligned_bound": "aligned bound",
    "aligned_growth": "  growth, blocks fixed",
    "kappa_bar": "mean κ_g lies in",
    "flat_alpha": "flat α = λ·R_g·√K",
    "factored_epsilon": "factored ε = λ/(R√K)",
    "averaged_epsilon": "averaged ε = 1/(KR)",
}
LOOP_DEPTH = "depth N = {N} blocks, forward visits M = {M}"
MODULES_DEPTH = "α and β at N = {rule_depth}; forward depth {N} blocks, M = {M} visits"


def plan_single(
    blocks: int,
    rounds: int,
    rule: ScalingRule = DEEPLOOP,
    *,
    prelude: int = 0,
    coda: int = 0,
    training: Numbers | None = None,
    other: "Rule | None" = None,
) -> Numbers:
    """Plan K blocks for R rounds under one rule, between blocks that are visited once.

    `training` is made by `plan_training`; `other` is a rule that is not the paper's, such as flat.
    """
    for name, count in (("prelude", prelude), ("coda", coda)):
        if count < 0:
            raise ValueError(f"{name}={count}: must be 0 (none) or more")
    s, once = single_loop(blocks, rounds), {"prelude": prelude, "coda": coda}
    numbers: Numbers = {"blocks": blocks, "rounds": rounds, **once, **_plan(s, {"loop": rule}, s.N)}
    numbers |= {"once": {name: _scales(rule, K, K, 1) for name, K in once.items() if K}, "training": training}
    if other:
        nothing = ("p", "ratio", "untied_bound", "untied_growth", "aligned_bound", "aligned_growth")
        numbers |= {"rule": str(other), **dict.fromkeys(nothing), **other.scales(blocks, rounds)._asdict()}
        numbers["verdict"] = f"under {other}, {other.claim}. The paper's bounds are for its own block."
    return numbers


def plan_hierarchy(
    high_blocks: int,
    low_blocks: int,
    cycles: int,
    low_cycles: int,
    horizon: Horizon = "last_cycle",
    rules: Rules = DEEPLOOP,
    depth_from: DepthFrom = "cycles",
) -> Numbers:
    """Plan two modules H and L under one rule, or one rule each: {"H": ..., "L": ...}."""
    sizes = {"high_blocks": high_blocks, "low_blocks": low_blocks, "cycles": cycles, "low_cycles": low_cycles}
    at = {h: hierarchy(**sizes, horizon=h) for h in HORIZONS}
    rules = rules_by_module(at[horizon], rules)
    plans = {h: _plan(s, rules, s.rule_depth(depth_from), R="R_g") for h, s in at.items()}
    beside = {h: {name: plan[name] for name in LABELS if name in plan} for h, plan in plans.items()}
    return {**sizes, "horizon": horizon, "depth_from": depth_from, **plans[horizon], "horizons": beside}


def plan_training(
    K: int, rule: ScalingRule, sample: str, law: DepthLaw, backprop: int | None
) -> Numbers | None:
    """Return N* of a loop whose rounds are drawn, or not all in the graph, and α there; None if it is N."""
    fixed, truncates = law.least == law.most, backprop is not None and backprop < law.most
    if fixed and not truncates:
        return None
    drawn = "K·√E[R·R_g]" if truncates else "K·√E[R²]"
    star = effective_depth(K, law, backprop)
    return {
        "sample": sample,
        "mean_rounds": law.mean,
        "least_rounds": law.least,
        "most_rounds": law.most,
        "backprop": backprop,
        "formula": "K·√(R·R_g)" if fixed else drawn,
        "N_star": star,
        "read_times_written": mean_read_write(law, backprop),
        "alpha": rule.alpha(1) * star ** float(rule.p),
        "flat_alpha": star / K**0.5,
    }


def _plan(s: Schedule, rules: Mapping[str, ScalingRule], N: int, R: str = "R") -> Numbers:
    """Return the numbers of a schedule whose rules use depth N; R is the symbol of its rounds."""
    compared = {rule.name: rules_by_module(s, rule) for rule in (DEEPNORM, DEEPLOOP)}
    if rules not in compared.values():
        compared["chosen"] = dict(rules)
    R_g = {m: s.R_g_of(m) for m in s.modules}
    modules = {
        m: {
            "J": s.J_of(m),
            "R": s.R_of(m),
            "R_g": R_g[m],
            **_scales(rules[m], N, s.J_of(m) // 2, R_g[m]),
            "aligned_exponent": ALIGNED if R_g[m] > 1 else UNTIED,
        }
        for m in s.modules
    }
    return {
        **{name: getattr(s, name) for name in ("N", "M", "J", "N_g", "M_g")},
        "R_g": R_g,
        "flat_alpha": {m: own["flat_alpha"] for m, own in modules.items()},
        "kappa_bar": kappa_bar_range(s),
        "rule_depth": N,
        **_bounds(s, rules, N, R),
        "modules": modules,
        "comparison": {name: _bounds(s, own, N, R) for name, own in compared.items()},
        "verdict": _verdict(s, rules, N, R),
    }


def _scales(rule: ScalingRule, N: int, K: int, R: int) -> Numbers:
    """Return the scales of K blocks for R rounds: of their rule at depth N, and of other rules."""
    return {
        "rule": rule.name,
        "p": float(rule.p),
        "alpha": rule.alpha(N),
        "beta": rule.beta(N),
        "flat_alpha": scaling.flat_alpha(K, R),
        "factored_epsilon": scaling.factored_epsilon(K, R),
        "averaged_epsilon": scaling.averaged_epsilon(K, R),
    }


def _bounds(s: Schedule, rules: Mapping[str, ScalingRule], N: int, R: str) -> Numbers:
    """Return scales and bounds of a rule, or of one for each module, at depth N, and how bounds grow."""

    def each(value: Callable[[ScalingRule], Any]) -> Any:
        values = {m: value(rule) for m, rule in rules.items()}
        return values if len(set(values.values())) > 1 else next(iter(values.values()))

    def growth(rule: ScalingRule) -> str:
        blocks = {"K": 1 - 4 * exact(rule.p)} if R == "R" else {}
        return _theta(**{R: 2 - 4 * exact(rule.p)}, **blocks)

    return {
        "rule": each(lambda rule: rule.name),
        "p": each(lambda rule: float(rule.p)),
        "alpha": each(lambda rule: rule.alpha(N)),
        "beta": each(lambda rule: rule.beta(N)),
        "ratio": each(lambda rule: rule.ratio_exact(N) or rule.ratio(N)),
        "untied_bound": _best(untied_bound(s, rules, N)),
        "untied_growth": each(lambda rule: _theta(N=1 - 4 * exact(rule.p))),
        "aligned_bound": _best(aligned_bound(s, rules, N)),
        "aligned_growth": each(growth),
    }


def _verdict(s: Schedule, rules: Mapping[str, ScalingRule], N: int, R: str) -> str:
    """Say in one sentence how the bounds grow with visits."""
    name = _text(_bounds(s, rules, N, R)["rule"])
    least = min(exact(rule.p) for rule in rules.values())
    tied = min((exact(rule.p) for m, rule in rules.items() if s.R_g_of(m) > 1), default=None)
    if least < UNTIED:
        growth = _theta(N=1 - 4 * least)
        return f"{name} is unbounded: p < 1/4 lets even the untied bound grow with depth, as {growth}."
    if tied is None:
        return f"nothing is visited twice in the graph, so p ≥ 1/4 is enough and {name} is bounded."
    if tied < ALIGNED:
        return (
            f"{name} is bounded only while γ ≤ {float(4 * tied - 1):g}; under aligned visits (γ = 1), the "
            f"blocks fixed, its bound grows as {_theta(**{R: 2 - 4 * tied})}, where p = 1/2 would hold it."
        )
    now, deepnorm = (_text(_best(aligned_bound(s, r, N))) for r in (rules, DEEPNORM))
    return (
        f"{name} stays bounded under aligned visits (now {now}) however large {R} gets with the blocks "
        f"fixed, while DeepNorm's bound (now {deepnorm}) grows in proportion to {R}."
    )


def render(n: Numbers, other: "Rule | None" = None) -> str:
    """Format the numbers for a terminal of 100 columns."""
    loop, t = "horizons" not in n, n.get("training")
    head = "A loop of K = {blocks} blocks, visited for R = {rounds} rounds"
    modules = (
        "Modules H ({high_blocks} blocks) and L ({low_blocks} blocks), C = {cycles} cycles, in each L for "
        "C_L = {low_cycles} calls and H once\n  gradients through {horizon} (HRM's code: last_call)"
    )
    parts = [
        (head if loop else modules).format(**n),
        (f"  {LOOP_DEPTH if loop else MODULES_DEPTH}, stored sublayers J = {{J}}\n").format(**n),
        *([_chosen(other, n), "Or one of these"] if other else ["Set"]),
        f"  α at every visit: x ← {'Norm(α·x + f(Norm(x)))' if loop else 'Norm(α·x + f(x))'}",
        "  β once, at init: value, output, feed-forward matrices",
        "  flat: no gain of the outer norm, no β; factored, averaged: x ← x + ε·f(Norm(x)), no β; λ = 1",
        _columns(n["modules"] | n.get("once", {})) + "\n",
        "The paper's rules: untied bound M_g(β/α)², aligned bound Σ J·R_g²(β/α)². Where a module's κ grows",
        f"  as R_g^γ it is finite if p ≥ (1+γ)/4: {UNTIED} for decorrelated visits, {ALIGNED} for aligned",
        _columns(n["comparison"]) + "\n",
        *([] if loop else ["With gradients through", _columns(n["horizons"]) + "\n"]),
        *([N_STAR.format(**t), _columns({t["sample"]: t}) + "\n"] if t else []),
        textwrap.fill(f"Verdict: {n['verdict']} {LOSSES}", 100),
    ]
    return "\n".join(parts)


def _chosen(rule: "Rule", n: Numbers) -> str:
    """List scales to set for a rule other than the paper's."""
    value = n["alpha"] if rule.has_alpha else n["epsilon"]
    unit = f" at λ = {rule.gain:g}" if "λ" in rule.formula else ""
    drawn = f"β = {n['beta']:.7g}" if rule.beta else "no β"
    scale = f"{rule.formula} = {value:.7g}{unit}, {drawn}" if rule.formula else "no α, β or ε"
    return f"Set, for {rule} (--rule {rule})\n  {scale}   at every visit: {rule.equation}\n"


def _best(bound: Bound) -> float | Fraction:
    return bound.exact or bound.value


def _theta(**exponents: Fraction) -> str:
    """Format Θ of a product of powers: R=1 gives Θ(R), R=0 and K=-1 give Θ(1/K)."""
    written = {Fraction(1): "{}", Fraction(-1): "1/{}"}
    factors = (written.get(e, f"{{}}^{float(e):.3g}").format(symbol) for symbol, e in exponents.items() if e)
    return f"Θ({'·'.join(factors) or '1'})"


def _text(value: Any, digits: int = 7) -> str:
    """Format seven digits, or a short fraction; five for each module if they differ."""
    if isinstance(value, dict):
        return ", ".join(f"{m} {_text(own, 5)}" for m, own in value.items())
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    if value is None:
        return "all"
    if isinstance(value, str) or (isinstance(value, Fraction) and len(str(value)) <= 12):
        return str(value)
    return f"{float(value):.{digits}g}"


def _columns(columns: Mapping[str, Numbers]) -> str:
    """Make a column for each object, and a row for each number that has a label."""
    names = [name for name in LABELS if any(name in own for own in columns.values())]
    cells = [[LABELS[name], *(_text(own.get(name, "")) for own in columns.values())] for name in names]
    widths = [max(map(len, column)) for column in zip(["", *columns], *cells, strict=True)]
    lines = [
        "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)) for row in (["", *columns], *cells)
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(f"  {line}".rstrip() for line in lines)
