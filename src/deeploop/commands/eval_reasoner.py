"""`deeploop eval` for reasoners: the test split of a run's puzzles, and on ARC the votes over a task's views.

The result goes to eval.json in the run folder, and the votes on ARC to gallery.html as pictures.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from deeploop.commands import gallery
from deeploop.commands.eval import ReasonerOptions
from deeploop.commands.memory import memory_advice
from deeploop.data.puzzles import PuzzleSet
from deeploop.eval.arc_votes import TaskVotes, vote
from deeploop.eval.reasoning import PuzzleScore, Solver, added, score, spread, spread_by_source, spread_rows
from deeploop.eval.voting import ladder
from deeploop.models.reasoner import PuzzleShape
from deeploop.report import scoreboard
from deeploop.report.page import text_table
from deeploop.report.published import ARC_TASKS, ARC_VIEWS, VOTES
from deeploop.train.checkpoint import read_state, step_of
from deeploop.train.distributed import arithmetic, how_computed, open_world, wrap
from deeploop.train.execution import choose_execution
from deeploop.train.puzzle import arc_differences, open_puzzles
from deeploop.train.rundir import (
    load_any_config,
    load_reasoner,
    load_reasoner_config,
    provenance,
    puzzle_shape,
    read_stamp,
    require_checkpoint,
)

# Results that agree in these replace one another; any other stays beside them in eval.json.
IDENTITY = ("puzzles", "checkpoint", "views", "limit", "halt", "precision")
GALLERY = 60


def run(
    folder: Path,
    options: ReasonerOptions,
    *,
    data: Path | None = None,
    limit: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: bool = False,
) -> str:
    """Solves the puzzles, writes the result into the run folder, and returns what to print."""
    checkpoint = require_checkpoint(folder)
    scoreboard.check(folder)
    puzzles = matching_puzzles(folder, data, checkpoint)
    if puzzles.kind != "arc":
        for name in ("views", "gallery"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name}: for ARC; {puzzles.folder} holds puzzles of kind {puzzles.kind}")
    asked = {"views": options.views, "limit": limit, "halt": options.halt}
    with open_solver(folder, options, device, checkpoint) as solver:
        start = time.perf_counter()
        result, tasks = solve_puzzles(solver, puzzles, options, limit)
        seconds = time.perf_counter() - start
        record = {
            **read_model(folder, solver),
            **asked,
            "kind": puzzles.kind,
            "puzzles": puzzles.hash,
            "data": str(puzzles.folder),
            "checkpoint": checkpoint.name,
            "seconds": round(seconds, 3),
            **result,
        }
    trained = arc_differences(puzzles, step_of(checkpoint), load_reasoner_config(folder).optim.batch)
    differs = deviations(record) + trained if puzzles.kind == "arc" else []
    record |= {"deviations": differs, **provenance()}
    files = [scoreboard.add(folder, record, IDENTITY)]
    count = GALLERY if options.gallery is None else options.gallery
    if tasks and count:
        files.append(gallery.write(folder, record, tasks, count))
    if as_json:
        return json.dumps(record, indent=1)
    return f"{report(folder, record)}\n\nwritten: {', '.join(map(str, files))}"


def matching_puzzles(folder: Path, data: Path | None, checkpoint: Path) -> PuzzleSet:
    """The puzzles that the run was trained on, and no others."""
    path = load_reasoner_config(folder).data.path if data is None else data
    try:
        puzzles = open_puzzles(path, "data")
    except ValueError as error:
        if data is not None or path.exists():  # damaged, and not moved
            raise
        raise ValueError(f"{error}; if they moved, say where they are: --data FOLDER") from None
    trained = str(read_stamp(folder).get("puzzles"))
    if (saved := str(read_state(checkpoint, ()).get("puzzles"))) != trained:
        raise ValueError(
            f"{checkpoint}: a checkpoint of other puzzles ({saved:.12}…) than the run's ({trained:.12}…)"
        )
    if puzzles.hash != trained:
        raise ValueError(
            f"data={path}: puzzles of hash {puzzles.hash:.12}…, {folder} was trained on {trained:.12}…; "
            "point --data to those"
        )
    shape = PuzzleShape(puzzles.vocabulary, puzzles.length, puzzles.puzzle_ids)
    if (own := puzzle_shape(folder)) != shape:
        raise ValueError(f"{folder / 'run.json'}: made for puzzles of {own}, those in {path} are {shape}")
    return puzzles


@contextmanager
def open_solver(
    folder: Path, options: ReasonerOptions, device: Literal["auto", "cpu", "cuda"], checkpoint: Path
) -> Iterator[Solver]:
    device_config = replace(load_any_config(folder).device, kind=device)
    with open_world(device_config) as world:
        batch = options.batch or (512 if world.device.type == "cuda" else 64)
        with memory_advice(f"--batch {max(1, batch // 2)}"):
            model, config = load_reasoner(folder, device=world.device, checkpoint=checkpoint)
            choose_execution(device_config, world, model).apply(wrap(model, device_config, world))
            yield Solver(
                model,
                config.halting,
                batch,
                world.device,
                partial(arithmetic, device_config, world.device),
                options.halt,
            )


def read_model(folder: Path, solver: Solver) -> dict[str, Any]:
    """What solved, and how."""
    config, stamp = load_any_config(folder), read_stamp(folder)
    return {
        "model": stamp["task"],
        "averaged": bool(getattr(config.optim, "ema", 0)),
        "most_segments": solver.config.segments,
        **how_computed(torch.device(solver.device), solver.arithmetic),
        "batch": solver.batch,
    }


def solve_puzzles(
    solver: Solver, puzzles: PuzzleSet, options: ReasonerOptions, limit: int | None
) -> tuple[dict[str, Any], list[TaskVotes]]:
    """The result as plain values; on ARC with every task's votes."""
    split = puzzles.test
    if puzzles.kind != "arc":
        return solve_boards(solver, puzzles, limit or len(split)), []
    groups = spread(limit or len(split.groups), len(split.groups))
    tasks, found = vote(solver, split, groups, views=options.views, keep=gallery.VOTES_SHOWN)
    return {
        "examples": int(found.puzzles),
        **found.means(),
        "tasks": len(tasks),
        "inputs": sum(len(task.questions) for task in tasks),
        "most_views": max(task.views for task in tasks),
        "ladder": {str(K): share for K, share in ladder([task.needed for task in tasks], VOTES).items()},
        "places": {task.name: [question.place for question in task.questions] for task in tasks},
    }, tasks


def solve_boards(solver: Solver, puzzles: PuzzleSet, count: int) -> dict[str, Any]:
    """The scores of boards; those of each file too, where the puzzles come from files."""
    if len(puzzles.sources) < 2 or puzzles.test.sources is None:
        return board_scores(score(solver, spread_rows(puzzles.test, count), progress=True))
    parts = spread_by_source(puzzles, count)
    found = {name: score(solver, rows, progress=True) for name, rows in parts.items()}
    by_source = {name: board_scores(part) for name, part in found.items()}
    return {**board_scores(added(list(found.values()))), "sources": by_source}


def board_scores(found: PuzzleScore) -> dict[str, Any]:
    return {"examples": int(found.puzzles), **found.means()}


def deviations(record: dict[str, Any]) -> list[str]:
    """Where this differs from the evaluation behind the paper's Table 3, in words."""
    checks = [
        (record["tasks"] != ARC_TASKS, f"{record['tasks']} ARC tasks, not {ARC_TASKS}"),
        (
            record["most_views"] < ARC_VIEWS,
            f"at most {record['most_views']:,} views of a task vote, not 1,001",
        ),
        (record["halt"], "puzzles stop when the model says so"),
        (record["precision"] != "bf16", f"{record['precision']} arithmetic, not bf16"),
    ]
    return [text for holds, text in checks if holds]


def report(folder: Path, record: dict[str, Any]) -> str:
    """The result for a terminal."""
    weights = ", averaged weights" if record["averaged"] else ""
    examples = f"{record['examples']:,} examples of {record['data']}"
    what = f"{record['tasks']:,} tasks, {examples}" if record["kind"] == "arc" else examples
    parts = [
        f"{folder} at {record['checkpoint']}{weights}: {what}{young_average(folder, record)}",
        accuracy(record),
    ]
    if record["kind"] == "arc":
        parts.append(ladder_table(record))
    seconds = max(record["seconds"], 1e-3)
    parts.append(
        f"{seconds:,.1f} s on {record['device']} ({record['precision']}): "
        f"{record['examples'] / seconds:,.1f} examples/s"
    )
    if record["deviations"]:
        lines = [f"  {text}" for text in record["deviations"]]
        parts.append("\n".join(["deviates from the paper's evaluation:", *lines]))
    return "\n\n".join(parts)


def young_average(folder: Path, record: dict[str, Any]) -> str:
    """A line where the averaged weights reach back beyond the start of the run."""
    ema, step = getattr(load_any_config(folder).optim, "ema", 0.0), step_of(Path(record["checkpoint"]))
    if not ema or 1 / (1 - ema) <= step:
        return ""
    return (
        "\nthe averaged weights are still near the start: they average over about "
        f"{1 / (1 - ema):,.0f} steps (optim.ema={ema:g}), and the run has {step:,}"
    )


def accuracy(record: dict[str, Any]) -> str:
    """Single answers, and the segments they took or would have."""
    taken = "segments" if record["halt"] else "segments wanted"
    heading = ("", "exact, %", "cells, %", "loss", taken)
    label = "each view by itself" if record["kind"] == "arc" else record["kind"]
    parts = [(label, record), *record.get("sources", {}).items()]
    rows = [
        (
            name,
            f"{100 * part['exact']:.2f}",
            f"{100 * part['cells']:.2f}",
            f"{part['loss']:.4f}",
            f"{part['segments']:.2f} of {record['most_segments']}",
        )
        for name, part in parts
    ]
    return text_table(heading, rows)


def ladder_table(record: dict[str, Any]) -> str:
    """Tasks solved by the best K answers, under the paper's Table 3."""
    header, rows = gallery.ladder_rows(record)
    return text_table(header, rows)
