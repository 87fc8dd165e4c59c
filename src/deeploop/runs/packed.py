"""Read run folders from the archive `runs.tar.xz`. Imports no torch.

It holds RUN/FILE, RUN.log and RUN.exit.json: `tar xf runs.tar.xz` restores the folders. Readers call
`opened`, which unpacks it into a temporary folder once per process; displayed paths remain those of the
sweep. research/pack.py writes the file.
"""

import atexit
import lzma
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import BinaryIO

from deeploop.files import open_regular
from deeploop.runs.endings import log_file

PACKED = "runs.tar.xz"
# An untrusted archive must not fill the disk or the memory.
MOST_BYTES = 1 << 30
MOST_FILES = 100_000
MEMORY = 10 << 20  # for decompression: archives of plain `xz` and `tar -J` need 9 MiB, deeploop's 5
BLOCK = 1 << 20


def opened(run: Path) -> Path:
    """The path to read a run folder and its log from: its own, or an unpacked copy from the archive."""
    pack = run.parent / PACKED
    own = run.exists() or log_file(run).exists()
    return run if own or not pack.is_file() else _unpacked(pack) / run.name


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder and in its archive, sorted."""
    return [folder / name for name in names_in(folder) if opened(folder / name).is_dir()]


def names_in(folder: Path) -> list[str]:
    """The names of files and folders in a folder and in its archive, sorted."""
    pack = folder / PACKED
    places = [opened(folder), *([_unpacked(pack)] if pack.is_file() else [])]
    return sorted({path.name for place in places for path in place.iterdir()})


def _unpacked(pack: Path) -> Path:
    return _temporary_copy(pack, pack.stat().st_mtime_ns)  # a new archive is unpacked again


@cache
def _temporary_copy(pack: Path, modified: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="deeploop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(pack, folder)
    return folder


def unpack(pack: Path, folder: Path) -> None:
    """Unpack an archive into an empty folder, refusing all but plain files of runs."""
    try:
        with tempfile.TemporaryFile() as plain:
            _decompress(pack, plain)
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                _extract(tar, folder)
    except (lzma.LZMAError, tarfile.TarError, ValueError, OverflowError, OSError) as error:
        # Only the text: the error would keep this frame alive, and with it the decoder's memory.
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
    _check_members(tar)  # before the first is written
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
            raise ValueError(f"{member.name!r} is not a name of a run's file")
        # Links lead elsewhere, and a sparse file may have any size.
        if member.type != tarfile.REGTYPE or member.issparse():
            raise ValueError(f"{member.name!r} is not a plain file")


def is_plain(name: str) -> bool:
    """True for RUN/FILE and for a file beside the runs, unless it leads out of the folder or is hidden."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part.isprintable() and part[:1] not in ("", ".") for part in parts)
