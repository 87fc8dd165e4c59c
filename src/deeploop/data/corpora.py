"""Sources of text: a description, and a function that reads the documents in a fixed order.

stdlib()          the Python standard library's own sources; needs no download
text_files(paths) .txt, .jsonl (one field of each line), both also as .xz or .gz, .parquet (one column)
fineweb_edu(…)    FineWeb-Edu, streamed through `datasets`, or a local copy in its layout
"""

import gzip
import hashlib
import lzma
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deeploop.extras import require
from deeploop.files import parse_json, sha256_of

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_EDU_SAMPLE = "sample-100BT"

TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".parquet")

# With fewer files than this, each is split, so that a representative part can be held out.
FEW_FILES = 64

STDLIB_SKIPPED = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "ensurepip"]
)


@dataclass(frozen=True)
class Source:
    """Documents that can be read more than once, in the same order each time."""

    description: str
    """Written to corpus.json; two sources with the same description give the same documents."""

    read: Callable[[], Iterator[str]]

    stream: bool = False
    """True if the source is too long to be read once just for its size."""

    files: tuple[Path, ...] = ()
    """The files that the text is read from, unless unknown or too long to hash."""

    skipped: tuple[Path, ...] = ()
    """Files that were left out, as they are not UTF-8."""

    def __iter__(self) -> Iterator[str]:
        return self.read()

    def sha256(self) -> str | None:
        """Hash of the hashes of all files in order, or None if there are no files."""
        if not self.files:
            return None
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(bytes.fromhex(sha256_of(path)))
        return digest.hexdigest()


def stdlib() -> Source:
    """The .py files of the running Python's standard library, without tests and bundled packages."""
    return Source(f"the standard library of Python {platform.python_version()}", _stdlib_documents)


def _stdlib_documents() -> Iterator[str]:
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in STDLIB_SKIPPED)
        for name in sorted(files):
            # _sysconfigdata_*.py describes how this machine's Python was built.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                try:
                    yield Path(folder, name).read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


def text_files(paths: Sequence[Path], field: str = "text", *, skip_bad: bool = False) -> Source:
    """The documents of files and folders, walked in sorted order: one per .txt file, .jsonl line or row.

    `field` names the text field of a line or row. With `skip_bad`, files that are not UTF-8 are left out. If
    there are fewer than 64 files, each .txt is split at line ends into pieces of about 1/64 of all the text,
    so that a part of it can be held out.
    """
    if not paths:
        raise ValueError("paths: name at least one file or folder of text")
    files = [file for path in paths for file in _walk(path, SUFFIXES)]
    if tables := [file for file in files if file.name.endswith(".parquet")]:
        require("pyarrow", "data", str(tables[0]))
    skipped = [file for file in files if not _is_readable(file)] if skip_bad else []
    files = [file for file in files if file not in set(skipped)]
    if not files:
        raise ValueError(f"{paths[0]}: none of {len(skipped)} files is UTF-8 text")
    chosen = "" if field == "text" else f", field {field}"
    described = _described(paths, files) + chosen
    return Source(described, lambda: _all_documents(files, field), files=tuple(files), skipped=tuple(skipped))


def _is_readable(file: Path) -> bool:
    """True if the file can be read as UTF-8 text, or is a parquet file."""
    try:
        return file.name.endswith(".parquet") or _characters(file) >= 0
    except ValueError:
        return False


def fineweb_edu(source: str = FINEWEB_EDU, name: str = FINEWEB_EDU_SAMPLE) -> Source:
    """FineWeb-Edu, streamed; `source` may also be a local folder or file of parquet or jsonl."""
    require("datasets", "data", "fineweb-edu")
    if Path(source).exists():
        files = _walk(Path(source), (".parquet", *JSON_SUFFIXES))
        return Source(_described([Path(source)], files), lambda: _local_rows(files), stream=True)
    return Source(f"{source} {name}", lambda: _rows(source, name=name), stream=True)


def _local_rows(files: Sequence[Path]) -> Iterator[str]:
    for builder, suffixes in (("parquet", (".parquet",)), ("json", JSON_SUFFIXES)):
        chosen = [str(file) for file in files if file.name.endswith(suffixes)]
        if chosen:
            yield from _rows(builder, data_files=chosen)


def _rows(path: str, **options: object) -> Iterator[str]:
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(path, split="train", streaming=True, **options)):
        if not isinstance(row.get("text"), str):
            raise ValueError(f'{options.get("data_files", path)}: row {number} has no string field "text"')
        yield row["text"]


def _walk(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or all files of the given kinds below a folder, sorted."""
    allowed = ", ".join(suffixes)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_file():
        if not path.name.endswith(suffixes):
            raise ValueError(f"{path}: unknown kind of file; known are {allowed}")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes))
    if not files:
        raise ValueError(f"{path}: no files of a known kind ({allowed}) in this folder")
    return files


def _described(paths: Sequence[Path], files: Sequence[Path]) -> str:
    """Names without folders, so that text that was moved keeps its description."""
    names = ", ".join(path.resolve().name for path in paths)
    size = sum(file.stat().st_size for file in files)
    return f"{names} ({len(files)} file{'s' * (len(files) != 1)}, {size} bytes)"


def _all_documents(files: Sequence[Path], field: str) -> Iterator[str]:
    try:
        yield from _each_document(files, field)
    except UnreadableText as error:
        raise ValueError(f"{error}; `deeploop prepare text --skip-bad` leaves such files out") from None


def _each_document(files: Sequence[Path], field: str) -> Iterator[str]:
    piece = max(1, sum(map(_length, files)) // FEW_FILES) if len(files) < FEW_FILES else None
    for file in files:
        if file.name.endswith(".parquet"):
            yield from _parquet(file, field)
        elif file.name.endswith(JSON_SUFFIXES):
            yield from _texts(file, field)
        else:
            yield from _text(file, piece)


class UnreadableText(ValueError):
    """A file is not UTF-8, or can't be decompressed."""


@contextmanager
def open_text(file: Path, errors: str = "strict") -> Iterator[TextIO]:
    """Open a text file, decompressed and without a byte-order mark. May raise UnreadableText.

    `errors` says how to treat bytes that are not UTF-8, as for `open`.
    """
    unpacked: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    try:
        with unpacked(file, "rt", encoding="utf-8-sig", errors=errors) as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise UnreadableText(f"{file}: unreadable as UTF-8 text: {error}") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UnreadableText(f"{file}: unreadable as {file.suffix}: {error}") from None


def _length(file: Path) -> int:
    """Count the characters of a .txt file; for other files the size on disk is close enough."""
    return _characters(file) if file.name.endswith(TEXT_SUFFIXES) else file.stat().st_size


def _characters(file: Path) -> int:
    with open_text(file) as lines:
        return sum(map(len, iter(lambda: lines.read(2**20), "")))


def _text(file: Path, piece: int | None) -> Iterator[str]:
    """The whole file, or its pieces, each ending at the first line end after `piece` characters."""
    with open_text(file) as lines:
        if piece is None:
            yield lines.read()
            return
        while some := lines.readlines(piece):
            yield "".join(some)


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location (`file:number`) and value of every line of a file, which may be compressed."""
    with open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                yield f"{file}:{number}", parse_json(line.rstrip())
            except ValueError as error:
                what = str(error).replace("line 1 column", "column")
                raise ValueError(f"{file}:{number}: not JSON: {what}") from None


def _texts(file: Path, field: str) -> Iterator[str]:
    for where, row in json_lines(file):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            names = [name for name in row if isinstance(row[name], str)] if isinstance(row, dict) else []
            raise ValueError(f'{where}: no string field "{field}"{_others(names)}')
        yield row[field]


def _others(names: Sequence[str]) -> str:
    """List the fields that exist, for an error about one that does not."""
    return f"; it has {', '.join(names[:9])}: name one with --field" if names else ""


def _parquet(file: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
    except ArrowInvalid as error:
        raise ValueError(f"{file}: not a parquet file: {error}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise ValueError(f'{file}: no column "{field}"{_others(table.schema_arrow.names)}')
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise ValueError(f'{file}: row {number} of column "{field}" is not a string')
                yield text
                number += 1
