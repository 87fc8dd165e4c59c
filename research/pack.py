"""Pack a sweep's run folders into one small file, runs.tar.xz, which `deeploop runs` and `report` read.

    python -m research.pack runs/sweeps/p-sweep-gpu --out docs/results/p-sweep

Configs, metrics, results and logs are packed; weights and pictures are left out, and nothing is deleted.
`tar xf runs.tar.xz` restores the folders.
"""

import argparse
import json
import lzma
import sys
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from deeploop.files import atomic_file, is_locked, parse_json, read_object, write_text
from deeploop.runs.endings import DROPPED, exit_file, log_file
from deeploop.runs.packed import MOST_BYTES, MOST_FILES, PACKED, is_plain, names_in, opened, subfolders

KEPT = (".json", ".jsonl", ".log", ".md", ".txt")
BLOCK = 1 << 20
WINDOW = 4 << 20  # how far back xz looks for repetitions: what a reader must reserve, however small the file
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": WINDOW}]


def pack(folder: Path, out: Path, train_every: int = 1) -> str:
    """Write the packed file and a copy of sweep.json; return a line on what it holds."""
    if train_every < 1:
        raise ValueError(f"--train-every {train_every}: must be at least 1")
    files = files_to_pack(folder)
    size = sum(path.stat().st_size for path in files.values())
    out.mkdir(parents=True, exist_ok=True)
    write_packed(files, out / PACKED, train_every)
    grid = folder / "sweep.json"
    if grid.is_file() and out.resolve() != folder.resolve():
        record = read_object(grid)
        write_text(out / "sweep.json", json.dumps(record, separators=(",", ":")) + "\n")  # a quarter smaller
    runs = len({name.partition("/")[0] for name in files if "/" in name})
    packed = (out / PACKED).stat().st_size
    sizes = f"{size / 1e3:,.0f} KB packed into {packed / 1e3:,.0f} KB"
    return f"{out / PACKED}: {runs} runs, {len(files)} files, {sizes}"


def files_to_pack(folder: Path) -> dict[str, Path]:
    """Name in the packed file → where it lies: JSON and text of the runs, their logs and exit codes."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    runs = [run for run in subfolders(folder) if (opened(run) / "config.json").is_file()]
    if not runs:
        raise ValueError(f"{folder}: holds no run folder (config.json)")
    for writing in (folder, *runs):
        if is_locked(writing / ".lock"):
            raise ValueError(f"{writing}: is being written; pack it when that has ended")
    found: dict[str, Path] = {}
    for run in runs:
        kept = (path for path in opened(run).iterdir() if path.suffix in KEPT or path.name == DROPPED)
        found |= {f"{run.name}/{path.name}": path for path in kept}
    # A cell that failed at once has a log and no run folder.
    cells = {name.removesuffix(".log") for name in names_in(folder) if name.endswith(".log")}
    for cell in {run.name for run in runs} | cells:
        run = opened(folder / cell)
        found |= {path.name: path for path in (log_file(run), exit_file(run))}
    for name in found:
        if not is_plain(name):
            raise ValueError(f"{folder / name}: can't be packed under this name; rename it")
    return {name: path for name, path in found.items() if path.is_file()}


def write_packed(files: Mapping[str, Path], out: Path, train_every: int = 1) -> None:
    """Write the packed file; the same files give the same bytes.

    Of the metrics' training lines those of every so many steps are kept; validations and the rest all are.
    """
    with (
        atomic_file(out) as file,
        lzma.open(file, "wb", filters=XZ) as xz,
        tarfile.open(fileobj=xz, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for number, (name, path) in enumerate(sorted(files.items()), start=1):
            data = path.read_bytes()
            if train_every > 1 and path.name == "metrics.jsonl":
                data = b"".join(line for line in data.splitlines(keepends=True) if stays(line, train_every))
            member = tarfile.TarInfo(name)  # of nobody, at time 0
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
            if number > MOST_FILES or tar.offset > MOST_BYTES - BLOCK:
                raise ValueError(f"{out}: would hold more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")


def stays(line: bytes, every: int) -> bool:
    """Keep a line that can't be read: whoever reads the pack must see that it is damaged."""
    try:
        record = parse_json(line)
        return record["kind"] != "train" or record["step"] % every == 0
    except (ValueError, LookupError, TypeError):
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a sweep folder, or another folder of run folders")
    parser.add_argument("--out", type=Path, help="gets runs.tar.xz and sweep.json; unset: the folder itself")
    parser.add_argument(
        "--train-every", type=int, default=1, help="keep training lines of every so many steps"
    )
    args = parser.parse_args()
    try:
        print(pack(args.folder, args.out or args.folder, args.train_every))
    except (ValueError, OSError) as error:
        sys.exit(f"pack: {error}")


if __name__ == "__main__":
    main()
