"""Recipes of the hierarchical reasoners: the published settings, and small ones for a CPU.

The published lengths are in epochs. An epoch draws one view of each task, so
steps = epochs · tasks · examples per view / batch. On ARC they are computed from the prepared set.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.config.run import CheckpointConfig, LogConfig
from deeploop.files import read_json
from deeploop.models.reasoner_config import HRMConfig, PuzzleShape, TRMConfig
from deeploop.tasks.puzzles.config import (
    HRMTrainConfig,
    PuzzleDataConfig,
    ReasonerTrainConfig,
    TRMTrainConfig,
)

# 100,000 epochs of the paper's 960 tasks at batch 768; `published_steps` computes those of another set.
ARC_STEPS = 518_226
ARC_OPTIM = ReasonerOptimConfig(steps=ARC_STEPS)
# Sudoku and mazes: 1,000 puzzles with one example each, without puzzle ids, and with more decay.
BOARD_OPTIM = ReasonerOptimConfig(
    peak_lr=1e-4, weight_decay=1.0, puzzle_lr=1e-4, puzzle_weight_decay=1.0, batch=768, steps=26_000
)
RARELY = CheckpointConfig(every=10_000)


class RecipePuzzles(NamedTuple):
    """The puzzles that a recipe expects: their shape, and the arguments of `deeploop prepare` for them."""

    shape: PuzzleShape
    prepare: str


# By the name of their folder in data/.
PUZZLES = {
    "arc1": RecipePuzzles(
        PuzzleShape(vocabulary=12, length=900, puzzle_ids=876_407), "arc --concept-arc ConceptARC/corpus"
    ),
    "sudoku": RecipePuzzles(PuzzleShape(vocabulary=11, length=81, puzzle_ids=1), "sudoku"),
    "sudoku4": RecipePuzzles(
        PuzzleShape(vocabulary=6, length=16, puzzle_ids=1), "sudoku --size 4 --train 2000 --test 500"
    ),
    "maze": RecipePuzzles(PuzzleShape(vocabulary=6, length=900, puzzle_ids=1), "maze"),
}


def require_puzzles(path: Path) -> None:
    """Raise ValueError if a recipe's puzzles are missing, with the command that makes them."""
    if path.name in PUZZLES and not path.exists():
        words = PUZZLES[path.name].prepare
        raise ValueError(
            f"data.path={path}: no such set of puzzles; make it with `deeploop prepare {words} --out {path}`"
        )


def expected_shape(path: Path) -> PuzzleShape | None:
    """Return the shape of the puzzles in a folder, or the one that a recipe expects under its name."""
    facts = read_json(path / "puzzles.json")
    sizes = [size for name in PuzzleShape._fields if type(size := facts.get(name)) is int]
    if len(sizes) == len(PuzzleShape._fields):
        return PuzzleShape(*sizes)
    known = PUZZLES.get(path.name)
    return known.shape if known else None


def published_steps(config: Any) -> Any:
    """Compute an ARC recipe's steps from its epochs and the prepared set, unless they were set."""
    if not isinstance(config, ReasonerTrainConfig) or config.optim.steps != ARC_STEPS:
        return config
    if not (config.data.path / "puzzles.json").is_file():
        return config
    from deeploop.tasks.puzzles.data.arc import steps_of_epochs  # imported here: --help needs no numpy
    from deeploop.tasks.puzzles.data.sets import PuzzleSet

    puzzles = PuzzleSet.open(config.data.path)
    if puzzles.kind != "arc":
        return config
    steps = steps_of_epochs(puzzles.facts["splits"]["train"], config.optim.batch)
    return replace(config, optim=replace(config.optim, steps=steps))


def hrm_arc1() -> HRMTrainConfig:
    """HRM on ARC-AGI-1 with ConceptARC as published: 27 M parameters, 100,000 epochs, 8 GPUs."""
    return HRMTrainConfig(
        out=Path("runs/hrm-arc1"),
        data=PuzzleDataConfig(path=Path("data/arc1"), validate_every=10_000),
        optim=ARC_OPTIM,
        checkpoint=RARELY,
    )


def hrm_arc1_deeploop() -> HRMTrainConfig:
    """The paper's HRM on ARC-AGI-1: p = 1/2 at N_g = 12 (the graph of the published code has 8 of them)."""
    return replace(hrm_arc1(), out=Path("runs/hrm-arc1-deeploop"), model=HRMConfig(rule="deeploop"))


def trm_arc1() -> TRMTrainConfig:
    """TRM with attention on ARC-AGI-1 as published: 7 M parameters, T = 3, n = 4."""
    return TRMTrainConfig(
        out=Path("runs/trm-arc1"),
        data=PuzzleDataConfig(path=Path("data/arc1"), validate_every=10_000),
        optim=replace(ARC_OPTIM, ema=0.999),
        checkpoint=RARELY,
    )


def hrm_sudoku() -> HRMTrainConfig:
    """HRM on 9 × 9 Sudoku with the published settings for one GPU: 1,000 puzzles, 20,000 epochs."""
    return HRMTrainConfig(
        out=Path("runs/hrm-sudoku"),
        data=PuzzleDataConfig(path=Path("data/sudoku"), validate_every=2_000),
        optim=replace(BOARD_OPTIM, peak_lr=7e-5, puzzle_lr=7e-5, batch=384, steps=52_000),
    )


def trm_sudoku() -> TRMTrainConfig:
    """TRM on 9 × 9 Sudoku as published: an MLP over the sequence, T = 3, n = 6, 50,000 epochs."""
    return TRMTrainConfig(
        out=Path("runs/trm-sudoku"),
        model=TRMConfig(low_cycles=6, mixer="mlp"),
        data=PuzzleDataConfig(path=Path("data/sudoku"), validate_every=5_000),
        optim=replace(BOARD_OPTIM, steps=65_000, ema=0.999),
    )


def hrm_maze() -> HRMTrainConfig:
    """HRM on 30 × 30 mazes, the published settings: 1,000 mazes, 20,000 epochs."""
    return HRMTrainConfig(
        out=Path("runs/hrm-maze"),
        data=PuzzleDataConfig(path=Path("data/maze"), validate_every=2_000),
        optim=BOARD_OPTIM,
    )


SMALL_DATA = PuzzleDataConfig(path=Path("data/sudoku4"), test_examples=500, validate_every=200)
# The decay published for boards; without it p = 1/2 does not converge (docs/reasoners.md).
SMALL_OPTIM = ReasonerOptimConfig(
    steps=2_000, batch=128, peak_lr=1e-3, warmup_steps=100, weight_decay=1.0, puzzle_lr=1e-3
)


def hrm_sudoku4() -> HRMTrainConfig:
    """HRM on 4 × 4 Sudoku, minutes on a CPU."""
    return HRMTrainConfig(
        out=Path("runs/hrm-sudoku4"),
        model=HRMConfig(width=64, heads=2, hidden=256, high_blocks=2, low_blocks=2),
        data=SMALL_DATA,
        optim=SMALL_OPTIM,
        halting=HaltingConfig(segments=8),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=25),
    )


def hrm_sudoku4_deeploop() -> HRMTrainConfig:
    """HRM on 4 × 4 Sudoku with p = 1/2, at the paper's N_g for its schedule."""
    small = hrm_sudoku4()
    return replace(
        small,
        out=Path("runs/hrm-sudoku4-deeploop"),
        model=replace(small.model, rule="deeploop"),
        # Its small branches learn slowly at hrm-sudoku4's rate: 16% exact after 1,200 steps.
        optim=replace(small.optim, peak_lr=2e-3, puzzle_lr=2e-3),
    )


def trm_sudoku4() -> TRMTrainConfig:
    """TRM on 4 × 4 Sudoku, minutes on a CPU."""
    return TRMTrainConfig(
        out=Path("runs/trm-sudoku4"),
        model=TRMConfig(width=64, heads=2, hidden=256, blocks=2, cycles=2, low_cycles=2, puzzle_positions=1),
        data=SMALL_DATA,
        optim=replace(SMALL_OPTIM, ema=0.999),
        halting=HaltingConfig(segments=8, learn_continue=False),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=25),
    )
