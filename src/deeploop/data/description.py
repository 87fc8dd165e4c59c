"""Read a prepared folder by its JSON description: corpus.json, chat.json or puzzles.json."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.arrays import read_npy
from deeploop.data.pretrained_tokenizer import LARGEST
from deeploop.files import read_object

JSON_NAMES = {int: "a whole number", str: "a string", list: "a list", dict: "an object"}
FILE_NAME = re.compile(r"\w[\w.-]*")  # no separator, not . or ..


def read_description(path: Path, name: str, version: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Read a description and check its format number and fields, which errors call `name`.field."""
    try:
        facts = read_object(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    if facts.get("format") != version:
        raise ValueError(f"{path}: format {facts.get('format')!r:.40}, this version reads {version}")
    try:
        check_fields(facts, fields, name)
        if "vocabulary" in fields and not 1 <= facts["vocabulary"] <= LARGEST:
            raise ValueError(f"{name}.vocabulary: must be 1 to {LARGEST}, not {facts['vocabulary']!r:.40}")
        if "end_of_text" in fields and not 0 <= facts["end_of_text"] < facts["vocabulary"]:
            raise ValueError(f"{name}.end_of_text: must be a token, not {facts['end_of_text']!r:.40}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return facts


def check_fields(value: Any, fields: Any, name: str) -> None:
    """Raise ValueError unless `value` has these fields with their types, and file names without folders."""
    kind: Any = fields if isinstance(fields, type) else type(fields)
    if type(value) is not kind:
        raise ValueError(f"{name}: must be {JSON_NAMES[kind]}, not {value!r:.40}")
    if isinstance(fields, list):
        for index, item in enumerate(value):
            check_fields(item, fields[0], f"{name}[{index}]")
    if isinstance(fields, dict):
        for field, inner in fields.items():
            if field not in value:
                raise ValueError(f"{name}: no field {field!r}")
            check_fields(value[field], inner, f"{name}.{field}")
        if "file" in fields and not FILE_NAME.fullmatch(value["file"]):
            raise ValueError(f"{name}.file: must be a plain file name, not {value['file']!r:.40}")


def require_settings(
    out: Path, what: str, recorded: Mapping[str, Any], asked: Mapping[str, Any], words: Mapping[str, str]
) -> None:
    """Raise ValueError unless a prepared folder has these settings; `words` name those kept as a hash."""
    for name, value in asked.items():
        if (before := recorded.get(name)) != value:
            other = words.get(name, f"{name} {before!r:.40}, not {value!r:.40}")
            raise ValueError(
                f"{out}: already holds {what} with {other}; remove it or choose another folder with --out"
            )


def digest(array: np.ndarray) -> str:
    """sha256 of an array's content."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def read_array(path: Path, description: str, shape: list[int], types: tuple[str, ...]) -> np.ndarray:
    """Read an array of the shape that a description names, and of one of these types; memory-mapped."""
    try:
        array = read_npy(path)
    except FileNotFoundError:
        raise ValueError(f"{path.name}: missing") from None
    except OSError as error:
        raise ValueError(f"{path.name}: can't be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: unreadable ({error})") from None
    if list(array.shape) != shape or array.dtype.str not in types:
        held = f"holds {list(array.shape)} of {array.dtype.str}"
        raise ValueError(f"{path.name}: {held}, {description} has {shape} of {' or '.join(types)}")
    return array


@contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Add the folder and a remedy to an error about its content, as `prepare` replaces nothing."""
    try:
        yield
    except ValueError as error:
        what = str(error).removeprefix(f"{folder}/")
        raise ValueError(f"{folder}: {what}; delete the folder and prepare it again") from None
