"""`deeploop pack`: a sweep's run folders as one small file, which `runs` and `report` read as it is."""

import json
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from deeploop.commands.parsing import run_command
from deeploop.files import read_object, write_text
from deeploop.report.packed import PACKED, files_to_pack, write_packed


@dataclass(frozen=True, kw_only=True)
class PackArgs:
    """Packs run folders into one file, runs.tar.xz: configs, metrics, results and logs.

    Weights and pictures are left out, and nothing is deleted. `deeploop runs`, `report` and `sweep` read the
    file as if the run folders lay there.
    """

    folder: Positional[Path]
    """A sweep folder, or another folder of run folders."""
    out: Path | None = None
    """Folder that gets runs.tar.xz and a copy of sweep.json; unset: the folder itself."""
    train_every: int = 1
    """Of the training lines in the metrics keep those of every so many steps; validations all stay."""


def run(args: PackArgs) -> str:
    """Writes the packed file; returns what it holds and how small it is."""
    if args.train_every < 1:
        raise ValueError(f"--train-every {args.train_every}: must be at least 1")
    files = files_to_pack(args.folder)
    out = args.out or args.folder
    size = sum(path.stat().st_size for path in files.values())
    out.mkdir(parents=True, exist_ok=True)
    write_packed(files, out / PACKED, args.train_every)
    grid = args.folder / "sweep.json"
    if grid.is_file() and out.resolve() != args.folder.resolve():
        record = read_object(grid)
        write_text(out / "sweep.json", json.dumps(record, separators=(",", ":")) + "\n")  # a quarter smaller
    runs = len({name.partition("/")[0] for name in files if "/" in name})
    packed = (out / PACKED).stat().st_size
    sizes = f"{size / 1e3:,.0f} KB packed into {packed / 1e3:,.0f} KB"
    return f"{out / PACKED}: {runs} runs, {len(files)} files, {sizes}"


def main(arguments: list[str]) -> int:
    return run_command(PackArgs, run, arguments, prog="deeploop pack")
