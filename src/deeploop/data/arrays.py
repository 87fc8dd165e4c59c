"""Read .npy and .npz files from untrusted sources, without pickles.

Memory use is bounded by the size of the file: a header may claim any size, and zip compresses zeros
a thousandfold.
"""

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from deeploop.files import open_regular

# Any archive may unpack to this many bytes; a larger one to at most ten times its own size. Puzzle requests,
# the most compressible files that deeploop writes, unpack to five times.
SMALL = 1 << 22
CHUNK = 1 << 20
HEADERS: dict[tuple[int, int], Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(
    path: Path, names: Iterable[str] | None = None, *, largest: int | None = None
) -> dict[str, np.ndarray]:
    """The named arrays of an archive, or all of them. A damaged archive raises ValueError.

    `largest` is the number of bytes that they may unpack to, if known.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
                wanted = list(entries) if names is None else list(names)
                unpacked = sum(entries[name].file_size for name in wanted)
                most = max(SMALL, 10 * path.stat().st_size) if largest is None else largest
                if unpacked > most:
                    raise ValueError(f"{unpacked:,} bytes when unpacked, at most {most:,} are read")
                return {name: _read_entry(archive, entries[name]) for name in wanted}
        except (OSError, MemoryError):
            raise
        except KeyError as error:
            raise ValueError(f"no array {error}") from None
        except Exception as error:  # zipfile, zlib and numpy raise many types on damaged files
            raise ValueError(str(error) or type(error).__name__) from None


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as member:
        shape, fortran, dtype = _read_header(member)  # type: ignore[arg-type]
        if math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
            raise ValueError(f"{entry.filename}: its size is not that of its header, {shape} of {dtype}")
        array = np.empty(math.prod(shape), dtype)
        raw = array.view(np.uint8)
        for start in range(0, raw.size, CHUNK):
            piece = member.read(min(CHUNK, raw.size - start))
            raw[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    return array.reshape(shape, order="F" if fortran else "C")


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file, memory-mapped. A damaged file raises ValueError."""
    with open_regular(path) as file:
        try:
            shape, fortran, dtype = _read_header(file)
            if math.prod(shape) * dtype.itemsize != path.stat().st_size - file.tell():
                raise ValueError(f"its size is not that of its header, {shape} of {dtype}")
            if 0 in shape:  # mmap refuses an empty file
                return np.empty(shape, dtype)
            order: Any = "F" if fortran else "C"
            return np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape, order=order)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # numpy parses the header as Python source: tokenizer errors come too
            raise ValueError(str(error) or type(error).__name__) from None


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"a .npy file of version {version}")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("an array of objects, which is a pickle")
    if any(length < 0 for length in shape):
        raise ValueError(f"a shape of {shape}")
    return shape, fortran, dtype
