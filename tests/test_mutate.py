"""The mutation tester: which changes it makes of a file, and whose tests it runs."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '''"""A docstring with a + b."""
LIMIT: int | None = 3


def area(width, height, scale=1.0):
    if width < 0 or not height:
        raise ValueError(f"width={width + 1}: must be at least 0")
    log.append(width)
    return None if scale is None else max(width * height, scale)
'''


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "mutate.py"))


def test_what_is_changed_and_what_is_not(tool):
    old = SOURCE.splitlines()
    found = set()
    for line, changed in tool["mutants"](SOURCE):
        new = changed.splitlines()
        assert [i for i, (a, b) in enumerate(zip(old, new, strict=True), 1) if a != b] == [line]
        found.add((line, new[line - 1].strip()))
    assert found == {
        (2, "LIMIT: int | None = (4)"),
        (5, "def area(width, height, scale=(2.0)):"),
        (6, "if (width < 0 and (not height)):"),
        (6, "if (width <= 0) or not height:"),
        (6, "if width < (1) or not height:"),
        (6, "if width < 0 or (height):"),
        (8, "pass"),
        (9, "return None"),
        (9, "return None if (scale is not None) else max(width * height, scale)"),
        (9, "return None if scale is None else (min(width * height, scale))"),
        (9, "return None if scale is None else max((width / height), scale)"),
    }


def test_a_mutants_tests_are_its_packages_with_its_own_first(tool):
    found = tool["tests_of"](ROOT, ROOT / "src/deeploop/theory/bounds.py")
    assert found[0] == str(ROOT / "tests/theory/test_bounds.py")
    assert {str(test) for test in (ROOT / "tests/theory").glob("test_*.py")} <= set(found)
    assert all("theory" in name or "deeploop.theory.bounds" in Path(name).read_text() for name in found)
