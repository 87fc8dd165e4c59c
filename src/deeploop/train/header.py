"""What is about to be trained, in a few aligned lines: for `deeploop train`, before the first step."""

import math
from dataclasses import dataclass

from deeploop.diagnose.collapse import LOSS_MARGIN, SIMILARITY_LIMIT
from deeploop.models.gpt_config import PARTS, GPTConfig
from deeploop.models.reasoner import ReasonerConfig
from deeploop.nn.residual import ALPHA, EPSILON
from deeploop.train.config import (
    AnyTrainConfig,
    ChatTrainConfig,
    CustomTrainConfig,
    IterateTrainConfig,
    TrainConfig,
)
from deeploop.train.optim import OptimConfig
from deeploop.train.progress import hours_minutes_seconds

LEGEND = {
    "floor": "best loss without context, by token frequencies; similarity 1 means one state at all positions",
    "verdict": f"escaped: loss below the floor by {LOSS_MARGIN} and similarity below {SIMILARITY_LIMIT}; "
    "collapsed: neither; undecided: one of them",
}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
UNITS = ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)


@dataclass(frozen=True)
class Facts:
    """What a config does not say by itself."""

    source: str
    """The words after `deeploop train` that the config came from: a recipe, --config FILE, --resume RUN."""
    parameters: int
    examples: int
    """Tokens of the training text, or training examples of a set of puzzles."""
    flops_per_step: int
    step_bytes: int
    """Memory of a rank's step, estimated."""
    device: str
    ranks: int = 1
    step: int = 0
    """Steps that are done, and the seconds they took."""
    seconds: float = 0.0
    validation_steps: float = 0.0
    """What one validation costs, in steps; 0: not known."""


def header(config: AnyTrainConfig, facts: Facts) -> list[str]:
    """Run, model, rule, data, optimizer, cost, device; `execution:`, which follows, has the same columns."""
    steps, done = config.optim.steps, facts.step
    far = f"step {done:,} of {steps:,}" if done else f"{steps:,} steps"
    lines = {
        "run": f"{config.out}, {far} (deeploop train {facts.source})",
        "model": f"{facts.parameters:,} parameters; {_loop(config.model)}",
        "rule": _rule(config.model),
        "data": _data(config, facts.examples),
        "optimizer": _optimizer(config),
        "cost": f"{steps * facts.flops_per_step:.2g} FLOPs; "
        f"memory about {bytes_text(facts.step_bytes)}{' per rank' if facts.ranks > 1 else ''} (estimate)"
        + (
            f"; a validation costs {facts.validation_steps:,.0f} steps"
            if round(facts.validation_steps) > 1
            else ""
        ),
        "device": facts.device + (f" × {facts.ranks} ranks" if facts.ranks > 1 else ""),
    }
    if isinstance(config, TrainConfig) and (drawn := _rounds(config)):
        lines["rounds"] = drawn
    if isinstance(config, TrainConfig) and config.model.exit_gate:
        frozen = config.gate.stage == "gate-only"
        lines["gate"] = (
            "gate-only: the rest is frozen, the loss is the gate's binary cross-entropy"
            if frozen
            else f"joint, the loss is Σ q·L − {config.gate.entropy:g}·H(q)"
        )
    if 0 < done < steps and facts.seconds:
        left = hours_minutes_seconds((steps - done) * facts.seconds / done)
        lines["time"] = f"{left} left at the speed so far, validation not counted"
    return _aligned(lines)


def legend(config: AnyTrainConfig) -> list[str]:
    """What the numbers of a validation mean."""
    return _aligned(LEGEND) if isinstance(config, TrainConfig) else []


def _aligned(lines: dict[str, str]) -> list[str]:
    return [f"{name + ':':<10} {text}" for name, text in lines.items()]


def _loop(model: GPTConfig | ReasonerConfig) -> str:
    if isinstance(model, GPTConfig):
        around = f"; prelude {model.prelude}, coda {model.coda} blocks" if model.prelude or model.coda else ""
        injected = f"; injection: {model.injection}" if model.injection != "none" else ""
        started = f"; first state: {model.first_state}" if model.first_state != "embedding" else ""
        loop = f"K = {model.blocks} blocks × R = {model.rounds} rounds, N = {model.depth}"
        return loop + around + injected + started
    plan = model.schedule
    modules = ", ".join(
        f"{name}: K = {blocks}, R_g = {plan.R_g_of(name)}" for name, blocks in model.blocks_of.items()
    )
    return f"{modules}; N = {plan.N}, {plan.N_g} blocks in the graph"


def _rule(model: GPTConfig | ReasonerConfig) -> str:
    """The block and its scales: its own, and those that are not 1."""
    if isinstance(model, GPTConfig):
        alpha, beta, epsilon = model.scales
        exponent = f", p = {model.p:g}" if model.rule else ""
        own = "α" if model.block in ALPHA else "ε" if model.block in EPSILON else ""
        parts = [
            f"{name} (R = 1) {_scales(*model.part(name).scales, own=own)}"
            for name in PARTS
            if getattr(model, name)
        ]
        return "; ".join([f"{model.block}{exponent}: {_scales(alpha, beta, epsilon, own=own)}", *parts])
    scales = {name: _reasoner_rule(model, name) for name in model.blocks_of}
    if len(set(scales.values())) == 1:
        return next(iter(scales.values()))
    return "; ".join(f"{name}: {text}" for name, text in scales.items())


def _reasoner_rule(model: ReasonerConfig, module: str) -> str:
    """p and the N it is taken at, then the scales."""
    scales, p = _scales(model.alpha(module), model.beta(module)), model.exponent(module)
    if not p or model.flat:
        return scales
    counted = {"cycles": "the paper's N_g", "graph": "the blocks in the graph"}[model.depth_from]
    return f"p = {p:g} at N = {model.N} ({'model.depth' if model.depth else counted}): {scales}"


def _rounds(config: TrainConfig) -> str:
    """How the rounds of a step are drawn and trained; nothing where they are fixed and all in the graph."""
    rounds, mean = config.rounds, config.model.rounds
    law = rounds.law(mean)
    parts = []
    if rounds.sample != "fixed":
        parts.append(f"{rounds.sample}, mean {float(law.mean):.4g}, {law.least} to {law.most}")
    if rounds.ramp != "off":
        over = math.ceil(rounds.ramp_share * config.optim.steps)
        parts.append(f"mean from 1 to {mean} over {over:,} steps ({rounds.ramp})")
    if rounds.truncates(mean):
        parts.append(f"gradient through the last {rounds.backprop}")
    return "; ".join(parts)


def _scales(alpha: float, beta: float, epsilon: float = 1.0, *, own: str = "") -> str:
    known = {"α": alpha, "β": beta, "ε": epsilon}
    shown = [f"{name} = {value:.4g}" for name, value in known.items() if value != 1 or name == own]
    return ", ".join(shown) or "no scales"


def _data(config: AnyTrainConfig, examples: int) -> str:
    sequences = config.optim.steps * config.optim.batch
    if isinstance(config, TrainConfig):
        tokens = sequences * config.model.context
        epochs = tokens / examples
        text = f"{epochs:,.1f}" if epochs >= 0.95 else f"{epochs:.2g}"
        corpus = f"{' '.join(config.data.mix)} have" if config.data.mix else "the corpus has"
        planned = f"{tokens:,} tokens planned, {corpus} {examples:,}: {text} epochs"
        if config.data.mix_last:
            planned += f"; the last {config.data.mix_last_share:.0%}: {' '.join(config.data.mix_last)}"
        if config.data.mask_documents:
            apart = "conversations" if isinstance(config, ChatTrainConfig) else "documents"
            planned += f"; {apart} kept apart"
        return planned
    if isinstance(config, IterateTrainConfig):
        data = config.data
        rule = f" of rule {data.rule}" if data.task == "automaton" else ""
        return (
            f"{data.task}{rule}, length {data.length}: {sequences:,} instances "
            f"of 1 to {data.train_steps} steps, rounds: {config.rounds.sample}"
        )
    if isinstance(config, CustomTrainConfig):
        return f"{sequences:,} rows planned"
    return (
        f"{sequences:,} segments planned, at most {config.halting.segments} per puzzle; "
        f"{examples:,} training examples"
    )


def _optimizer(config: AnyTrainConfig) -> str:
    optim = config.optim
    rate = f"peak rate {optim.peak_lr:g} after {optim.warmup_steps:,} steps of warm-up"
    if isinstance(config, CustomTrainConfig):  # the task may make another optimizer
        return rate
    return f"{OPTIMIZERS[optim.kind] if isinstance(optim, OptimConfig) else 'AdamATan2'}, {rate}"


def bytes_text(count: int) -> str:
    """1.5 GiB."""
    unit, size = next((pair for pair in UNITS if count >= pair[1]), UNITS[-1])
    return f"{count / size:.3g} {unit}"
