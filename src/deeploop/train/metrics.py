"""Metrics as JSON lines, which every plot and table reads; TensorBoard and W&B on request."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from deeploop.config.run import LogConfig
from deeploop.files import (
    NotRegularError,
    append_file,
    atomic_file,
    open_regular,
    own_folder,
    parse_json,
)

Record = dict[str, Any]

LONGEST_LINE = 1 << 20
"""Bytes of a line; ours have some hundreds, a diagnosis some thousands."""
# Fields that readers expect to be numbers or null, and strings or null.
NUMBERS = frozenset(
    (
        *("loss", "floor", "similarity", "exact", "cells", "segments", "lr", "grad_norm", "tokens"),
        *("tokens_per_s", "mfu", "seconds", "rounds", "kappa", "kappa_raw"),
    )
)
WORDS = frozenset(("verdict", "advice", "updates"))
EVALUATIONS = ("validation", "collapse", "diagnose")  # kinds of lines


class MetricsWriter:
    """Appends one JSON object per line to `metrics.jsonl`, flushed at once."""

    def __init__(self, folder: Path, config: LogConfig, settings: Record) -> None:
        self._path = folder / "metrics.jsonl"
        self._file = append_file(self._path)
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb(config.wandb, folder, settings) if config.wandb else None

    def write(self, kind: str, step: int, values: Record) -> None:
        line = json.dumps({"kind": kind, "step": step, **finite(values)}) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # a full disk
            raise OSError(f"{self._path}: can't be written ({error.strerror})") from None
        numbers = {f"{kind}/{name}": value for name, value in scalars(values)}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        with suppress(OSError):  # a full disk was already reported
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(folder: Path, kind: str | None = None) -> list[Record]:
    """Return the records of a run in order, without a line that a crash cut off."""
    records = (record for record in stream_lines(folder) if record is not None)
    return [record for record in records if kind is None or record["kind"] == kind]


def stream_lines(folder: Path) -> Iterator[Record | None]:
    """Yield each line's record, or None if the line is damaged. A truncated last line is dropped."""
    if (lines := _opened(folder / "metrics.jsonl")) is None:
        return
    with lines:
        while line := lines.readline(LONGEST_LINE):
            record, whole = _parse(line), line.endswith(b"\n")
            if record is not None and not is_sound(record):
                record = None
            while not whole and (rest := lines.readline(LONGEST_LINE)):  # of a line that is too long
                record, whole = None, rest.endswith(b"\n")
            if record is not None or (whole and line.strip()):
                yield record


def stream_back(folder: Path, block: int = 1 << 16) -> Iterator[Record]:
    """Yield lines from the last to the first without reading the whole file; values are not checked."""
    if (file := _opened(folder / "metrics.jsonl")) is None:
        return
    with file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start > 0:
            start, end = max(0, start - block), start
            file.seek(start)
            # The first line of a block may have begun in the one before it.
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from (record for record in map(_parse, reversed(lines)) if record is not None)
            if len(rest) > LONGEST_LINE:
                rest = b"\x00"  # longer than any line that deeploop writes
        if (record := _parse(rest)) is not None:
            yield record


def last_lines(folder: Path, *, count: int = 1, sound: bool = True) -> tuple[list[Record], Record]:
    """Return the last `count` lines of training metrics, newest first, and the last validation or {}.

    With `sound` damaged lines are left out; without it values are not checked.
    """
    train: list[Record] = []
    validation: Record = {}
    for record in stream_back(folder):
        if sound and not is_sound(record):
            continue
        if record["kind"] == "validation":
            validation = validation or record
        elif record["kind"] == "train" and len(train) < count:
            train.append(record)
        if validation and len(train) == count:
            break
    return train, validation


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open_regular(path)
    except (FileNotFoundError, NotRegularError):
        return None


def _parse(line: bytes) -> Record | None:
    """Parse a line; None without valid JSON, kind and step."""
    try:
        record = parse_json(line) if len(line) <= LONGEST_LINE else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if record.get("verdict") == "between":  # the old name of `undecided`
        record["verdict"] = "undecided"
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**53 else None


def is_number(value: Any) -> bool:
    """Return True for a finite number that a float can hold."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def is_sound(record: Mapping[str, Any]) -> bool:
    """Return True if every field that readers use has its type: numbers are finite and fit a float."""
    for name, value in record.items():
        if value is None:
            continue
        if name in NUMBERS and not is_number(value):
            return False
        if name in WORDS and type(value) is not str:
            return False
    return True


def rewind_metrics(folder: Path, step: int, evaluated: int | None = None) -> None:
    """Drop lines after `step` and evaluations after `evaluated`, which a resumed run writes again."""
    last = dict.fromkeys(EVALUATIONS, step if evaluated is None else evaluated)
    records = (one for one in read_metrics(folder) if one["step"] <= last.get(one["kind"], step))
    kept = [json.dumps(record) + "\n" for record in records]
    with atomic_file(folder / "metrics.jsonl") as file:
        file.write("".join(kept).encode())


def scalars(values: Record) -> Iterator[tuple[str, float]]:
    """Yield the numbers among the values; those of a list as `loss_by_rounds/0`, `/1`, …"""
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from scalars({f"{name}/{index}": item for index, item in enumerate(value)})


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, in lists and dictionaries too: JSON has no name for them."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_read_back(values: Record) -> Record:
    """Return the values as JSON gives them back; raise for one that readers would refuse."""
    plain = {}
    for name, value in finite(values).items():
        try:
            plain[name] = parse_json(json.dumps(value))
        except TypeError:  # a tensor, an array
            raise ValueError(f"{name}={value!r:.40}: must be a plain value, such as a float") from None
        if not is_sound({name: plain[name]}):
            raise ValueError(f"{name}={value!r:.40}: must be a {'string' if name in WORDS else 'number'}")
    return plain


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(own_folder(folder / "tensorboard")))


def _wandb(project: str, folder: Path, settings: Record) -> Any:
    import wandb

    own_folder(folder / "wandb")
    try:
        return wandb.init(project=project, name=folder.name, dir=str(folder), config=settings)
    except wandb.Error as error:  # not logged in, or a bad project name
        raise ValueError(f"log.wandb={project}: {error}") from None
