"""Ablate the collapse of a looped start: freeze one part, or change one thing, at a time.

    python -m research.experiments.escape_mechanism --data data/text-bytes --out runs/mechanism

Trains K = 4, R = 3, width 128 on bytes at 2e-5 a step, where the paper's block collapses, and looks at it
every few steps: loss, token similarity, each kind of branch against its skip and how much of it is common to
all positions, how far the outer gains went, and how the value and output matrices moved: by how much of the
sum S of the learning rates, and how much of that movement is of rank one. A table, mechanism.json and
mechanism.png in --out. Finished runs are kept and not repeated.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MethodType

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from deeploop.diagnose.stream import BranchVisits, branch_visits
from deeploop.models.gpt import LoopedGPT
from deeploop.report.plots import save_png
from deeploop.report.tables import text_table
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.recipes import get_recipe
from deeploop.train.active import ActiveRun
from deeploop.train.distributed import World, open_world
from deeploop.train.opening import open_run
from deeploop.train.optim import learning_rate, set_learning_rate

MERGED = 0.5
FIRST = 20  # sequences of a look

# ── What is changed ─────────────────────────────────────────────────────────────────────────────────────
# Parameters that stay where they are, by the end of their names.
HELD = {
    "feed-forward held": ("gate.weight", "up.weight", "down.weight"),
    "value, output held": ("v.weight", "o.weight"),
    "all branches held": ("v.weight", "o.weight", "gate.weight", "up.weight", "down.weight"),
    "query, key held": (".q.weight", ".k.weight"),
    "embedding held": ("embedding.weight",),
    "outer gains held": ("outer.weight",),
}
HEADS = {"untied head": 0.02, "untied head from zero": 0.0}  # the deviation that it is drawn at
OTHER = (*HEADS, "logits × 0.1", "gradient, same length", "plain SGD", "unigram bias")
VARIANTS = ("the paper's", *HELD, *OTHER)
PANELS = {
    "which matrices": ("feed-forward held", "value, output held", "all branches held", "query, key held"),
    "embedding, head, gains": (
        "embedding held", "outer gains held", "untied head", "untied head from zero", "logits × 0.1",
    ),
    "optimizer, and the cure": ("gradient, same length", "plain SGD", "unigram bias"),
}  # fmt: skip


def untie(model: LoopedGPT, deviation: float) -> nn.Parameter:
    """Gives the model a head of its own."""
    draw = torch.Generator().manual_seed(1)
    head = nn.Parameter(torch.randn(model.embedding.weight.shape, generator=draw) * deviation)

    def own_head(self: LoopedGPT, words: int) -> tuple[Tensor, None]:
        return head[:words], None

    model._head = MethodType(own_head, model)  # type: ignore[method-assign]
    return head


def plain_step(parameters: list[nn.Parameter], rate: float, *, same_length: bool) -> None:
    """Along the gradient itself: as far as Adam goes with all entries at the rate, or rate × gradient.

    The rate of plain SGD is in units of Adam's: it is multiplied by 100, which starts about as fast.
    """
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    norm = float(nn.utils.get_total_norm(gradients.values()))
    entries = sum(p.numel() for p in gradients)
    factor = rate * entries**0.5 / norm if same_length else 100 * rate / max(1.0, norm)
    with torch.no_grad():
        for p, gradient in gradients.items():
            p.sub_(factor * gradient)


# ── One run ─────────────────────────────────────────────────────────────────────────────────────────────
def config_of(data: Path, variant: str, seed: int, steps: int, ramp: float, out: Path) -> TrainConfig:
    tiny = get_recipe("tiny")
    assert isinstance(tiny, TrainConfig)
    return replace(
        tiny,
        out=out,
        seed=seed,
        model=replace(tiny.model, blocks=4, unigram_bias=variant == "unigram bias"),
        data=replace(tiny.data, path=data, validation_sequences=FIRST),
        device=replace(tiny.device, kind="cpu"),
        optim=replace(tiny.optim, steps=steps, warmup_steps=50, peak_lr=50 * ramp, floor_lr=50 * ramp),
    )


def train(config: TrainConfig, variant: str, world: World, every: int) -> list[dict[str, float]]:
    run = open_run(config, world)
    model = run.model
    assert isinstance(model, LoopedGPT)
    if variant == "logits × 0.1":
        model._head_input = lambda states: 0.1 * states  # type: ignore[method-assign]
    extra = [untie(model, HEADS[variant])] if variant in HEADS else []
    if extra:
        run.optimizer.add_param_group({**run.optimizer.param_groups[0], "params": extra})
    held = [p for name, p in model.named_parameters() if name.endswith(HELD.get(variant, ("-",)))]
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    total, looks = 0.0, [look(run, initial, 0, 0.0)]
    for step in range(config.optim.steps):
        rate = learning_rate(step, config.optim)
        total += rate
        set_learning_rate(run.optimizer, rate)
        (batch,) = run.task.batches(step).batches
        model.train()
        run.task.loss(model, batch).backward()
        for parameter in held:
            parameter.grad = None
        if variant in ("gradient, same length", "plain SGD"):
            same = variant != "plain SGD"
            plain_step([*model.parameters()], rate, same_length=same)
        else:
            nn.utils.clip_grad_norm_([*model.parameters(), *extra], config.optim.clip)
            run.optimizer.step()
        model.zero_grad()
        for parameter in extra:
            parameter.grad = None
        if (step + 1) % every == 0:
            looks.append(look(run, initial, step + 1, total))
    return looks


@torch.no_grad()
def look(run: ActiveRun, initial: dict[str, Tensor], step: int, S: float) -> dict[str, float]:
    """Everything that is measured, at one moment."""
    model = run.model
    result = run.task.evaluate(model)
    tokens = run.task.validation[0]  # type: ignore[attr-defined]
    visits = branch_visits(model, lambda: model(tokens))
    moved = {name: p - initial[name] for name, p in model.named_parameters()}
    matrices = [moved[name] for name in moved if name.endswith(("branch.v.weight", "branch.o.weight"))]
    gains = [p for name, p in model.named_parameters() if name.endswith("outer.weight")]
    return {
        "step": step,
        "S": S,
        "loss": result["loss"],
        "floor": result["floor"],
        "similarity": result["similarity"],
        "attention": _mean(visits, "attention", "ratio"),
        "mlp": _mean(visits, "mlp", "ratio"),
        "attention_common": _mean(visits, "attention", "common"),
        "mlp_common": _mean(visits, "mlp", "common"),
        "gain": fmean(float(gain.mean()) for gain in gains),
        "coherence": fmean(float(m.square().mean().sqrt()) / S for m in matrices) if S else 0.0,
        "rank_one": fmean(_rank_one(m) for m in matrices) if S else 0.0,
    }


def _mean(visits: Iterable[BranchVisits], kind: str, what: str) -> float:
    return fmean(value for one in visits if one.name.endswith(kind) for value in getattr(one, what))


def _rank_one(matrix: Tensor) -> float:
    """Share of a matrix's energy in its largest singular value."""
    energy = torch.linalg.svdvals(matrix).square()
    return float(energy[0] / energy.sum().clamp(min=1e-30))


# ── What comes out ──────────────────────────────────────────────────────────────────────────────────────
def crossing(looks: list[dict[str, float]]) -> dict[str, float] | None:
    """The first look at which the positions are merged half way."""
    return next((one for one in looks if one["similarity"] >= MERGED), None)


def row(variant: str, runs: list[list[dict[str, float]]]) -> list[str]:
    """Means over seeds: when the positions merge, what the branches are then, and how the runs end."""
    crossings = [crossing(looks) for looks in runs]
    merged = [one for one in crossings if one is not None]

    def mean(what: str, form: str, looks: list[dict[str, float]] = merged) -> str:
        return format(fmean(one[what] for one in looks), form) if looks else "–"

    ends = [looks[-1] for looks in runs]
    return [
        variant,
        f"{len(merged)}/{len(runs)}",
        mean("S", ".1e"),
        mean("attention", ".2f"),
        mean("mlp", ".2f"),
        mean("attention_common", ".2f"),
        mean("coherence", ".2f"),
        mean("rank_one", ".2f"),
        f"{fmean(max(one['similarity'] for one in looks) for looks in runs):.2f}",
        mean("similarity", ".2f", ends),
        mean("loss", ".3f", ends),
        mean("gain", ".2f", ends),
    ]


HEADER = "variant|merge|S then|attn/skip|ff/skip|common|moved/S|rank 1|most similar|at the end|loss|gain"


def draw(found: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, len(PANELS), sharex=True, sharey="row")
    for (similarity, loss), (title, variants) in zip(axes.T, PANELS.items(), strict=True):
        for number, variant in enumerate(("the paper's", *variants)):
            colour = "black" if not number else f"C{number - 1}"
            for index, looks in enumerate(found.get(variant, [])):
                S, seen = [one["S"] for one in looks[1:]], looks[1:]
                label = None if index else variant
                similarity.plot(S, [one["similarity"] for one in seen], color=colour, label=label, lw=1.3)
                loss.plot(S, [one["loss"] for one in seen], color=colour, lw=1.3)
        loss.axhline(next(iter(found.values()))[0][0]["floor"], color="gray", lw=0.8, ls="--")
        similarity.set_title(title)
        similarity.legend(frameon=False, fontsize=8, loc="upper left")
        loss.set(xlabel="sum of the learning rates S", xscale="log")
    axes[0, 0].set_ylabel("token similarity")
    axes[1, 0].set_ylabel("validation loss (dashed: unigram floor)")
    axes[1, 0].set_ylim(top=5.6)
    save_png(figure, path)


def name(variant: str, seed: int) -> str:
    return f"{variant}, seed {seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared corpus of bytes")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ramp", type=float, default=2e-5, help="rise of the rate a step, for 50 steps")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=3, help="steps between two looks")
    parser.add_argument("--out", type=Path, default=Path("runs/mechanism"))
    options = parser.parse_args()
    if unknown := set(options.variants) - {*VARIANTS}:
        parser.error(f"no variant {unknown.pop()!r}; choose from {', '.join(VARIANTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "mechanism.json"
    done: dict[str, list[dict[str, float]]] = (
        json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        base = config_of(options.data, "", 0, 1, options.ramp, Path(folder))
        with open_world(base.device) as world:
            cells = [(variant, seed) for variant in options.variants for seed in options.seeds]
            for variant, seed in tqdm([cell for cell in cells if name(*cell) not in done], disable=None):
                out = Path(folder) / name(variant, seed)
                config = config_of(options.data, variant, seed, options.steps, options.ramp, out)
                done[name(variant, seed)] = train(config, variant, world, options.every)
                lines = [
                    f"{json.dumps(key)}: {json.dumps(looks, separators=(',', ':'))}"
                    for key, looks in done.items()
                ]
                kept.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    found = {v: [done[name(v, seed)] for seed in options.seeds] for v in options.variants}
    print(text_table(tuple(HEADER.split("|")), [row(variant, runs) for variant, runs in found.items()]))
    draw(found, options.out / "mechanism.png")


if __name__ == "__main__":
    main()
