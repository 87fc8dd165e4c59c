"""`deeploop eval` for reasoners: the test split of a run's puzzles, with votes over a task's views on ARC.

With more segments, views or first states than in training it gives accuracy against forward passes. It writes
eval.json to the run folder, this curve to passes.png, and the votes on ARC to gallery.html.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from deeploop.exits import memory_advice
from deeploop.paper.published import ARC_TASKS, ARC_VIEWS, VOTES
from deeploop.report import plots, results
from deeploop.runs.folder import (
    load_reasoner_config,
    provenance,
    puzzle_shape,
    read_stamp,
    require_checkpoint,
    step_of,
)
from deeploop.tasks.options import EvalArgs
from deeploop.tasks.puzzles import gallery, tables
from deeploop.tasks.puzzles.data.arc import arc_differences
from deeploop.tasks.puzzles.data.sets import PuzzleSet, open_puzzles
from deeploop.tasks.puzzles.load import load_reasoner
from deeploop.tasks.puzzles.options import NOISE, ReasonerOptions
from deeploop.tasks.puzzles.scoring import PuzzleScore, Solver, added, by_source, score, spread
from deeploop.tasks.puzzles.test_time import TaskVotes, by_passes, vote
from deeploop.tasks.puzzles.voting import ladder
from deeploop.train.checkpoint import read_state
from deeploop.train.distributed import arithmetic, how_computed, open_world, wrap
from deeploop.train.execution import choose_execution

# A result that agrees in these replaces an earlier one in eval.json; others are kept.
IDENTITY = ("puzzles", "checkpoint", "views", "limit", "halt", "test_time", "precision")
GALLERY = 60


def run(args: EvalArgs) -> str:
    """Solve the puzzles, write the result into the run folder, and return the text to print."""
    assert args.run is not None
    folder, options = args.run, args.reasoner
    checkpoint, config = require_checkpoint(folder), load_reasoner_config(folder)
    results.check(folder)
    puzzles = matching_puzzles(folder, args.data, checkpoint)
    check_views(puzzles, options)
    with open_solver(folder, options, args.device, checkpoint) as solver:
        segments = tuple(sorted(set(options.segments))) or (solver.config.segments,)
        effort = replace(options, segments=segments)
        start = time.perf_counter()
        more = asked_more(options)
        scaling = more is not None or (puzzles.kind != "arc" and options.views is not None)
        result, tasks = solve_puzzles(solver, puzzles, effort, args.limit, scaling)
        record = {
            "model": config.task,
            "averaged": bool(config.optim.ema),
            "most_segments": segments[-1],
            **how_computed(torch.device(solver.device), solver.arithmetic),
            "batch": solver.batch,
            "views": options.views,
            "limit": args.limit,
            "halt": options.halt,
            "test_time": more and {"segments": [*segments], **more},
            "kind": puzzles.kind,
            "puzzles": puzzles.hash,
            "data": str(puzzles.folder),
            "checkpoint": checkpoint.name,
            "seconds": round(time.perf_counter() - start, 3),
            **result,
        }
    trained = None if "imported" in read_stamp(folder) else step_of(checkpoint)
    unlike = arc_differences(puzzles, trained, config.optim.batch)
    differs = deviations(record) + unlike if puzzles.kind == "arc" else []
    record |= {"deviations": differs, **provenance()}
    files = write(folder, record, tasks, GALLERY if options.gallery is None else options.gallery)
    text = tables.report(folder, record, tables.young_average(config.optim.ema, step_of(checkpoint)))
    return results.printed(record, text, files, as_json=args.json)


def write(folder: Path, record: dict[str, Any], tasks: list[TaskVotes], count: int) -> list[Path]:
    """Write the result, its curve over passes, and ARC's gallery of `count` tasks; return the files."""
    files = [results.add(folder, record, IDENTITY)]
    if len(record.get("passes", ())) > 1:
        files.append(folder / "passes.png")
        plots.save_png(tables.passes_chart(record), files[-1])
    if record["kind"] == "arc" and count:
        files.append(gallery.write(folder, record, tasks, count))
    return files


def matching_puzzles(folder: Path, data: Path | None, checkpoint: Path) -> PuzzleSet:
    """The puzzles that the run was trained on; any others are refused."""
    path = load_reasoner_config(folder).data.path if data is None else data
    try:
        puzzles = open_puzzles(path, "data")
    except ValueError as error:
        if data is not None or path.exists():  # the folder is damaged, not moved
            raise
        raise ValueError(f"{error}; if they moved, give their folder: --data FOLDER") from None
    trained = str(read_stamp(folder).get("puzzles"))
    if (saved := str(read_state(checkpoint, ()).get("puzzles"))) != trained:
        raise ValueError(
            f"{checkpoint}: a checkpoint of other puzzles ({saved:.12}…) than the run's ({trained:.12}…)"
        )
    if puzzles.hash != trained:
        raise ValueError(
            f"data={path}: puzzles of hash {puzzles.hash:.12}…, {folder} was trained on {trained:.12}…; "
            "set --data to those"
        )
    if (own := puzzle_shape(folder)) != puzzles.shape:
        raise ValueError(
            f"{folder / 'run.json'}: made for puzzles of {own}, those in {path} are {puzzles.shape}"
        )
    return puzzles


@contextmanager
def open_solver(
    folder: Path, options: ReasonerOptions, device: Literal["auto", "cpu", "cuda"], checkpoint: Path
) -> Iterator[Solver]:
    device_config = replace(load_reasoner_config(folder).device, kind=device)
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


def check_views(puzzles: PuzzleSet, options: ReasonerOptions) -> None:
    """Raise ValueError for options that these puzzles do not support."""
    if puzzles.kind == "arc":
        return
    where = f"{puzzles.folder} holds puzzles of kind {puzzles.kind}"
    if options.gallery is not None:
        raise ValueError(f"--gallery: for ARC; {where}")
    if options.views is not None:
        if not (symmetries := puzzles.test.kind.symmetries):
            raise ValueError(f"--views: {where}, without known symmetries; use --starts for more answers")
        symmetries(puzzles.test.side, np.arange(options.views))


def asked_more(options: ReasonerOptions) -> dict[str, Any] | None:
    """The options that differ from a validation during training, except views; None if there are none."""
    if not options.segments and options.starts == 1 and options.choose == "vote":
        return None
    noise = (options.noise or NOISE) if options.starts > 1 else 0.0
    return {"starts": options.starts, "noise": noise, "choose": options.choose}


def solve_puzzles(
    solver: Solver, puzzles: PuzzleSet, effort: ReasonerOptions, limit: int | None, scaling: bool
) -> tuple[dict[str, Any], list[TaskVotes]]:
    """Solve the puzzles; return the result (`scaling`: with accuracy against passes) and the votes on ARC."""
    split = puzzles.test
    if puzzles.kind != "arc":
        return solve_boards(solver, puzzles, effort, limit or len(split), scaling), []
    groups = spread(limit or len(split.groups), len(split.groups))
    tasks, total = vote(solver, split, groups, effort, keep=gallery.VOTES_SHOWN)
    return {
        "examples": int(total.puzzles),
        **total.means(),
        "tasks": len(tasks),
        "inputs": sum(len(task.questions) for task in tasks),
        "most_views": max(task.votes for task in tasks) // effort.starts,
        "ladder": {str(K): share for K, share in ladder([task.needed for task in tasks], VOTES).items()},
        "places": {task.name: [question.place for question in task.questions] for task in tasks},
        **({"passes": by_passes(tasks)} if scaling else {}),
    }, tasks


def solve_boards(
    solver: Solver, puzzles: PuzzleSet, effort: ReasonerOptions, count: int, scaling: bool
) -> dict[str, Any]:
    """The scores of boards, and those of each source file if there are several."""
    split, numbers = puzzles.test, spread(count, len(puzzles.test))
    one = len(puzzles.sources) < 2 or split.sources is None
    parts = {"": numbers} if one else by_source(puzzles, numbers)
    if scaling:  # each board is a group of its own
        solved = {name: vote(solver, split, own, effort, keep=1) for name, own in parts.items()}
    else:
        solved = {name: ([], score(solver, split.rows(own), progress=True)) for name, own in parts.items()}
    tasks, scores = zip(*solved.values(), strict=True)
    whole = board_scores(list(chain(*tasks)), added(list(scores)))
    return whole if one else {**whole, "sources": {name: board_scores(*own) for name, own in solved.items()}}


def board_scores(tasks: list[TaskVotes], total: PuzzleScore) -> dict[str, Any]:
    """Means over single answers, and the accuracy of the choice among them if there were votes."""
    chosen = {"tasks": len(tasks), "passes": by_passes(tasks)} if tasks else {}
    return {"examples": int(total.puzzles), **total.means(), **chosen}


def deviations(record: dict[str, Any]) -> list[str]:
    """Differences from the evaluation behind the paper's Table 3."""
    checks = [
        (record["tasks"] != ARC_TASKS, f"{record['tasks']} ARC tasks, not {ARC_TASKS}"),
        (
            record["most_views"] < ARC_VIEWS,
            f"at most {record['most_views']:,} views of a task vote, not 1,001",
        ),
        (record["halt"], "puzzles stop when the model halts"),
        (record["test_time"], "segments, first states or the choice are not those of the paper's evaluation"),
        (record["precision"] != "bf16", f"{record['precision']} arithmetic, not bf16"),
    ]
    return [text for holds, text in checks if holds]
