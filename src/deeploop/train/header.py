"""The header that `deeploop train` prints before the first step."""

from deeploop.config.run import RunConfig
from deeploop.models.accounting import parameter_count
from deeploop.models.gpt_config import PARTS, GPTConfig
from deeploop.models.reasoner_config import ReasonerConfig
from deeploop.rules import Rule
from deeploop.tasks import task_class
from deeploop.theory.scaling import Scales
from deeploop.train.active import ActiveRun
from deeploop.train.device import device_name
from deeploop.train.memory import memory_of
from deeploop.train.progress import hours_minutes_seconds
from deeploop.train.task import Task

# What to do about a run that ends inside its warm-up.
SHORTER_WARMUP = "; raise --steps or lower --warmup"
MAY_COLLAPSE = (
    ", and a collapse says little yet; raise --steps (with fewer --warmup this block collapses more easily)"
)
UNITS = ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)


def header(
    config: RunConfig,
    source: str,
    *,
    parameters: int,
    examples: int,
    flops_per_step: int,
    step_bytes: int,
    device: str,
    ranks: int = 1,
    step: int = 0,
    seconds: float = 0.0,
    begun_with: int = 0,
    validation_steps: float = 0.0,
) -> list[str]:
    """Return the lines on run, model, rule, data, optimizer, cost and device.

    `source` is the words after `deeploop train` that the config came from; `examples` are the training text's
    tokens, or a set's puzzles; `step_bytes` is a rank's memory; `step` steps took `seconds`. 0 means unknown.
    """
    steps = config.optim.steps
    each, others = (" per rank", f" × {ranks} ranks") if ranks > 1 else ("", "")
    cost = f"{steps * flops_per_step:.2g} FLOPs" if flops_per_step else "not known"
    cost += f"; memory about {bytes_text(step_bytes)}{each} (estimate)"
    if round(validation_steps) > 1:
        cost += f"; a validation costs {validation_steps:,.0f} steps"
    lines = _plan(config, source, parameters, step, config.planned(examples), cost)
    lines |= {"device": device + others, **config.more_of_header(begun_with or steps)}
    if 0 < step < steps and seconds:
        left = hours_minutes_seconds((steps - step) * seconds / step)
        lines["time"] = f"{left} left at the speed so far, validation not counted"
    return _aligned(lines)


def without_data(config: RunConfig, source: str) -> list[str]:
    """The header of a run whose data is not there: what the config alone says."""
    missing = ", ".join(str(folder) for folder in config.folders if not folder.exists())
    parameters = parameter_count(config.model) if isinstance(config.model, GPTConfig) else 0
    tokens, flops = task_class(config.task).tokens_and_flops(config) or (0, 0)
    data = f"{tokens:,} tokens planned; " * bool(tokens)
    data += f"{missing}: not there yet, make it with `deeploop prepare`"
    cost = f"{tokens * flops:.2g} FLOPs" if tokens else "not known"
    return _aligned(_plan(config, source, parameters, 0, data, cost))


def _plan(config: RunConfig, source: str, parameters: int, done: int, data: str, cost: str) -> dict[str, str]:
    steps = config.optim.steps
    far = f"step {done:,} of {steps:,}" if done else f"{steps:,} steps"
    return {
        "run": f"{config.out}, {far} (deeploop train {source})",
        "model": f"{parameters:,} parameters; " * bool(parameters) + _loop(config.model),
        "rule": _rule(config.model),
        "data": data,
        "optimizer": _optimizer(config),
        "cost": cost,
    }


def legend(task: Task | type[Task]) -> list[str]:
    """Explain the numbers of a validation."""
    return _aligned(task.legend)


def _aligned(lines: dict[str, str]) -> list[str]:
    return [f"{name + ':':<10} {text}" for name, text in lines.items()]


def _loop(model: GPTConfig | ReasonerConfig) -> str:
    if isinstance(model, GPTConfig):
        around = f"; prelude {model.prelude}, coda {model.coda} blocks" if model.prelude or model.coda else ""
        injected = f"; injection: {model.injection}" if model.injection != "none" else ""
        started = f"; first state: {model.first_state}" if model.first_state != "embedding" else ""
        loop = f"K = {model.blocks} blocks × R = {model.rounds} rounds, N = {model.depth}"
        bias = "; unigram bias (the paper has none)" if model.unigram_bias else ""
        return loop + around + injected + started + bias
    plan = model.schedule
    modules = ", ".join(
        f"{name}: K = {blocks}, R_g = {plan.R_g_of(name)}" for name, blocks in model.blocks_of.items()
    )
    return f"{modules}; N = {plan.N}, {plan.N_g} blocks in the graph"


def _rule(model: GPTConfig | ReasonerConfig) -> str:
    """Describe the rule, its equation and its scales."""
    if isinstance(model, GPTConfig):
        rule = model.residual
        parts = [
            f"{name} (R = 1) {_scales(rule, model.part(name).scales)}"
            for name in PARTS
            if getattr(model, name)
        ]
        return "; ".join([f"{rule.title}, {rule.equation}: {_scales(rule, model.scales)}", *parts])
    texts = {name: _module_rule(model, name) for name in model.blocks_of}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _module_rule(model: ReasonerConfig, module: str) -> str:
    """Describe the rule of a reasoner's module, the N it is taken at, and its scales."""
    rule, N = model.rule_of(module), ""
    if rule.needs_depth:
        counted = {"cycles": "the paper's N_g", "graph": "the blocks in the graph"}[model.depth_from]
        N = f" at N = {model.N} ({'model.depth' if model.depth else counted})"
    return f"{rule.title}, {rule.equation}{N}: {_scales(rule, model.scales_of(module))}"


def _scales(rule: Rule, scales: Scales) -> str:
    own = {"α": rule.has_alpha, "ε": rule.epsilon != "none"}
    known = zip("αβε", scales, strict=True)
    shown = [f"{name} = {value:.4g}" for name, value in known if value != 1 or own.get(name)]
    return ", ".join(shown) or "no scales"


def _optimizer(config: RunConfig) -> str:
    optim = config.optim
    rate = f"peak rate {optim.peak_lr:g} after {optim.warmup_steps:,} steps of warm-up"
    if task_class(config.task).is_given:  # it may make another optimizer
        return rate
    return f"{optim.label}, {rate}"


def bytes_text(count: int) -> str:
    """Format a number of bytes, such as 1.5 GiB."""
    unit, size = next((pair for pair in UNITS if count >= pair[1]), UNITS[-1])
    return f"{count / size:.3g} {unit}"


def introduction(run: ActiveRun, source: str | None) -> list[str]:
    """Return the header, if there is a source, and the notes below it."""
    if source is None:
        return _notes(run)
    task = run.task
    lines = header(
        run.config,
        source,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        examples=task.examples,
        flops_per_step=task.flops_per_step,
        step_bytes=task.step_bytes,
        device=device_name(run.world.device),
        ranks=run.world.size,
        step=run.step,
        seconds=run.clock.total,
        begun_with=task.begun_with,
        validation_steps=task.validation_steps,
    )
    return [*lines, *_notes(run), *legend(task)]


def _notes(run: ActiveRun) -> list[str]:
    """Notes on the execution and on doubtful settings."""
    config, fit = run.config, run.task.fit
    notes = [f"execution: {run.execution.describe()}"]
    if run.world.device.type == "cuda":
        notes[0] += f"; micro-batch {fit.micro_batch}, recompute {fit.recompute}"
    if run.step < config.optim.steps < config.optim.warmup_steps:
        model = config.model
        can_collapse = isinstance(model, GPTConfig) and model.residual.has_alpha and not model.unigram_bias
        notes.append(
            f"ends at step {config.optim.steps}, inside its warm-up of {config.optim.warmup_steps}: "
            f"the learning rate only rises{MAY_COLLAPSE if can_collapse else SHORTER_WARMUP}"
        )
    if run.step < config.optim.steps:
        notes += [f"warning: {text}" for text in _warnings(run)]
    return notes


def _warnings(run: ActiveRun) -> list[str]:
    """Warnings about the plan, each with the option that changes it."""
    task = run.task
    texts = task.warnings()
    memory, whose = memory_of(run.world.device)
    if task.step_bytes > memory:
        texts.append(
            f"a step needs about {bytes_text(task.step_bytes)}, {whose} has {bytes_text(memory)}; "
            f"set a smaller --device.micro-batch (now {task.fit.micro_batch}), or --device.recompute block"
        )
    return texts
