"""Import a checkpoint of HRM's or TRM's public code as a run folder, for `eval` and `solve`."""

import pickle
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from deeploop.config.json import to_dict
from deeploop.config.loop import HaltingConfig
from deeploop.config.optim import ReasonerOptimConfig
from deeploop.files import sha256_of, write_json
from deeploop.models.public_reasoner import check_shape, config_of, is_hrm, our_names, read_public
from deeploop.models.reasoner import Reasoner
from deeploop.tasks.puzzles.config import HRMTrainConfig, PuzzleDataConfig, TRMTrainConfig
from deeploop.tasks.puzzles.data.arc_public import NAMES
from deeploop.tasks.puzzles.data.sets import PuzzleSet, open_puzzles
from deeploop.tasks.puzzles.options import ImportArgs
from deeploop.train.checkpoint import save_weights
from deeploop.train.rundir import create_run, new_run


def run(args: ImportArgs) -> str:
    """Write the run folder and return the text to print."""
    public = read_checkpoint(args)
    puzzles = trained_puzzles(args.data)
    weights = our_names(public)
    check_shape(weights, puzzles.shape)
    model = Reasoner(config_of(weights, given(args, puzzles), puzzles.length), puzzles.shape)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{args.checkpoint}: {' '.join(str(error).split()):.200}") from None
    config = (HRMTrainConfig if args.kind == "hrm" else TRMTrainConfig)(
        out=args.out,
        model=model.config,  # type: ignore[arg-type]
        data=PuzzleDataConfig(path=args.data),
        optim=ReasonerOptimConfig(),  # no average: TRM's checkpoint holds the averaged weights
        halting=HaltingConfig(segments=args.segments, learn_continue=args.kind == "hrm"),
    )
    stamp = {
        "task": args.kind,
        "puzzles": puzzles.hash,
        "shape": puzzles.shape._asdict(),
        "imported": {"file": args.checkpoint.name, "sha256": sha256_of(args.checkpoint)},
    }
    with new_run(args.out) as part:
        create_run(replace(config, out=part), stamp, {})
        write_json(part / "config.json", to_dict(config))  # with the folder that the run has in the end
        save_weights(part, model, {"puzzles": puzzles.hash})
    count = sum(parameter.numel() for parameter in model.parameters())
    made = f"{args.out}: {args.kind} of {count:,} parameters from {args.checkpoint}"
    return f"{made}; next: deeploop eval {args.out}"


def read_checkpoint(args: ImportArgs) -> dict[str, Tensor]:
    """Read the public weights, which must be of the kind given."""
    try:
        public = read_public(str(args.checkpoint))
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{args.checkpoint}: can't be read as a checkpoint ({text:.80})") from None
    if is_hrm(public) != (args.kind == "hrm"):
        raise ValueError(
            f"{args.checkpoint}: holds {'an HRM' if is_hrm(public) else 'no HRM'}, not {args.kind}"
        )
    return public


def trained_puzzles(folder: Path) -> PuzzleSet:
    """Open the puzzles; those of ARC must be the public build, which numbers the puzzle embeddings."""
    if (folder / NAMES).is_file():
        raise ValueError(
            f"data={folder}: a build of the public code; prepare it with "
            f"`deeploop prepare arc --from-public {folder}` and name its --out"
        )
    puzzles = open_puzzles(folder, "data")
    if puzzles.kind == "arc" and puzzles.facts["build"].get("builder") != "arc-public":
        raise ValueError(
            f"data={folder}: not the build that the checkpoint's puzzle embeddings are numbered by; "
            "prepare that with `deeploop prepare arc --from-public FOLDER`"
        )
    return puzzles


def given(args: ImportArgs, puzzles: PuzzleSet) -> dict[str, int]:
    """The fields of the model that its weights do not show: as published, unless set."""
    low_cycles = (4 if puzzles.kind == "arc" else 6) if args.kind == "trm" else 2
    asked = {name: getattr(args, name) for name in ("cycles", "low_cycles", "puzzle_positions")}
    own = {name: value for name, value in asked.items() if value is not None}
    return {"heads": args.heads, "low_cycles": low_cycles, **own}
