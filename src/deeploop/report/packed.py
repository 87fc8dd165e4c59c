"""Run folders packed into one file, `runs.tar.xz`, and read from it as if they lay beside it. No torch.

A tar archive of RUN/FILE, RUN.log and RUN.exit.json: `tar xf runs.tar.xz` restores the folders. Readers call
`opened`, which unpacks into a temporary folder once per process; the paths shown stay those of the sweep.
"""

import atexit
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from deeploop.files import atomic_file, is_locked, open_regular, parse_json
from deeploop.report.endings import DROPPED, exit_file, log_file

PACKED = "runs.tar.xz"
KEPT = (".json", ".jsonl", ".log", ".md", ".txt")
# A file from elsewhere must not fill the disk or the memory.
MOST_BYTES = 1 << 30
MOST_FILES = 100_000
MEMORY = 10 << 20  # for decompression: what plain `xz` and `tar -J` write needs 9 MiB, ours 5
WINDOW = 4 << 20  # how far back xz looks for repetitions: what a reader must reserve, however small the file
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": WINDOW}]
BLOCK = 1 << 20


# ── Reading ─────────────────────────────────────────────────────────────────────────────────────────────
def opened(run: Path) -> Path:
    """Where to read a run folder and its log: there, or unpacked, if only the packed file has them."""
    pack = run.parent / PACKED
    own = run.exists() or log_file(run).exists()
    return run if own or not pack.is_file() else _unpacked(pack) / run.name


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, those in its packed file too, sorted."""
    return [folder / name for name in _entries(folder) if opened(folder / name).is_dir()]


def _entries(folder: Path) -> list[str]:
    pack = folder / PACKED
    places = [opened(folder), *([_unpacked(pack)] if pack.is_file() else [])]
    return sorted({path.name for place in places for path in place.iterdir()})


def _unpacked(pack: Path) -> Path:
    return _temporary_copy(pack, pack.stat().st_mtime_ns)  # packed anew, it is another file


@cache
def _temporary_copy(pack: Path, modified: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="deeploop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(pack, folder)
    return folder


def unpack(pack: Path, folder: Path) -> None:
    """Writes the files of a packed file into an empty folder; refuses what is not a plain file of a run."""
    try:
        with tempfile.TemporaryFile() as plain:
            _decompress(pack, plain)
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                _extract(tar, folder)
    except (lzma.LZMAError, tarfile.TarError, ValueError, OverflowError, OSError) as error:
        # Its text, not the error itself: that would hold this frame, and with it the memory of the decoder.
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        if "Memory usage" in why:
            why = f"it needs more than {MEMORY >> 20} MiB; unpack it with tar, and pack the folders anew"
        raise ValueError(f"{pack}: can't be unpacked ({why})") from None


def _decompress(pack: Path, plain: BinaryIO) -> None:
    xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
    with open_regular(pack) as file:
        while not xz.eof:
            block = file.read(BLOCK) if xz.needs_input else b""
            if xz.needs_input and not block:
                raise ValueError("it is cut off")
            plain.write(xz.decompress(block, BLOCK))
            if plain.tell() > MOST_BYTES:
                raise ValueError(f"it holds more than {MOST_BYTES:,} bytes")
    plain.seek(0)


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    _check_members(tar)  # all of them before the first is written
    for member in tar:
        content = tar.extractfile(member)
        assert content is not None  # of a plain file
        path = folder / member.name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)


def _check_members(tar: tarfile.TarFile) -> None:
    for number, member in enumerate(tar, start=1):
        if number > MOST_FILES:
            raise ValueError(f"it holds more than {MOST_FILES:,} files")
        if not is_plain(member.name):
            raise ValueError(f"{member.name!r} is no name of a run's file")
        # Links lead elsewhere, and a sparse file has any size that it claims.
        if member.type != tarfile.REGTYPE or member.issparse():
            raise ValueError(f"{member.name!r} is no plain file")


def is_plain(name: str) -> bool:
    """RUN/FILE, or a file beside the run folders: nothing that leads out of the folder, nothing hidden."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part.isprintable() and part[:1] not in ("", ".") for part in parts)


# ── Writing ─────────────────────────────────────────────────────────────────────────────────────────────
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
        found |= {f"{run.name}/{path.name}": path for path in opened(run).iterdir() if _is_kept(path)}
    # A cell that failed at once has a log and no run folder.
    cells = {name.removesuffix(".log") for name in _entries(folder) if name.endswith(".log")}
    for cell in {run.name for run in runs} | cells:
        run = opened(folder / cell)
        found |= {path.name: path for path in (log_file(run), exit_file(run))}
    for name in found:
        if not is_plain(name):
            raise ValueError(f"{folder / name}: can't be packed under this name; rename it")
    return {name: path for name, path in found.items() if path.is_file()}


def _is_kept(path: Path) -> bool:
    return path.suffix in KEPT or path.name == DROPPED


def write_packed(files: Mapping[str, Path], out: Path, train_every: int = 1) -> None:
    """Writes the packed file; the same files give the same bytes.

    Of the metrics' training lines those of every so many steps are kept; validations and the rest all are.
    """
    with (
        atomic_file(out) as file,
        lzma.open(file, "wb", filters=XZ) as xz,
        tarfile.open(fileobj=xz, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for number, (name, path) in enumerate(sorted(files.items()), start=1):
            data = _thinned(path, train_every) if path.name == "metrics.jsonl" else path.read_bytes()
            member = tarfile.TarInfo(name)  # of nobody, at time 0
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
            if number > MOST_FILES or tar.offset > MOST_BYTES - BLOCK:
                raise ValueError(f"{out}: would hold more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")


def _thinned(path: Path, every: int) -> bytes:
    if every == 1:
        return path.read_bytes()
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if _stays(line, every))


def _stays(line: bytes, every: int) -> bool:
    """A line that can't be read stays: whoever reads the pack is to be told of it."""
    try:
        record = parse_json(line)
        return record["kind"] != "train" or record["step"] % every == 0
    except (ValueError, LookupError, TypeError):
        return True
