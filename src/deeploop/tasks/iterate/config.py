"""The config of a looped GPT on an iterated task."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from deeploop.config.optim import OptimConfig
from deeploop.config.run import RunConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.iterate.problems import TASKS, make_examples
from deeploop.tasks.looped import check_optim
from deeploop.theory.depth_law import DepthLaw, uniform_law

if TYPE_CHECKING:
    from deeploop.tasks.iterate.problems.examples import Examples

IDENTITY = ("task", "rule", "length", "train_steps")  # fields that say which sequence of batches it is


@dataclass(frozen=True)
class IterateDataConfig:
    """The task, which is generated while training; nothing is prepared."""

    task: Literal["automaton", "hops", "induction", "addition", "reachability"] = "automaton"
    """What is iterated: docs/iterate.md has them."""
    rule: int = 86
    """Rule of the automaton, 0 to 255; its neighbours are (x[-2], x[-1], x)."""
    length: int = 24
    """Size of an instance: cells of a row, nodes, digits or symbols."""
    train_steps: int = 4
    """Most steps in training: every batch asks for a number from 1 to this one."""
    test_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Steps that a validation asks for, each by itself."""
    test_examples: int = 256
    """Held-out instances of a validation, the same for every seed."""
    validate_every: int = 500
    """Steps between validations; one more comes at the end."""

    def __post_init__(self) -> None:
        for name in ("length", "train_steps", "test_examples", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 1")
        if self.task not in TASKS:
            raise ValueError(f"data.task={self.task}: unknown; choose one of {', '.join(TASKS)}")
        if not 0 <= self.rule <= 255:
            raise ValueError(f"data.rule={self.rule}: must be 0 to 255, an elementary automaton's")
        if not self.test_steps or min(self.test_steps) < 1:
            raise ValueError(f"data.test_steps={self.test_steps}: must be numbers of at least 1")

    def examples(self, *, tells_steps: bool) -> "Examples":
        """The task as a model reads it."""
        return make_examples(self.task, self.length, self.rule, tells_steps=tells_steps)


@dataclass(frozen=True)
class IterateRoundsConfig:
    """Rounds of a step of training, and whether the model is told the number of steps it is asked for."""

    sample: Literal["steps", "fixed", "uniform"] = "steps"
    """steps: a round for each step that is asked for; fixed: model.rounds; uniform: 1 to model.rounds."""
    noise: float = 0.0
    """Gaussian noise on the stream after every round of training, as a share of its root mean square."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"rounds.noise={self.noise}: must be a finite number, 0 or more")

    @property
    def tells_steps(self) -> bool:
        """Where rounds do not say how many steps are asked for, tokens of the input do."""
        return self.sample != "steps"

    def at_test(self, steps: int, most: int) -> int:
        """Rounds at which a model of `most` rounds is evaluated on `steps` steps."""
        return steps if self.sample == "steps" else most

    def law(self, most: int, steps: int) -> DepthLaw:
        """The distribution of the rounds of a batch that asks for `steps` steps, in a model of `most`."""
        least, most = {"steps": (steps, steps), "fixed": (most, most)}.get(self.sample, (1, most))
        return uniform_law(least, most)


@dataclass(frozen=True)
class IterateTrainConfig(RunConfig):
    """One training run of a looped GPT on an iterated task."""

    task: ClassVar[str] = "iterate"
    kind: ClassVar[str] = "an iterated task"
    kept: ClassVar[tuple[str, ...]] = (*RunConfig.kept, *(f"data.{name}" for name in IDENTITY))
    model: GPTConfig = field(default_factory=partial(GPTConfig, vocabulary=64, context=256))
    data: IterateDataConfig = field(default_factory=IterateDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rounds: IterateRoundsConfig = field(default_factory=IterateRoundsConfig)

    @property
    def examples(self) -> "Examples":
        """The task as the model reads it."""
        return self.data.examples(tells_steps=self.rounds.tells_steps)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.model, self.optim, self.device)
        data, shown = self.data, self.examples
        if self.rounds.sample == "steps" and data.train_steps > self.model.rounds:
            raise ValueError(
                f"data.train_steps={data.train_steps}: must be at most model.rounds={self.model.rounds} with "
                "rounds.sample=steps, which takes a round for each; raise --rounds"
            )
        for name, steps in (("train_steps", data.train_steps), ("test_steps", max(data.test_steps))):
            if steps > shown.longest:
                raise ValueError(
                    f"data.{name}={steps}: must be at most {shown.longest} for {data.task} at "
                    f"data.length={data.length}, rounds.sample={self.rounds.sample}"
                )
        for name, least in (("vocabulary", shown.vocabulary), ("context", shown.tokens)):
            if getattr(self.model, name) < least:
                raise ValueError(
                    f"model.{name}={getattr(self.model, name)}: {data.task} at data.length={data.length} "
                    f"needs at least {least}; set --model.{name} {least}"
                )
        if self.model.first_state == "noise":
            raise ValueError("model.first_state=noise: must be embedding or zeros for an iterated task")
        if self.model.exit_gate:
            raise ValueError("model.exit_gate=True: must be False, it is for language models")
        if self.model.unigram_bias:
            raise ValueError("model.unigram_bias=True: must be False, iterated tasks have no text to count")
        if self.device.parallel == "fsdp":
            raise ValueError(
                "device.parallel=fsdp: must be ddp, the states of iterated tasks are read out between rounds"
            )

    def planned(self, examples: int) -> str:
        data = self.data
        rule = f" of rule {data.rule}" if data.task == "automaton" else ""
        return (
            f"{data.task}{rule}, length {data.length}: {self.optim.steps * self.optim.batch:,} instances "
            f"of 1 to {data.train_steps} steps, rounds: {self.rounds.sample}"
        )
