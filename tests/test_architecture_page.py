"""docs/architecture.md is the map of the code, and CONTRIBUTING.md the guide: both name files that exist."""

import re
from pathlib import Path

import pytest

import deeploop

SOURCE = Path(deeploop.__file__).parent
ROOT = Path(__file__).parents[1]
FILE = re.compile(r"[\w/]+\.py\b")


def files_on_the_map():
    """Every file between the ``` of the map, as a path below src/deeploop."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, tree = text.split("src/deeploop/\n", 1)
    folders: list[str] = []
    for line in tree.split("```")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        if folder := re.match(r"\s+(\w+)/", line):
            folders[depth:] = [folder[1]]
        own = folders if folder else folders[:depth]
        yield from ("/".join([*own, name]) for name in FILE.findall(line))


def test_the_map_has_every_file_once():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    named = sorted(files_on_the_map())
    assert len(named) == len(set(named))
    assert set(named) == found


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/data.md"])
def test_every_path_of_a_page_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in set(FILE.findall(" ".join(re.findall(r"`([^`]+)`", text)))):
        if "/" in path:
            assert (SOURCE / path).exists() or (ROOT / path).exists(), f"{page}: {path}"
