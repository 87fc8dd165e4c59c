"""Every path that a page about the code names exists."""

import re
from pathlib import Path

import pytest

import deeploop

SOURCE = Path(deeploop.__file__).parent
ROOT = Path(__file__).parents[1]
FILE = re.compile(r"[\w/]+\.py\b")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/data.md"])
def test_every_path_of_a_page_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in set(FILE.findall(" ".join(re.findall(r"`([^`]+)`", text)))):
        if "/" in path:
            assert (SOURCE / path).exists() or (ROOT / path).exists(), f"{page}: {path}"
