"""Atomic writes, locks, and readers of untrusted files: JSON and TOML.

Nothing here writes through a symbolic link inside a folder, and only regular files are read: an untrusted
folder may hold links, FIFOs and devices.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

SHIPPED = Path("shipped")
"""The name under which every command finds the small trained model that comes with the package."""
DESCRIPTIONS = {
    "corpus.json": "a corpus",
    "chat.json": "a chat folder",
    "puzzles.json": "a set of puzzles",
    "run.json": "a run folder",
}
"""The kind of a folder, by the file that marks it."""
LOCK_SECONDS = 1.0
LARGEST_JSON = 1 << 26
"""Bytes of a file that is parsed whole; the largest of ours are some megabytes."""
DEEPEST = 64
"""Lists and objects inside one another; ours have five or six, and Python gives up at some hundreds."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that appears under its name only when whole and on disk."""
    # The name is fixed, so that a restart removes what a killed writer left.
    temporary = path.with_name(f".{path.name}.part")
    with os.fdopen(_open_new(temporary), "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _open_new(path: Path) -> int:
    """Open a new, locked file. Remove one left by a killed writer, but wait for a live one."""
    while True:
        try:
            descriptor = os.open(path, _NEW, 0o666)
        except FileExistsError:
            _remove_left_behind(path)
            continue
        _lock_if_possible(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # taken for one left behind before it was locked


def _remove_left_behind(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError:  # symbolic links are unlinked, never followed
        path.unlink(missing_ok=True)
        return
    try:
        _lock_if_possible(descriptor)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):  # else its writer has finished
                path.unlink()
    finally:
        os.close(descriptor)


def _lock_if_possible(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks can't exclude a second writer
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, as fsync does for the content of a file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system whose folders can't be synced
            raise
    finally:
        os.close(handle)


def append_file(path: Path) -> TextIO:
    """Open a file for appending, never through a link."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _refused(path, error) from None
    return os.fdopen(descriptor, "a", encoding="utf-8")


def own_folder(path: Path) -> Path:
    """Make a folder inside an untrusted one, refusing a symbolic link."""
    if path.is_symlink():
        raise ValueError(f"{path}: is a link, and nothing is written through one; put a folder in its place")
    path.mkdir(parents=True, exist_ok=True)
    return path


def new_folder(path: Path) -> Path:
    """Make an empty folder, deleting what a killed writer left; symbolic links are unlinked."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def publish(part: Path, folder: Path, last: str) -> None:
    """Move the content of `part` into `folder`, the file `last` at the end, and remove `part`."""
    for path in sorted(part.iterdir(), key=lambda path: path.name == last):
        if (old := folder / path.name).is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        os.replace(path, old)
    sync_folder(folder)
    part.rmdir()


def _refused(path: Path, error: OSError) -> OSError:
    if error.errno == errno.ELOOP:
        return OSError(f"{path}: is a link, and nothing is written through one; remove it")
    return error


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


class NotRegularError(OSError):
    """A FIFO, which would block, a device, which may be endless, or a folder."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file"
        raise NotRegularError(errno.EINVAL, what, str(path))
    return os.fdopen(descriptor, "rb")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a regular file, in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, limit: int = LARGEST_JSON) -> str:
    """Read the UTF-8 text of a file of at most `limit` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ValueError(f"{path}: can't be read (more than {limit:,} bytes)")
        raw = file.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: can't be read (not UTF-8: {error.reason} at byte {error.start})") from None


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError for any fault."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # A text with few brackets can't be deep; there are millions of lines of metrics.
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > DEEPEST:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def read_value(path: Path) -> Any:
    """Read the JSON value in a file. Raises ValueError with the file's name for any fault."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: can't be read (not JSON: {error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ValueError for anything else."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: can't be read (not a JSON object)")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, or return an empty one if it can't be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_table(path: Path) -> Any:
    """Read a file of settings: JSON if it is named .json, otherwise TOML. Errors name the file."""
    try:
        return read_value(path) if path.suffix == ".json" else read_toml(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None


def unused_path(path: Path) -> Path:
    """The path, or the first of path-2, path-3, … that does not exist."""
    names = (path.with_name(f"{path.stem}-{n}{path.suffix}") if n > 1 else path for n in count(1))
    return next(name for name in names if not name.exists())


def resolve(run: str | Path) -> Path:
    """Resolve a run folder: `shipped` is the one in the package, unless there is a folder of that name."""
    run = Path(run)
    return Path(__file__).parent / "assets" / "tiny" if is_shipped(run) else run


def is_shipped(run: Path) -> bool:
    return run == SHIPPED and not run.exists()


def refuse_other(folder: Path, description: str, advice: str) -> None:
    """Raise ValueError if deeploop wrote the folder, but as something without that description."""
    for name, what in DESCRIPTIONS.items():
        if name != description and (folder / name).is_file():
            raise ValueError(f"{folder}: is {what}, not {DESCRIPTIONS[description]}; {advice}")


@contextmanager
def naming_field(field: str, folder: Path) -> Iterator[None]:
    """Prefix errors about a folder with the option that named it, giving its path once."""
    try:
        yield
    except ValueError as error:
        what = str(error).removeprefix(str(folder)).lstrip("/: ")
        raise ValueError(f"{field}={folder}: {what}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read the table in a TOML file. Raises ValueError with the file's name for any fault."""
    text = read_text(path)
    try:
        value = tomllib.loads(text)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"{path}: can't be read (not TOML: nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{path}: can't be read (not TOML: {error})") from None
    return value


def lock_folder(folder: Path, field: str = "out") -> TextIO:
    """Make the folder, and lock it against a second run for as long as the returned file is open.

    `field` is the option that named it.
    """
    while True:
        file = _try_lock(folder, field)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(folder / ".lock")):
                return file
        file.close()  # of one who has just finished, and removed it


def _try_lock(folder: Path, field: str) -> TextIO:
    option = "--out" if field == "out" else field
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "r+")
    except OSError as error:
        why = ".lock is a link; remove it" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"{field}={folder}: can't be written ({why})") from None
    try:
        lock(file)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{field}={folder}: another run is writing there; choose another {option}") from None
    except OSError as error:
        file.close()
        if is_new:
            _remove_unlocked(folder)
        raise ValueError(
            f"{field}={folder}: can't be locked ({error.strerror}), and without a lock two runs could write "
            "there; choose a folder on another file system"
        ) from None
    return file


def _remove_unlocked(folder: Path) -> None:
    """Remove a new folder that could not be locked."""
    with suppress(OSError):
        (folder / ".lock").unlink()
        folder.rmdir()  # one that holds something stays


def lock(file: TextIO) -> None:
    """Lock an open file. Raises BlockingIOError if another process holds the lock.

    Retries for a moment, as `is_locked` briefly holds a shared lock.
    """
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


@contextmanager
def exclusive_folder(folder: Path, field: str = "out") -> Iterator[None]:
    """Lock a folder for this process; remove it afterwards if it is empty, as after a failure."""
    with lock_folder(folder, field):
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # it holds something
                folder.rmdir()


def is_locked(path: Path) -> bool:
    """True if a process holds a lock on the file."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks, where nobody holds one
        return False
    return False
