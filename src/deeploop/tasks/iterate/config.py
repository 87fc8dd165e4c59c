"""The config for training a looped GPT on an iterated task."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from deeploop.config.checks import at_least
from deeploop.config.optim import OptimConfig
from deeploop.config.run import RunConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.tasks.iterate.problems import TASKS, make_task
from deeploop.tasks.looped import check_optim
from deeploop.theory.depth_law import DepthLaw, uniform_law

if TYPE_CHECKING:
    from deeploop.tasks.iterate.problems.examples import Examples

IDENTITY = ("task", "rule", "length", "train_steps")  # fields that determine the sequence of batches


@dataclass(frozen=True)
class IterateDataConfig:
    """The task, whose instances are generated during training."""

    task: Literal["automaton", "hops", "induction", "addition", "reachability"] = "automaton"
    """The step that is iterated (docs/iterate.md)."""
    rule: int = 86
    """Rule of the automaton, 0 to 255; its neighbours are (x[-2], x[-1], x)."""
    length: int = 24
    """Size of an instance: cells of a row, nodes, digits or symbols."""
    train_steps: int = 4
    """Most steps in training: the number of every batch is drawn from 1 to this one."""
    test_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of steps to validate at."""
    test_examples: int = 256
    """Held-out instances of a validation, the same for every seed."""
    validate_every: int = 500
    """Steps between validations; there is also one at the end."""

    def __post_init__(self) -> None:
        at_least(1, self, "length", "train_steps", "test_examples", "validate_every", section="data.")
        if self.task not in TASKS:
            raise ValueError(f"data.task={self.task}: unknown; choose one of {', '.join(TASKS)}")
        if not 0 <= self.rule <= 255:
            raise ValueError(f"data.rule={self.rule}: must be 0 to 255, an elementary automaton's")
        if not self.test_steps or min(self.test_steps) < 1:
            raise ValueError(f"data.test_steps={self.test_steps}: must be numbers of at least 1")

    def examples(self, *, tells_steps: bool) -> "Examples":
        """The task as the model's inputs and targets."""
        from deeploop.tasks.iterate.problems.examples import Examples  # imported here: needs numpy

        return Examples(make_task(self.task, self.length, self.rule), tells_steps)


@dataclass(frozen=True)
class IterateRoundsConfig:
    """The rounds of a training step, and whether the input has the number of steps."""

    sample: Literal["steps", "fixed", "uniform"] = "steps"
    """steps: a round for each step of the task; fixed: model.rounds; uniform: 1 to model.rounds."""
    noise: float = 0.0
    """Gaussian noise on the stream after every training round, relative to its root mean square."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"rounds.noise={self.noise}: must be a finite number, 0 or more")

    @property
    def tells_steps(self) -> bool:
        """True if the input has the number of steps, as the number of rounds does not tell it."""
        return self.sample != "steps"

    def at_test(self, steps: int, most: int) -> int:
        """The rounds at which a model with `most` rounds is evaluated on `steps` steps."""
        return steps if self.sample == "steps" else most

    def law(self, most: int, steps: int) -> DepthLaw:
        """The distribution of rounds for a batch with `steps` steps, in a model with `most` rounds."""
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
        """The task as the model's inputs and targets."""
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
