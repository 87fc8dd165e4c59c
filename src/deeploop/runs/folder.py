"""A run folder's config, run.json and checkpoints. `train/rundir.py` describes its content."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deeploop
from deeploop.config.json import differences, from_dict, to_dict
from deeploop.config.old_names import require_supported
from deeploop.config.run import RunConfig
from deeploop.files import SHIPPED, is_shipped, read_json, read_object, refuse_other, resolve, write_json
from deeploop.models.reasoner_config import PuzzleShape
from deeploop.tasks import KINDS, config_class
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.puzzles.config import ReasonerTrainConfig

FORMAT = 1
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})")  # from 10^8 on, steps have more digits


def record_ending(folder: Path, how: str | None, step: int = 0) -> None:
    """Write to run.json how the run ended, and at which step; None if it continues."""
    stamp = read_stamp(folder)
    before = stamp.pop("ended", None)
    if how is not None:
        stamp["ended"] = {"how": how, "step": step}
    if stamp.get("ended") != before:
        write_json(folder / "run.json", stamp)


def record_execution(folder: Path, execution: dict[str, Any]) -> None:
    """Write to run.json how steps are executed from now on: a resumed run may be on another device."""
    stamp = read_stamp(folder)
    if stamp.get("execution") != execution:
        write_json(folder / "run.json", {**stamp, "execution": execution})


def read_ending(folder: Path) -> dict[str, Any] | None:
    """Read the ending of a run: `how` (finished, collapsed, stopped, failed) and `step`; None without one."""
    ended = read_json(folder / "run.json").get("ended")
    known = isinstance(ended, dict) and isinstance(ended.get("how"), str) and type(ended.get("step")) is int
    return ended if known else None


def write_config(config: RunConfig) -> None:
    write_json(config.out / "config.json", to_dict(config))


def check_folder(config: RunConfig) -> Path | None:
    """The checkpoint to continue from, or None for a new run. Refuses to mix two runs."""
    checkpoint = last_checkpoint(config.out)
    if checkpoint is None:
        if (config.out / "config.json").exists() and not (config.out / "run.json").exists():
            raise ValueError(
                f"out={config.out}: holds a config.json that is not a run's; choose another --out"
            )
        if not config.resume and (ended := read_ending(config.out)) and ended["how"] != "stopped":
            raise ValueError(
                f"out={config.out}: holds a run that ended at step {ended['step']} ({ended['how']}) and kept "
                "no checkpoint; choose another --out"
            )
        return None
    if not config.resume:
        raise ValueError(
            f"out={config.out}: already holds a run at {checkpoint.name}; "
            "add --resume to continue it, or choose another --out"
        )
    check_kind(config, config.out, "out")
    require_supported(_read(config.out / "config.json"), f"{config.out}: ", "resume it with deeploop 0.2.0")
    for name, old, new in changes_since(config):
        if name == "optim.steps" and new <= (step := step_of(checkpoint)) < old:  # it has not finished
            raise ValueError(
                f"optim.steps={new}: the run in {config.out} is at step {step} already; give more than that"
            )
        if name.startswith(("model.", "rounds.", "gate.")) or name in config.kept:
            raise other_setting(config.out, name, old, new)
    return checkpoint


def other_setting(run: Path, field: str, old: object, new: object) -> ValueError:
    """The error for a setting that a resumed run keeps."""
    return ValueError(
        f"{field}={new}: the run in {run} was started with {field}={old}; "
        f"`deeploop train --resume {shlex.quote(str(run))}` keeps that; or choose another --out"
    )


def check_kind(config: RunConfig, run: Path, field: str) -> None:
    """Raise ValueError if the folder holds a run of another kind."""
    task = str(read_stamp(run).get("task"))
    if task in KINDS and not isinstance(config, config_class(task)):
        raise ValueError(f"{field}={run}: holds a run of another kind ({task}); name another folder")


def changes_since(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """The differences between this config and that of the run in its folder."""
    old = to_dict(load_any_config(config.out))
    ignored = {"resume", "out", "init_from"}
    return [change for change in differences(old, to_dict(config)) if change[0] not in ignored]


def require_family(configs: Mapping[Path, RunConfig], but: str) -> None:
    """Raise ValueError unless the runs have the same data and model, except for the model's field `but`."""
    (first, reference), *rest = configs.items()
    for path, config in rest:
        if config.folders != reference.folders:
            own, other = (", ".join(map(str, one.folders)) for one in (config, reference))
            raise ValueError(f"{path}: trained on {own}, but {first} on {other}; diagnose them separately")
        for name, old, new in differences(to_dict(reference.model), to_dict(config.model)):
            if name != but:
                raise ValueError(
                    f"{path}: model.{name}={new}, but {first} has {old}; diagnose them separately"
                )


def results_folder(run: Path) -> Path:
    """The folder for results about a run: its own, except for the shipped run, which is read-only."""
    if not is_shipped(run):
        return run
    folder = "runs" / SHIPPED
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_any_config(run: Path) -> RunConfig:
    """The config of the run in a folder, of any kind."""
    stamp = read_stamp(run)
    task = str(stamp.get("task"))
    if task not in KINDS:
        raise ValueError(f"{run}: a run of task {task!r:.40}; this deeploop supports {', '.join(KINDS)}")
    config: RunConfig = from_dict(config_class(task), _read(resolve(run) / "config.json"))
    return config


def config_to_resume(run: Path) -> RunConfig:
    """The config to resume a run with, which is its own."""
    config = load_any_config(run)
    if is_shipped(run):
        raise ValueError(
            f"{run}: comes with the package and can't be changed; --init-from {run} starts from it"
        )
    checkpoint = last_checkpoint(run)
    if checkpoint is None:
        raise ValueError(f"{run}: holds no checkpoint to continue from; {_start_anew(run)}")
    # Only weights at step 0, as `save_weights` writes them; a healing stopped at step 0 also has moments.
    if checkpoint.name.endswith("-00000000") and not (checkpoint / OPTIMIZER).exists():
        raise ValueError(
            f"{run}: is a retrofit's start; heal it with: deeploop train --config {run / 'config.json'}"
        )
    return replace(config, out=run, resume=True)


def load_config(run: Path, instead: str = "") -> TrainConfig:
    """The config of a language model's run; for another run, the error suggests what to do `instead`."""
    config = load_any_config(run)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{run}: a run of {config.kind}; this is for language models{instead}")
    return config


def read_stamp(run: Path) -> dict[str, Any]:
    """The content of run.json."""
    run = resolve(run)
    stamp = _read(run / "run.json")
    if stamp.get("format") != FORMAT:
        raise ValueError(f"{run}: run format {stamp.get('format')}, this deeploop reads {FORMAT}")
    return stamp


def tokenizer_name(run: Path) -> str:
    name = read_stamp(run).get("tokenizer")
    if not isinstance(name, str):
        raise ValueError(f"{run / 'run.json'}: tokenizer={name!r:.40}: must be a name")
    return name


def load_reasoner_config(run: Path) -> ReasonerTrainConfig:
    """The config of a reasoner's run."""
    config = load_any_config(run)
    if not isinstance(config, ReasonerTrainConfig):
        raise ValueError(f"{run}: a run of {config.kind}; this is for reasoners")
    return config


def puzzle_shape(run: Path) -> PuzzleShape:
    """The shape of a reasoner's puzzles, from run.json."""
    sizes = read_stamp(run).get("shape")
    fields = PuzzleShape._fields
    if not isinstance(sizes, dict) or any(type(sizes.get(name)) is not int for name in fields):
        raise ValueError(f"{run / 'run.json'}: shape must give {', '.join(fields)} as whole numbers")
    return PuzzleShape(*(sizes[name] for name in fields))


def require_checkpoint(run: Path) -> Path:
    """The last checkpoint of a run."""
    run = resolve(run)
    checkpoint = last_checkpoint(run)
    if checkpoint is None:
        if not (run / "run.json").exists():
            raise _not_a_run(run, "run.json")
        raise ValueError(f"{run}: holds no checkpoint (none yet, or none was kept); {_start_anew(run)}")
    return checkpoint


def _start_anew(run: Path) -> str:
    return f"start a new run: deeploop train --config {run / 'config.json'} --out ANOTHER"


def provenance() -> dict[str, Any]:
    """The versions, source revision, command and time of a result."""
    return {
        "deeploop": deeploop.__version__,
        "torch": version("torch"),  # without importing torch
        "python": platform.python_version(),
        "git": git_revision(),
        "command": ["deeploop", *sys.argv[1:]],  # without argv[0], a path on this machine
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def git_revision() -> str | None:
    """Revision of the source tree that this package was imported from, with `+` if it was changed.

    It is read once, as later commits do not change the running code. None outside a checkout of deeploop,
    also in a virtual environment inside another repository.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        raise _not_a_run(path.parent, path.name) from None
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None


def _not_a_run(folder: Path, missing: str) -> ValueError:
    """The error for a folder that is not a run."""
    if not folder.is_dir():
        return ValueError(f"{folder}: no such run folder; `deeploop runs` lists those under runs/")
    if runs := sorted(file.parent.name for file in folder.glob("*/run.json")):
        some = ", ".join(runs[:5]) + (", …" if len(runs) > 5 else "")
        return ValueError(f"{folder}: a folder of runs; name one of them: {some}")
    if is_export(folder):
        return ValueError(f"{folder}: is an export, not a run folder; name the run that was exported")
    refuse_other(folder, "run.json", f"`deeploop data {folder}` shows it")
    return ValueError(f"{folder}: not a run folder (no {missing})")


def is_export(folder: Path) -> bool:
    """True for the folder of an export."""
    config = folder / "config.json"
    return not (folder / "run.json").exists() and read_json(config).get("model_type") == "deeploop"


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Copies under other names are the user's own."""
    checkpoints = [path for path in (folder / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def last_checkpoint(folder: Path) -> Path | None:
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None
