"""The whole configuration of a run, composed once, and its way to JSON and back.

The class says what is trained: `TrainConfig` a looped GPT on text, `IterateTrainConfig` one on an iterated
task, `ChatTrainConfig` one on conversations, `HRMTrainConfig` and `TRMTrainConfig` a reasoner,
`CustomTrainConfig` what a task of your own builds.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from deeploop.data.iterate.examples import Examples
from deeploop.files import read_json, read_table
from deeploop.models.exit_gate import GateConfig
from deeploop.models.gpt_config import GPTConfig
from deeploop.models.halting import HaltingConfig
from deeploop.models.hrm import HRMConfig
from deeploop.models.trm import TRMConfig
from deeploop.train.chat import ChatDataConfig
from deeploop.train.checkpoint import CheckpointConfig
from deeploop.train.custom import CustomDataConfig
from deeploop.train.diagnosis import DiagnoseConfig
from deeploop.train.distributed import DeviceConfig
from deeploop.train.iterate import IterateDataConfig
from deeploop.train.metrics import LogConfig
from deeploop.train.optim import OptimConfig, ReasonerOptimConfig
from deeploop.train.puzzle import PuzzleDataConfig
from deeploop.train.rounds import IterateRoundsConfig, RoundsConfig
from deeploop.train.text import DataConfig


@dataclass(frozen=True)
class GuardConfig:
    """The collapse guard: a run whose positions all carry one state predicts no better than unigrams."""

    stop: bool = False
    """Stop a run that is still collapsed after warm-up, in place of only saying so."""


@dataclass(frozen=True)
class RunConfig:
    """What every run has, whatever it trains."""

    task: ClassVar[str]
    """A key of `deeploop.tasks.KINDS`, which run.json has too."""

    out: Path = Path("runs/latest")
    """Run folder: config, metrics and checkpoints."""
    resume: bool = False
    """Continue from the last checkpoint in the run folder; starts afresh when there is none."""
    init_from: Path | None = None
    """Start from the weights of another run (its last checkpoint), or of an exported folder."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))  # from Python a text will do
        if self.init_from is not None:
            object.__setattr__(self, "init_from", Path(self.init_from))
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be 0 or more, and below 2^63")


def check_optim(model: GPTConfig, optim: OptimConfig, device: DeviceConfig) -> None:
    """Raises where the optimizer of a looped GPT does not go with its model or its ranks."""
    if optim.branch_lr != 1 and model.scales.beta == 1:
        cause = "beta" if model.block == "sandwich" else "block"
        raise ValueError(
            f"optim.branch_lr={optim.branch_lr}: must be 1 with "
            f"model.{cause}={getattr(model, cause)}, which draws no matrix at beta"
        )
    if optim.injection_lr != 1 and model.injection in ("none", "add"):
        raise ValueError(
            f"optim.injection_lr={optim.injection_lr}: must be 1 with model.injection={model.injection}, "
            "which has no weights"
        )
    if optim.kind == "muon" and device.parallel == "fsdp":
        raise ValueError(
            "optim.kind=muon: must be adamw with device.parallel=fsdp, where no rank has a whole matrix; "
            "or use device.parallel=ddp"
        )
    if optim.kind == "muon" and model.mup_base_width:
        raise ValueError(
            f"optim.kind=muon: must be adamw with model.mup_base_width={model.mup_base_width}, "
            "whose rate over widths is Adam's; or set that to 0"
        )


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """One training run of a looped GPT."""

    task: ClassVar[str] = "language"
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
        if self.optim.wait_for_escape and self.guard.stop:
            raise ValueError(
                "guard.stop=True: must be False with optim.wait_for_escape=True, "
                "whose warm-up lasts as long as the collapse does"
            )

    def _check_gate(self) -> None:
        """What the exit gate needs, and what only a model that has one may say."""
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


@dataclass(frozen=True)
class ChatTrainConfig(TrainConfig):
    """One fine-tuning of a looped GPT on conversations."""

    task: ClassVar[str] = "chat"
    data: ChatDataConfig = field(default_factory=ChatDataConfig)  # type: ignore[assignment]


@dataclass(frozen=True)
class HRMTrainConfig(RunConfig):
    """One training run of an HRM."""

    task: ClassVar[str] = "hrm"
    model: HRMConfig = field(default_factory=HRMConfig)
    data: PuzzleDataConfig = field(default_factory=PuzzleDataConfig)
    optim: ReasonerOptimConfig = field(default_factory=ReasonerOptimConfig)
    halting: HaltingConfig = field(default_factory=HaltingConfig)


@dataclass(frozen=True)
class TRMTrainConfig(RunConfig):
    """One training run of a TRM."""

    task: ClassVar[str] = "trm"
    model: TRMConfig = field(default_factory=TRMConfig)
    data: PuzzleDataConfig = field(default_factory=PuzzleDataConfig)
    optim: ReasonerOptimConfig = field(default_factory=partial(ReasonerOptimConfig, ema=0.999))
    halting: HaltingConfig = field(default_factory=partial(HaltingConfig, learn_continue=False))


@dataclass(frozen=True)
class IterateTrainConfig(RunConfig):
    """One training run of a looped GPT on an iterated task."""

    task: ClassVar[str] = "iterate"
    model: GPTConfig = field(default_factory=partial(GPTConfig, vocabulary=64, context=256))
    data: IterateDataConfig = field(default_factory=IterateDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rounds: IterateRoundsConfig = field(default_factory=IterateRoundsConfig)

    @property
    def examples(self) -> Examples:
        """The task as the model reads it."""
        return self.data.examples(tells_steps=self.rounds.tells_steps)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.model, self.optim, self.device)
        data, shown = self.data, self.examples
        if self.rounds.sample == "steps" and data.train_steps > self.model.rounds:
            raise ValueError(
                f"data.train_steps={data.train_steps}: must be at most model.rounds={self.model.rounds} with "
                "rounds.sample=steps, which takes a round for each; raise --model.rounds"
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
        if self.optim.wait_for_escape:
            raise ValueError("optim.wait_for_escape=True: must be False, it is for language models")
        if self.device.parallel == "fsdp":
            raise ValueError(
                "device.parallel=fsdp: must be ddp, the states of iterated tasks are read out between rounds"
            )


@dataclass(frozen=True)
class CustomTrainConfig(RunConfig):
    """One training run on a task of your own: `train(config, task=YourTask)`."""

    task: ClassVar[str] = "custom"
    model: GPTConfig = field(default_factory=GPTConfig)
    data: CustomDataConfig = field(default_factory=CustomDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.model, self.optim, self.device)


ReasonerTrainConfig = HRMTrainConfig | TRMTrainConfig
AnyTrainConfig = TrainConfig | ReasonerTrainConfig | IterateTrainConfig | CustomTrainConfig
KINDS: dict[str, type[AnyTrainConfig]] = {
    "language": TrainConfig,
    "chat": ChatTrainConfig,
    "hrm": HRMTrainConfig,
    "trm": TRMTrainConfig,
    "iterate": IterateTrainConfig,
    "custom": CustomTrainConfig,
}
"""The `task` that a run folder's run.json names, and the class of its config."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))


def from_dict(kind: type, data: dict[str, Any], where: str = "config") -> Any:
    """The config a JSON object describes; unknown fields are an error, absent ones take their default."""
    hints = _field_hints(kind)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be a JSON object")
    data = getattr(kind, "from_saved", dict)(data)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: unknown field (written by another version of deeploop?)")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return from_dict(hint, value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _value(options[0], value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint == tuple[int, ...] and type(value) is int:  # data.max_epochs was one number, 0 for none
        return (value,) if value else ()
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        kinds = typing.get_args(hint)
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            return tuple(_value(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
    elif type(value) is hint or (hint is float and type(value) is int):
        return value
    raise ValueError(f"{where}={value!r}: not a value of the kind this field has")


def _field_hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def leaf_hints(kind: type, prefix: str = "") -> dict[str, Any]:
    """Path → type of every field of a config."""
    found: dict[str, Any] = {}
    for name, hint in _field_hints(kind).items():
        inner = isinstance(hint, type) and hasattr(hint, "__dataclass_fields__")
        found |= leaf_hints(hint, f"{prefix}{name}.") if inner else {prefix + name: hint}
    return found


def read_config(path: Path) -> AnyTrainConfig:
    """The config in a file: a run's config.json, or TOML with the same nesting; absent fields are default.

    What is trained is said by the run.json beside a run's config.json, else by the fields: the first of
    `KINDS` that has them all. Whether a run is resumed is no part of what is trained, and is left out.
    """
    data = read_table(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be an object with the fields of a config")
    stamp = read_json(path.with_name("run.json")) if path.name == "config.json" else {}
    kind = KINDS.get(str(stamp.get("task"))) or _kind_with(_leaves(data))
    try:
        return from_dict(kind, {**data, "resume": False})
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('config.')}") from None


def _kind_with(given: set[str]) -> type[AnyTrainConfig]:
    """The class of configs that has the fields given, or most of them."""
    return min(KINDS.values(), key=lambda kind: len(given - leaf_hints(kind).keys()))


def _leaves(data: dict[str, Any], prefix: str = "") -> set[str]:
    """The paths of a nested object's values."""
    found: set[str] = set()
    for name, value in data.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(field, old value, new value) for every leaf in which two configs differ."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append((prefix + name, a, b))
    return found
