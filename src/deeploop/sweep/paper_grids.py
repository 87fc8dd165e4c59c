"""The paper's sweeps as grids, at three scales; and those on questions that it leaves open.

`paper`   its settings, as far as they are known
`gpu`     minutes on one GPU, on any corpus of GPT-2 tokens: K = 6, width 512, 64 × 512 tokens per step
`laptop`  minutes on two cores, on the bytes of Python's standard library
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from deeploop.sweep.grid import Axis, Grid, along

Scale = Literal["paper", "gpu", "laptop"]
SCALES = get_args(Scale)
ROUNDS = (1, 3, 5, 7)
METHODS = ("prenorm", "deeploop")  # the baseline, and the paper's rule

PAPER = {"model.unigram_bias": False}  # recipes have it, the paper's models do not

# ── Table 1: size × rule × R ────────────────────────────────────────────────────────────────────────────
GPU: dict[str, Any] = {
    "model.blocks": 6,
    "model.width": 512,
    "model.heads": 4,
    "model.hidden": 1360,  # ⌊8·512/3⌋ = 1365, down to a multiple of 16
    "model.context": 512,
    "data.path": "data/text",
    "data.validation_sequences": 256,
    "optim.batch": 64,
    "device.micro_batch": 64,
}
TABLE1_SIZES: dict[str, dict[Any, dict[str, Any]]] = {
    "paper": {"small": {"recipe": "gpt2-small"}, "medium": {"recipe": "gpt2-medium"}},
    "gpu": {
        "small": {},
        "medium": {"model.blocks": 12, "model.width": 768, "model.heads": 6, "model.hidden": 2048},
    },
    "laptop": {"small": {}, "medium": {"model.blocks": 4}},
}
TABLE1_SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    # A thousandth of the paper's 49.152 B tokens; the rate rises by the lineage's 5e-7 per step.
    "gpu": {
        **GPU,
        "optim.steps": 1_500,
        "optim.peak_lr": 5e-4,
        "optim.warmup_steps": 1_000,
        "data.validate_every": 250,
        "checkpoint.every": 500,
        "checkpoint.keep": 1,
    },
    "laptop": {"model.context": 64},
}


def table1(scale: Scale) -> Grid:
    """Table 1: pre-norm against DeepLoop at R = 1, 3, 5, 7, small and medium; 16 cells."""
    return Grid(
        "table1",
        "tiny" if scale == "laptop" else "gpt2-small",
        {"size": TABLE1_SIZES[scale], **along("model.rule", METHODS), **along("model.rounds", ROUNDS)},
        PAPER | TABLE1_SETTINGS[scale],
        scale,
    )


def downstream(scale: Scale) -> Grid:
    """Tables 2 and 4: table1 but for small at R = 7, scored on the eight tasks; 14 cells."""
    base = table1(scale)
    return Grid(
        "downstream",
        base.recipe,
        base.axes,
        base.settings,
        scale,
        omit=({"size": "small", "rounds": 7},),
        evaluate=True,
        shares_folder_of="table1",
    )


# ── Appendix C: p × seed ────────────────────────────────────────────────────────────────────────────────
def _exponents(values: Iterable[float]) -> dict[str, Axis]:
    return {"p": {p: {"model.rule": f"deeploop:p={p:g}"} for p in values}}


PAPER_P = (0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60)
P_SWEEP: dict[str, tuple[str, dict[str, Any], dict[str, Axis]]] = {
    # The text's 2,700 steps of the 100,000-step schedule, whose cosine has lost 0.01% of the rate by then.
    "paper": (
        "gpt2-small",
        {"optim.steps": 2_700, "optim.floor_lr": 1e-3},
        {**_exponents(PAPER_P), **along("seed", range(5))},
    ),
    # 300 steps decide an escape. At 1.7e-6 per step (1e-3 over 600) p = ½ does and p = ¼ does not, at 5e-6
    # neither. The ramps are two of `escape`, and the peak stays, as there.
    "gpu": (
        "gpt2-small",
        {
            **GPU,
            "optim.steps": 300,
            "optim.floor_lr": 1e-3,
            "data.validate_every": 50,
            "checkpoint.every": 300,
            "checkpoint.keep": 1,
        },
        {
            **along("optim.warmup_steps", (600, 200)),
            **_exponents((0.25, *PAPER_P, 0.75, 1.0)),
            **along("seed", range(3)),
        },
    ),
    # The demo's ramp and depth: at R = 3 no ramp is known that tells exponents apart at this size.
    "laptop": (
        "tiny",
        {
            "model.rounds": 12,
            "model.context": 64,
            "data.validation_sequences": 128,
            "data.validate_every": 40,
            "optim.steps": 160,
            "optim.peak_lr": 1.2e-2,
            "optim.floor_lr": 1.2e-3,
            "optim.warmup_steps": 100,
            "checkpoint.every": 80,
            "checkpoint.keep": 1,
        },
        {**_exponents((0.25, *PAPER_P)), **along("seed", range(3))},
    ),
}


def p_sweep(scale: Scale) -> Grid:
    """Appendix C: which exponents escape the unigram floor, over seeds, at R = 3 (laptop: R = 12)."""
    recipe, settings, axes = P_SWEEP[scale]
    compare_at = 2_000 if scale == "paper" else None
    return Grid("p-sweep", recipe, axes, PAPER | settings, scale, compare_at=compare_at)


# ── How a start escapes, and which rule to take ─────────────────────────────────────────────────────────
def escape(scale: Scale) -> Grid:
    """With and without the unigram bias: escapes over p, the ramp and seeds; 90 cells (laptop: 60)."""
    recipe = "tiny" if scale == "laptop" else "gpt2-small"
    few = scale == "laptop"
    # The peak is 1e-3 and stays, as at the start of a long schedule: what differs is the rise.
    warmups = {"1e-5": 100, "2e-5": 50} if few else {"1.7e-6": 600, "5e-6": 200, "1e-5": 100}
    return Grid(
        "escape",
        recipe,
        {
            "start": {"paper": PAPER, "stable": {}},
            **_exponents((0.25, 0.5, 0.75)),
            "ramp": {ramp: {"optim.warmup_steps": steps} for ramp, steps in warmups.items()},
            **along("seed", range(5)),
        },
        {
            **{"paper": {}, "gpu": GPU, "laptop": {"model.blocks": 4, "model.context": 64}}[scale],
            "optim.steps": 150 if few else 300,
            "optim.floor_lr": 1e-3,
            "data.validate_every": 50,
            "checkpoint.every": 300,
            "checkpoint.keep": 1,
        },
        scale,
    )


# Every rule starts with the unigram bias: it is not a part of any of them, and without it a comparison shows
# who needed it.
RULES: Axis = {
    "prenorm": {"model.rule": "prenorm"},
    "deepnorm": {"model.rule": "deepnorm"},
    "deeploop": {},
    "averaged": {"model.rule": "averaged"},
    "factored": {"model.rule": "factored"},
    "flat": {"model.rule": "flat"},
}
RULE_SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    # Small, so that a run is long against its warm-up: 1,000 steps of 8 × 512 tokens in some five seconds.
    "gpu": GPU
    | {
        "model.blocks": 4,
        "model.width": 384,
        "model.heads": 3,
        "model.hidden": 1024,
        "optim.batch": 8,
        "device.micro_batch": 8,
        "optim.steps": 1_000,
        "optim.warmup_steps": 400,
        "data.validate_every": 250,
        "checkpoint.every": 1_000,
        "checkpoint.keep": 1,
    },
    "laptop": {
        "model.context": 64,
        "optim.steps": 600,
        "data.validate_every": 150,
        "checkpoint.every": 600,
        "checkpoint.keep": 1,
    },
}
# Peak and warm-up: the same eight points for every rule, the rate rising by 1.2e-6 to 4e-5 per step.
SEARCH = {
    f"{peak:g}+{warmup}": {"optim.peak_lr": peak, "optim.warmup_steps": warmup}
    for warmup, peaks in {400: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), 100: (1e-3, 2e-3, 4e-3)}.items()
    for peak in peaks
}


def _rules(name: str, axes: dict[str, Axis], scale: Scale) -> Grid:
    recipe = "tiny" if scale == "laptop" else "gpt2-small"
    settings = {"model.unigram_bias": True, **RULE_SETTINGS[scale]}
    return Grid(name, recipe, {"rule": RULES, **axes}, settings, scale)


def rules_search(scale: Scale) -> Grid:
    """A rate and a warm-up for every rule of `rules`: eight trials at R = 3 with two seeds; 96 cells."""
    seeds = along("seed", (2, 3))  # not those of `rules`, which are reported
    return _rules("rules-search", {"trial": SEARCH, **seeds}, scale)


def rules(scale: Scale) -> Grid:
    """Six rules at R = 1, 3, 5, 7, equal tokens, all with the unigram bias, two seeds: loss; 48 cells."""
    return _rules("rules", {**along("model.rounds", ROUNDS), **along("seed", range(2))}, scale)


# Does a rule keep its learning rate when R grows? Peaks an octave apart; 20% of the steps are warm-up.
TRANSFER: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "paper": ("gpt2-small", {"optim.steps": 20_000, "optim.warmup_steps": 4_000}, (1, 3, 7)),
    "gpu": (
        "gpt2-small",
        RULE_SETTINGS["gpu"] | {"optim.steps": 700, "optim.warmup_steps": 140, "data.validate_every": 350},
        (1, 4, 16, 64),
    ),
    "laptop": (
        "tiny",
        RULE_SETTINGS["laptop"] | {"optim.steps": 400, "optim.warmup_steps": 80, "data.validate_every": 200},
        (1, 4, 16),
    ),
}
PEAKS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
TRANSFER_RULES = {name: RULES[name] for name in ("flat", "prenorm", "averaged", "factored", "deeploop")}


def transfer(scale: Scale) -> Grid:
    """Which rule keeps one learning rate at any R? Five rules × R × five peaks, three seeds; 300 cells."""
    recipe, settings, rounds = TRANSFER[scale]
    axes = {**along("model.rounds", rounds), **along("optim.peak_lr", PEAKS), **along("seed", range(3))}
    settings = {"model.unigram_bias": True, **settings}
    return Grid("transfer", recipe, {"rule": TRANSFER_RULES, **axes}, settings, scale)


# ── Iterated tasks: which rule learns the step, and which goes on beyond the trained depth ───────────────
ITERATED = ("automaton", "hops", "addition", "reachability", "induction")
ITERATE_RULES: Axis = {
    "flat": {"model.rule": "flat"},
    "deeploop": {"model.rule": "deeploop"},
    "deeploop-no-gain": {"model.rule": "deeploop:outer_gain=off"},
    "prenorm": {"model.rule": "prenorm"},
    "averaged": {"model.rule": "averaged"},
    # α of each R in place of the trained one; rounds that do not tell the steps.
    "flat-recomputed": {"model.rule": "flat", "model.recompute_alpha": True},
    "flat-fixed": {"model.rule": "flat", "rounds.sample": "fixed"},
    "flat-uniform": {"model.rule": "flat", "rounds.sample": "uniform"},
    # No loop: the parameters of the looped block, and the arithmetic of its four rounds.
    "one-layer": {"model.rule": "prenorm", "model.rounds": 1, "rounds.sample": "fixed"},
    "four-layers": {
        "model.rule": "prenorm",
        "model.blocks": 4,
        "model.rounds": 1,
        "rounds.sample": "fixed",
    },
}
# Rate and noise, the same five for every rule.
ITERATE_TRIALS = {
    f"{peak:g}+{noise:g}": {"optim.peak_lr": peak, "optim.floor_lr": peak / 10, "rounds.noise": noise}
    for peak, noise in ((1e-3, 0.0), (3e-3, 0.0), (6e-3, 0.0), (3e-3, 0.1), (4e-3, 0.3))
}


def _iterate(name: str, axes: dict[str, Axis], scale: Scale) -> Grid:
    tasks: Axis = {task: {"recipe": task} for task in ITERATED}
    steps = {"paper": 8_000, "gpu": 2_000, "laptop": 1_000}[scale]
    # Rules by themselves, for as long as each other: some recipes have an injection, or more steps.
    settings: dict[str, Any] = {"optim.steps": steps, "model.injection": "none"}
    settings |= {"data.validate_every": 250, "checkpoint.every": 10_000, "checkpoint.keep": 1}
    return Grid(name, "automaton", {"task": tasks, "rule": ITERATE_RULES, **axes}, settings, scale)


def iterate_search(scale: Scale) -> Grid:
    """A rate and a noise for every rule of `iterate`: five trials with two seeds; 500 cells."""
    seeds = along("seed", (100, 101))  # not those of `iterate`, which are reported
    return _iterate("iterate-search", {"trial": ITERATE_TRIALS, **seeds}, scale)


def iterate(scale: Scale) -> Grid:
    """Iterated tasks × rules, three seeds: who learns them, who goes on beyond training; 150 cells."""
    return _iterate("iterate", along("seed", range(3)), scale)


# ── Reasoners ───────────────────────────────────────────────────────────────────────────────────────────
# The published block, and p = ½: on 4 × 4 boards at a rate of its own, for it is slow at the other's.
SUDOKU: dict[str, dict[Any, dict[str, Any]]] = {
    "hrm-sudoku": {"hrm": {}, "deeploop": {"model.rule": "deeploop"}},
    "hrm-sudoku4": {"hrm": {}, "deeploop": {"recipe": "hrm-sudoku4-deeploop"}},
}
HRM_ARC: dict[str, tuple[str, dict[str, Axis]]] = {
    # Four seeds, as the paper's control.
    "paper": (
        "hrm-arc1",
        {"method": {"hrm": {}, "deeploop": {"recipe": "hrm-arc1-deeploop"}}, **along("seed", range(4))},
    ),
    "gpu": ("hrm-sudoku", {"method": SUDOKU["hrm-sudoku"], **along("seed", range(2))}),
    "laptop": ("hrm-sudoku4", {"method": SUDOKU["hrm-sudoku4"], **along("seed", range(3))}),
}


def hrm_arc(scale: Scale) -> Grid:
    """Table 3: HRM as published against p = 1/2, on ARC-AGI-1 (gpu: 9 × 9 Sudoku, laptop: 4 × 4).

    Every cell is evaluated, on ARC by votes. The puzzles come from `deeploop prepare`: of ARC
    `arc --concept-arc ConceptARC/corpus`.
    """
    recipe, axes = HRM_ARC[scale]
    return Grid("hrm-arc", recipe, axes, {}, scale, evaluate=True)


def depth(scale: Scale) -> Grid:
    """Section 4: C_L inner iterations × gradient horizon of HRM as published and with p = 1/2, on Sudoku."""
    recipe = "hrm-sudoku4" if scale == "laptop" else "hrm-sudoku"
    return Grid(
        "depth",
        recipe,
        {
            "method": SUDOKU[recipe],
            **along("model.low_cycles", (1, 2, 4, 8)),
            **along("model.horizon", ("last_call", "last_cycle", "full")),
        },
        {},
        scale,
        omit=({"low_cycles": 1, "horizon": "last_cycle"},),  # whose one call is the last
    )


GRIDS: dict[str, Callable[[Scale], Grid]] = {
    "table1": table1,
    "p-sweep": p_sweep,
    "downstream": downstream,
    "hrm-arc": hrm_arc,
    "depth": depth,
    "escape": escape,
    "rules-search": rules_search,
    "rules": rules,
    "transfer": transfer,
    "iterate-search": iterate_search,
    "iterate": iterate,
}
