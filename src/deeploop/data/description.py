"""Read the JSON description of a prepared folder: corpus.json, chat.json or puzzles.json."""

import re
from pathlib import Path
from typing import Any

from deeploop.data.pretrained_tokenizer import LARGEST
from deeploop.files import read_object

JSON_NAMES = {int: "a whole number", str: "a string", list: "a list", dict: "an object"}
FILE_NAME = re.compile(r"\w[\w.-]*")  # no separator, not . or ..


def read_description(path: Path, name: str, version: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Read a description and check its format number and fields, which errors call `name`.field."""
    try:
        found = read_object(path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None
    if found.get("format") != version:
        raise ValueError(f"{path}: format {found.get('format')!r:.40}, this version reads {version}")
    try:
        check_fields(found, fields, name)
        if "vocabulary" in fields and not 1 <= found["vocabulary"] <= LARGEST:
            raise ValueError(f"{name}.vocabulary: must be 1 to {LARGEST}, not {found['vocabulary']!r:.40}")
        if "end_of_text" in fields and not 0 <= found["end_of_text"] < found["vocabulary"]:
            raise ValueError(f"{name}.end_of_text: must be a token, not {found['end_of_text']!r:.40}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def check_fields(found: Any, fields: Any, name: str) -> None:
    """Raise ValueError unless `found` has the fields and types of `fields`, and plain names of files."""
    kind: Any = fields if isinstance(fields, type) else type(fields)
    if type(found) is not kind:
        raise ValueError(f"{name}: must be {JSON_NAMES[kind]}, not {found!r:.40}")
    if isinstance(fields, list):
        for index, item in enumerate(found):
            check_fields(item, fields[0], f"{name}[{index}]")
    if isinstance(fields, dict):
        for field, inner in fields.items():
            if field not in found:
                raise ValueError(f"{name}: no field {field!r}")
            check_fields(found[field], inner, f"{name}.{field}")
        if "file" in fields and not FILE_NAME.fullmatch(found["file"]):
            raise ValueError(f"{name}.file: must be a plain file name, not {found['file']!r:.40}")
