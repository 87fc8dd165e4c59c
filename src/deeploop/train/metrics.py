"""Metrics as JSON lines, which every plot and table reads; TensorBoard and W&B on request."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from deeploop.files import append_file, atomic_file, own_folder

Record = dict[str, Any]


@dataclass(frozen=True)
class LogConfig:
    """What is written down while training."""

    every: int = 10
    """Steps between two lines of training metrics."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder (needs the extra `tensorboard`)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (needs the extra `wandb`)."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"log.every={self.every}: must be at least 1")


class MetricsWriter:
    """Appends one JSON object a line to `metrics.jsonl`, flushed at once."""

    def __init__(self, folder: Path, config: LogConfig, settings: Record) -> None:
        self._file = append_file(folder / "metrics.jsonl")
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb(config.wandb, folder, settings) if config.wandb else None

    def write(self, kind: str, step: int, values: Record) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **_finite(values)}) + "\n")
        self._file.flush()
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(folder: Path, kind: str | None = None, *, file: str = "metrics.jsonl") -> list[Record]:
    """The records of a run, in order; a line cut off by a crash is left out."""
    return [record for record in stream_metrics(folder, file) if kind is None or record["kind"] == kind]


def stream_metrics(folder: Path, file: str = "metrics.jsonl") -> Iterator[Record]:
    """The same one by one, for files that are better not held whole."""
    return (record for record in stream_lines(folder, file) if record is not None)


def stream_lines(folder: Path, file: str = "metrics.jsonl") -> Iterator[Record | None]:
    """The same with None for each damaged line, unless it is a last one without its end, as a kill leaves."""
    path = folder / file
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _parse(line)
            if record is not None or (line.endswith(b"\n") and line.strip()):
                yield record


def stream_back(folder: Path, block: int = 1 << 16) -> Iterator[Record]:
    """The same from the last to the first: of a million lines, the last is there at once."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start > 0:
            start, end = max(0, start - block), start
            file.seek(start)
            # The first line of a block may have begun in the one before it.
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from (record for record in map(_parse, reversed(lines)) if record is not None)
        if (record := _parse(rest)) is not None:
            yield record


def read_metrics_tail(folder: Path, lines: int = 500) -> list[Record]:
    """The last records of a run, in order, for one who looks at it every second."""
    return [*islice(stream_back(folder), lines)][::-1]


def _parse(line: bytes | str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int)
    return record if whole else None


def rewind_metrics(folder: Path, step: int) -> None:
    """Drops what was logged after `step`: a resumed run writes those lines again."""
    kept = [json.dumps(record) + "\n" for record in read_metrics(folder) if record["step"] <= step]
    with atomic_file(folder / "metrics.jsonl") as file:
        file.write("".join(kept).encode())


def _finite(values: Record) -> Record:
    """JSON has no NaN: a number that is none is written as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            'log.tensorboard: TensorBoard is not installed; run: pip install "deeploop[tensorboard]"'
        ) from None
    return SummaryWriter(str(own_folder(folder / "tensorboard")))


def _wandb(project: str, folder: Path, settings: Record) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f'log.wandb={project}: wandb is not installed; run: pip install "deeploop[wandb]"'
        ) from None
    own_folder(folder / "wandb")
    try:
        return wandb.init(project=project, name=folder.name, dir=folder, config=settings)
    except wandb.Error as error:  # nobody is logged in, a bad project name
        raise ValueError(f"log.wandb={project}: {error}") from None
