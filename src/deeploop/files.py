"""Files that others may read while we write: atomic writes, JSON objects, locks."""

import fcntl
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

LOCK_SECONDS = 1.0


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that appears under its name only when whole and on disk."""
    # The name is fixed so that a killed writer leaves nothing that its restart does not overwrite.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """`value` as indented JSON, atomically."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=1, default=default) + "\n").encode())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError where it holds anything else."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The same, or nothing where there is none that can be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_table(path: Path) -> Any:
    """What a file of settings holds: JSON where it is named so, else TOML; a mistake names the file."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:  # no JSON, no TOML, no UTF-8
        raise ValueError(f"{path}: {error}") from None


def unused_path(path: Path) -> Path:
    """The path, or the first of path-2, path-3, … under which nothing stands."""
    names = (path.with_name(f"{path.stem}-{n}{path.suffix}") if n > 1 else path for n in count(1))
    return next(name for name in names if not name.exists())


def lock_folder(folder: Path) -> TextIO:
    """Makes the folder, and keeps a second run out of it for as long as the returned file is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"out={folder}: can't be written ({error.strerror})") from None
    try:
        lock(file)
    except BlockingIOError:
        file.close()
        raise ValueError(f"out={folder}: another run is writing there; choose another --out") from None
    except OSError as error:  # a file system without locks
        file.close()
        raise ValueError(f"out={folder}: can't be locked ({error.strerror}); choose another --out") from None
    return file


def lock(file: TextIO) -> None:
    """Locks an open file; BlockingIOError where another process holds it.

    Tries for a moment: one who only asks whether the file is locked holds a shared lock while it does.
    """
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on the file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks, where nobody holds one
        return False
    return False
