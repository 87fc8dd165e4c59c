"""Save and load checkpoints: atomic, and independent of the number of ranks.

A checkpoint is a folder `step-00001000` of safetensors and JSON, nothing pickled. It is written under
another name, synced, and renamed, so a folder with that name is always complete. Tensors are gathered
to their full shape, so a run may resume on other ranks, sharded or not.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deeploop.files import (
    NotRegularError,
    open_regular,
    own_folder,
    read_object,
    sha256_of,
    sync_folder,
    unused_path,
)
from deeploop.runs.folder import OPTIMIZER, WEIGHTS, list_checkpoints
from deeploop.train.checks import NotFinite, ShapeMismatch, check_files, check_state, check_tensors
from deeploop.train.distributed import World, is_sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

Moments = dict[str, dict[str, Tensor]]  # {"blocks.0.w": {"exp_avg": …}}
OF_WORDS = {"embedding.weight", "head.weight", "output_bias"}  # weights with a row for each word

FORMAT = 1
GENERATORS = "rng.safetensors"
TASK = "task.safetensors"  # of a task with tensors of its own


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    world: World,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `step-…` on rank 0 after gathering every rank's part.

    `state` is the JSON beside the tensors; `tensors` are a task's own, whole on rank 0.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict  # as in load_weights

    weights, moments = get_state_dict(model, optimizer, options=_whole_tensors())
    rng = world.gather(_rng_state(world.device))
    final = folder / "checkpoints" / f"step-{step:08d}"
    if world.is_main and not final.exists():
        files: dict[str, dict[str, Any]] = {
            WEIGHTS: weights,
            OPTIMIZER: _flatten(cast(Moments, moments["state"])),
            GENERATORS: {f"{rank}.{k}": v for rank, own in enumerate(rng) for k, v in own.items()},
        }
        if tensors:
            files[TASK] = dict(tensors)
        _write(final, files, {"step": step, **state})
        for old in list_checkpoints(folder)[:-keep]:
            # Renamed first: a deletion cut short must not leave something that looks complete.
            _remove(old.rename(old.with_name(f".{old.name}.old")))
    world.barrier()
    return final


def _write(final: Path, files: Mapping[str, dict[str, Any]], state: dict[str, Any]) -> None:
    """Write a checkpoint under another name, sync it, and rename it."""
    for left_behind in own_folder(final.parent).glob(".step-*"):  # left by a process killed while saving
        _remove(left_behind)
    part = final.with_name(f".{final.name}.part")
    part.mkdir()
    for name, tensors in files.items():
        _save_tensors(part / name, tensors)
    _write_record(part, {"format": FORMAT, **state}, files)
    sync_folder(part)
    part.rename(final)
    sync_folder(final.parent)


def _remove(folder: Path) -> None:
    """Delete a folder; symbolic links are unlinked, never followed."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or was changed after it was written."""


def read_state(checkpoint: Path, files: Collection[str] | None = None) -> dict[str, Any]:
    """Verify a checkpoint's files and return its JSON; by default all files are verified.

    Verifying reads a file to its end: name those that are about to be loaded, () for none. A file that the
    checkpoint never had, such as OPTIMIZER beside published weights, is not required here.
    """
    path = checkpoint / "state.json"
    try:
        state = read_object(path)
        version, checksums = state["format"], state.pop("sha256")
        digest = checksums.pop("state.json")
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotRegularError):  # the disk may answer later
            raise ValueError(f"{path}: can't be read ({error.strerror})") from None
        raise DamagedCheckpoint(f"{path}: not the state of a checkpoint ({error!r})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: not the state of a checkpoint ({error!r})") from None
    if version != FORMAT:
        raise ValueError(f"{path}: checkpoint format {version}, this deeploop reads {FORMAT}")
    if _digest(state) != digest:
        raise DamagedCheckpoint(f"{path}: damaged (its checksum does not match)")
    try:
        check_files(checksums)
        check_state(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in checksums if files is None else files:
        path = checkpoint / name
        if (name in checksums or path.exists()) and _hash(path) != checksums.get(name):
            raise DamagedCheckpoint(f"{path}: damaged (its checksum does not match state.json)")
    return state


def read_whole_state(checkpoint: Path, files: Collection[str] | None = None) -> dict[str, Any]:
    """`read_state` for a checkpoint that was asked for; the error for a damaged one says what to do."""
    try:
        return read_state(checkpoint, files)
    except DamagedCheckpoint as error:
        run = checkpoint.parent.parent
        good, _, _ = find_whole(run)
        advice = f"no checkpoint of {run} is whole"
        if good is not None:
            command = f"deeploop train --resume {shlex.quote(str(run))}"
            advice = f"{good.name} is whole: `{command}` puts this one aside and continues from there"
        raise DamagedCheckpoint(f"{error}; {advice}") from None


def find_whole(folder: Path) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """Return the newest intact checkpoint, its state, and what is wrong with each newer one."""
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, read_state(checkpoint), damaged
        except DamagedCheckpoint as error:
            damaged[checkpoint] = str(error)
    return None, {}, damaged


def last_good_checkpoint(folder: Path, world: World) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Return the newest intact checkpoint, its state, and what is wrong with newer ones.

    Damaged ones are renamed, because the run will reach their step and save there again.
    """
    newest: tuple[Path | None, dict[str, Any], list[str]] = (None, {}, [])
    if world.is_main:  # the other ranks follow it, so that all resume from the same checkpoint
        whole, state, damaged = find_whole(folder)
        if damaged and whole is None:  # nothing is renamed, or the next start would begin a new run
            raise ValueError(f"{next(iter(damaged.values()))}; no checkpoint of {folder} is whole")
        for checkpoint in damaged:
            own_folder(checkpoint.parent)
            checkpoint.rename(unused_path(checkpoint.with_name(f"damaged-{checkpoint.name}")))
        newest = whole, state, [*damaged.values()]
    return world.gather(newest)[0]


def load_weights(
    model: nn.Module, checkpoint: Path, *, may_lack: str | None = None, prefix: str = "", words: int = 0
) -> None:
    """Load a checkpoint's weights into `model`, which may be sharded; shapes must agree.

    Weights whose names begin with `may_lack` stay as they are where the checkpoint has none of them. Names
    in the file may begin with a `prefix`. A file with exactly `words` rows of the vocabulary gets padding.
    """
    weights = {name.removeprefix(prefix): tensor for name, tensor in _load(checkpoint / WEIGHTS).items()}
    state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    if may_lack is not None and not any(name.startswith(may_lack) for name in weights):
        weights |= {name: tensor for name, tensor in state.items() if name.startswith(may_lack)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in OF_WORDS & weights.keys() & shapes.keys():
        if weights[name].shape[:1] == (words,) and words < shapes[name][0]:
            weights[name] = _padded(weights[name], shapes[name][0] - words)
    with _named(checkpoint):
        check_tensors(weights, shapes)
    if not is_sharded(model):
        model.load_state_dict({name: weights[name.removeprefix("module.")] for name in model.state_dict()})
        return
    # Imported here, as it takes as long as torch, and commands that only read a model do without it.
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, dict(weights), options=_whole_tensors())


def _padded(rows: Tensor, count: int) -> Tensor:
    """Add rows of zeros to a matrix, or the lowest value to a bias."""
    if rows.ndim == 1:
        return torch.cat((rows, rows.min().expand(count)))
    return torch.cat((rows, rows.new_zeros(count, *rows.shape[1:])))


def load_moments(checkpoint: Path, model: nn.Module) -> Moments:
    """Return the optimizer's moments by parameter; empty for weights published without them."""
    path = checkpoint / OPTIMIZER
    if not path.exists():
        return {}
    moments = _load(path)
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    keys = {"exp_avg", "exp_avg_sq", "step", *(flat.partition(":")[0] for flat in moments)}
    with _named(path):
        check_tensors(moments, {f"{key}:{name}": own[name] * (key != "step") for key in keys for name in own})
    return _unflatten(moments)


def load_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return the task's own tensors; most tasks have none."""
    path = checkpoint / TASK
    return _load(path) if path.exists() else {}


def copy_weights(checkpoint: Path, folder: Path) -> None:
    """Copy weights and state into a folder that can be loaded but not resumed."""
    record = read_state(checkpoint, [WEIGHTS])
    folder.mkdir(parents=True)
    shutil.copyfile(checkpoint / WEIGHTS, folder / WEIGHTS)
    _write_record(folder, record)


def save_weights(folder: Path, model: nn.Module, state: dict[str, Any]) -> Path:
    """Save weights trained elsewhere as the checkpoint of step 0: to start from, not to resume."""
    final = folder / "checkpoints" / f"step-{0:08d}"
    _write(final, {WEIGHTS: model.state_dict()}, {"step": 0, **state})
    return final


def _write_record(folder: Path, record: dict[str, Any], names: Iterable[str] = (WEIGHTS,)) -> None:
    """Write state.json with its own checksum and those of the named files."""
    checksums = {name: _sync_and_hash(folder / name) for name in names}
    record["sha256"] = {**checksums, "state.json": _digest(record)}
    (folder / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    _sync_and_hash(folder / "state.json")


def load_checkpoint(
    checkpoint: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Restore weights, optimizer moments and, where the ranks are the same, random generators."""
    from torch.distributed.checkpoint.state_dict import (  # as in load_weights
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    load_weights(model, checkpoint)
    # The groups and their settings are the new run's own (not asked for in full, for then rank 0 alone
    # gets them); only the moments come from the file.
    whole: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    moments = _load(checkpoint / OPTIMIZER)
    with _named(checkpoint / OPTIMIZER):
        check_tensors(moments, {name: tuple(own.shape) for name, own in _flatten(whole["state"]).items()})
    whole["state"] = _unflatten(moments)
    set_optimizer_state_dict(model, optimizer, whole, options=_whole_tensors())
    generators = _load(checkpoint / GENERATORS)
    try:
        if f"{world.rank}.cpu" in generators:
            torch.set_rng_state(generators[f"{world.rank}.cpu"])
        if f"{world.rank}.cuda" in generators and world.device.type == "cuda":
            torch.cuda.set_rng_state(generators[f"{world.rank}.cuda"], world.device)
    except (RuntimeError, TypeError) as error:  # another dtype or length
        raise ValueError(f"{checkpoint / GENERATORS}: no state of a generator ({error})") from None


def _whole_tensors() -> "StateDictOptions":
    """Gather whole tensors on the CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Prefix errors with the path they are about."""
    try:
        yield
    except ValueError as error:
        kind = type(error) if isinstance(error, ShapeMismatch | NotFinite) else ValueError
        raise kind(f"{path}: {error}") from None


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _flatten(state: Moments) -> dict[str, Tensor]:
    """{"blocks.0.w": {"exp_avg": …}} → {"exp_avg:blocks.0.w": …}, which safetensors can hold."""
    return {f"{key}:{name}": tensor for name, tensors in state.items() for key, tensor in tensors.items()}


def _unflatten(tensors: dict[str, Tensor]) -> Moments:
    state: Moments = {}
    for flat, tensor in tensors.items():
        key, _, name = flat.partition(":")
        state.setdefault(name, {})[key] = tensor
    return state


def _save_tensors(path: Path, tensors: dict[str, Any]) -> None:
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # most often a full disk, whose space is freed at once
        shutil.rmtree(path.parent, ignore_errors=True)
        raise OSError(f"{path}: can't be written ({error}); earlier checkpoints are whole") from None
    path.chmod(0o644)  # safetensors sets 0600, but a shared disk has other readers


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path):  # only regular files reach the parser
            return load_file(path)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:  # KeyError: a dtype unknown to torch
        raise ValueError(f"{path}: can't be read ({error})") from None


def _digest(record: dict[str, Any]) -> str:
    """Checksum of a JSON object, whatever the layout of its file."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    try:
        return sha256_of(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: is missing") from None
    except OSError as error:  # an unreachable disk is not damage
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _hash(path)
