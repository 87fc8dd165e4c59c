"""The config for training a looped GPT on text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from deeploop.config.checks import at_least
from deeploop.config.loop import DiagnoseConfig, GateConfig, GuardConfig
from deeploop.config.optim import OptimConfig
from deeploop.config.run import RunConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.looped import check_optim
from deeploop.theory.depth_law import MOST_ROUNDS, MOST_SPREAD, DepthLaw, most_rounds, rounds_law


@dataclass(frozen=True)
class DataConfig:
    """The corpus, as `deeploop prepare` writes it."""

    path: Path = Path("data/fineweb-edu")
    """Folder of token shards."""
    mix: tuple[str, ...] = ()
    """Corpora and weights instead of `path`, such as data/a=0.7 data/b=0.3; 0: only in the last phase."""
    mix_last: tuple[str, ...] = ()
    """Weights of a last phase, for corpora of `mix`; the weight of any other corpus is 0."""
    mix_last_share: float = 0.2
    """Share of the steps that the last phase has, if there is one."""
    max_epochs: tuple[int, ...] = ()
    """Epochs after which a corpus of `mix` is no longer drawn: one number, or one each; 0: no limit."""
    mask_documents: bool = False
    """Mask attention between documents, and restart positions in each."""
    validation_sequences: int = 2_000
    """Sequences of the fixed validation set, spread evenly over the validation split."""
    validate_every: int = 1_000
    """Steps between validations; there is also one at the end."""
    validation_rounds: tuple[int, ...] = ()
    """More numbers of rounds to validate at, besides model.rounds."""

    def __post_init__(self) -> None:
        self._check_mixture()
        at_least(1, self, "validation_rounds", "validation_sequences", "validate_every", section="data.")

    def _check_mixture(self) -> None:
        folders = [folder for folder, _ in parse_mix(self.mix)]
        for folder, _ in parse_mix(self.mix_last, "mix_last"):
            if folder not in folders:
                raise ValueError(
                    f"data.mix_last={folder}: must be a corpus of data.mix; add it there, with weight 0 to "
                    "keep it for the last phase"
                )
        if not 0 < self.mix_last_share < 1:
            raise ValueError(f"data.mix_last_share={self.mix_last_share}: must be above 0 and below 1")
        asked = " ".join(map(str, self.max_epochs))
        if self.max_epochs and not self.mix:
            raise ValueError(f"data.max_epochs={asked}: must be left out without data.mix")
        if len(self.max_epochs) not in (0, 1, len(folders)) or min(self.max_epochs, default=0) < 0:
            raise ValueError(
                f"data.max_epochs={asked}: must be one number for all {len(folders)} corpora of data.mix, or "
                "one for each, 0 or more"
            )

    @property
    def epochs(self) -> tuple[int, ...]:
        """The limit of each corpus in the mixture; 0 is no limit."""
        return self.max_epochs if len(self.max_epochs) > 1 else (self.max_epochs or (0,)) * len(self.mix)

    @property
    def last_weights(self) -> tuple[float, ...]:
        """The weights of the last phase, in the order of the mixture; empty if there is no last phase."""
        weights = dict(parse_mix(self.mix_last, "mix_last"))
        return tuple(weights.get(folder, 0.0) for folder, _ in parse_mix(self.mix)) if weights else ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The corpora of the mixture, or the one in `path`."""
        return tuple(folder for folder, _ in parse_mix(self.mix)) or (self.path,)


def parse_mix(entries: Sequence[str], field: str = "mix") -> list[tuple[Path, float]]:
    """Parse entries such as `data/a=0.7` into folders and weights; `field` is named in errors."""
    parts = []
    for entry in entries:
        folder, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not folder or math.isnan(weight):
            raise ValueError(f"data.{field}={entry}: must be FOLDER=WEIGHT, such as data/books=0.7")
        if weight < 0 or math.isinf(weight):
            raise ValueError(f"data.{field}={entry}: the weight must be 0 or more, and finite")
        parts.append((Path(folder), weight))
    if entries and not any(weight for _, weight in parts):
        all_of_them = " ".join(entries)
        raise ValueError(f"data.{field}={all_of_them}: every weight is 0; give one corpus more than that")
    if math.isinf(sum(weight for _, weight in parts)):
        raise ValueError(f"data.{field}={' '.join(entries)}: the weights' sum is infinite; give smaller ones")
    if len({folder for folder, _ in parts}) < len(parts):
        raise ValueError(f"data.{field}={' '.join(entries)}: names a folder twice; give it one weight")
    return parts


@dataclass(frozen=True)
class RoundsConfig:
    """The number of rounds of each training step. `model.rounds` is the mean, which determines alpha."""

    sample: Literal["fixed", "uniform", "poisson-lognormal"] = "fixed"
    """fixed: model.rounds in every step; uniform: around it; poisson-lognormal: long-tailed, as in Huginn."""
    limit: int = 0
    """Most rounds of a step; 0: 2 model.rounds − 1 for uniform, 4 model.rounds for poisson-lognormal."""
    spread: float = 0.5
    """Standard deviation of the log rate for poisson-lognormal."""
    ramp: Literal["off", "linear", "sqrt"] = "off"
    """Raise the mean from 1 to model.rounds over the first steps, linearly or as 1 − sqrt(1 − t)."""
    ramp_share: float = 0.25
    """Share of the steps over which the mean increases."""
    backprop: int = 0
    """Rounds G that gradients go through, the last min(R, G); earlier ones keep no activations. 0: all."""

    def __post_init__(self) -> None:
        if self.backprop < 0:
            raise ValueError(f"rounds.backprop={self.backprop}: must be 0 (all rounds) or more")
        if not 0 < self.spread <= MOST_SPREAD:
            raise ValueError(f"rounds.spread={self.spread}: must be above 0, and at most {MOST_SPREAD:g}")
        if not 0 < self.ramp_share <= 1:
            raise ValueError(f"rounds.ramp_share={self.ramp_share}: must be above 0, and at most 1")

    def check(self, mean: int) -> None:
        """Raise ValueError unless the distribution can have this mean."""
        if self.sample == "fixed" and self.limit:
            raise ValueError(f"rounds.limit={self.limit}: must be 0 with rounds.sample=fixed")
        if self.sample != "fixed" and mean < 2:
            raise ValueError(f"model.rounds={mean}: must be at least 2 with rounds.sample={self.sample}")
        if self.limit and self.limit < mean:
            raise ValueError(
                f"rounds.limit={self.limit}: must be at least model.rounds={mean}, the mean of the draws"
            )
        if self.sample == "uniform" and self.limit > 2 * mean - 1:
            raise ValueError(
                f"rounds.limit={self.limit}: must be at most {2 * mean - 1} with rounds.sample=uniform, "
                f"whose mean is model.rounds={mean}"
            )
        if (most := self.most(mean)) > MOST_ROUNDS and self.sample != "fixed":
            raise ValueError(
                f"rounds.limit={most}: must be at most {MOST_ROUNDS}; lower it, or model.rounds={mean}"
            )
        if self.backprop > most:
            raise ValueError(
                f"rounds.backprop={self.backprop}: must be at most {most}, the most rounds of a step; "
                "0 trains through all of them"
            )

    def truncates(self, mean: int) -> bool:
        """True if a step may have rounds outside the autograd graph."""
        return 0 < self.backprop < self.most(mean)

    def most(self, mean: int) -> int:
        """The most rounds that a step can have."""
        return most_rounds(self.sample, mean, self.limit)

    def law(self, mean: int) -> DepthLaw:
        """The distribution of a step's rounds after the ramp."""
        return rounds_law(self.sample, mean, limit=self.limit, spread=self.spread)

    def law_at(self, step: int, *, mean: int, steps: int) -> DepthLaw:
        """The distribution of the rounds of training step number `step` (from 0) of `steps`."""
        limit = 0 if self.sample == "fixed" else self.most(mean)
        now = self.mean_at(step, mean=mean, steps=steps)
        return rounds_law(self.sample, now, limit=limit, spread=self.spread)

    def mean_at(self, step: int, *, mean: int, steps: int) -> int:
        """The mean at that step, an integer."""
        if self.ramp == "off":
            return mean
        share = min(1.0, step / (self.ramp_share * steps))
        return round(1 + (mean - 1) * (share if self.ramp == "linear" else 1 - math.sqrt(1 - share)))


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """One training run of a looped GPT."""

    task: ClassVar[str] = "language"
    kind: ClassVar[str] = "a language model"
    kept_apart: ClassVar[str] = "documents"
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.model, self.optim, self.device)
        self.rounds.check(self.model.rounds)
        self._check_gate()
        if self.rounds.truncates(self.model.rounds) and self.model.injection == "none":
            raise ValueError(
                f"rounds.backprop={self.rounds.backprop}: must be 0 with model.injection=none, where no "
                "gradient would reach what stands before the loop; give --model.injection add"
            )

    def _check_gate(self) -> None:
        """Check the requirements of the exit gate, and that no gate option is set without one."""
        gate, default = self.gate, GateConfig()
        for name in ("stage", "entropy"):
            value = getattr(gate, name)
            if not self.model.exit_gate and value != getattr(default, name):
                raise ValueError(f"gate.{name}={value}: is for a model with an exit gate; --model.exit-gate")
        if not self.model.exit_gate:
            return
        if self.model.rounds < 2:
            raise ValueError(
                f"model.rounds={self.model.rounds}: must be at least 2 with model.exit_gate=True"
            )
        if gate.stage == "joint" and self.rounds.truncates(self.model.rounds):
            raise ValueError(
                f"rounds.backprop={self.rounds.backprop}: must be 0 with gate.stage=joint, "
                "whose loss is read after every round"
            )
        if gate.stage == "gate-only" and self.init_from is None:
            raise ValueError(
                "gate.stage=gate-only: needs a trained model that stays as it is; --init-from RUN"
            )
        if gate.stage == "gate-only" and self.diagnose.every:
            raise ValueError(
                f"diagnose.every={self.diagnose.every}: must be 0 with gate.stage=gate-only, "
                "which leaves the loop as it is"
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.data.folders

    @property
    def stops_when_collapsed(self) -> bool:
        return self.guard.stop

    def planned(self, examples: int) -> str:
        tokens = self.optim.steps * self.optim.batch * self.model.context
        epochs = tokens / examples
        text = f"{epochs:,.1f}" if epochs >= 0.95 else f"{epochs:.2g}"
        corpus = f"{' '.join(self.data.mix)} have" if self.data.mix else "the corpus has"
        planned = f"{tokens:,} tokens planned, {corpus} {examples:,}: {text} epochs"
        if self.data.mix_last:
            planned += f"; the last {self.data.mix_last_share:.0%}: {' '.join(self.data.mix_last)}"
        return planned + (f"; {self.kept_apart} kept apart" if self.data.mask_documents else "")

    def more_of_header(self, begun_with: int) -> dict[str, str]:
        """Describe the distribution of rounds, unless fixed, and the exit gate."""
        lines = {"rounds": "; ".join(self._drawn_rounds(begun_with))}
        if self.model.exit_gate:
            lines["gate"] = (
                "gate-only: the rest is frozen, the loss is the gate's binary cross-entropy"
                if self.gate.stage == "gate-only"
                else f"joint, the loss is Σ q·L − {self.gate.entropy:g}·H(q)"
            )
        return {name: text for name, text in lines.items() if text}

    def _drawn_rounds(self, begun_with: int) -> Iterator[str]:
        rounds, mean = self.rounds, self.model.rounds
        law = rounds.law(mean)
        if rounds.sample != "fixed":
            yield f"{rounds.sample}, mean {float(law.mean):.4g}, {law.least} to {law.most}"
        if rounds.ramp != "off":
            over = math.ceil(rounds.ramp_share * begun_with)
            yield f"mean from 1 to {mean} over {over:,} steps ({rounds.ramp})"
        if rounds.truncates(mean):
            yield f"gradient through the last {rounds.backprop}"
